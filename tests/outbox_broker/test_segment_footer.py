"""The footer of a segment: what is in it comes back, in whatever frames it stands, and a flipped bit never misleads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from outbox_broker.journal.journal import Journal, frames
from outbox_broker.journal.segment_footer import (
    FooterBlocks,
    FooterDamaged,
    find_footer,
    footer_of,
    read_ids,
)
from outbox_broker.log.storage import DiskStorage, UnsyncedStorage
from outbox_broker.log.topic_index import BlockPlace, Runs, TopicIndex
from outbox_broker.segments.local import LocalSegments
from outbox_core.common.clock import ManualClock
from outbox_core.journal.block import BLOCK_HEAD_BYTES, FRAME_HEAD_BYTES, FrameKind, SegmentKind
from tests.outbox_broker.message_log import flip, message_segments

SEGMENT, SEGMENT_END = 7_000_000_000, 7_100_000_000
"""Beyond 32 bits."""
REMADE = {5: 6_900_000_000}
IDS = [
    ("often", [f"o{number}" for number in range(25_000)]),
    ("once", ["single"]),
    ("often", [f"again{number}" for number in range(7)]),
]
MANY_RUNS = 90_000
"""Of 28 bytes each: more than a frame has."""


class NoBlocks:
    """No footers."""

    def load(self, place: BlockPlace) -> Runs:
        """Never asked."""
        raise AssertionError(f"there is no block {place}")


def topics() -> list[TopicIndex]:
    """One with as many runs as fill several frames, one with a single run, one whose only messages are damaged."""
    often, once, lost = (TopicIndex(name, NoBlocks()) for name in ("often", "once", "lost"))
    for number in range(MANY_RUNS):
        often.place(1, SEGMENT + 1_000 * number, 900, ready_at_ms=number)
    once.begin_at(77)
    once.place(3, SEGMENT + 17, 300, ready_at_ms=5)
    lost.skip_to(4, ready_at_ms=9)
    return [often, once, lost]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Journal]:
    """A log of messages that has begun."""
    segments = LocalSegments.open(tmp_path / "messages", storage=UnsyncedStorage(DiskStorage()), clock=ManualClock())
    with closing(segments):
        journal = Journal(segments, name="messages", kind=SegmentKind.MESSAGES, has_checkpoints=False)
        journal.resume()
        journal.append(frames(FrameKind.MESSAGE, [b"first"]), at_ms=1)
        yield journal


def test_what_is_in_a_footer_comes_back_from_whichever_of_its_frames(log: Journal) -> None:
    indexes = topics()
    footer = footer_of(SEGMENT, SEGMENT_END, topics=indexes, ids=IDS, special=[SEGMENT + 17], remade=REMADE)
    appended = footer.ending_at(log.append(footer.frames, at_ms=2))

    found = find_footer(log, appended.offset, segment=SEGMENT, segment_end=SEGMENT_END)

    assert found == appended
    assert len(footer.frames) > 3
    assert found.directory.special == [SEGMENT + 17]
    assert found.directory.remade == REMADE
    assert found.directory.ids_count == sum(len(some) for _, some in IDS)
    ids: dict[str, list[str]] = {}
    for topic, some in read_ids(log, found) or []:
        ids.setdefault(topic, []).extend(some)
    assert ids == {"often": [*IDS[0][1], *IDS[2][1]], "once": IDS[1][1]}
    blocks = FooterBlocks(log.read)
    for index in indexes:
        rows = bytearray()
        for entry in found.directory.topics[index.name]:
            place = BlockPlace(SEGMENT, found.base + entry.position, entry.runs, entry.crc)
            rows += blocks.load(place).rows
            assert blocks.load(place) is blocks.load(place), "from memory"
        assert rows == index.tail.rows


def test_a_footer_of_another_segment_is_none(log: Journal) -> None:
    footer = footer_of(SEGMENT, SEGMENT_END, topics=(), ids=(), special=[], remade={})
    offset = footer.ending_at(log.append(footer.frames, at_ms=2)).offset

    assert find_footer(log, offset, segment=SEGMENT + 1, segment_end=SEGMENT_END) is None
    assert find_footer(log, offset, segment=SEGMENT, segment_end=SEGMENT_END + 1) is None
    assert find_footer(log, 0, segment=0, segment_end=SEGMENT_END) is None, "a block of messages"
    assert find_footer(log, log.end, segment=SEGMENT, segment_end=SEGMENT_END) is None, "nothing"


def test_no_flipped_bit_makes_a_footer_say_something_else(log: Journal, tmp_path: Path, random_seed: int) -> None:
    once = topics()[1:]
    footer = footer_of(SEGMENT, SEGMENT_END, topics=once, ids=IDS, special=[], remade=REMADE)
    appended = footer.ending_at(log.append(footer.frames, at_ms=2))
    [path] = message_segments(tmp_path)
    begin = path.stat().st_size - footer.frames.size_bytes - BLOCK_HEAD_BYTES
    near = range(begin, begin + BLOCK_HEAD_BYTES + 2 * FRAME_HEAD_BYTES + appended.directory_bytes + 28)
    far = random.Random(random_seed).sample(range(near.stop, path.stat().st_size), 50)
    ids, spared = read_ids(log, appended), 0

    for position in (*near, *far):
        flip(path, position)
        found = find_footer(log, appended.offset, segment=SEGMENT, segment_end=SEGMENT_END)
        assert found is None or found == appended
        if found is not None:
            assert read_ids(log, found) in (None, ids)
            for index in once:
                for entry in found.directory.topics[index.name]:
                    place = BlockPlace(SEGMENT, found.base + entry.position, entry.runs, entry.crc)
                    with suppress(FooterDamaged):
                        assert FooterBlocks(log.read).load(place).rows == index.tail.rows
                        spared += 1
        flip(path, position)

    assert spared, "what is not hit is read"
