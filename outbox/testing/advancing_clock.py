"""A running clock that can be advanced, for tests: a message that is due in two years becomes due now."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta

from outbox_core.common.clock import Clock, SystemClock


class AdvancingClock:
    """A Clock: another clock's time, plus the sum of all advances. Thread-safe."""

    def __init__(self, base: Clock | None = None) -> None:
        self._base = base or SystemClock()
        self._lock = threading.Lock()
        self._ahead_ms = 0
        self._waiting: Counter[threading.Condition] = Counter()

    def now_ms(self) -> int:
        """Returns the wall time."""
        with self._lock:
            return self._base.now_ms() + self._ahead_ms

    def monotonic_ms(self) -> int:
        """Returns the monotonic time."""
        with self._lock:
            return self._base.monotonic_ms() + self._ahead_ms

    def advance(self, by: timedelta | int) -> None:
        """Advance the clock at once (by a timedelta, or milliseconds), and wake the threads that wait on it."""
        by_ms = by // timedelta(milliseconds=1) if isinstance(by, timedelta) else by
        if by_ms < 0:
            raise ValueError("time passes forward")
        with self._lock:
            self._ahead_ms += by_ms
            waiting = list(self._waiting)
        for condition in waiting:
            with condition:
                condition.notify_all()

    def wait(self, condition: threading.Condition, timeout_ms: int | None) -> bool:
        """Wait on a condition that the caller holds; returns False after a time-out, which advance() may cause."""
        deadline_ms = None if timeout_ms is None else self.monotonic_ms() + timeout_ms
        with self._lock:
            self._waiting[condition] += 1
        try:
            condition.wait(None if timeout_ms is None else timeout_ms / 1000)
        finally:
            with self._lock:
                self._waiting[condition] -= 1
                if not self._waiting[condition]:
                    del self._waiting[condition]
        return deadline_ms is None or self.monotonic_ms() < deadline_ms
