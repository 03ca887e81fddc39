"""Segments as files: torn tails, lost pages, foreign formats, failing disks, few open files, several threads."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread

import google_crc32c
import pytest

from outbox_broker.log.storage import DiskStorage, UnsyncedStorage
from outbox_broker.segments.local import LocalSegments
from outbox_broker.segments.port import RecordDamaged, WriterFenced, read_record
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.journal.block import (
    BLOCK_HEAD_BYTES,
    FRAME_HEAD_BYTES,
    SEGMENT_HEAD_BYTES,
    Block,
    FrameKind,
    SegmentKind,
    block,
    framed,
)
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.runtime.logs import event_name
from tests.outbox_broker.failing_storage import FailingStorage
from tests.outbox_broker.open_files import open_files
from tests.outbox_broker.segments.gates import WAIT_SECONDS, Gate, while_held
from tests.outbox_broker.segments.written_log import WrittenSegment, names, payloads

PAYLOADS = [b"a", bytes(range(256)) * 40, b"c"]
PAGE_BYTES = 4096


@pytest.fixture
def disk() -> FailingStorage:
    return FailingStorage()


@pytest.fixture
def segments(tmp_path: Path, disk: FailingStorage) -> Iterator[LocalSegments]:
    """Open segments on a disk that can be told to fail."""
    opened = LocalSegments.open(tmp_path, storage=disk)
    yield opened
    opened.close()


def page(name: str) -> bytes:
    return name.encode() * (PAGE_BYTES // len(name))


ANSWERED = [page("answered"), page("too")]
UNSYNCED = [page("first"), page("second"), page("third")]


def left(folder: Path, *blocks: bytes, boot: str = "this", name: str = "a") -> list[int]:
    """Have an owner append and commit one block after the other, and be killed; returns where each ends."""
    opened = LocalSegments.open(folder, boot=boot)
    written = WrittenSegment.create(opened, name)
    ends = [written.append_committed(one) for one in blocks]
    opened.close()
    return ends


def found_in(folder: Path, *, boot: str = "this", proven: int = 0) -> list[Block]:
    """The blocks that the next owner reads."""
    opened = LocalSegments.open(folder, boot=boot)
    try:
        return list(opened.blocks("a", proven=proven))
    finally:
        opened.close()


def whole_in(blocks: Sequence[Block]) -> list[bytes]:
    return [frame.payload for found in blocks for frame in found.frames]


def lose(folder: Path, position: int, size_bytes: int = 100) -> None:
    """Let these bytes be lost by a power cut, and no others."""
    path = folder / "a.segment"
    data = bytearray(path.read_bytes())
    at = SEGMENT_HEAD_BYTES + position
    data[at : at + size_bytes] = bytes(len(data[at : at + size_bytes]))
    path.write_bytes(data)


# -- what a crash leaves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boot", ["this", "another"])
def test_a_tail_torn_at_any_byte_ends_the_blocks_and_is_cut_by_the_next_owner(tmp_path: Path, boot: str) -> None:
    ends = left(tmp_path, *PAYLOADS)
    path = tmp_path / "a.segment"
    whole, note = path.read_bytes(), (tmp_path / "a.proven").read_bytes()

    for size in range(SEGMENT_HEAD_BYTES + ends[1], len(whole)):
        path.write_bytes(whole[:size])
        (tmp_path / "a.proven").write_bytes(note)
        opened = LocalSegments.open(tmp_path, boot=boot)
        assert payloads(opened) == PAYLOADS[:2], size
        writer = opened.reopen("a", end=ends[1])
        WrittenSegment(writer, number=2).append_committed(b"x")
        opened.close()
        assert whole_in(found_in(tmp_path)) == [*PAYLOADS[:2], b"x"], size


@pytest.mark.parametrize("size", range(SEGMENT_HEAD_BYTES + 1))
def test_a_file_whose_owner_died_making_it_is_no_segment_and_can_be_made_again(tmp_path: Path, size: int) -> None:
    left(tmp_path, b"x")
    path = tmp_path / "a.segment"
    path.write_bytes(path.read_bytes()[:size] if size % 2 else bytes(size))

    opened = LocalSegments.open(tmp_path)
    assert [payloads(opened, name) for name in names(opened)] in ([], [[]])
    opened.close()
    left(tmp_path, *PAYLOADS)
    assert whole_in(found_in(tmp_path)) == PAYLOADS


@pytest.mark.parametrize("lost_bytes", [SEGMENT_HEAD_BYTES, 512, PAGE_BYTES])
def test_a_segment_that_lost_its_first_bytes_is_there_with_all_that_is_behind_them(
    tmp_path: Path, lost_bytes: int
) -> None:
    opened = LocalSegments.open(tmp_path, boot="this")
    written = WrittenSegment.create(opened, first=7_000)
    for one in (*ANSWERED, *UNSYNCED):
        written.append_committed(one)
    opened.close()

    path = tmp_path / "a.segment"
    path.write_bytes(bytes(lost_bytes) + path.read_bytes()[lost_bytes:])

    lost = lost_bytes > SEGMENT_HEAD_BYTES
    for boot in ("this", "another"):
        found = found_in(tmp_path, boot=boot)
        assert whole_in(found) == [*ANSWERED, *UNSYNCED][lost:]
        assert [one.damaged for one in found] == [int(lost), 0, 0, 0, 0]


def test_what_an_opening_removes_is_empty_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left(tmp_path, b"1", name="kept")
    magic = (tmp_path / "kept.segment").read_bytes()[:12]
    for name, data in {"a": b"", "b": magic, "c": bytes(40), "d": bytes(3 * PAGE_BYTES)}.items():
        (tmp_path / f"{name}.segment").write_bytes(data)

    opened = LocalSegments.open(tmp_path)

    assert names(opened) == ["kept"]
    opened.close()
    removed = [vars(one)["file"] for one in caplog.records if event_name(one) == "unfinished_file_removed"]
    assert removed == [f"{name}.segment" for name in "abcd"]
    assert [one.stem for one in tmp_path.glob("*.segment")] == ["kept"]


def test_a_flipped_bit_anywhere_costs_one_frame_at_most_while_the_machine_is_not_started_anew(tmp_path: Path) -> None:
    left(tmp_path, b"first", b"second", b"third")
    path = tmp_path / "a.segment"
    whole = path.read_bytes()

    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        found = whole_in(found_in(tmp_path))
        assert len(found) >= 2, at
        assert [one for one in (b"first", b"second", b"third") if one in found] == found, at


@pytest.mark.parametrize("lost", range(3))
def test_a_lost_page_that_was_never_synced_is_a_torn_tail_whatever_is_kept_behind_it(tmp_path: Path, lost: int) -> None:
    opened = LocalSegments.open(tmp_path, boot="before the power cut")
    written = WrittenSegment.create(opened)
    ends = [written.append(one) for one in ANSWERED]
    written.commit()
    ends += [written.append(one) for one in UNSYNCED]
    opened.close()

    lose(tmp_path, ends[1 + lost] + BLOCK_HEAD_BYTES + 30)

    assert whole_in(found_in(tmp_path)) == [*ANSWERED, *UNSYNCED[:lost]]


def test_a_lost_page_in_the_middle_of_one_append_is_a_torn_tail(tmp_path: Path) -> None:
    opened = LocalSegments.open(tmp_path, boot="before the power cut")
    written = WrittenSegment.create(opened)
    end = written.append_committed(*ANSWERED)
    written.append(*UNSYNCED)
    opened.close()

    lose(tmp_path, end + BLOCK_HEAD_BYTES + PAGE_BYTES + 100)

    assert whole_in(found_in(tmp_path)) == ANSWERED


@pytest.mark.parametrize("lost", range(2))
@pytest.mark.parametrize("boot", ["this", "another"])
def test_what_was_synced_before_a_later_block_was_written_is_damaged_where_it_is_lost(
    tmp_path: Path, lost: int, boot: str
) -> None:
    opened = LocalSegments.open(tmp_path, boot="this")
    written = WrittenSegment.create(opened)
    starts = [0, written.append(ANSWERED[0])]
    written.append_committed(ANSWERED[1])
    written.append(UNSYNCED[0])
    opened.close()

    lose(tmp_path, starts[lost] + BLOCK_HEAD_BYTES + 50)

    found = found_in(tmp_path, boot=boot)
    assert whole_in(found) == [ANSWERED[1 - lost], UNSYNCED[0]]
    assert [one.damaged for one in found] == [1 - lost, lost, 0]


@pytest.mark.parametrize("boot", ["this", "another"])
def test_after_an_end_in_order_the_last_block_is_proven_too(tmp_path: Path, boot: str) -> None:
    opened = LocalSegments.open(tmp_path, boot="this")
    written = WrittenSegment.create(opened)
    start = written.append(ANSWERED[0])
    written.append(ANSWERED[1])
    written.writer.seal()
    opened.close()

    lose(tmp_path, start + BLOCK_HEAD_BYTES + 50)

    found = found_in(tmp_path, boot=boot)
    assert whole_in(found) == ANSWERED[:1]
    assert [one.damaged for one in found] == [0, 1]


def test_after_a_failed_sync_a_lost_page_is_a_torn_tail_though_the_machine_was_not_started_anew(
    tmp_path: Path, disk: FailingStorage
) -> None:
    opened = LocalSegments.open(tmp_path, storage=disk, boot="this")
    written = WrittenSegment.create(opened)
    end = written.append_committed(ANSWERED[0])
    written.append(UNSYNCED[0])
    written.append(UNSYNCED[1])
    disk.fail("sync")
    with pytest.raises(StorageFailed):
        written.commit()
    disk.mend()
    opened.close()

    lose(tmp_path, end + BLOCK_HEAD_BYTES + 50)  # the kernel dropped it

    assert whole_in(found_in(tmp_path)) == ANSWERED[:1]


@pytest.mark.parametrize("boot", ["this", "another"])
def test_without_syncs_nothing_is_vouched_for_and_a_power_loss_ends_the_blocks_at_its_first_hole(
    tmp_path: Path, boot: str
) -> None:
    ends: list[int] = []
    for _ in range(2):
        opened = LocalSegments.open(tmp_path, storage=UnsyncedStorage(DiskStorage()), boot="this")
        writer = opened.reopen("a", end=ends[-1]) if ends else opened.create("a", kind=SegmentKind.MESSAGES)
        written = WrittenSegment(writer, number=len(ends))
        for _ in range(3):
            ends.append(written.append(page("left to the system")))
            written.commit()
        opened.close()
    if boot == "another":
        lose(tmp_path, ends[1] + BLOCK_HEAD_BYTES + 50)

    found = found_in(tmp_path, boot=boot)

    assert [one.damaged for one in found] == [0] * (6 if boot == "this" else 2)


def test_a_sealed_segment_is_durable_also_where_syncs_are_left_to_the_system(
    tmp_path: Path, disk: FailingStorage
) -> None:
    opened = LocalSegments.open(tmp_path, storage=UnsyncedStorage(disk), boot="this")
    disk.calls.clear()
    written = WrittenSegment.create(opened)
    ends = [written.append_committed(page("left to the system")) for _ in range(3)]
    assert disk.calls.count("sync") == 1, "as it was begun"

    written.writer.seal()

    assert disk.calls.count("sync") == 2
    opened.close()
    lose(tmp_path, ends[0] + BLOCK_HEAD_BYTES + 50)
    assert [one.damaged for one in found_in(tmp_path, boot="another")] == [0, 1, 0], "no torn tail"


def test_what_is_written_again_behind_a_cut_says_no_more_than_was_synced(tmp_path: Path) -> None:
    opened = LocalSegments.open(tmp_path, boot="before the power cut")
    written = WrittenSegment.create(opened)
    end = written.append_committed(ANSWERED[0])
    written.append(UNSYNCED[0])
    written.writer.cut(end)
    written.append(UNSYNCED[1])
    written.append(UNSYNCED[2])
    opened.close()

    lose(tmp_path, end + BLOCK_HEAD_BYTES + 50)

    assert whole_in(found_in(tmp_path)) == ANSWERED[:1]


def test_blocks_of_another_file_in_a_torn_record_make_no_damage_of_it(tmp_path: Path) -> None:
    copied = block(
        framed(FrameKind.MESSAGE, range(3), [page("of a copy")] * 3), offset=2_000_000, durable=1_000_000, at_ms=1,
        frames_before=0,
    )  # fmt: skip
    opened = LocalSegments.open(tmp_path, boot="before the power cut")
    written = WrittenSegment.create(opened)
    written.append_committed(ANSWERED[0])
    end = written.append(copied)
    opened.close()
    os.truncate(tmp_path / "a.segment", SEGMENT_HEAD_BYTES + end - 1)

    assert whole_in(found_in(tmp_path)) == ANSWERED[:1]


# -- going on --------------------------------------------------------------------------------------------------------


def test_a_segment_that_was_not_ended_in_order_is_copied_before_it_is_gone_on_with(tmp_path: Path) -> None:
    [end] = left(tmp_path, b"1")
    inode = (tmp_path / "a.segment").stat().st_ino

    opened = LocalSegments.open(tmp_path, boot="this")
    written = WrittenSegment(opened.reopen("a", end=end), number=1)
    copied = (tmp_path / "a.segment").stat().st_ino
    assert copied != inode, "whether a sync of its owner failed is not known"
    written.append_committed(b"2")
    written.writer.seal()
    opened.close()
    opened = LocalSegments.open(tmp_path, boot="another")
    opened.reopen("a", end=written.writer.end)

    assert (tmp_path / "a.segment").stat().st_ino == copied, "it is proven"
    opened.close()
    assert whole_in(found_in(tmp_path)) == [b"1", b"2"]


def test_a_note_is_removed_before_the_first_write_that_it_does_not_cover(tmp_path: Path, disk: FailingStorage) -> None:
    opened = LocalSegments.open(tmp_path, boot="this")
    written = WrittenSegment.create(opened)
    end = written.append_committed(b"1")
    written.writer.seal()
    opened.close()
    opened = LocalSegments.open(tmp_path, storage=disk, boot="this")
    disk.calls.clear()

    opened.reopen("a", end=end)

    assert disk.calls[0] == "remove"
    opened.close()


@pytest.mark.parametrize("end", ["in order", "by a kill"])
def test_the_newest_segment_of_a_log_is_missed_until_it_is_back_or_its_note_is_gone(tmp_path: Path, end: str) -> None:
    opened = LocalSegments.open(tmp_path)
    for number in (1, 2):
        written = WrittenSegment.create(opened, f"log-{number}")
        written.append_committed(b"x")
        if end == "in order":
            written.writer.seal()
    opened.close()
    gone = tmp_path / "log-2.segment"
    data = gone.read_bytes()
    gone.unlink()
    left_there = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    for _ in range(2):
        with pytest.raises(SegmentDamaged, match=r"log-2 is missing.*restore it from a copy"):
            LocalSegments.open(tmp_path)

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "lock"} == {
        name: content for name, content in left_there.items() if name != "lock"
    }
    gone.write_bytes(data)
    LocalSegments.open(tmp_path).close()
    gone.unlink()
    (tmp_path / "log-2.proven").unlink()
    opened = LocalSegments.open(tmp_path)
    assert names(opened) == ["log-1"]
    opened.close()


def test_a_kill_at_either_step_of_a_delete_leaves_nothing_that_is_missed(tmp_path: Path, disk: FailingStorage) -> None:
    opened = LocalSegments.open(tmp_path, storage=disk)
    WrittenSegment.create(opened, "log-1").append_committed(b"x")
    for step in (1, 2):
        calls = iter(range(step))

        def before(call: str, calls: Iterator[int] = calls, step: int = step) -> None:
            if call == "remove" and next(calls) == step - 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        disk.before = before
        with pytest.raises(StorageFailed):
            opened.delete(["log-1"])
        opened.close()
        disk.mend()

        opened = LocalSegments.open(tmp_path, storage=disk)

        assert names(opened) == ["log-1"]
    opened.close()


def test_a_segment_that_a_power_cut_emptied_is_no_missing_one_at_later_openings(tmp_path: Path) -> None:
    left(tmp_path, b"x", name="log-1")
    path = tmp_path / "log-1.segment"
    path.write_bytes(bytes(path.stat().st_size))

    for _ in range(2):
        opened = LocalSegments.open(tmp_path)
        assert names(opened) == []
        opened.close()


def a_log_without_its_first_page(folder: Path, *, last: int, is_committed: bool) -> None:
    """A log of which a power cut kept the later pages of the second segment's first block, and not the first page."""
    opened = LocalSegments.open(folder)
    for number in range(1, last + 1):
        name = f"log-{number:012d}"
        written = WrittenSegment.create(opened, name, first=20_000 * (number - 1))
        written.append(b"x" * 3 * PAGE_BYTES)
        if number != 2 or is_committed:
            written.commit()
    opened.close()
    path = folder / "log-000000000002.segment"
    path.write_bytes(bytes(PAGE_BYTES) + path.read_bytes()[PAGE_BYTES:])


def test_a_newest_segment_that_lost_its_first_page_before_any_commit_is_set_aside(tmp_path: Path) -> None:
    a_log_without_its_first_page(tmp_path, last=2, is_committed=False)

    for _ in range(2):
        opened = LocalSegments.open(tmp_path)
        assert names(opened) == ["log-000000000001"]
        opened.close()

    assert (tmp_path / "log-000000000002.unreadable").stat().st_size > 3 * PAGE_BYTES


@pytest.mark.parametrize(("last", "is_committed"), [(2, True), (3, False)])
def test_a_segment_that_lost_its_first_page_is_damage_where_somebody_was_told_that_it_is_durable(
    tmp_path: Path, last: int, is_committed: bool
) -> None:
    a_log_without_its_first_page(tmp_path, last=last, is_committed=is_committed)

    for _ in range(2):
        with pytest.raises(SegmentDamaged, match=r"log-000000000002: its head.*restore log-000000000002 from a copy"):
            LocalSegments.open(tmp_path)


def test_a_commit_of_one_segment_says_nothing_of_the_next_one(tmp_path: Path) -> None:
    opened = LocalSegments.open(tmp_path)
    first, second = (WrittenSegment.create(opened, f"log-{number}") for number in (1, 2))
    first.append(b"1")
    second.append(b"2")

    first.commit()

    assert [path.name for path in tmp_path.glob("*.proven")] == ["log-1.proven"]
    second.commit()
    assert len(list(tmp_path.glob("*.proven"))) == 2
    opened.close()


def test_files_that_a_copy_left_are_removed(tmp_path: Path) -> None:
    left(tmp_path, b"1")
    (tmp_path / "a.new").write_bytes(b"half of a copy")

    LocalSegments.open(tmp_path).close()

    assert not list(tmp_path.glob("*.new"))


# -- other formats ---------------------------------------------------------------------------------------------------


def checked(head: bytes) -> bytes:
    return head + int(google_crc32c.value(head)).to_bytes(4, "little")


def folder_of(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.iterdir() if one.name != "lock"}


@pytest.mark.parametrize(
    ("file", "data", "cure"),
    [
        ("log-000000000001.delay", b"OUTBOXDL" + bytes(16), "earlier format.*use an empty folder"),
        ("a.segment", checked(b"OMQSEGM1" + struct.pack("<HHQQQ", 2, 1, 1, 0, 0)), "format 2.*upgrade"),
        ("a.segment", checked(b"OMQSEGM1" + struct.pack("<HHQQQ", 1, 99, 1, 0, 0)), "kind 99.*upgrade"),
        ("a.segment", b"another service's file, and more than a head", "use an empty folder"),
        ("a.segment", b"another's", "use an empty folder"),
    ],
    ids=["earlier", "newer", "newer kind", "foreign", "short foreign"],
)
def test_a_folder_of_another_format_is_refused_with_the_cure_and_nothing_is_touched(
    tmp_path: Path, file: str, data: bytes, cure: str
) -> None:
    if cure != "use an empty folder":
        left(tmp_path, b"1", name="before")
    (tmp_path / file).write_bytes(data)
    before = folder_of(tmp_path)

    with pytest.raises(ConfigurationError, match=cure):
        LocalSegments.open(tmp_path)

    assert folder_of(tmp_path) == before


def test_a_damaged_head_of_a_segment_costs_nothing(tmp_path: Path) -> None:
    left(tmp_path, *PAYLOADS)
    path = tmp_path / "a.segment"
    whole = path.read_bytes()

    for at in range(SEGMENT_HEAD_BYTES):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        assert whole_in(found_in(tmp_path)) == PAYLOADS, at


# -- failing disks ---------------------------------------------------------------------------------------------------


def test_a_flipped_bit_of_a_frame_is_told_by_its_read_with_what_stands_there(tmp_path: Path) -> None:
    opened = LocalSegments.open(tmp_path)
    written = WrittenSegment.create(opened)
    written.append_committed(*PAYLOADS)
    [first, second, _] = written.places
    path = tmp_path / "a.segment"
    whole = path.read_bytes()

    for at in range(FRAME_HEAD_BYTES + len(PAYLOADS[0])):
        damaged = bytearray(whole)
        damaged[SEGMENT_HEAD_BYTES + first.position + at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(RecordDamaged, match=rf"^a: damaged record at {first.position}"):
            read_record(opened, first)
    assert read_record(opened, second) == PAYLOADS[1]
    damaged = bytearray(whole)
    damaged[SEGMENT_HEAD_BYTES + second.position + FRAME_HEAD_BYTES + 1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(RecordDamaged) as raised:
        read_record(opened, second)
    assert raised.value.found == b"\x00\x00" + PAYLOADS[1][2:]
    opened.close()


def test_a_new_file_is_synced_with_its_folder_before_it_is_durable(
    segments: LocalSegments, disk: FailingStorage
) -> None:
    disk.calls.clear()

    writer = segments.create("a", kind=SegmentKind.BUCKET)
    written = WrittenSegment(writer)
    written.append(b"1")
    for _ in range(2):
        written.commit()

    assert [call.partition(" ")[0] for call in disk.calls] == ["create", "write", "sync", "sync_folder"]


def test_an_owner_whose_lock_file_was_removed_is_fenced_by_the_next(tmp_path: Path) -> None:
    first = LocalSegments.open(tmp_path)
    written = WrittenSegment.create(first)
    written.append(b"1")
    (tmp_path / "lock").unlink()

    second = LocalSegments.open(tmp_path)

    for refused in (lambda: written.append(b"2"), written.commit, lambda: first.delete(["a"]), first.check):
        with pytest.raises(WriterFenced):
            refused()
    first.close()
    second.close()


def test_a_second_process_is_told_who_holds_the_folder(segments: LocalSegments, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()}"):
        LocalSegments.open(tmp_path)
    segments.check()


def open_segments(folder: Path) -> list[str]:
    """The segments of a folder whose files this process has open."""
    return [one.name for one in open_files(folder) if one.suffix == ".segment"]


def buckets(opened: LocalSegments, count: int) -> list[WrittenSegment]:
    """Segments that have a block each, not committed."""
    written = [WrittenSegment(opened.create(f"s-{number}", kind=SegmentKind.BUCKET)) for number in range(count)]
    for one in written:
        one.append(one.writer.name.encode())
    return written


def test_few_files_are_open_and_one_with_unsynced_writes_is_synced_before_it_is_closed(
    tmp_path: Path, disk: FailingStorage
) -> None:
    opened = LocalSegments.open(tmp_path, storage=disk, open_files_max=3)

    written = buckets(opened, 10)

    assert disk.calls.count("sync") == 1 + 7  # the epoch's, and one for each that was closed
    assert len(open_segments(tmp_path)) == 3
    for one in written:
        one.append_committed(b"more")
    assert [payloads(opened, one.writer.name) for one in written] == [
        [one.writer.name.encode(), b"more"] for one in written
    ]
    opened.close()
    assert not open_segments(tmp_path)


def test_a_file_that_fails_to_sync_when_it_is_closed_fails_all_segments(tmp_path: Path, disk: FailingStorage) -> None:
    opened = LocalSegments.open(tmp_path, storage=disk, open_files_max=1)
    [written] = buckets(opened, 1)
    disk.fail("sync", errno.EIO)

    other = WrittenSegment(opened.create("b", kind=SegmentKind.BUCKET))
    with pytest.raises(StorageFailed):
        other.append(b"x")
    disk.mend()
    with pytest.raises(StorageFailed, match="restarted"):
        written.append(b"more")
    opened.close()


def test_an_append_that_finds_no_descriptor_says_so_and_is_not_final(tmp_path: Path, disk: FailingStorage) -> None:
    opened = LocalSegments.open(tmp_path, storage=disk, open_files_max=1)
    first, second = buckets(opened, 2)
    disk.fail("create", errno.EMFILE)

    with pytest.raises(StorageFailed, match=r"Too many open files.*ulimit -n"):
        first.append(b"more")
    first.commit()

    disk.mend()
    for one in (first, second):
        one.append_committed(b"more")
    opened.close()


# -- several threads -------------------------------------------------------------------------------------------------


class GatedDisk(DiskStorage):
    """A disk on which the next write, or the next sync, can be held, and that of a folder can fail. Counts syncs."""

    def __init__(self) -> None:
        self.write_gate: Gate | None = None
        self.sync_gate: Gate | None = None
        self.folder_fails = False
        self.syncs = 0

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        if self.write_gate is not None:
            self.write_gate.hold()
        super().write(descriptor, data, position=position)

    def sync(self, descriptor: int) -> None:
        if self.sync_gate is not None:
            self.sync_gate.hold()
        super().sync(descriptor)
        self.syncs += 1

    def sync_folder(self, folder: Path) -> None:
        if self.folder_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync_folder(folder)


@pytest.fixture
def gated() -> GatedDisk:
    return GatedDisk()


@pytest.fixture
def on_gated(tmp_path: Path, gated: GatedDisk) -> Iterator[LocalSegments]:
    """Open segments on that disk."""
    opened = LocalSegments.open(tmp_path, storage=gated)
    yield opened
    opened.close()


def test_what_is_written_while_another_syncs_the_segment_is_synced_by_its_own_commit(
    on_gated: LocalSegments, gated: GatedDisk
) -> None:
    written = WrittenSegment.create(on_gated)
    written.append(b"first")
    gated.write_gate = Gate()
    raised = while_held(gated.write_gate, lambda: written.append(b"second"), written.commit)
    before = gated.syncs

    written.commit()

    assert not raised
    assert gated.syncs == before + 1, "the sync of the other one began before the write was there"


def test_what_is_cut_while_another_syncs_it_and_written_anew_is_synced_by_its_own_commit(
    on_gated: LocalSegments, gated: GatedDisk
) -> None:
    written = WrittenSegment.create(on_gated)
    kept = written.append_committed(b"kept")
    written.append(b"to be cut" * 100)
    gated.sync_gate = Gate()

    def write_anew() -> None:
        written.writer.cut(kept)
        written.append(b"anew")

    raised = while_held(gated.sync_gate, written.commit, write_anew)
    before = gated.syncs
    written.commit()

    assert not raised
    assert gated.syncs == before + 1, "the sync of the other one may have covered nothing but what was cut"


def test_who_comes_behind_a_failed_sync_of_the_folder_is_not_acknowledged(
    on_gated: LocalSegments, gated: GatedDisk
) -> None:
    one, other = WrittenSegment.create(on_gated), WrittenSegment.create(on_gated, "b")
    one.append(b"1")
    other.append(b"1")
    gated.sync_gate = Gate()

    def fail() -> None:
        gated.folder_fails = True
        with pytest.raises(StorageFailed, match="did not confirm"):
            other.commit()
        gated.folder_fails = False

    raised = while_held(gated.sync_gate, one.commit, fail)

    assert [str(error) for error in raised] == [
        "the disk failed earlier (Input/output error); nothing is taken until the broker is restarted"
    ]


def test_a_segment_that_is_deleted_while_it_is_synced_fails_nobody_and_leaves_no_file_open(
    on_gated: LocalSegments, gated: GatedDisk, tmp_path: Path
) -> None:
    deleted, other = WrittenSegment.create(on_gated), WrittenSegment.create(on_gated, "b")
    deleted.append(b"old")
    other.append(b"new")
    gated.sync_gate = Gate()

    raised = while_held(gated.sync_gate, deleted.commit, lambda: on_gated.delete(["a"]))

    assert not raised
    assert names(on_gated) == ["b"]
    other.append_committed(b"more")
    assert not [one for one in open_files(tmp_path) if one.name.startswith("a.segment")]


def until_closed(opened: LocalSegments) -> Callable[[], None]:
    def wait() -> None:
        while True:
            try:
                opened.check()
            except StorageFailed:
                return

    return wait


def test_segments_that_are_closed_under_a_write_never_have_it_written_to_a_file_of_another_owner(
    on_gated: LocalSegments, gated: GatedDisk, tmp_path: Path
) -> None:
    written = WrittenSegment.create(on_gated)
    written.append(b"first")
    gated.write_gate = Gate()
    others: list[LocalSegments] = []
    closing = Thread(target=on_gated.close, daemon=True)

    def close_and_open_another() -> None:
        closing.start()
        until_closed(on_gated)()
        others.append(LocalSegments.open(tmp_path / "other"))  # descriptors that were let go are taken again
        WrittenSegment.create(others[0], "b").append(b"of another owner")

    raised = while_held(gated.write_gate, lambda: written.append(b"second"), close_and_open_another)
    closing.join(WAIT_SECONDS)
    others[0].close()

    assert not closing.is_alive()
    assert not raised
    assert whole_in(found_in(tmp_path)) == [b"first", b"second"]
    again = LocalSegments.open(tmp_path / "other")
    assert payloads(again, "b") == [b"of another owner"]
    again.close()
