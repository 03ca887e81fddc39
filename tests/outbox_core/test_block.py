"""The log's format: what is written is read; a flipped bit costs one message, a torn tail nothing that was durable.

A history is written as a group commit does: `durable` lags behind what was appended. Its bodies are the worst there
are: copies of what the log holds already, and frames and heads that were made for the place at which they stand.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.journal.block import (
    BLOCK_HEAD_BYTES,
    FRAME_HEAD_BYTES,
    FRAMES_MAX,
    PAYLOAD_BYTES_MAX,
    SECOND_COPY,
    SEGMENT_HEAD_BYTES,
    Block,
    Frame,
    Framed,
    FrameDamaged,
    FrameKind,
    SegmentHead,
    SegmentKind,
    SegmentRefused,
    block,
    block_head_at,
    changes_of,
    decode_segment_head,
    framed,
    framed_changes,
    frames_in,
    last_head_in,
    payloads_in,
    read_run,
    scan,
)

FIRST = 7_000_000_000
"""The segment's first offset: beyond 32 bits."""
PAGE_BYTES = 64


@dataclass
class History:
    """A segment as it was written: its bytes, and what a reader must find."""

    data: bytearray = field(default_factory=bytearray)
    blocks: list[list[Frame]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    durable: int = 0
    """Up to here the last sync came: everything before it was acknowledged."""
    _sequence: int = 0

    def append(self, frames: Framed, *, durable: int | None = None) -> None:
        """Append a block. `durable`: what the writer knows at that time; what it knew, if None."""
        self.durable = self.durable if durable is None else max(self.durable, durable)
        before = len(self.blocks[-1]) if self.blocks else 0
        offset = FIRST + len(self.data)
        self.data += block(frames, offset=offset, durable=FIRST + self.durable, at_ms=offset, frames_before=before)
        written = frames_in(bytes(self.data), offset - FIRST + BLOCK_HEAD_BYTES, len(self.data), count=len(frames))
        assert written.damaged == 0
        self.blocks.append(written.whole)
        self.ends.append(len(self.data))

    def messages(self, *bodies: bytes, durable: int | None = None) -> None:
        """Append messages with the next sequences."""
        self.append(
            framed(FrameKind.MESSAGE, range(self._sequence, self._sequence + len(bodies)), bodies), durable=durable
        )
        self._sequence += len(bodies)

    def dispatch(self, *bodies: bytes, durable: int | None = None) -> None:
        """Append a change of state, twice, around messages."""
        change, copy = framed_changes([b"dispatch " + bytes([len(bodies)])])
        change.extend(framed(FrameKind.DISPATCHED, range(self._sequence, self._sequence + len(bodies)), bodies))
        change.extend(copy)
        self.append(change, durable=durable)
        self._sequence += len(bodies)

    def changes(self, *payloads: bytes, durable: int | None = None) -> None:
        """Append changes of state, twice."""
        changes, copies = framed_changes(payloads)
        changes.extend(copies)
        self.append(changes, durable=durable)

    @property
    def frames(self) -> list[Frame]:
        """All of them, in order."""
        return [frame for frames in self.blocks for frame in frames]

    def hostile(self, chance: random.Random) -> bytes:
        """A body that looks like a part of the log: whole frames of it to its end, or a block for this very place."""
        kind = chance.randrange(3)
        if kind == 0 and self.data:
            start = chance.choice([0, *self.ends[:-1]])
            return bytes(chance.randbytes(chance.randrange(3)) + self.data[start:][:600])
        one = framed(FrameKind.MESSAGE, range(self._sequence, self._sequence + 1), [chance.randbytes(5)])
        if kind == 1:
            return one.heads[0] + one.payloads[0]
        offset = FIRST + len(self.data) + BLOCK_HEAD_BYTES + FRAME_HEAD_BYTES
        return block(one, offset=offset, durable=0, at_ms=1, frames_before=1)


def history_of(seed: int, *, length: int = 14) -> History:
    """A history with a sync now and then, which covers what was appended before it, and is known a little later."""
    chance, history = random.Random(seed), History()
    synced = known = 0
    for _ in range(length):
        bodies = [
            history.hostile(chance) if chance.random() < 0.4 else chance.randbytes(chance.choice([1, 9, 90]))
            for _ in range(chance.choice([1, 1, 2, 6]))
        ]
        write = chance.choice([history.messages, history.messages, history.dispatch, history.changes])
        write(*bodies, durable=known)
        if chance.random() < 0.4:
            known, synced = synced, len(history.data)
    history.durable = max(history.durable, known)
    return history


def read(data: bytes | bytearray, *, same_boot: bool = True, proven: int = 0) -> list[Block]:
    return list(scan(bytes(data), first=FIRST, proven=FIRST + proven, same_boot=same_boot))


def frames_of(blocks: list[Block]) -> list[Frame]:
    return [frame for found in blocks for frame in found.frames]


def timed(blocks: list[Block], wanted: frozenset[FrameKind]) -> list[tuple[Frame, int | None]]:
    return [(frame, found.at_ms) for found in blocks for frame in found.frames if frame.kind in wanted]


def check_found(history: History, blocks: list[Block], *, upto: int) -> list[Frame]:
    """Checks that nothing was read that was not written; returns what is missing of the first `upto` bytes' blocks."""
    found = frames_of(blocks)
    rest = iter(history.frames)
    assert all(frame in rest for frame in found), "in the order in which they were written, and nothing else"
    written = [
        frame for frames, end in zip(history.blocks, history.ends, strict=True) if end <= upto for frame in frames
    ]
    left = list(found)
    missing: list[Frame] = []
    for frame in written:
        if left and left[0] == frame:
            left.pop(0)
        else:
            missing.append(frame)
    return missing


def state_of(frames: list[list[Frame]]) -> list[dict[int, bytes]]:
    return [changes for changes in map(changes_of, frames) if changes]


@given(seed=st.integers(0, 1 << 32))
def test_what_was_written_is_read_and_each_change_once(seed: int) -> None:
    history = history_of(seed)

    blocks = read(history.data, same_boot=False)

    assert [found.frames for found in blocks] == history.blocks
    assert [found.end for found in blocks] == history.ends
    assert {(found.damaged, found.at_ms) for found in blocks} == {
        (0, FIRST + position) for position in [0, *history.ends[:-1]]
    }


@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_a_flipped_bit_costs_one_message_at_most_and_no_change_of_state(seed: int, data: st.DataObject) -> None:
    history = history_of(seed)
    for _ in range(40):
        position, bit = data.draw(st.integers(0, len(history.data) - 1)), data.draw(st.integers(0, 7))
        flipped = bytearray(history.data)
        flipped[position] ^= 1 << bit

        blocks = read(flipped)

        missing = check_found(history, blocks, upto=len(flipped))
        assert len(missing) <= 1
        assert state_of([found.frames for found in blocks]) == state_of(history.blocks)
        assert any(found.damaged or found.at_ms is None for found in blocks), "it is reported"
        assert blocks[-1].end == len(flipped)


@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_payloads_in_bulk_and_the_blocks_behind_the_first_that_is_not_whole_are_what_was_scanned(
    seed: int, data: st.DataObject
) -> None:
    history = history_of(seed)
    wanted = frozenset({FrameKind.MESSAGE, FrameKind.DISPATCHED})
    for _ in range(20):
        position, frames_max = data.draw(st.integers(0, len(history.data))), data.draw(st.integers(1, 9))
        flipped = bytearray(history.data)
        if position < len(flipped):
            flipped[position] ^= 1 << data.draw(st.integers(0, 7))

        frames, ends = in_bulk(bytes(flipped), wanted, frames_max=frames_max)
        rest = list(scan(bytes(flipped[ends[-1] :]), first=FIRST + ends[-1], proven=0, same_boot=True))

        assert ends[-1] == max([0, *(end for end in history.ends if end <= position)]), "up to the damaged block"
        assert set(ends[1:]) <= set(history.ends), "whole blocks"
        assert [*frames, *timed(rest, wanted)] == timed(read(flipped), wanted)


def test_blocks_that_are_known_are_passed_over_by_their_heads_and_one_that_was_half_written_is_not() -> None:
    history = History()
    for number in range(4):
        history.messages(b"%d" % number, b"more")
    data, (first, second, *_) = bytearray(history.data), history.ends
    data[first - 1] ^= 1  # nobody looks at it

    frames, ends = in_bulk(bytes(data), frozenset({FrameKind.MESSAGE}), frames_max=99, known=second - 1)
    none, _ = in_bulk(bytes(data), frozenset({FrameKind.MESSAGE}), frames_max=99, known=first - 1)

    assert [frame.payload for frame, _ in frames] == [b"1", b"more", b"2", b"more", b"3", b"more"]
    assert ends == [0, len(data)]
    assert none == []


def in_bulk(
    data: bytes, wanted: frozenset[FrameKind], *, frames_max: int, known: int = 0
) -> tuple[list[tuple[Frame, int | None]], list[int]]:
    """The frames that are read in bulk, each with its block's time, and where each part of them ends, from 0 on."""
    frames: list[tuple[Frame, int | None]] = []
    ends = [0]
    while True:
        found = payloads_in(data, ends[-1], first=FIRST, wanted=wanted, frames_max=frames_max, known=known)
        frames += found.frames(data)
        if found.end == ends[-1]:
            return frames, ends
        ends.append(found.end)


@given(seed=st.integers(0, 1 << 32), data=st.data(), same_boot=st.booleans())
def test_a_tail_that_was_cut_short_ends_with_the_last_whole_block(
    seed: int, data: st.DataObject, same_boot: bool
) -> None:
    history = history_of(seed)
    length = data.draw(st.integers(history.durable, len(history.data)))

    blocks = read(history.data[:length], same_boot=same_boot)

    assert [found.end for found in blocks] == [end for end in history.ends if end <= length]
    assert all(found.damaged == 0 for found in blocks)


@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_after_a_loss_of_power_all_that_was_acknowledged_is_read_and_then_a_prefix(
    seed: int, data: st.DataObject
) -> None:
    history = history_of(seed)
    left = bytearray(history.data)
    pages = range(history.durable // PAGE_BYTES, len(left) // PAGE_BYTES + 1)
    for page in data.draw(st.sets(st.sampled_from(pages))):
        start, end = max(page * PAGE_BYTES, history.durable), min((page + 1) * PAGE_BYTES, len(left))
        left[start:end] = bytes(max(0, end - start))

    blocks = read(left, same_boot=False)

    found = frames_of(blocks)
    assert found == history.frames[: len(found)]
    assert blocks[-1].end >= history.durable if blocks else history.durable == 0


@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_what_a_note_vouches_for_is_damaged_and_never_cut_after_another_start(seed: int, data: st.DataObject) -> None:
    history = history_of(seed)
    position = data.draw(st.integers(0, len(history.data) - 1))
    flipped = bytearray(history.data)
    flipped[position] ^= 1 << data.draw(st.integers(0, 7))

    blocks = read(flipped, same_boot=False, proven=len(flipped))

    assert len(check_found(history, blocks, upto=len(flipped))) <= 1
    assert blocks[-1].end == len(flipped)


@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_a_sealed_segment_that_lost_a_sector_is_read_to_its_end(seed: int, data: st.DataObject) -> None:
    history = history_of(seed, length=20)
    start = data.draw(st.integers(0, len(history.data) - 1)) // PAGE_BYTES * PAGE_BYTES
    lost = bytearray(history.data)
    lost[start : start + PAGE_BYTES] = bytes(len(lost[start : start + PAGE_BYTES]))

    blocks = read(lost, proven=len(lost))

    assert blocks[-1].end == len(lost)
    assert lost == history.data or any(found.damaged != 0 or found.at_ms is None for found in blocks)
    whole = {end for end in history.ends if end <= start}
    assert whole <= {found.end for found in blocks}


def test_a_durable_block_that_the_file_cuts_is_reported() -> None:
    history = History()
    history.messages(b"one", b"two", b"three")

    [found] = read(history.data[:-2], same_boot=False, proven=len(history.data))

    assert [frame.payload for frame in found.frames] == [b"one", b"two"]
    assert (found.damaged, found.end) == (None, len(history.data)), "where it ended"


def test_blocks_whose_frames_are_not_wanted_are_passed_and_still_checked_where_nothing_vouches() -> None:
    history = History()
    history.messages(b"one")
    history.changes(b"two", durable=len(history.data))
    history.messages(b"three")

    blocks = list(
        scan(bytes(history.data), first=FIRST, proven=0, same_boot=False, wanted=frozenset({FrameKind.CHANGE}))
    )

    assert [len(found.frames) for found in blocks] == [0, 2, 1]


@pytest.mark.parametrize("numbers", [range(3), range((1 << 32) - 2, (1 << 32) + 1), range(1 << 54, (1 << 54) + 3)])
def test_a_run_is_read_by_kind_and_numbers_and_nothing_else_is_taken_for_it(numbers: range) -> None:
    history = History()
    history.append(framed(FrameKind.MESSAGE, numbers, [b"a", b"b", b"c"]))
    data, start = bytes(history.data), BLOCK_HEAD_BYTES

    assert read_run(data, start, kind=FrameKind.MESSAGE, numbers=numbers) == [b"a", b"b", b"c"]
    for kind, others in (
        (FrameKind.SCHEDULED, numbers),
        (FrameKind.MESSAGE, range(numbers.start + 1, numbers.stop + 1)),
        (FrameKind.MESSAGE, range(numbers.start, numbers.stop + 1)),
    ):
        with pytest.raises(FrameDamaged):
            read_run(data, start, kind=kind, numbers=others)
    for position in range(start, len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 4
        with pytest.raises(FrameDamaged):
            read_run(bytes(flipped), start, kind=FrameKind.MESSAGE, numbers=numbers)


def test_a_change_of_which_both_copies_are_damaged_is_missing_and_one_of_them_is_enough() -> None:
    history = History()
    history.changes(b"a" * 99, b"b" * 99)
    positions = [BLOCK_HEAD_BYTES + index * (99 + FRAME_HEAD_BYTES) + FRAME_HEAD_BYTES for index in range(4)]

    history.data[positions[0]] ^= 1
    assert changes_of(read(history.data)[0].frames) == {0: b"a" * 99, 1: b"b" * 99}
    history.data[positions[2]] ^= 1

    [found] = read(history.data)
    assert changes_of(found.frames) == {1: b"b" * 99}
    assert found.damaged == 2


def test_a_damaged_length_that_leads_over_the_next_frame_to_a_copy_of_one_in_its_body_is_not_followed() -> None:
    copy = framed(FrameKind.MESSAGE, range(99, 100), [b"other"])
    history = History()
    history.messages(b"x" * 9, copy.heads[0] + copy.payloads[0], b"last")
    history.data[BLOCK_HEAD_BYTES] ^= 16

    [found] = read(history.data)

    assert (found.frames, found.damaged) == (history.frames[1:], 1)


def test_a_damaged_block_full_of_what_may_be_frames_is_given_up_in_time() -> None:
    bait = framed(FrameKind.MESSAGE, range(1), [b"x" * 100])
    head = (3_000_000).to_bytes(4, "little") + bait.heads[0][4:]
    history = History()
    history.messages(b"first", head * 250_000, b"last")
    history.data[BLOCK_HEAD_BYTES + FRAME_HEAD_BYTES + 5 + 4] ^= 1

    [found] = read(history.data)

    assert [frame.payload for frame in found.frames] in ([b"first", b"last"], [b"first"])
    assert found.damaged == 3 - len(found.frames)


def test_a_head_of_a_segment_comes_back_and_what_is_none_of_this_version_is_refused_with_the_cure() -> None:
    head = SegmentHead(kind=SegmentKind.ACTIONS, epoch=9, first=FIRST, created_at_ms=1_800_000_000_000)
    data = head.encode()

    assert len(data) == SEGMENT_HEAD_BYTES == 40
    assert decode_segment_head(data + b"more") == head
    with pytest.raises(SegmentRefused, match="use an empty folder"):
        decode_segment_head(b"OUTBOXMQ" + data[8:])
    with pytest.raises(SegmentRefused, match="damaged: restore"):
        decode_segment_head(data[:-1])
    with pytest.raises(SegmentRefused, match="damaged: restore"):
        decode_segment_head(data[:12] + b"\xff" + data[13:])
    newer = data[:8] + b"\x02\x00" + data[10:36]
    with pytest.raises(SegmentRefused, match="format 2 and kind 2, and this version reads format 1: upgrade"):
        decode_segment_head(newer + google_crc32c.value(newer).to_bytes(4, "little"))


def of_version(data: bytes, position: int, version: int) -> bytes:
    """The head of the block at a position, as another version would have written it."""
    changed = bytearray(data[position : position + BLOCK_HEAD_BYTES])
    changed[5] = version
    return bytes(changed[:-4]) + google_crc32c.value(bytes(changed[:-4])).to_bytes(4, "little")


@pytest.mark.parametrize("same_boot", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_block_of_a_newer_version_is_refused_with_the_cure_and_never_taken_for_damage(
    same_boot: bool, place: int
) -> None:
    history = History()
    for body in (b"one", b"two", b"three"):
        history.messages(body)
    start = ([0, *history.ends])[place]
    data = bytes(history.data[:start]) + of_version(history.data, start, 2)
    data += bytes(history.data[len(data) :])

    for ending in (data, data + b"torn", data[: start + BLOCK_HEAD_BYTES]):
        with pytest.raises(SegmentRefused, match=r"format 2.*reads format 1: upgrade"):
            list(scan(ending, first=FIRST, proven=FIRST, same_boot=same_boot))


def test_behind_a_damaged_head_a_block_of_a_newer_version_is_refused_as_well() -> None:
    history = History()
    history.messages(b"one")
    history.messages(b"two")
    start = history.ends[0]
    data = bytearray(history.data[:start] + of_version(history.data, start, 3) + history.data[start + 44 :])
    data[9] ^= 1

    with pytest.raises(SegmentRefused, match="format 3"):
        list(scan(bytes(data), first=FIRST, proven=FIRST + len(data), same_boot=True))


@pytest.mark.parametrize("gap", [b"", bytes(4_000), b"OMQB" * 1_000, bytes(range(256)) * 16])
def test_a_head_behind_any_gap_says_where_its_segment_begins_and_one_inside_a_body_does_not(gap: bytes) -> None:
    copied = block(framed(FrameKind.RECORD, range(1), [b"of another"]), offset=77, durable=0, at_ms=1, frames_before=0)
    frames = framed(FrameKind.MESSAGE, range(2), [copied, b"own" + copied])
    own = block(frames, offset=FIRST + len(gap), durable=FIRST, at_ms=1, frames_before=0)

    found = last_head_in(gap + own)

    assert found is not None
    assert (found.first, found.kind, found.end) == (FIRST, FrameKind.MESSAGE, len(gap + own))
    for at in range(BLOCK_HEAD_BYTES):
        damaged = bytearray(gap + own)
        damaged[len(gap) + at] ^= 1
        other = last_head_in(bytes(damaged))
        assert other is not None
        assert other.offset == 77, "a copy counts where no head of the segment's own is left"


def test_a_head_of_a_newer_version_inside_a_body_refuses_nothing() -> None:
    history = History()
    history.messages(b"before")
    inside = FIRST + len(history.data) + BLOCK_HEAD_BYTES + FRAME_HEAD_BYTES
    one = framed(FrameKind.MESSAGE, range(1), [b"x"])
    bait = block(one, offset=inside, durable=inside, at_ms=1, frames_before=1)
    history.messages(of_version(bait, 0, 2) + bait[BLOCK_HEAD_BYTES:])

    found = read(history.data)

    assert [one.damaged for one in found] == [0, 0]
    assert found[1].frames == history.blocks[1]


def test_a_head_is_one_only_at_its_own_offset_and_the_limits_fit() -> None:
    history = History()
    history.messages(b"x")
    data = bytes(history.data)

    assert block_head_at(data, 0, first=FIRST) is not None
    assert block_head_at(data, 0, first=FIRST + 1) is None
    assert block_head_at(b"-" + data, 1, first=FIRST) is None
    assert int.from_bytes(data[:4], "little") > PAYLOAD_BYTES_MAX
    assert FRAMES_MAX == (1 << 16) - 1
    assert framed_changes([b"x"])[1].heads[0][8:] == (FrameKind.CHANGE << 56 | SECOND_COPY).to_bytes(8, "little")


def test_a_head_within_a_body_takes_nothing_back_of_what_real_heads_vouch_for() -> None:
    """A publisher who knows the offset at which his message will stand."""
    history = History()
    history.messages(b"one", b"two")
    history.messages(b"three")
    offset = FIRST + len(history.data) + BLOCK_HEAD_BYTES + FRAME_HEAD_BYTES
    forged = block(framed(FrameKind.MESSAGE, range(9), [b"x"]), offset=offset, durable=0, at_ms=1, frames_before=1)
    frames = framed(FrameKind.MESSAGE, range(3, 4), [forged])
    data = bytes(history.data) + block(
        frames, offset=FIRST + len(history.data), durable=FIRST + len(history.data), at_ms=1, frames_before=1
    )
    damaged = bytearray(data)
    damaged[BLOCK_HEAD_BYTES + FRAME_HEAD_BYTES] ^= 1

    found = list(scan(bytes(damaged), first=FIRST, proven=0, same_boot=False))

    assert [len(one.frames) for one in found] == [1, 1, 1], "only the message that the bit hit is gone"


@pytest.mark.parametrize("body", [b"x" * 20, b"".join(framed(FrameKind.MESSAGE, range(1), [b"y"]).heads) + b"y"])
def test_damage_in_a_block_of_many_frames_is_searched_once(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2_000
    frames = framed(FrameKind.MESSAGE, range(count), [body * 3] * count)
    data = bytearray(b"".join(head + payload for head, payload in zip(frames.heads, frames.payloads, strict=True)))
    size_bytes = FRAME_HEAD_BYTES + 3 * len(body)
    for number in (10, 1_900):
        data[number * size_bytes + FRAME_HEAD_BYTES + 1] ^= 1
    looked: list[int] = []
    extend = google_crc32c.extend
    monkeypatch.setattr(google_crc32c, "extend", lambda crc, chunk: looked.append(len(chunk)) or extend(crc, chunk))

    found = frames_in(bytes(data), 0, len(data), count=count)

    assert (len(found.whole), found.damaged) == (count - 2, 2)
    assert len(looked) < 30 * count
