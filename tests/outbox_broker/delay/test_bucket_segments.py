"""Each opening begins another segment of a bucket: they are merged where there are many, and nothing is lost by it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from outbox_broker.log.storage import DiskStorage, Storage
from outbox_broker.schedule.sorted_run import TimedMessage
from outbox_broker.segments.local import LocalSegments
from outbox_broker.segments.port import Segments
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import SegmentDamaged
from tests.outbox_broker.delay.conftest import DAY_MS, NOW_MS, Opened, drain, flush, put, recorded, settle, timed
from tests.outbox_broker.delay.failing_disk import Killed, KillingDisk
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster
from tests.outbox_broker.segments.memory_segments import MemoryMedium

OPENINGS = 40
SEGMENTS_MAX = 16
DUE_MS = NOW_MS + 40 * DAY_MS
CALLS_MAX = 400


class FullAtTimes(DiskStorage):
    """A disk that is full behind so many writes, half of the next one of which it takes. None: it has room."""

    def __init__(self) -> None:
        self.writes_left: int | None = None

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        if self.writes_left is not None:
            if self.writes_left == 0:
                super().write(descriptor, data[: len(data) // 2], position=position)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.writes_left -= 1
        super().write(descriptor, data, position=position)


def ids_of(opening: int) -> list[str]:
    return [f"m{opening:02}-{number}" for number in range(3)]


def put_flush(opened: Opened, opening: int, **options: int) -> None:
    """Have a process put messages into one bucket, which another one did before."""
    schedule = opened.open(**options)
    put(schedule, NOW_MS, *(timed(one, DUE_MS + opening * 100 + at) for at, one in enumerate(ids_of(opening))))
    flush(schedule, NOW_MS)


@pytest.fixture(params=["files", "ledgers", "memory"])
def reopened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """A schedule on each medium."""
    openers: dict[str, Callable[[], Segments]] = {
        "files": lambda: LocalSegments.open(tmp_path / "delay"),
        "ledgers": LedgerCluster().open,
        "memory": MemoryMedium().open,
    }
    return Opened(tmp_path / "delay", opener=openers[request.param])


def test_a_bucket_has_few_segments_after_many_openings_and_all_its_messages_in_order(reopened: Opened) -> None:
    stored = []
    for opening in range(OPENINGS):
        put_flush(reopened, opening)
        stored += ids_of(opening)
        assert reopened.schedule is not None
        [status] = reopened.schedule.cancel([stored.pop()], now_ms=NOW_MS)
        assert status == "canceled"
        settle(reopened.schedule, NOW_MS)

    [bucket] = recorded(reopened).buckets.values()
    assert len(bucket.segments) <= SEGMENTS_MAX + 1
    there = {info.name for info in reopened.segments.list() if not info.name.startswith(("log-", "ids-"))}
    assert there == set(bucket.segments)
    schedule = reopened.open()
    assert schedule.queries.count() == len(stored)
    assert schedule.queries.find(stored[0]) is not None
    assert drain(schedule, DUE_MS + DAY_MS) == stored
    reopened.drop()


def test_buckets_whose_log_is_gone_are_refused_with_the_cure_and_stay(reopened: Opened) -> None:
    put_flush(reopened, 0)
    there = [info.name for info in reopened.segments.list()]
    logs = [name for name in there if name.startswith("log-")]
    reopened.segments.delete(logs)

    for _ in range(2):
        with pytest.raises(SegmentDamaged, match=r"restore the segments log-\* from a copy"):
            reopened.open()

    assert [info.name for info in reopened.segments.list()] == [name for name in there if name not in logs]
    reopened.drop()


@pytest.mark.parametrize("size_bytes", [0, 100])
def test_buckets_whose_first_log_has_no_checkpoint_are_refused_with_the_cure_and_stay(
    tmp_path: Path, size_bytes: int
) -> None:
    opened = Opened(tmp_path)
    put_flush(opened, 0)
    opened.drop()
    first, *others = sorted(tmp_path.glob("log-*.segment"))
    assert first.stem == "log-000000000001"
    for other in others:
        other.unlink()
        other.with_suffix(".proven").unlink(missing_ok=True)
    first.write_bytes(first.read_bytes()[:size_bytes])
    before = sorted(path.name for path in tmp_path.glob("l0*.segment"))

    with pytest.raises(SegmentDamaged, match=r"restore .*log-.* from a copy"):
        opened.open()

    assert sorted(path.name for path in tmp_path.glob("l0*.segment")) == before
    opened.drop()


def test_a_bucket_whose_segments_are_too_large_to_merge_keeps_no_other_from_it() -> None:
    opened = Opened(Path("unused"), opener=MemoryMedium().open)
    large_ms, small_ms = NOW_MS + 60 * DAY_MS, NOW_MS + 90 * DAY_MS
    for opening in range(5):
        schedule = opened.open(bucket_segments_max=3)
        large = [TimedMessage(large_ms, f"large-{opening}-{at}", "t", Random(at).randbytes(900_000)) for at in range(6)]
        put(schedule, NOW_MS, *large, timed(f"small-{opening}", small_ms))
        flush(schedule, NOW_MS)

    settle(schedule, NOW_MS)

    counts = {
        bucket.id.start_ms <= large_ms < bucket.id.end_ms: len(bucket.segments)
        for bucket in recorded(opened).buckets.values()
    }  # fmt: skip
    assert counts[True] == 5
    assert counts[False] <= 3
    assert schedule.queries.count() == 35
    opened.drop()


@pytest.mark.parametrize("way", ["before", "half", "power"])
def test_a_merge_that_dies_at_any_call_loses_nothing_and_repeats_nothing(tmp_path: Path, way: str) -> None:
    for at in range(1, CALLS_MAX):
        storage: list[Storage | None] = [None]
        folder = tmp_path / str(at)
        opened = Opened(folder, opener=lambda folder=folder, storage=storage: LocalSegments.open(
            folder, storage=storage[0], boot="another" if way == "power" else "the same"
        ))  # fmt: skip
        for opening in range(4):
            put_flush(opened, opening, bucket_segments_max=2)
        stored = [one for opening in range(4) for one in ids_of(opening)]
        storage[0] = KillingDisk(at=at, way=way)
        try:
            settle(opened.open(), NOW_MS)
        except Killed:
            storage[0] = None
            schedule = opened.open()
            assert schedule.queries.count() == len(stored), at
            settle(schedule, NOW_MS)
            assert drain(schedule, DUE_MS + DAY_MS) == stored, at
            opened.drop()
        else:
            assert at > 15, "a merge has more calls than this"
            [bucket] = recorded(opened).buckets.values()
            assert len(bucket.segments) <= 2
            opened.drop()
            return
    pytest.fail(f"a merge did not end within {CALLS_MAX} calls")


def test_two_years_of_buckets_take_little_more_than_their_messages_after_openings_and_full_disks(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "delay"
    disk = FullAtTimes()
    opened = Opened(folder, opener=lambda: LocalSegments.open(folder, storage=disk))
    stored: list[TimedMessage] = []
    for opening in range(20):
        schedule = opened.open()
        some = [
            TimedMessage(NOW_MS + (1 + number) * 730 * DAY_MS // 300, f"m{opening}-{number}", "t", b"x" * 400)
            for number in range(300)
        ]
        put(schedule, NOW_MS, *some)
        stored += some
        for writes in (0, 1, 40, 90):
            disk.writes_left = writes
            with pytest.raises(StorageFailed, match="No space left"):
                flush(schedule, NOW_MS)
            disk.writes_left = None
        flush(schedule, NOW_MS)
        settle(schedule, NOW_MS)

    assert opened.schedule is not None
    assert opened.schedule.queries.figures()["buckets"] > 100
    live_bytes = sum(len(one.payload) + len(one.id) for one in stored)
    disk_bytes = sum(path.stat().st_size for path in folder.iterdir())
    assert disk_bytes <= 3 * live_bytes
    assert opened.schedule.queries.count() == len(stored)
    due_ms = NOW_MS + 732 * DAY_MS
    came: list[TimedMessage] = []
    while (batch := opened.schedule.due(due_ms)) is not None:
        came += batch.messages
        opened.schedule.fired(batch.number)
    assert sorted(came, key=lambda one: one.id) == sorted(stored, key=lambda one: one.id)
    opened.drop()
