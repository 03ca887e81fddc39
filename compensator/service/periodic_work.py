"""Runs periodic work: beats, gauges, retention. Decides when and in which thread; the work itself is elsewhere.

A task runs at its interval, never twice at the same time, and goes on after an error. After the clock was stepped back
the scheduler would wait for a time that has already passed: mind_clock() detects this, and runs every task at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from outbox_core.common.clock import Clock
from outbox_core.common.errors import OutboxError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

STEP_MS: Final = 1_000
_JITTER: Final = 0.1


class PeriodicTasks:
    """A scheduler and its jobs. start() and stop() are idempotent."""

    def __init__(
        self, *, clock: Clock, failed: Callable[[str], None], scheduler: BackgroundScheduler | None = None
    ) -> None:
        """`failed` is called with the name of a task that ended by an error. `scheduler`: one that is not started and
        has no other jobs, started and shut down with the tasks; by default one in UTC.
        """
        self._clock = clock
        self._failed = failed
        self._scheduler = scheduler or BackgroundScheduler(timezone=UTC)
        self._changed = threading.Condition()
        self._running: set[str] = set()
        self._stopping = False
        self._offset_ms = self._offset()

    def add(self, name: str, work: Callable[[], None], *, every_ms: int) -> None:
        """Run `work` every `every_ms`, with some jitter, the first time at once."""
        seconds = every_ms / 1_000
        self._scheduler.add_job(
            lambda: self._do(name, work),
            IntervalTrigger(seconds=seconds, jitter=seconds * _JITTER, timezone=UTC),
            id=name,
            max_instances=1,
            coalesce=True,
            misfire_grace_time=None,
            next_run_time=datetime.now(UTC),
        )

    def start(self) -> None:
        """Start the scheduler, with a thread for each task: one that waits for a dead server holds up no other."""
        if not self._scheduler.running:
            threads = max(1, len(self._scheduler.get_jobs()))
            self._scheduler.add_executor(ThreadPoolExecutor(threads), "default")
            self._scheduler.start()

    def stop(self, *, timeout_ms: int) -> bool:
        """Start no more work; True if running work has ended in time."""
        with self._changed:
            self._stopping = True
            ended = self._changed.wait_for(lambda: not self._running, timeout_ms / 1_000)
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        return ended

    def mind_clock(self) -> None:
        """If the wall clock was stepped, run every task now and count its interval from there."""
        offset_ms = self._offset()
        if abs(offset_ms - self._offset_ms) < STEP_MS:
            return
        logger.warning("clock_stepped", extra={"by_ms": offset_ms - self._offset_ms})
        self._offset_ms = offset_ms
        for job in self._scheduler.get_jobs():
            job.modify(next_run_time=datetime.now(UTC))

    def _offset(self) -> int:
        return self._clock.now_ms() - self._clock.monotonic_ms()

    def _do(self, name: str, work: Callable[[], None]) -> None:
        with self._changed:
            if self._stopping:
                return
            self._running.add(name)
        try:
            work()
        except OutboxError as error:
            logger.warning("periodic_task_failed", extra={"task": name, "error": str(error)})
            self._failed(name)
        except Exception:  # the thread boundary: the next run must come, whatever this one raised
            logger.exception("periodic_task_failed", extra={"task": name})
            self._failed(name)
        finally:
            with self._changed:
                self._running.discard(name)
                self._changed.notify_all()
