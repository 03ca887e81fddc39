"""The order of a schedule's locks: who holds `lock` never waits for `keeping`. Not what they protect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import pytest

from outbox_broker.schedule.delay_options import DelayOptions
from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.schedule.schedule_context import ScheduleContext, ScheduleLocks
from outbox_broker.segments.local import LocalSegments
from outbox_core.common.errors import StorageFailed
from tests.outbox_broker.delay.conftest import DAY_MS, HOUR_MS, MINUTE_MS, NOW_MS, flush, put, settle, timed

JOIN_SECONDS = 300


class OrderedLock:
    """A lock that refuses to be taken by a thread which holds one of those that come behind it."""

    def __init__(self, name: str, *, behind: tuple[OrderedLock, ...] = ()) -> None:
        self.name = name
        self.taken = 0
        self._behind = behind
        self._lock = threading.RLock()
        self._depth = threading.local()

    def is_held(self) -> bool:
        return getattr(self._depth, "count", 0) > 0

    def __enter__(self) -> bool:
        held = [one.name for one in self._behind if one.is_held()]
        if held and not self.is_held():
            raise AssertionError(f"{self.name} is taken while {', '.join(held)} is held")
        self._lock.acquire()
        self._depth.count = getattr(self._depth, "count", 0) + 1
        self.taken += 1
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._depth.count -= 1
        self._lock.release()


@pytest.fixture
def locks() -> ScheduleLocks:
    lock = OrderedLock("lock")
    return ScheduleLocks(keeping=OrderedLock("keeping", behind=(lock,)), lock=lock)


@pytest.fixture
def schedule(locks: ScheduleLocks, tmp_path: Path) -> Iterator[DelayStore]:
    segments = LocalSegments.open(tmp_path / "delay")
    options = DelayOptions(
        memory_messages_max=8, batch_messages_max=3, expand_messages_max=3, dedup_messages=10,
        index_pieces_max=3, index_merged_pieces_max=2,
    )  # fmt: skip
    yield DelayStore(ScheduleContext(segments, options=options, locks=locks))
    segments.close()


def test_keeping_is_refused_to_a_thread_that_holds_the_lock(schedule: DelayStore, locks: ScheduleLocks) -> None:
    for refused in (
        lambda: schedule.housekeeping.step(NOW_MS),
        lambda: schedule.housekeeping.make_room(NOW_MS, fill=0),
    ):
        with locks.lock, pytest.raises(AssertionError, match="keeping is taken while lock is held"):
            refused()


def test_keeping_comes_before_the_lock_in_all_that_a_schedule_does(schedule: DelayStore, locks: ScheduleLocks) -> None:
    dues = [1, MINUTE_MS, 3 * HOUR_MS, 5 * DAY_MS, 30 * DAY_MS, 300 * DAY_MS]
    for number in range(12):
        put(schedule, NOW_MS, *(timed(f"m{number}-{at}", NOW_MS + due) for at, due in enumerate(dues)))
        flush(schedule, NOW_MS)
    assert schedule.cancel(["m0-5", "early"], now_ms=NOW_MS) == ["canceled", "unknown"]
    fired = 0

    for now_ms in (NOW_MS, NOW_MS + HOUR_MS, NOW_MS + 4 * DAY_MS, NOW_MS + 29 * DAY_MS, NOW_MS + 301 * DAY_MS):
        settle(schedule, now_ms)
        _ask_all(schedule)
        while (batch := schedule.due(now_ms)) is not None:
            schedule.fired(batch.number)
            fired += len(batch)
    schedule.close()

    assert fired == 12 * len(dues) - 1
    assert isinstance(locks.keeping, OrderedLock)
    assert locks.keeping.taken > 12
    with pytest.raises(StorageFailed, match="closed"):
        schedule.housekeeping.step(NOW_MS)


def test_threads_that_publish_cancel_deliver_and_keep_house_never_wait_for_each_other_in_a_circle(
    schedule: DelayStore,
) -> None:
    failures: list[BaseException] = []
    turns = range(40)
    acts: list[Callable[[int], object]] = [
        lambda at: schedule.schedule([timed(f"m{at}", NOW_MS + at * HOUR_MS)], now_ms=NOW_MS),
        lambda at: schedule.cancel([f"m{at // 2}"], now_ms=NOW_MS),
        lambda at: [schedule.fired(batch.number) for batch in [schedule.due(NOW_MS + at)] if batch],
        lambda at: schedule.housekeeping.step(NOW_MS + at),
        lambda _: _ask_all(schedule),
    ]

    def run(act: Callable[[int], object]) -> None:
        try:
            for at in turns:
                act(at)
        except BaseException as error:  # told by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(act,), daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_SECONDS)

    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def _ask_all(schedule: DelayStore) -> None:
    schedule.queries.find("m1-4")
    schedule.queries.topics()
    schedule.queries.figures()
    schedule.queries.next_due_ms()
    list(schedule.queries.ids_of("t", before_seq=schedule.next_seq()))
    schedule.queries.histogram(topic=None, from_ms=0, to_ms=NOW_MS + 400 * DAY_MS, bucket_ms=DAY_MS)
    schedule.queries.due_within([HOUR_MS, DAY_MS], now_ms=NOW_MS)
    schedule.check_ready()
