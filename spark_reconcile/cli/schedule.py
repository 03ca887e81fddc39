"""Runs again and again, once an interval, until told to stop. What a run does, and what it finds, is not known here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from outbox_core.common.clock import Clock
from outbox_core.common.errors import DatabaseUnavailable
from spark_reconcile.core.errors import NotComparable, OutputBusy, OutputFailed

logger = logging.getLogger(__name__)

RETRY_MS: Final = 60_000
"""After a source that was down, so long; or an interval, where that is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A run an interval, `after_ms` behind its whole multiples: hours are judged when they and the grace are over."""

    every_ms: int
    after_ms: int

    def next_ms(self, now_ms: int) -> int:
        """When the next run is due."""
        return ((now_ms - self.after_ms) // self.every_ms + 1) * self.every_ms + self.after_ms


class ScheduledRuns:
    """The loop. stop() may be called from any thread, and from a signal's handler by a thread of its own."""

    def __init__(self, run_once: Callable[[int], None], *, schedule: Schedule, clock: Clock) -> None:
        self._run_once = run_once
        self._schedule = schedule
        self._clock = clock
        self._changed = threading.Condition()
        self._stopping = False
        self.runs = 0
        self.failures = 0

    def run(self) -> None:
        """Run now, and then as the schedule has it, until stop()."""
        while not self._stopping:
            now_ms = self._clock.now_ms()
            due_ms = self._schedule.next_ms(now_ms) if self._try(now_ms) else now_ms + self._retry_ms
            self._wait_until(due_ms)

    def stop(self) -> None:
        """End after the run that goes on, if one does. Idempotent."""
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
                self._clock.wait(self._changed, left_ms)
