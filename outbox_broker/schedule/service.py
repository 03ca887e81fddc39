"""Runs a schedule in two threads: one delivers due messages to a target function, one does housekeeping.

Never early: the wall clock is read right before each batch is taken. The threads wait on monotonic time in slices of at
most a second, so that a step of the wall clock, or a suspended process, is noticed within one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from outbox_broker.schedule.delay_store import DelayStore, DueBatch, Timed
from outbox_broker.schedule.lateness import Lateness
from outbox_core.common.backoff import Backoff
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerThrottled, OutboxError

logger = logging.getLogger(__name__)

Deliver = Callable[[Sequence[Timed]], Sequence[Timed]]
"""Delivers a batch; returns the rejected messages. Raises OutboxError if the whole batch may be retried."""
SLICE_MS: Final = 1_000
REFUSED_AGAIN_MS: Final = 3_600_000
"""A message rejected by the target is kept, and retried each hour; it is never dropped."""


@dataclass(slots=True)
class _Held:
    """A batch that could not be delivered yet."""

    batch: DueBatch
    failures: int
    retry_at_ms: int  # monotonic


class DelayService:
    """Two threads on one schedule. start() and stop() are idempotent; wake() is thread-safe."""

    def __init__(self, schedule: DelayStore, *, deliver: Deliver, clock: Clock, backoff: Backoff | None = None) -> None:
        self._schedule = schedule
        self._deliver = deliver
        self._clock = clock
        self._backoff = backoff or Backoff(initial_ms=100, max_ms=30_000)
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._wakes = 0
        self._held: _Held | None = None
        self.lateness = Lateness()
        self.delivered = 0
        self.refused = 0
        self.failures = 0

    def start(self) -> None:
        """Start the threads."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, args=(self.turn,), name="delay-service", daemon=True),
                threading.Thread(target=self._run, args=(self.keep,), name="delay-keeper", daemon=True),
            ]
            for thread in self._threads:
                thread.start()

    def stop(self, *, timeout_ms: int = 10_000) -> None:
        """Stop after the work in progress, waiting up to a deadline. Undelivered messages come again later."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_ms / 1000)

    def wake(self) -> None:
        """Signal that something was scheduled that may be due earlier than all else."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def turn(self) -> int:
        """Deliver one batch; returns how long to wait then, in milliseconds."""
        batch = self._take()
        if batch is not None:
            self._try(batch)
            return 0 if self._held is None else self._wait_for_retry_ms()
        if self._held is not None:
            return self._wait_for_retry_ms()
        return max(0, min(self._schedule.soonest_ms() - self._clock.now_ms(), SLICE_MS))

    def keep(self) -> int:
        """Do one step of housekeeping; returns how long to wait then, in milliseconds."""
        return 0 if self._schedule.maintain(self._clock.now_ms()) else SLICE_MS

    def _take(self) -> DueBatch | None:
        if self._held is None:
            return self._schedule.due(self._clock.now_ms())
        return self._held.batch if self._wait_for_retry_ms() == 0 else None

    def _wait_for_retry_ms(self) -> int:
        retry_at_ms = self._held.retry_at_ms if self._held else 0
        return max(0, min(retry_at_ms - self._clock.monotonic_ms(), SLICE_MS))

    def _try(self, batch: DueBatch) -> None:
        try:
            refused = self._deliver(batch.messages)
        except OutboxError as error:
            self._hold(batch, error)
            return
        self._held = None
        now_ms = self._clock.now_ms()
        again = [msgspec.structs.replace(one, due_ms=now_ms + REFUSED_AGAIN_MS) for one in refused]
        self._schedule.fired(batch.number, again=again)
        self.delivered += len(batch) - len(again)
        self.refused += len(again)
        self.lateness.add_due(_dues(batch, but=refused), now_ms=now_ms)

    def _hold(self, batch: DueBatch, error: OutboxError) -> None:
        """Retain the batch, and everything after it, until the target accepts it."""
        failures = 1 if self._held is None else self._held.failures + 1
        pause_ms = self._backoff.delay_ms(failures)
        if isinstance(error, BrokerThrottled):
            pause_ms = max(pause_ms, error.retry_after_ms)
        self._held = _Held(batch, failures, self._clock.monotonic_ms() + pause_ms)
        self.failures += 1
        logger.warning("delivery_failed", extra={"messages": len(batch), "failures": failures, "error": str(error)})

    def _run(self, turn: Callable[[], int]) -> None:
        while not self._stopping:
            wakes, wait_ms = self._wakes, SLICE_MS
            try:
                wait_ms = turn()
            except OutboxError as error:
                logger.warning("delay_service_failed", extra={"error": str(error)})
            except Exception:  # the thread boundary: if this thread ended silently, nothing would be delivered any more
                logger.exception("delay_service_failed")
            with self._changed:
                if wait_ms > 0 and self._wakes == wakes and not self._stopping:
                    self._clock.wait(self._changed, wait_ms)


def _dues(batch: DueBatch, *, but: Sequence[Timed]) -> list[int]:
    """Returns the due times of a batch's messages, except for some."""
    if not but:
        return batch.dues
    others = {(one.topic, one.id) for one in but}
    places = zip(batch.dues, batch.topics, batch.ids, strict=True)
    return [due_ms for due_ms, *place in places if tuple(place) not in others]
