"""Segments on a local disk: torn tails, flipped bits, full disks, failed syncs, a stolen lock, few open files."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import pytest

from outbox_broker.segments.frame_format import FRAME_BYTES
from outbox_broker.segments.local_segments import HEADER_BYTES, VERSION, LocalSegmentStore
from outbox_broker.segments.segment_store import WriterFenced
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.journal.journal import SegmentDamaged
from tests.outbox_broker.failing_storage import FailingStorage
from tests.outbox_broker.open_files import open_files

HEAD = struct.Struct("<8sIQ")  # magic, version, epoch of the writer; then their CRC-32C
RECORDS = [b"\x91first", b"\x91" + b"second" * 20, b"\x91last"]


@pytest.fixture
def disk() -> FailingStorage:
    return FailingStorage()


@pytest.fixture
def store(tmp_path: Path, disk: FailingStorage) -> Iterator[LocalSegmentStore]:
    """An open store on a disk that can be told to fail."""
    opened = LocalSegmentStore.open(tmp_path, storage=disk)
    yield opened
    opened.close()


def written(folder: Path, *, is_sealed: bool = False) -> tuple[Path, list[int]]:
    store = LocalSegmentStore.open(folder)
    positions = store.append("a", RECORDS, position=0)
    store.sync(["a"])
    if is_sealed:
        store.seal("a")
    store.close()
    return folder / "a.delay", positions


def scanned(folder: Path) -> list[bytes]:
    store = LocalSegmentStore.open(folder)
    try:
        return [one.payload for one in store.scan("a")]
    finally:
        store.close()


def test_a_segment_of_a_later_version_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    magic, _, epoch = HEAD.unpack_from(path.read_bytes())
    head = HEAD.pack(magic, VERSION + 1, epoch)
    path.write_bytes(head + struct.pack("<I", google_crc32c.value(head)) + path.read_bytes()[HEADER_BYTES:])

    with pytest.raises(SegmentDamaged, match=f"version {VERSION + 1}; this code reads version {VERSION}: drain"):
        scanned(tmp_path)
    store = LocalSegmentStore.open(tmp_path)
    with pytest.raises(SegmentDamaged, match="drain it"):
        store.read("a", 0, len(RECORDS[0]))
    store.close()


def test_a_tail_torn_at_any_byte_ends_the_scan_and_is_cut_by_the_next_append(tmp_path: Path) -> None:
    path, positions = written(tmp_path)
    whole = path.read_bytes()

    for size in range(HEADER_BYTES + positions[2], len(whole)):
        path.write_bytes(whole[:size])
        assert scanned(tmp_path) == RECORDS[:2], size
        store = LocalSegmentStore.open(tmp_path)
        store.append("a", [b"\x91x"], position=positions[2])
        store.close()
        assert scanned(tmp_path) == [*RECORDS[:2], b"\x91x"], size


@pytest.mark.parametrize("size", range(HEADER_BYTES + 1))
def test_a_file_whose_writer_died_making_it_is_empty_and_can_be_made_again(tmp_path: Path, size: int) -> None:
    path, _ = written(tmp_path)
    path.write_bytes(path.read_bytes()[:size])

    assert scanned(tmp_path) == []
    store = LocalSegmentStore.open(tmp_path)
    store.append("a", RECORDS, position=0)
    store.close()
    assert scanned(tmp_path) == RECORDS


def test_a_flipped_bit_in_any_byte_of_what_is_sealed_is_told_by_scan_and_read(tmp_path: Path) -> None:
    path, positions = written(tmp_path, is_sealed=True)
    whole = path.read_bytes()

    for at in range(HEADER_BYTES + positions[3]):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(SegmentDamaged, match=r"^a: .*restore"):
            scanned(tmp_path)
    store = LocalSegmentStore.open(tmp_path)
    for at in range(FRAME_BYTES + len(RECORDS[0])):
        damaged = bytearray(whole)
        damaged[HEADER_BYTES + at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(SegmentDamaged, match=r"^a: damaged record at 0"):
            store.read("a", 0, len(RECORDS[0]))
    store.close()


def test_a_full_disk_refuses_the_append_and_the_next_one_goes_where_it_would_have_gone(
    store: LocalSegmentStore, disk: FailingStorage
) -> None:
    *_, end = store.append("a", RECORDS[:1], position=0)
    disk.room_bytes = 3

    with pytest.raises(StorageFailed, match="free some disk space"):
        store.append("a", RECORDS[1:], position=end)
    disk.mend()
    store.append("a", RECORDS[2:], position=end)

    assert [one.payload for one in store.scan("a")] == [RECORDS[0], RECORDS[2]]


def test_a_failed_sync_is_final(store: LocalSegmentStore, disk: FailingStorage) -> None:
    store.append("a", RECORDS, position=0)
    disk.fail("sync")

    with pytest.raises(StorageFailed, match="did not confirm"):
        store.sync(["a"])
    disk.mend()

    for refused in (lambda: store.sync(["a"]), lambda: store.append("a", RECORDS, position=0)):
        with pytest.raises(StorageFailed, match="restarted"):
            refused()


def test_a_new_file_is_synced_with_its_folder_before_it_is_durable(
    store: LocalSegmentStore, disk: FailingStorage
) -> None:
    disk.calls.clear()

    store.append("a", RECORDS, position=0)
    store.sync(["a"])
    store.sync(["a"])

    assert [call.partition(" ")[0] for call in disk.calls] == ["create", "write", "write", "sync", "sync_folder"]


def test_what_another_process_wrote_is_synced_before_it_is_answered_for(tmp_path: Path, disk: FailingStorage) -> None:
    written(tmp_path)
    store = LocalSegmentStore.open(tmp_path, storage=disk)
    disk.calls.clear()

    store.sync(["a"])

    assert "sync" in disk.calls
    store.close()


def test_a_writer_whose_lock_file_was_removed_is_fenced_by_the_next(tmp_path: Path) -> None:
    first = LocalSegmentStore.open(tmp_path)
    first.append("a", RECORDS, position=0)
    (tmp_path / "lock").unlink()

    second = LocalSegmentStore.open(tmp_path)

    for refused in (
        lambda: first.append("a", RECORDS, position=0),
        lambda: first.sync(["a"]),
        lambda: first.delete(["a"]),
    ):
        with pytest.raises(WriterFenced):
            refused()
    second.append("a", RECORDS, position=0)
    first.close()
    second.close()


def test_a_second_process_is_told_who_holds_the_folder(store: LocalSegmentStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()}"):
        LocalSegmentStore.open(tmp_path)


def test_few_files_are_open_and_one_with_unsynced_writes_is_synced_before_it_is_closed(
    tmp_path: Path, disk: FailingStorage
) -> None:
    store = LocalSegmentStore.open(tmp_path, storage=disk, open_files_max=3)
    for number in range(10):
        store.append(f"s-{number}", RECORDS, position=0)

    assert disk.calls.count("sync") == 1 + 7  # the epoch's, and one for each that was closed
    assert len(open_segments(tmp_path)) == 3
    assert [one.payload for one in store.scan("s-0")] == RECORDS
    store.close()
    assert not open_segments(tmp_path)


def test_a_file_that_fails_to_sync_when_it_is_closed_fails_the_store(tmp_path: Path, disk: FailingStorage) -> None:
    store = LocalSegmentStore.open(tmp_path, storage=disk, open_files_max=1)
    store.append("a", RECORDS, position=0)
    disk.fail("sync", errno.EIO)

    with pytest.raises(StorageFailed):
        store.append("b", RECORDS, position=0)
    disk.mend()
    with pytest.raises(StorageFailed, match="restarted"):
        store.append("a", RECORDS, position=0)
    store.close()


def test_a_sync_that_finds_no_descriptor_says_so_and_is_not_final(tmp_path: Path, disk: FailingStorage) -> None:
    store = LocalSegmentStore.open(tmp_path, storage=disk, open_files_max=1)
    for name in ("a", "b"):
        store.append(name, RECORDS, position=0)
    disk.fail("create", errno.EMFILE)

    with pytest.raises(StorageFailed, match=r"Too many open files.*ulimit -n"):
        store.sync(["a", "b"])

    disk.mend()
    store.sync(["a", "b"])
    store.append("c", RECORDS, position=0)
    store.close()


@pytest.mark.parametrize("name", ["", "../a", "A", "a.b", "x" * 65])
def test_a_name_that_could_leave_the_folder_is_refused(store: LocalSegmentStore, name: str) -> None:
    with pytest.raises(ValueError, match="segment's name"):
        store.append(name, RECORDS, position=0)


def open_segments(folder: Path) -> list[str]:
    """The segments of a folder whose files this process has open."""
    return [one.name for one in open_files(folder) if one.suffix == ".delay"]
