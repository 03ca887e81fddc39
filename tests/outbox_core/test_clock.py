"""ManualClock: time moves only when told to, and whoever waits on it is woken. SystemClock: the machine's."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core import ManualClock, SystemClock

WAIT_SECONDS = 300


def until_waited_on(clock: ManualClock, condition: threading.Condition) -> None:
    """Returns once a thread waits: none misses what comes then."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        with condition:
            if clock.is_waited_on(condition):
                return
        time.sleep(0.001)
    pytest.fail("the thread never waited")


class Waiter:
    """A thread that waits on a clock, and what the wait answered."""

    def __init__(self, clock: ManualClock, timeout_ms: int | None) -> None:
        self._clock = clock
        self._timeout_ms = timeout_ms
        self.condition = threading.Condition()
        self.answer: bool | None = None
        self.thread = threading.Thread(target=self._run)
        with self.condition:
            self.thread.start()
        until_waited_on(clock, self.condition)

    def _run(self) -> None:
        with self.condition:
            self.answer = self._clock.wait(self.condition, self._timeout_ms)

    def joined(self) -> bool | None:
        """The wait's answer, once the thread has ended."""
        self.thread.join(WAIT_SECONDS)
        assert not self.thread.is_alive()
        return self.answer


@given(st.lists(st.integers(0, 10**9)), st.lists(st.integers(-(10**9), 10**9)))
def test_advancing_moves_both_clocks_and_a_step_only_the_wall(moves: list[int], steps: list[int]) -> None:
    clock = ManualClock(5)

    for move in moves:
        clock.advance(move)
    for step in steps:
        clock.step_wall(step)

    assert clock.now_ms() == 5 + sum(moves) + sum(steps)
    assert clock.monotonic_ms() == sum(moves)


def test_time_does_not_run_backwards() -> None:
    with pytest.raises(ValueError, match="step_wall"):
        ManualClock().advance(-1)


def test_a_wait_ends_when_its_time_has_passed() -> None:
    clock = ManualClock()
    waiter = Waiter(clock, 1_000)

    clock.advance(1_000)

    assert waiter.joined() is False


def test_a_wait_ends_when_it_is_notified() -> None:
    waiter = Waiter(ManualClock(), 1_000)

    with waiter.condition:
        waiter.condition.notify_all()

    assert waiter.joined() is True


def test_a_step_of_the_wall_clock_wakes_who_waits_so_that_they_look_again() -> None:
    clock = ManualClock()
    waiter = Waiter(clock, None)

    clock.step_wall(-3_600_000)

    assert waiter.joined() is True


def test_a_move_that_comes_between_a_look_at_the_clock_and_a_wait_ends_that_wait_and_no_other() -> None:
    clock, condition = ManualClock(), threading.Condition()
    looked, moved, ended = threading.Event(), threading.Event(), threading.Semaphore(0)

    def wait_twice() -> None:
        left_ms = 1_000 - clock.monotonic_ms()
        looked.set()
        assert moved.wait(WAIT_SECONDS)
        for timeout_ms in (left_ms, 1_000):
            with condition:
                clock.wait(condition, timeout_ms)
            ended.release()

    thread = threading.Thread(target=wait_twice, daemon=True)
    thread.start()
    assert looked.wait(WAIT_SECONDS)
    clock.advance(1_000)
    moved.set()

    assert ended.acquire(timeout=WAIT_SECONDS), "nothing else would end it: time stands still"
    until_waited_on(clock, condition)
    assert not ended.acquire(blocking=False)
    clock.advance(1_000)
    assert ended.acquire(timeout=WAIT_SECONDS)
    thread.join(WAIT_SECONDS)


def test_who_moves_the_clock_knows_of_it_and_waits() -> None:
    clock, condition = ManualClock(), threading.Condition()
    ended = threading.Event()

    def move_and_wait() -> None:
        clock.now_ms()
        clock.advance(1_000)
        with condition:
            clock.wait(condition, 1_000)
        ended.set()

    thread = threading.Thread(target=move_and_wait, daemon=True)
    thread.start()
    until_waited_on(clock, condition)
    is_early = ended.is_set()
    clock.advance(1_000)
    thread.join(WAIT_SECONDS)

    assert (is_early, ended.is_set()) == (False, True)


def test_a_wait_without_time_does_not_wait() -> None:
    condition = threading.Condition()

    with condition:
        assert ManualClock().wait(condition, 0) is False


def test_the_systems_clocks_agree_with_each_other_and_wait_for_real() -> None:
    clock, condition = SystemClock(), threading.Condition()
    began_ms, wall_ms = clock.monotonic_ms(), clock.now_ms()

    with condition:
        notified = clock.wait(condition, 20)

    assert not notified
    assert clock.monotonic_ms() - began_ms >= 19
    assert clock.now_ms() >= wall_ms
