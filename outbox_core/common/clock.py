"""Clocks, passed as arguments: wall time to compare with due times, monotonic time for waits. Not a scheduler."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Protocol


class Clock(Protocol):
    """A source of time. `now_ms` may step either way; `monotonic_ms` never goes back."""

    def now_ms(self) -> int:
        """Returns the wall clock's time, integer milliseconds since the Unix epoch, UTC."""

    def monotonic_ms(self) -> int:
        """Returns milliseconds from an arbitrary origin; only differences mean anything."""

    def wait(self, condition: threading.Condition, timeout_ms: int | None) -> bool:
        """Wait on a condition that the caller holds, for `timeout_ms` of this clock at most; False after a time-out."""


class SystemClock:
    """The clocks of the operating system."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wait(self, condition: threading.Condition, timeout_ms: int | None) -> bool:
        return condition.wait(None if timeout_ms is None else timeout_ms / 1000)


class ManualClock:
    """A clock for tests: only advance() and step_wall() move it, and wake the threads that wait on it. Thread-safe.

    A thread that uses the clock, and does not wait at that moment, is woken from its next wait, at once: it may have
    decided how long to wait by the time before, and nothing else would end that wait.
    """

    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        self._lock = threading.Lock()
        self._now_ms = now_ms
        self._monotonic_ms = 0
        self._waiting: Counter[threading.Condition] = Counter()
        self._moves = 0
        self._of_thread = threading.local()
        """`moves`: up to which one the thread was woken. Set when it first uses the clock."""

    def now_ms(self) -> int:
        with self._lock:
            self._moves_known()
            return self._now_ms

    def monotonic_ms(self) -> int:
        with self._lock:
            self._moves_known()
            return self._monotonic_ms

    def advance(self, ms: int) -> None:
        """Advance both clocks by `ms` milliseconds."""
        if ms < 0:
            raise ValueError("time passes forward; use step_wall() for a clock step")
        with self._lock:
            self._now_ms += ms
            self._monotonic_ms += ms
            waiting = self._moved()
        self._wake(waiting)

    def step_wall(self, ms: int) -> None:
        """Step the wall clock by `ms`, either way, as NTP or an operator would; monotonic time does not move."""
        with self._lock:
            self._now_ms += ms
            waiting = self._moved()
        self._wake(waiting)

    def is_waited_on(self, condition: threading.Condition) -> bool:
        """Returns whether a thread waits on a condition, which the caller holds."""
        with self._lock:
            return condition in self._waiting

    def wait(self, condition: threading.Condition, timeout_ms: int | None) -> bool:
        deadline = None if timeout_ms is None else self.monotonic_ms() + timeout_ms
        with self._lock:
            is_moved = self._moves_known() != self._moves
            self._waiting[condition] += 1
        try:
            if deadline is not None and self.monotonic_ms() >= deadline:
                return False
            if not is_moved:
                condition.wait()
            return deadline is None or self.monotonic_ms() < deadline
        finally:
            with self._lock:
                self._of_thread.moves = self._moves
                self._waiting[condition] -= 1
                if not self._waiting[condition]:
                    del self._waiting[condition]

    def _moves_known(self) -> int:
        """Returns the moves up to which this thread was woken, or those before it used the clock. Under the lock."""
        if not hasattr(self._of_thread, "moves"):
            self._of_thread.moves = self._moves
        moves: int = self._of_thread.moves
        return moves

    def _moved(self) -> list[threading.Condition]:
        """Count a move, which its own thread knows of; returns the conditions to notify. Under the lock."""
        self._moves += 1
        self._of_thread.moves = self._moves
        return list(self._waiting)

    @staticmethod
    def _wake(waiting: list[threading.Condition]) -> None:
        for condition in waiting:
            with condition:
                condition.notify_all()
