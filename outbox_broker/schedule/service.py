"""Runs a schedule in two threads: one delivers due messages to a target function, one does housekeeping.

Never early: the wall clock is read right before each batch is taken. The threads wait on monotonic time in slices of at
most a second, so that a step of the wall clock, or a suspended process, is noticed within one.

A batch that was taken stays in flight until the schedule has settled it: whatever error its delivery or its settlement
meets, that step is repeated, and no other batch is taken before. After a kill the schedule dispatches it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from outbox_broker.schedule.delay_store import DelayStore, DueBatch, TimedMessage
from outbox_broker.schedule.dispatch_health import DispatchHealth
from outbox_broker.schedule.lateness import Lateness
from outbox_core.common.backoff import Backoff
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerThrottled, OutboxError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

Deliver = Callable[[Sequence[TimedMessage]], Sequence[TimedMessage]]
"""Delivers a batch; returns the rejected messages. Raises OutboxError if the whole batch may be retried."""
SLICE_MS: Final = 1_000
REFUSED_AGAIN_MS: Final = 3_600_000
"""A message rejected by the target is kept, and retried each hour; it is never dropped."""


@dataclass(slots=True)
class _InFlight:
    """A batch that was taken and is not settled; `refused` are its messages that the target rejected, None before the
    delivery.
    """

    batch: DueBatch
    refused: Sequence[TimedMessage] | None = None
    delivered_at_ms: int = 0
    failures: int = 0
    retry_at_ms: int = 0  # monotonic


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
        self._in_flight: _InFlight | None = None
        self._health = DispatchHealth()
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
        """Deliver and settle one batch; returns how long to wait then, in milliseconds."""
        one = self._in_flight or self._take()
        if one is None:
            return max(0, min(self._schedule.soonest_ms() - self._clock.now_ms(), SLICE_MS))
        if self._wait_for_retry_ms(one) == 0:
            try:
                self._deliver_once(one)
                self._settle(one)
            except OutboxError as error:
                self._put_off(one, error)
            except Exception as error:  # a defect of the target's client, which another attempt may not meet
                logger.exception("delay_service_failed")
                self._put_off(one, error)
        return self._wait_for_retry_ms(one)

    def keep(self) -> int:
        """Do one step of housekeeping; returns how long to wait then, in milliseconds."""
        return 0 if self._schedule.maintain(self._clock.now_ms()) else SLICE_MS

    def check_ready(self) -> None:
        """Raise StorageFailed, naming the cure, while batches can be taken from the schedule or settled with it no
        more.
        """
        self._health.check()

    def _take(self) -> _InFlight | None:
        with self._health.attempt():
            batch = self._schedule.due(self._clock.now_ms())
        if batch is not None:
            self._in_flight = _InFlight(batch)
        return self._in_flight

    def _deliver_once(self, one: _InFlight) -> None:
        """Deliver a batch unless that was done. Before a repetition it is checked whether another process has taken the
        schedule over: it would deliver the batch as well.
        """
        if one.refused is not None:
            return
        if one.failures:
            with self._health.attempt():
                self._schedule.check_ready()
        one.refused = self._deliver(one.batch.messages)
        one.delivered_at_ms = self._clock.now_ms()

    def _settle(self, one: _InFlight) -> None:
        refused = one.refused or ()
        again_at_ms = self._clock.now_ms() + REFUSED_AGAIN_MS
        with self._health.attempt():
            self._schedule.fired(
                one.batch.number, again=[msgspec.structs.replace(message, due_ms=again_at_ms) for message in refused]
            )
        self._in_flight = None
        self.delivered += len(one.batch) - len(refused)
        self.refused += len(refused)
        self.lateness.add_due(_dues(one.batch, but=refused), now_ms=one.delivered_at_ms)

    def _wait_for_retry_ms(self, one: _InFlight) -> int:
        return max(0, min(one.retry_at_ms - self._clock.monotonic_ms(), SLICE_MS))

    def _put_off(self, one: _InFlight, error: Exception) -> None:
        """Repeat the step that failed after a pause; everything else that is due waits."""
        one.failures += 1
        pause_ms = self._backoff.delay_ms(one.failures)
        if isinstance(error, BrokerThrottled):
            pause_ms = max(pause_ms, error.retry_after_ms)
        one.retry_at_ms = self._clock.monotonic_ms() + pause_ms
        self.failures += 1
        event = "delivery_failed" if one.refused is None else "settlement_failed"
        logger.warning(event, extra={"messages": len(one.batch), "failures": one.failures, "error": str(error)})

    def _run(self, turn: Callable[[], int]) -> None:
        while not self._stopping:
            wakes, wait_ms = self._wakes, SLICE_MS
            try:
                wait_ms = turn()
            except OutboxError as error:
                logger.warning("delay_service_failed", extra={"error": str(error)})
            except BaseException:  # the thread boundary: if this thread ended, nothing would be delivered any more
                logger.exception("delay_service_failed")
            with self._changed:
                if wait_ms > 0 and self._wakes == wakes and not self._stopping:
                    self._clock.wait(self._changed, wait_ms)


def _dues(batch: DueBatch, *, but: Sequence[TimedMessage]) -> list[int]:
    """Returns the due times of a batch's messages, except for some."""
    if not but:
        return batch.dues
    others = {(one.topic, one.id) for one in but}
    places = zip(batch.dues, batch.topics, batch.ids, strict=True)
    return [due_ms for due_ms, *place in places if tuple(place) not in others]
