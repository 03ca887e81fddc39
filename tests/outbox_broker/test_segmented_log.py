"""The log: what is appended and committed is there after any end of its process; damage is refused, never served."""

from __future__ import annotations

import errno
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import pytest

from outbox_broker.common.engine_options import Durability
from outbox_broker.log.segmented_log import SegmentedLog
from outbox_broker.log.storage import DiskStorage, Storage
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import (
    FRAME_BYTES,
    HEADER_BYTES,
    Frame,
    SegmentDamaged,
    SegmentKind,
    frame,
    segment_paths,
)
from outbox_core.runtime.logs import event_name
from tests.outbox_broker.failing_storage import FailingStorage, HeldSyncs

PAYLOADS = [b"\x91" + word for word in (b"first" * 5, b"second" * 9, b"third" * 4)]  # records are arrays
type_of_open = Callable[..., tuple[SegmentedLog, list[bytes]]]


@pytest.fixture
def open_log(tmp_path: Path) -> Iterator[type_of_open]:
    """Open the log of this test; returns it and the payloads that it recovered."""
    with ExitStack() as stack:

        def opened(
            *,
            storage: Storage | None = None,
            segment_bytes: int = 1 << 20,
            durability: Durability = Durability.FSYNC,
            kind: SegmentKind = SegmentKind.MESSAGES,
        ) -> tuple[SegmentedLog, list[bytes]]:
            log = SegmentedLog(
                tmp_path / "log", kind=kind, segment_bytes=segment_bytes, durability=durability,
                storage=storage or FailingStorage(), now_ms=lambda: 1_800_000_000_000,
            )  # fmt: skip
            stack.callback(log.sync_and_close)
            return log, [one.payload for one in log.recover() if isinstance(one, Frame)]

        yield opened


def written(open_log: type_of_open, payloads: Sequence[bytes] = PAYLOADS, *, segment_bytes: int = 1 << 20) -> list[int]:
    """Append the payloads one by one, commit and close; returns their offsets."""
    log, _ = open_log(segment_bytes=segment_bytes)
    offsets = [offset for payload in payloads for offset in log.append([payload])]
    log.commit()
    log.sync_and_close()
    return offsets


def test_what_was_appended_is_recovered_in_order_and_read_by_offset(open_log: type_of_open) -> None:
    offsets = written(open_log)

    log, recovered = open_log()

    assert recovered == PAYLOADS
    assert [log.read(offset) for offset in offsets] == PAYLOADS
    assert log.durable_end == log.end


def test_a_segment_can_be_read_and_written_by_its_owner_alone(open_log: type_of_open, tmp_path: Path) -> None:
    log, _ = open_log(storage=DiskStorage())
    log.append(PAYLOADS)
    log.commit()

    assert [stat.S_IMODE(segment.stat().st_mode) for segment in segment_paths(tmp_path / "log")] == [0o600]


def test_a_payload_longer_than_the_read_ahead_is_read_whole(open_log: type_of_open) -> None:
    long = bytes(range(256)) * 100
    log, _ = open_log()

    [before, offset, after] = log.append([b"x", long, b"y"])

    assert log.read(offset) == long
    assert (log.read(before), log.read(after)) == (b"x", b"y")


def test_a_tail_torn_at_any_byte_of_the_last_record_is_cut_and_appending_goes_on(
    open_log: type_of_open, tmp_path: Path
) -> None:
    offsets = written(open_log)
    [segment] = segment_paths(tmp_path / "log")
    whole = segment.read_bytes()
    last = HEADER_BYTES + offsets[-1]
    assert len(whole) == last + FRAME_BYTES + len(PAYLOADS[-1])

    for size in range(last, len(whole)):
        segment.write_bytes(whole[:size])
        log, recovered = open_log()
        assert recovered == PAYLOADS[:-1], size
        assert segment.stat().st_size == last, size
        assert log.append([b"after"]) == [offsets[-1]]
        log.commit()
        log.sync_and_close()
        log, recovered = open_log()
        assert recovered == [*PAYLOADS[:-1], b"after"], size
        log.sync_and_close()


def test_a_tail_of_zeros_is_cut(open_log: type_of_open, tmp_path: Path) -> None:
    written(open_log)
    [segment] = segment_paths(tmp_path / "log")
    segment.write_bytes(segment.read_bytes() + bytes(500))

    _, recovered = open_log()

    assert recovered == PAYLOADS


def test_a_flipped_bit_in_any_byte_costs_its_record_alone_and_is_told_with_file_and_offset(
    open_log: type_of_open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offsets = written(open_log)
    [segment] = segment_paths(tmp_path / "log")
    whole = segment.read_bytes()

    for position in range(HEADER_BYTES, HEADER_BYTES + offsets[-1]):
        segment.write_bytes(flipped(whole, position))
        damaged = max(offset for offset in offsets if offset <= position - HEADER_BYTES)
        caplog.clear()
        log, recovered = open_log()
        assert recovered == [one for one, offset in zip(PAYLOADS, offsets, strict=True) if offset != damaged], position
        assert log.quarantined_bytes == min(one for one in [*offsets, log.end] if one > damaged) - damaged
        [told] = [one for one in caplog.records if event_name(one) == "segment_damaged"]
        assert (vars(told)["segment"], vars(told)["offset"]) == (segment.name, damaged)
        log.sync_and_close()
        assert segment.read_bytes() == flipped(whole, position), "what is damaged stays, for whoever can mend it"


@pytest.mark.parametrize("position", [HEADER_BYTES + 3, HEADER_BYTES + 500_000], ids=["length", "payload"])
def test_a_flipped_bit_in_a_long_record_costs_nothing_that_follows_it(
    open_log: type_of_open, tmp_path: Path, position: int
) -> None:
    written(open_log, [b"\x91" + b"x" * 2_000_000, b"\x91after", b"\x91last"], segment_bytes=8 << 20)
    [segment] = segment_paths(tmp_path / "log")
    segment.write_bytes(flipped(segment.read_bytes(), position))

    assert open_log(segment_bytes=8 << 20)[1] == [b"\x91after", b"\x91last"]


def test_a_flipped_bit_in_the_header_costs_no_record(open_log: type_of_open, tmp_path: Path) -> None:
    written(open_log)
    [segment] = segment_paths(tmp_path / "log")
    whole = segment.read_bytes()

    for position in range(HEADER_BYTES):
        segment.write_bytes(flipped(whole, position))
        log, recovered = open_log()
        assert recovered == PAYLOADS
        assert log.quarantined_bytes
        log.sync_and_close()


def test_a_bit_that_flips_while_the_log_is_open_is_never_served(open_log: type_of_open, tmp_path: Path) -> None:
    offsets = written(open_log)
    log, _ = open_log()
    [segment] = segment_paths(tmp_path / "log")
    segment.write_bytes(flipped(segment.read_bytes(), HEADER_BYTES + offsets[1] + FRAME_BYTES))

    with pytest.raises(SegmentDamaged, match=f"offset {offsets[1]}"):
        log.read(offsets[1])

    assert log.read(offsets[0]) == PAYLOADS[0]
    assert log.read(offsets[2]) == PAYLOADS[2]


def test_the_log_rolls_over_segments_and_reads_across_them(open_log: type_of_open, tmp_path: Path) -> None:
    payloads = [f"payload {number}".encode() * 20 for number in range(60)]

    offsets = written(open_log, payloads, segment_bytes=4096)

    assert len(segment_paths(tmp_path / "log")) >= 3
    log, recovered = open_log(segment_bytes=4096)
    assert recovered == payloads
    assert [log.read(offset) for offset in offsets] == payloads


def test_a_torn_tail_is_cut_in_the_last_of_many_segments(open_log: type_of_open, tmp_path: Path) -> None:
    payloads = [bytes([65 + number]) * 500 for number in range(20)]
    written(open_log, payloads, segment_bytes=4096)
    last = segment_paths(tmp_path / "log")[-1]
    last.write_bytes(last.read_bytes()[:-3])

    _, recovered = open_log(segment_bytes=4096)

    assert recovered == payloads[:-1]


@pytest.mark.parametrize("number", [0, 1])
def test_a_segment_before_the_last_that_is_cut_short_costs_its_last_record_alone(
    open_log: type_of_open, tmp_path: Path, number: int
) -> None:
    payloads = [b"\x91" + bytes([65 + number]) * 500 for number in range(20)]
    offsets = written(open_log, payloads, segment_bytes=4096)
    cut, following = segment_paths(tmp_path / "log")[number : number + 2]
    cut.write_bytes(cut.read_bytes()[:-3])

    log, recovered = open_log(segment_bytes=4096)

    lost = offsets.index(int(following.stem)) - 1
    assert recovered == [*payloads[:lost], *payloads[lost + 1 :]]
    assert log.quarantined_bytes == offsets[lost + 1] - offsets[lost]


def test_a_span_is_read_across_segments(open_log: type_of_open) -> None:
    payloads = [bytes([65 + number]) * 500 for number in range(30)]
    offsets = written(open_log, payloads, segment_bytes=4096)

    log, _ = open_log(segment_bytes=4096)

    whole = log.read_span(offsets[2], offsets[28] - offsets[2])
    assert whole == b"".join(frame(one) for one in payloads[2:28])


def test_dropped_segments_are_gone_and_the_others_are_read(open_log: type_of_open, tmp_path: Path) -> None:
    payloads = [bytes([65 + number]) * 500 for number in range(30)]
    offsets = written(open_log, payloads, segment_bytes=4096)
    log, _ = open_log(segment_bytes=4096)
    paths = segment_paths(tmp_path / "log")
    second = int(paths[1].stem)

    assert [one.path for one in log.drop_before(second)] == [paths[0]]

    assert segment_paths(tmp_path / "log") == paths[1:]
    with pytest.raises(SegmentDamaged, match="dropped"):
        log.read(offsets[0])
    assert log.read(second) == payloads[offsets.index(second)]
    assert log.drop_before(log.end + 1)
    assert len(segment_paths(tmp_path / "log")) == 1, "the last one stays"
    log.sync_and_close()
    assert open_log(segment_bytes=4096)[1] == payloads[offsets.index(int(paths[-1].stem)) :]


def test_a_missing_segment_is_refused(open_log: type_of_open, tmp_path: Path) -> None:
    written(open_log, [b"x" * 500] * 30, segment_bytes=4096)
    [_, middle, *_, last] = segment_paths(tmp_path / "log")
    middle.unlink()

    with pytest.raises(SegmentDamaged, match="missing"):
        open_log(segment_bytes=4096)

    assert last.exists()


def test_a_segment_of_another_log_is_refused(open_log: type_of_open) -> None:
    written(open_log)

    with pytest.raises(SegmentDamaged, match="another log"):
        open_log(kind=SegmentKind.ACTIONS)


@pytest.mark.parametrize("content", [b"", b"OUTBOX", bytes(HEADER_BYTES)], ids=["empty", "short", "zeros"])
def test_a_segment_that_was_being_made_when_the_machine_ended_is_removed(
    open_log: type_of_open, tmp_path: Path, content: bytes
) -> None:
    written(open_log)
    log, _ = open_log()
    end = log.end
    log.sync_and_close()
    (tmp_path / "log" / f"{end:020d}.log").write_bytes(content)

    log, recovered = open_log()

    assert recovered == PAYLOADS
    assert log.append([b"after"]) == [end]


def test_a_full_disk_refuses_and_leaves_nothing_half_written(open_log: type_of_open, tmp_path: Path) -> None:
    storage = FailingStorage()
    log, _ = open_log(storage=storage)
    log.append([b"before"])
    log.commit()
    size = segment_paths(tmp_path / "log")[0].stat().st_size

    for room_bytes in (0, 1, FRAME_BYTES, 30):
        storage.room_bytes = room_bytes
        with pytest.raises(StorageFailed, match="No space left"):
            log.append([b"a" * 20, b"b" * 20])
        assert segment_paths(tmp_path / "log")[0].stat().st_size == size

    storage.mend()
    log.append([b"after"])
    log.commit()
    log.sync_and_close()
    assert open_log()[1] == [b"before", b"after"]


@pytest.mark.parametrize("call", ["create", "sync_folder log"])
def test_a_full_disk_at_a_roll_refuses_and_a_later_append_rolls(
    open_log: type_of_open, tmp_path: Path, call: str
) -> None:
    storage = FailingStorage()
    log, _ = open_log(storage=storage, segment_bytes=4096)
    log.append([b"x" * 5000])
    storage.fail(call, errno.ENOSPC)

    with pytest.raises(StorageFailed, match="No space left"):
        log.append([b"y"])

    assert len(segment_paths(tmp_path / "log")) == 1
    storage.mend()
    [offset] = log.append([b"z"])
    assert log.read(offset) == b"z"
    assert len(segment_paths(tmp_path / "log")) == 2


def test_a_log_that_cannot_take_back_a_half_written_piece_takes_nothing_more(open_log: type_of_open) -> None:
    storage = FailingStorage()
    log, _ = open_log(storage=storage)
    log.append([b"before"])
    log.commit()
    storage.room_bytes = 5
    storage.fail("truncate")
    with pytest.raises(StorageFailed):
        log.append([b"torn" * 10])
    storage.mend()

    with pytest.raises(StorageFailed, match="restarted"):
        log.append([b"after"])

    log.sync_and_close()
    assert open_log()[1] == [b"before"]


def test_a_failed_sync_fails_every_caller_that_waits_and_every_later_append(open_log: type_of_open) -> None:
    storage = HeldSyncs()
    log, _ = open_log(storage=storage)
    log.append([b"before"])
    log.commit()
    storage.hold()

    with ThreadPoolExecutor(4) as pool:
        waiting: list[Future[None]] = []
        for number in range(4):
            log.append([b"lost %d" % number])
            waiting.append(pool.submit(log.commit, log.end))
        assert storage.waiting.wait(120)
        storage.release(error=OSError(errno.EIO, "Input/output error"))
        failures = [one.exception(120) for one in waiting]

    assert [type(failure) for failure in failures] == [StorageFailed] * 4
    storage.error = None
    with pytest.raises(StorageFailed, match="restarted"):
        log.append([b"after"])
    with pytest.raises(StorageFailed, match="restarted"):
        log.commit()
    log.sync_and_close()
    log, recovered = open_log()
    assert recovered[0] == b"before"
    assert log.append([b"after"])


def test_a_sync_that_fails_while_rolling_is_final_too(open_log: type_of_open) -> None:
    storage = FailingStorage()
    log, _ = open_log(storage=storage, segment_bytes=4096)
    log.append([b"x" * 5000])
    storage.fail("sync")
    with pytest.raises(StorageFailed):
        log.append([b"y"])
    storage.mend()

    with pytest.raises(StorageFailed, match="restarted"):
        log.commit()


def test_a_rolling_append_does_not_swallow_the_failure_that_a_committing_caller_waits_for(
    open_log: type_of_open,
) -> None:
    """The kernel reports a lost page once a descriptor: two syncs at a time, and one of them would be told "well"."""
    storage = HeldSyncs()
    log, _ = open_log(storage=storage, segment_bytes=4096)
    log.append([b"x" * 5000])
    storage.hold()
    calls = len(storage.calls)

    with ThreadPoolExecutor(2) as pool:
        commit = pool.submit(log.commit, log.end)
        assert storage.waiting.wait(120)
        rolling = threading.Event()
        storage.before = lambda call: rolling.set()
        append = pool.submit(log.append, [b"y"])
        rolled_meanwhile = rolling.wait(0.2) or len(storage.calls) > calls + 1
        storage.release()
        commit.result(120)
        append.result(120)

    assert not rolled_meanwhile


class FailingOnce(HeldSyncs):
    """The one sync that is released with an error fails, and no other."""

    def sync(self, descriptor: int) -> None:
        try:
            super().sync(descriptor)
        finally:
            self.error = None


def test_a_sync_that_waited_for_one_that_failed_is_refused(open_log: type_of_open) -> None:
    """The kernel reports a lost page once a descriptor: the sync that waited would be told "well"."""
    storage = FailingOnce()
    log, _ = open_log(storage=storage, segment_bytes=4096)
    log.append([b"x" * 5000])
    storage.hold()

    with ThreadPoolExecutor(2) as pool:
        commit = pool.submit(log.commit, log.end)
        assert storage.waiting.wait(120)
        append = pool.submit(log.append, [b"y"])  # which rolls, and for that syncs
        wait([append], timeout=0.2)
        storage.release(error=OSError(errno.EIO, "Input/output error"))
        failures = [commit.exception(120), append.exception(120)]

    assert [type(failure) for failure in failures] == [StorageFailed, StorageFailed]


def test_callers_share_a_sync(open_log: type_of_open) -> None:
    storage = HeldSyncs()
    log, _ = open_log(storage=storage)
    before = log.syncs
    storage.hold()

    with ThreadPoolExecutor(20) as pool:
        log.append([b"first"])
        leader = pool.submit(log.commit, log.end)
        assert storage.waiting.wait(120)
        waiting: list[Future[None]] = []
        for number in range(19):
            log.append([b"%d" % number])
            waiting.append(pool.submit(log.commit, log.end))
        storage.release()
        for one in [leader, *waiting]:
            one.result(120)

    assert log.syncs - before == 2


def test_without_fsync_commits_do_not_sync(open_log: type_of_open) -> None:
    log, _ = open_log(durability=Durability.OS)

    log.append([b"x"])
    log.commit()

    assert log.syncs == 0
    assert log.durable_end == log.end


def test_a_new_folder_is_synced_into_the_folder_above_it(open_log: type_of_open, tmp_path: Path) -> None:
    storage = FailingStorage()

    open_log(storage=storage)

    assert f"sync_folder {tmp_path.name}" in storage.calls
    assert "sync_folder log" in storage.calls


def test_a_closed_log_refuses(open_log: type_of_open) -> None:
    log, _ = open_log()
    log.sync_and_close()
    log.sync_and_close()

    with pytest.raises(StorageFailed, match="closed"):
        log.append([b"x"])


def flipped(data: bytes, position: int) -> bytes:
    """The data with one bit of one byte turned over."""
    return data[:position] + bytes([data[position] ^ 0x04]) + data[position + 1 :]


def test_after_an_end_in_order_nothing_is_written_anew(open_log: type_of_open, tmp_path: Path) -> None:
    written(open_log)
    [segment] = segment_paths(tmp_path / "log")
    before = segment.stat().st_ino

    _, recovered = open_log()

    assert recovered == PAYLOADS
    assert segment.stat().st_ino == before


def test_after_any_other_end_the_newest_segment_is_written_anew_and_synced_before_it_counts(
    open_log: type_of_open, tmp_path: Path
) -> None:
    log, _ = open_log()
    log.append(PAYLOADS)
    log.commit()
    log.close()
    [segment] = segment_paths(tmp_path / "log")
    before = segment.stat().st_ino
    storage = FailingStorage()

    log, recovered = open_log(storage=storage)

    assert recovered == PAYLOADS
    assert segment.stat().st_ino != before
    calls = [one for one in storage.calls if one in {"write", "sync", "sync_folder log"}]
    assert calls[:3] == ["write", "sync", "sync_folder log"]
    [offset] = log.append([b"after"])
    log.commit()
    log.sync_and_close()
    log, recovered = open_log()
    assert recovered == [*PAYLOADS, b"after"]
    assert log.read(offset) == b"after"


def test_what_came_after_a_failed_sync_is_not_taken_for_proven_when_the_log_is_closed(
    open_log: type_of_open, tmp_path: Path
) -> None:
    storage = FailingStorage()
    log, _ = open_log(storage=storage)
    log.append(PAYLOADS)
    storage.fail("sync")
    with pytest.raises(StorageFailed, match="did not confirm"):
        log.commit()
    storage.mend()
    log.sync_and_close()
    [segment] = segment_paths(tmp_path / "log")
    before = segment.stat().st_ino

    _, recovered = open_log()

    assert recovered == PAYLOADS
    assert segment.stat().st_ino != before


def test_a_log_that_cannot_be_proven_is_not_opened(open_log: type_of_open) -> None:
    log, _ = open_log()
    log.append(PAYLOADS)
    log.close()
    storage = FailingStorage()
    storage.fail("sync")

    with pytest.raises(StorageFailed, match="did not confirm"):
        open_log(storage=storage)

    _, recovered = open_log()
    assert recovered == PAYLOADS


def test_without_room_for_a_copy_the_log_opens_and_is_proven_the_next_time(
    open_log: type_of_open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, _ = open_log()
    log.append(PAYLOADS)
    log.close()
    [segment] = segment_paths(tmp_path / "log")
    before = segment.stat().st_ino
    storage = FailingStorage()
    storage.room_bytes = 10

    log, recovered = open_log(storage=storage)

    assert recovered == PAYLOADS
    assert segment.stat().st_ino == before
    assert [event_name(one) for one in caplog.records] == ["segment_not_verified"]
    assert {one.name for one in segment.parent.iterdir()} <= {segment.name, "proven.new", "proven"}
    log.close()
    open_log()
    assert segment.stat().st_ino != before


def test_a_copy_that_was_not_finished_is_made_anew(open_log: type_of_open, tmp_path: Path) -> None:
    log, _ = open_log()
    log.append(PAYLOADS)
    log.close()
    [segment] = segment_paths(tmp_path / "log")
    segment.with_suffix(".new").write_bytes(b"half a copy" * 1_000)

    _, recovered = open_log()

    assert recovered == PAYLOADS
    assert not segment.with_suffix(".new").exists()


def test_whatever_call_of_an_opening_is_the_last_nothing_is_lost(open_log: type_of_open, tmp_path: Path) -> None:
    log, _ = open_log()
    log.append(PAYLOADS)
    log.commit()
    log.close()
    ended = 0
    for at in range(1, 30):
        storage = FailingStorage()
        storage.before = lambda call, storage=storage, at=at: ends_at(storage, at)  # type: ignore[misc]
        try:
            log, _ = open_log(storage=storage)
        except (StorageFailed, OSError):
            ended += 1
        else:
            log.close()
        storage.mend()
        log, recovered = open_log()
        assert recovered == PAYLOADS, at
        log.close()
        (tmp_path / "log" / "proven").unlink()

    assert ended >= 4


def ends_at(storage: FailingStorage, number: int) -> None:
    if len(storage.calls) >= number:
        raise OSError(errno.EIO, "the process ended here")


def test_a_note_of_another_segment_proves_nothing(open_log: type_of_open, tmp_path: Path) -> None:
    """The file may have been begun by a process whose sync of it failed, right behind what is proven."""
    written(open_log, segment_bytes=4096)
    log, _ = open_log(segment_bytes=10)
    note = tmp_path / "log" / "proven"
    older = note.read_bytes()
    log.roll()
    log.close()
    note.write_bytes(older)
    newest = segment_paths(tmp_path / "log")[-1]
    before = newest.stat().st_ino

    open_log()

    assert newest.stat().st_ino != before
