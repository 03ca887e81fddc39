"""PeriodicTasks: one at a time, never ended by an error, not stopped by a clock that is stepped back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from apscheduler.schedulers.background import BackgroundScheduler

from compensator.service.periodic_work import PeriodicTasks
from outbox_core import ManualClock
from outbox_core.common.errors import DatabaseUnavailable

WAIT_SECONDS = 300
NEVER_AGAIN_MS = 3_600_000
HANGING = 24
TOGETHER_SECONDS = 120


class Watched:
    """PeriodicTasks, and what failed."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.failed: list[str] = []
        self.scheduler = BackgroundScheduler(timezone=UTC)
        self.tasks = PeriodicTasks(clock=self.clock, failed=self.failed.append, scheduler=self.scheduler)


@pytest.fixture
def watched() -> Iterator[Watched]:
    """PeriodicTasks that are stopped at the end."""
    it = Watched()
    yield it
    it.tasks.stop(timeout_ms=WAIT_SECONDS * 1_000)


def counting(times: int, *, then: Callable[[], None] = lambda: None) -> tuple[Callable[[], None], threading.Event]:
    """A task, and an event for when it has run so often."""
    done, count = threading.Event(), iter(range(1, 1_000_000))

    def work() -> None:
        if next(count) >= times:
            done.set()
        then()

    return work, done


def test_a_task_runs_at_once_and_again(watched: Watched) -> None:
    work, done = counting(3)

    watched.tasks.add("it", work, every_ms=20)
    watched.tasks.start()

    assert done.wait(WAIT_SECONDS)


@pytest.mark.parametrize("error", [DatabaseUnavailable("down"), RuntimeError("a defect")])
def test_a_task_that_fails_is_counted_and_comes_again(watched: Watched, error: Exception) -> None:
    def fail() -> None:
        raise error

    work, done = counting(3, then=fail)
    watched.tasks.add("it", work, every_ms=20)
    watched.tasks.start()

    assert done.wait(WAIT_SECONDS)
    assert watched.tasks.stop(timeout_ms=WAIT_SECONDS * 1_000)
    assert set(watched.failed) == {"it"}
    assert len(watched.failed) >= 3


def test_tasks_that_hang_hold_up_no_other(watched: Watched) -> None:
    go_on, hanging = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        hanging.release()
        go_on.wait(WAIT_SECONDS)

    beat, beats = counting(3)
    for number in range(HANGING):
        watched.tasks.add(f"timers-{number}", hang, every_ms=NEVER_AGAIN_MS)
    watched.tasks.add("beat", beat, every_ms=20)
    watched.tasks.start()
    hang_all = all(hanging.acquire(timeout=TOGETHER_SECONDS) for _ in range(HANGING))
    beats_beside_them = beats.wait(TOGETHER_SECONDS)
    go_on.set()

    assert (hang_all, beats_beside_them) == (True, True)


def test_stop_waits_for_what_runs_and_begins_nothing_more(watched: Watched) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        go_on.wait(WAIT_SECONDS)

    watched.tasks.add("it", hang, every_ms=20)
    watched.tasks.start()
    assert entered.wait(WAIT_SECONDS)

    too_soon = watched.tasks.stop(timeout_ms=1)
    go_on.set()
    ended = watched.tasks.stop(timeout_ms=WAIT_SECONDS * 1_000)

    assert (too_soon, ended) == (False, True)


def test_a_clock_that_was_stepped_back_keeps_no_task_waiting(watched: Watched) -> None:
    first, second = threading.Event(), threading.Event()

    def work() -> None:
        (second if first.is_set() else first).set()

    watched.tasks.add("it", work, every_ms=NEVER_AGAIN_MS)
    watched.tasks.start()
    assert first.wait(WAIT_SECONDS)
    [job] = watched.scheduler.get_jobs()
    job.modify(next_run_time=datetime.now(UTC) + timedelta(hours=2))  # as a step back by an hour leaves it

    watched.tasks.mind_clock()
    without_step = second.wait(0.1)
    watched.clock.step_wall(-NEVER_AGAIN_MS)
    watched.tasks.mind_clock()

    assert not without_step
    assert second.wait(WAIT_SECONDS)
