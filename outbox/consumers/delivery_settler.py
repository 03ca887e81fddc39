"""DeliverySettler: sends acks and nacks to the broker. Acks are retried a few times, nacks are not. AckSender has it
send the acks of one worker in a separate thread, while the worker handles the next message.

If a settlement fails in the end, the message is redelivered when its invisible time ends: it is repeated, which an
inbox makes harmless, and never lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import Final

from outbox.consumers.in_flight import InFlightDelivery
from outbox.telemetry import Settlement, Telemetry
from outbox_core.common.backoff import Backoff
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import OutboxError
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.message import AckStatus
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

ACK_TRIES_MAX: Final = 3
ACK_BACKOFF: Final = Backoff(initial_ms=50, multiplier=4, max_ms=1_000, jitter=0.5)


class DeliverySettler:
    """Acks and nacks of one runner. Thread-safe."""

    def __init__(self, *, broker: Broker, telemetry: Telemetry, random: Random) -> None:
        self._broker = broker
        self._telemetry = telemetry
        self._random = random
        self._never = threading.Event()  # waited on with a deadline, also while the runner stops

    def ack(self, batch: Sequence[InFlightDelivery]) -> bool:
        """Acknowledge deliveries of one topic and group; returns False if the broker could not be reached."""
        if not batch:
            return True
        for in_flight in batch:
            in_flight.settling = True
        receipts = [in_flight.delivery.receipt for in_flight in batch]
        for attempt in range(1, ACK_TRIES_MAX + 1):
            try:
                with self._span(Settlement.ACK, batch):
                    statuses = self._broker.ack(receipts)
            except OutboxError as error:
                logger.warning("ack_failed", extra={"messages": len(batch), "attempt": attempt, "error": str(error)})
                if not error.retryable or attempt == ACK_TRIES_MAX:
                    break
                self._never.wait(ACK_BACKOFF.delay_ms(attempt, self._random) / 1000)
            else:
                self._count_stale(batch, statuses)
                return True
        self._count("ack_failed", batch)
        return False

    def nack(self, batch: Sequence[InFlightDelivery], *, delay_ms: int | None, reason: str, counts: bool) -> bool:
        """Nack deliveries of one topic and group; returns False if the broker could not be reached."""
        if not batch:
            return True
        for in_flight in batch:
            in_flight.settling = True
        try:
            with self._span(Settlement.NACK, batch):
                self._broker.nack(
                    [in_flight.delivery.receipt for in_flight in batch], delay_ms=delay_ms, reason=reason, counts=counts
                )
        except OutboxError as error:
            logger.warning("nack_failed", extra={"messages": len(batch), "error": str(error)})
            self._count("nack_failed", batch)
            return False
        return True

    def _span(self, settlement: Settlement, batch: Sequence[InFlightDelivery]) -> AbstractContextManager[None]:
        return self._telemetry.settling(
            settlement, [in_flight.delivery for in_flight in batch], group=batch[0].consumer.group
        )

    def _count_stale(self, batch: Sequence[InFlightDelivery], statuses: Sequence[AckStatus]) -> None:
        """Counts acks that came too late: another consumer has, or had, the message as well."""
        stale = [in_flight for in_flight, status in zip(batch, statuses, strict=True) if status is AckStatus.STALE]
        if stale:
            self._count("ack_stale", stale)
            logger.warning("ack_stale", extra={"message_ids": [in_flight.delivery.id for in_flight in stale]})

    def _count(self, event: str, batch: Sequence[InFlightDelivery]) -> None:
        self._telemetry.counted(event, batch[0].delivery.topic, batch[0].consumer.group, by=len(batch))


ACK_LINGER_MS: Final = 3
"""A lingering ack is sent once nothing was added for this time,"""
ACK_LINGER_ROUNDS_MAX: Final = 4
"""and after this multiple of that time in any case."""
IDLE_MS_MAX: Final = 60_000


class AckSender:
    """Sends acks for one worker's thread. Its own thread starts with the first ack, and is a daemon: unlike a pool's
    threads, it does not delay the exit of the process.

    At most one ack request is in flight. It contains all that was handled before it was sent, so acks reach the broker
    in the order of handling. The first messages of a batch may wait for the others, but for no slow handler. If
    messages come faster than the broker responds to acks, an ack lingers for a few milliseconds to include more of
    them: each request costs a sync at the broker, which delays publishes too. A worker that is a batch ahead of its
    acks waits for them, so it holds two batches at most. The caller sends and retries the requests.
    """

    def __init__(
        self,
        ack: Callable[[Sequence[InFlightDelivery]], None],
        *,
        name: str,
        ahead_max: int,
        ack_linger_ms: int = ACK_LINGER_MS,
        clock: Clock | None = None,
    ) -> None:
        """`ack` acknowledges and releases deliveries of one topic and group; it is called in a thread named `name`.

        put() waits while more than `ahead_max` deliveries are unacknowledged. `ack_linger_ms`: see ACK_LINGER_MS.
        """
        self._ack = ack
        self._name = name
        self._ahead_max = ahead_max
        self._linger_ms = ack_linger_ms
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._added = threading.Condition(self._lock)
        self._settled = threading.Condition(self._lock)
        self._waiting: list[InFlightDelivery] = []
        self._due_count = 0  # of the first of them; the others may wait until `_send_at_ms`
        self._send_at_ms = 0
        self._in_flight_count = 0
        self._ended = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, done: Sequence[InFlightDelivery], *, wait_ms: int = 0) -> None:
        """Acknowledge these deliveries and all that were put before: soon, or after `wait_ms` unless a put() without it
        comes first. Raises the error of an earlier ack, after queueing these.
        """
        if done:
            self._start()
        for in_flight in done:
            in_flight.settling = in_flight.acking = True
        with self._lock:
            before_ms = self._wait_ms()
            if wait_ms and self._due_count == len(self._waiting):
                self._send_at_ms = self._clock.monotonic_ms() + wait_ms
            self._waiting += done
            if not wait_ms:
                self._due_count = len(self._waiting)
            self._wake(before_ms)
            while not wait_ms and len(self._waiting) + self._in_flight_count > self._ahead_max:
                self._clock.wait(self._settled, IDLE_MS_MAX)
        self._raise()

    def end(self) -> None:
        """Wait for the ack in flight, end the thread, and raise the ack's error, if any. Idempotent."""
        with self._lock:
            self._ended = True
            self._added.notify()
        if self._thread is not None:
            self._thread.join()
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def _wait_ms(self) -> int:
        """Returns the time until the next ack; IDLE_MS_MAX if nothing waits for it. The caller holds the lock."""
        if self._due_count or len(self._waiting) >= self._ahead_max:
            return 0
        return max(0, self._send_at_ms - self._clock.monotonic_ms()) if self._waiting else IDLE_MS_MAX

    def _wake(self, before_ms: int) -> None:
        """Wake the thread if it waits for something to acknowledge, or longer than it has to now, and end its linger if
        there is enough. `before_ms`: what it had to wait before. The caller holds the lock.
        """
        is_idle, is_full = before_ms == IDLE_MS_MAX, len(self._waiting) >= self._ahead_max
        if self._waiting and (is_idle or is_full or (before_ms and not self._wait_ms())):
            self._added.notify()

    def _run(self) -> None:
        lingers = False
        while batch := self._next(lingers=lingers):
            try:
                self._ack(batch)
            except BaseException as error:  # noqa: BLE001  (the worker's thread raises it)
                self._error = error
            with self._lock:
                self._in_flight_count = 0
                self._settled.notify()
                lingers = not self._wait_ms()  # they come faster than the broker responds
            del batch  # frees the acknowledged deliveries before the wait for the next ones

    def _next(self, *, lingers: bool) -> list[InFlightDelivery]:
        """Waits for deliveries and returns those of the next ack; empty at the end."""
        with self._lock:
            while not self._ended and (wait_ms := self._wait_ms()):
                self._clock.wait(self._added, wait_ms)
            if lingers:
                self._linger()
            batch, self._waiting = self._waiting[: self._ahead_max], self._waiting[self._ahead_max :]
            self._due_count = max(0, self._due_count - len(batch))
            self._in_flight_count = len(batch)
            return batch

    def _linger(self) -> None:
        for _ in range(ACK_LINGER_ROUNDS_MAX):
            waiting_before = len(self._waiting)
            if self._ended or waiting_before >= self._ahead_max:
                return
            self._clock.wait(self._added, self._linger_ms)
            if len(self._waiting) == waiting_before:
                return
