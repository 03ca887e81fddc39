"""A thread that takes turns: woken only for what is sooner than the end of its pause."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from outbox_broker.schedule.service_thread import ServiceThread
from outbox_core.common.clock import ManualClock
from tests.outbox_broker.delay.conftest import NOW_MS

PAUSE_MS = 500
SECONDS_MAX = 120


class WatchedClock(ManualClock):
    """Signals that a thread pauses."""

    def __init__(self) -> None:
        super().__init__(NOW_MS)
        self.pauses = threading.Semaphore(0)

    def wait(self, condition: threading.Condition, timeout_ms: int | None) -> bool:
        self.pauses.release()
        return super().wait(condition, timeout_ms)


class Turns:
    """Counts turns, and pauses for the same time after each; one of them may be held."""

    def __init__(self) -> None:
        self.count = 0
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self) -> int:
        self.count += 1
        self.begun.release()
        assert self.may_end.wait(SECONDS_MAX)
        return PAUSE_MS


@pytest.fixture
def clock() -> WatchedClock:
    return WatchedClock()


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def thread(turns: Turns, clock: WatchedClock) -> Iterator[ServiceThread]:
    thread = ServiceThread(turns, name="turns", clock=clock)
    yield thread
    turns.may_end.set()
    thread.begin_stop()
    thread.join(timeout_ms=SECONDS_MAX * 1000)


def test_what_is_later_than_the_end_of_the_pause_wakes_nobody_and_what_is_sooner_does(
    thread: ServiceThread, turns: Turns, clock: WatchedClock
) -> None:
    thread.start()
    assert clock.pauses.acquire(timeout=SECONDS_MAX)

    thread.wake(before_ms=NOW_MS + PAUSE_MS)
    thread.wake(before_ms=NOW_MS + PAUSE_MS + 1)
    thread.wake(before_ms=NOW_MS + PAUSE_MS - 1)
    assert clock.pauses.acquire(timeout=SECONDS_MAX)
    thread.begin_stop()
    thread.join(timeout_ms=SECONDS_MAX * 1000)

    assert turns.count == 2, "the first two woke it as well"


def test_a_wake_during_a_turn_is_followed_by_another_turn(
    thread: ServiceThread, turns: Turns, clock: WatchedClock
) -> None:
    turns.may_end.clear()
    thread.start()
    assert turns.begun.acquire(timeout=SECONDS_MAX)

    thread.wake(before_ms=NOW_MS + 10 * PAUSE_MS)
    turns.may_end.set()

    assert clock.pauses.acquire(timeout=SECONDS_MAX)
    assert turns.count == 2


def test_an_error_ends_a_turn_and_not_the_thread(clock: WatchedClock) -> None:
    came: list[int] = []

    def fail_once() -> int:
        came.append(1)
        if len(came) == 1:
            raise ZeroDivisionError("a defect")
        return PAUSE_MS

    thread = ServiceThread(fail_once, name="failing", clock=clock)
    thread.start()
    assert clock.pauses.acquire(timeout=SECONDS_MAX)
    thread.wake()
    assert clock.pauses.acquire(timeout=SECONDS_MAX)
    thread.begin_stop()
    thread.join(timeout_ms=SECONDS_MAX * 1000)

    assert len(came) == 2
