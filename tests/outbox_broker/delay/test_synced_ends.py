"""Pages that were never synced, and that a power cut loses, are a torn tail; what was synced and is gone is damage."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from outbox_broker.segments import frame_format
from outbox_broker.segments.local_segments import HEADER_BYTES, LocalSegmentStore
from outbox_core.journal.journal import SegmentDamaged

PAGE_BYTES = 4096
type_of_records = Sequence[bytes]


def record(name: str, *, size_bytes: int = PAGE_BYTES) -> bytes:
    return b"\x91" + name.encode() * (size_bytes // len(name))


ANSWERED = [record("answered"), record("too")]
UNSYNCED = [record("first"), record("second"), record("third")]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalSegmentStore]:
    opened = LocalSegmentStore.open(tmp_path)
    yield opened
    opened.close()


def appended(store: LocalSegmentStore, records: type_of_records, *, position: int) -> int:
    """Append one by one; returns the end."""
    for one in records:
        *_, position = store.append("log", [one], position=position)
    return position


def lose(store: LocalSegmentStore, tmp_path: Path, position: int, size_bytes: int) -> None:
    """Let these bytes be lost by a power cut, and no others."""
    store.close()
    path = tmp_path / "log.delay"
    data = bytearray(path.read_bytes())
    at = HEADER_BYTES + position
    data[at : at + size_bytes] = bytes(len(data[at : at + size_bytes]))
    path.write_bytes(data)


def scanned(tmp_path: Path) -> list[bytes]:
    store = LocalSegmentStore.open(tmp_path)
    try:
        return [one.payload for one in store.scan("log")]
    finally:
        store.close()


@pytest.mark.parametrize("lost", range(3))
def test_a_lost_page_that_was_never_synced_is_a_torn_tail_whatever_is_kept_behind_it(
    store: LocalSegmentStore, tmp_path: Path, lost: int
) -> None:
    begin = appended(store, ANSWERED, position=0)
    store.sync(["log"])
    at = appended(store, UNSYNCED[:lost], position=begin)
    appended(store, UNSYNCED[lost:], position=at)

    lose(store, tmp_path, at, 100)

    assert scanned(tmp_path) == [*ANSWERED, *UNSYNCED[:lost]]


def test_a_lost_page_in_the_middle_of_one_append_is_a_torn_tail(store: LocalSegmentStore, tmp_path: Path) -> None:
    begin = appended(store, ANSWERED, position=0)
    store.sync(["log"])
    _, at, *_ = store.append("log", UNSYNCED, position=begin)

    lose(store, tmp_path, at, 100)

    assert scanned(tmp_path) == [*ANSWERED, UNSYNCED[0]]


@pytest.mark.parametrize("lost", range(2))
def test_what_was_synced_before_a_later_record_was_written_is_damaged_where_it_is_lost(
    store: LocalSegmentStore, tmp_path: Path, lost: int
) -> None:
    at = appended(store, ANSWERED[:lost], position=0)
    end = appended(store, ANSWERED[lost:], position=at)
    store.sync(["log"])
    appended(store, UNSYNCED[:1], position=end)

    lose(store, tmp_path, at, 100)

    with pytest.raises(SegmentDamaged, match=rf"log: damaged record at {at}; restore log\.delay from a copy"):
        scanned(tmp_path)


def test_after_an_end_in_order_the_last_record_is_proven_too(store: LocalSegmentStore, tmp_path: Path) -> None:
    at = appended(store, ANSWERED[:1], position=0)
    appended(store, ANSWERED[1:], position=at)
    store.sync(["log"])
    store.seal("log")

    lose(store, tmp_path, at, 100)

    with pytest.raises(SegmentDamaged, match=f"damaged record at {at}"):
        scanned(tmp_path)


def test_what_is_written_again_behind_a_cut_says_no_more_than_was_synced(
    store: LocalSegmentStore, tmp_path: Path
) -> None:
    begin = appended(store, ANSWERED[:1], position=0)
    appended(store, UNSYNCED, position=begin)
    store.sync(["log"])

    end = appended(store, ANSWERED[1:], position=begin)
    appended(store, UNSYNCED[:1], position=end)
    lose(store, tmp_path, begin, 100)

    assert scanned(tmp_path) == ANSWERED[:1]


def test_a_file_that_another_process_wrote_is_not_taken_for_synced(store: LocalSegmentStore, tmp_path: Path) -> None:
    end = appended(store, ANSWERED, position=0)
    store.sync(["log"])
    store.close()
    store = LocalSegmentStore.open(tmp_path)
    appended(store, UNSYNCED[:1], position=end)

    lose(store, tmp_path, 0, 100)

    assert scanned(tmp_path) == []


def test_a_torn_tail_that_was_found_and_left_as_it_is_stays_one(store: LocalSegmentStore, tmp_path: Path) -> None:
    begin = appended(store, ANSWERED, position=0)
    store.sync(["log"])
    appended(store, UNSYNCED, position=begin)
    lose(store, tmp_path, begin, 100)

    store = LocalSegmentStore.open(tmp_path)
    store.sync(["log"])
    store.seal("log")
    store.close()

    assert scanned(tmp_path) == ANSWERED


def test_frames_of_another_file_in_a_torn_record_make_no_damage_of_it(store: LocalSegmentStore, tmp_path: Path) -> None:
    begin = appended(store, ANSWERED, position=0)
    store.sync(["log"])
    copied, _ = frame_format.frames([record("of a copy")] * 3, position=2_000_000, synced_end=1_000_000)
    end = appended(store, [b"\x91" + copied], position=begin)
    store.close()

    os.truncate(tmp_path / "log.delay", HEADER_BYTES + end - 1)  # as a kill in the middle of the write leaves it

    assert scanned(tmp_path) == ANSWERED


def test_a_frame_is_found_behind_any_gap_and_at_any_place() -> None:
    data, _ = frame_format.frames([record("found", size_bytes=50)], position=5_000, synced_end=1)

    for gap in (b"", b"\x00" * 4_000, b"\x91" * 4_000, bytes(range(256)) * 16):
        view = memoryview(b"x" + gap + data)
        assert frame_format.was_synced_beyond(view, 0)
        assert not frame_format.was_synced_beyond(view, 1)
        for at in range(1 + len(gap), len(view)):
            flipped = bytearray(view)
            flipped[at] ^= 1
            assert not frame_format.was_synced_beyond(memoryview(flipped), 0), at
