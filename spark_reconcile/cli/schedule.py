"""Repeats a run once an interval, until stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from outbox_core.common.clock import Clock
from outbox_core.common.errors import DatabaseUnavailable
from outbox_core.runtime.event_logger import EventLogger
from spark_reconcile.core.errors import NotComparable, OutputBusy, OutputFailed

logger: EventLogger = EventLogger(__name__)

RETRY_MS: Final = 60_000
"""The time until a retry after a source was unavailable; an interval, if that is shorter."""
AWAKE_EVERY_MS: Final = 1_000
"""The longest wait: another thread may get a signal, whose handler then runs when the main thread next runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One run an interval, `after_ms` after its multiples: an hour is evaluated when it and the grace time are over."""

    every_ms: int
    after_ms: int

    def next_ms(self, now_ms: int) -> int:
        """Returns when the next run is due."""
        return ((now_ms - self.after_ms) // self.every_ms + 1) * self.every_ms + self.after_ms


class ScheduledRuns:
    """The loop of runs. stop() may be called from any thread; a signal handler must call it from another thread."""

    def __init__(self, run_once: Callable[[int], None], *, schedule: Schedule, clock: Clock) -> None:
        self._run_once = run_once
        self._schedule = schedule
        self._clock = clock
        self._changed = threading.Condition()
        self._stopping = False
        self.runs = 0
        self.failures = 0

    def run(self) -> None:
        """Run now, then by the schedule, until stop()."""
        while not self._stopping:
            now_ms = self._clock.now_ms()
            due_ms = self._schedule.next_ms(now_ms) if self._try(now_ms) else now_ms + self._retry_ms
            self._wait_until(due_ms)

    def stop(self) -> None:
        """Stop after the current run, if there is one. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _try(self, now_ms: int) -> bool:
        self.runs += 1
        try:
            self._run_once(now_ms)
        except (NotComparable, OutputBusy, OutputFailed, DatabaseUnavailable) as error:
            self.failures += 1
            logger.warning("reconciliation_failed", extra={"error": str(error), "failures": self.failures})
            return False
        return True

    @property
    def _retry_ms(self) -> int:
        return min(RETRY_MS, self._schedule.every_ms)

    def _wait_until(self, due_ms: int) -> None:
        with self._changed:
            while not self._stopping and (left_ms := due_ms - self._clock.now_ms()) > 0:
                self._clock.wait(self._changed, min(left_ms, AWAKE_EVERY_MS))
