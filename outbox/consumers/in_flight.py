"""Deliveries in flight: extends those that are being handled, and nacks those that wait too long. Handles none.

A delivery is held from its pull to its settlement. After half of its invisible time it is extended if its handler has
begun; one that waits behind a slow handler for longer than its invisible time is nacked untried, so that a hung handler
blocks only its own message. If the broker reports a receipt as stale, another consumer has the message or will get it:
its handling does not begin any more, and a running handler can check still_held().
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Final

from outbox.consumers.handler import Consumer
from outbox.telemetry import Telemetry
from outbox_core.common.clock import Clock
from outbox_core.common.errors import OutboxError
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.limits import PULL_MESSAGES_MAX
from outbox_core.messages.message import Delivery, ExtendStatus
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

EXTEND_PAUSE_MS_MIN: Final = 10
EXTEND_RETRY_MS: Final = 1_000
IDLE_WAIT_MS: Final = 60_000


@dataclass(slots=True, eq=False)
class InFlightDelivery:
    """One delivery in flight, invisible to others until `until_ms` (monotonic clock), as far as this process knows."""

    consumer: Consumer
    delivery: Delivery
    since_ms: int
    until_ms: int
    extend_at_ms: int
    begun: bool = False
    settling: bool = False
    acking: bool = False
    """Its ack has been sent; the ack's end releases it."""
    lost: bool = False


_current: ContextVar[tuple[InFlightDelivery, Clock] | None] = ContextVar("outbox_held", default=None)


class _HandlingScope:
    """The context of InFlightDeliveries.handling(); entered for every message."""

    __slots__ = ("_current_delivery", "_token")

    def __init__(self, in_flight: InFlightDelivery, clock: Clock) -> None:
        self._current_delivery = (in_flight, clock)
        self._token: Token[tuple[InFlightDelivery, Clock] | None] | None = None

    def __enter__(self) -> None:
        self._token = _current.set(self._current_delivery)

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _current.reset(self._token)


def still_held() -> bool:
    """Returns whether the message that the calling handler works on is still held by it.

    False means that the broker has delivered it to another consumer, or may have: an inbox lets only one commit;
    without one, stop before the next effect. True without a runner, as in a test.
    """
    current = _current.get()
    if current is None:
        return True
    in_flight, clock = current
    return not in_flight.lost and clock.monotonic_ms() < in_flight.until_ms


class InFlightDeliveries:
    """All deliveries that one runner holds, and the thread that keeps them invisible. Thread-safe."""

    def __init__(self, *, broker: Broker, clock: Clock, telemetry: Telemetry) -> None:
        self._broker = broker
        self._clock = clock
        self._telemetry = telemetry
        self._by_receipt: dict[str, InFlightDelivery] = {}
        self._changed = threading.Condition()
        self._wakes_at_ms = 0
        self._ending = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that extends deliveries. Raises RuntimeError if the process can have no more threads."""
        thread = threading.Thread(target=self._run, name="consumer-extender", daemon=True)
        thread.start()
        self._thread = thread

    def is_alive(self) -> bool:
        """Returns whether the thread that extends deliveries runs."""
        return self._thread is not None and self._thread.is_alive()

    def begun_ids(self) -> list[str]:
        """Returns the ids of the messages whose handlers run, or whose ack is not answered."""
        with self._changed:
            return [in_flight.delivery.id for in_flight in self._by_receipt.values() if in_flight.begun]

    def stop(self, *, timeout_seconds: float) -> bool:
        """End the thread; returns whether it ended in time. Deliveries that are still held are redelivered when their
        invisible time ends.
        """
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def hold(self, consumer: Consumer, deliveries: Sequence[Delivery]) -> list[InFlightDelivery]:
        """Hold deliveries that have just been pulled."""
        now_ms = self._clock.monotonic_ms()
        batch = [
            InFlightDelivery(
                consumer=consumer, delivery=delivery, since_ms=now_ms, until_ms=now_ms + consumer.invisible_ms,
                extend_at_ms=now_ms + consumer.invisible_ms // 2,
            )
            for delivery in deliveries
        ]  # fmt: skip
        with self._changed:
            self._by_receipt.update({in_flight.delivery.receipt: in_flight for in_flight in batch})
            if now_ms + consumer.invisible_ms // 2 < self._wakes_at_ms:
                self._changed.notify_all()
        return batch

    def release(self, batch: Sequence[InFlightDelivery]) -> None:
        """Release deliveries that are settled, or never will be."""
        with self._changed:
            for in_flight in batch:
                self._by_receipt.pop(in_flight.delivery.receipt, None)

    def may_begin(self, in_flight: InFlightDelivery) -> bool:
        """Begin to handle a delivery if it is still held; it is not nacked as untried any more."""
        if in_flight.delivery.expired:
            # It may have ended its last consumer. If it ends this process too, it is an attempt of this message and of
            # none that waits behind it; the report costs a request, so the first delivery goes without.
            self._extend([in_flight], invisible_ms=in_flight.consumer.invisible_ms, begun=True)
        with self._changed:
            now_ms = self._clock.monotonic_ms()
            if in_flight.lost or now_ms >= in_flight.until_ms:
                in_flight.lost = True
                return False
            in_flight.begun, in_flight.since_ms = True, now_ms
            return True

    def handling(self, in_flight: InFlightDelivery) -> AbstractContextManager[None]:
        """Returns a context for the handler's call, inside which still_held() refers to this delivery."""
        return _HandlingScope(in_flight, self._clock)

    def extend_due(self) -> None:
        """Extend or nack the deliveries that are due for it."""
        now_ms = self._clock.monotonic_ms()
        with self._changed:
            due = [
                in_flight
                for in_flight in self._by_receipt.values()
                if not in_flight.lost and in_flight.extend_at_ms <= now_ms
            ]
            over = [in_flight for in_flight in due if _is_over(in_flight, now_ms)]
            for in_flight in over:
                in_flight.lost = True  # under the lock: its handling cannot begin any more
        extended = [in_flight for in_flight in due if not in_flight.lost]
        for invisible_ms, begun in sorted(
            {(in_flight.consumer.invisible_ms, in_flight.begun) for in_flight in extended}
        ):
            alike = [
                in_flight
                for in_flight in extended
                if (in_flight.consumer.invisible_ms, in_flight.begun) == (invisible_ms, begun)
            ]
            for start in range(0, len(alike), PULL_MESSAGES_MAX):
                self._extend(alike[start : start + PULL_MESSAGES_MAX], invisible_ms=invisible_ms, begun=begun)
        self._abandon([in_flight for in_flight in over if in_flight.begun])
        self._nack_waiting([in_flight for in_flight in over if not in_flight.begun])

    def _run(self) -> None:
        while True:
            pause_ms = 0
            try:
                self.extend_due()
            except BaseException:  # the thread boundary: without this thread slow messages would be delivered twice
                logger.exception("extend_failed")
                pause_ms = EXTEND_RETRY_MS
            with self._changed:
                if not self._ending:
                    wait_ms = max(pause_ms, self._until_next_ms())
                    self._wakes_at_ms = self._clock.monotonic_ms() + wait_ms
                    self._clock.wait(self._changed, wait_ms)
                if self._ending:
                    return

    def _until_next_ms(self) -> int:
        """Returns the time until a delivery is due. The caller holds the lock."""
        at_ms = min(
            (in_flight.extend_at_ms for in_flight in self._by_receipt.values() if not in_flight.lost), default=None
        )
        return IDLE_WAIT_MS if at_ms is None else max(EXTEND_PAUSE_MS_MIN, at_ms - self._clock.monotonic_ms())

    def _extend(self, batch: Sequence[InFlightDelivery], *, invisible_ms: int, begun: bool) -> None:
        receipts = [in_flight.delivery.receipt for in_flight in batch]
        # Before the request: the broker counts from then on at the earliest, and its answer may take long.
        now_ms = self._clock.monotonic_ms()
        try:
            statuses = self._broker.extend(receipts, invisible_ms=invisible_ms, begun=begun)
        except OutboxError as error:
            logger.warning("extend_failed", extra={"receipts": len(batch), "error": str(error)})
            again_at_ms = self._clock.monotonic_ms() + min(EXTEND_RETRY_MS, invisible_ms // 8)
            for in_flight in batch:
                in_flight.extend_at_ms = again_at_ms
            return
        for in_flight, status in zip(batch, statuses, strict=True):
            if status is ExtendStatus.EXTENDED:
                in_flight.until_ms, in_flight.extend_at_ms = now_ms + invisible_ms, now_ms + invisible_ms // 2
                self._count("extended", in_flight)
            elif in_flight.settling:  # expected to be stale, and released when its ack or nack has returned
                in_flight.extend_at_ms = now_ms + invisible_ms // 2
            else:
                self._lose(in_flight)

    def _lose(self, in_flight: InFlightDelivery) -> None:
        in_flight.lost = True
        self._count("receipt_lost", in_flight)
        logger.warning(
            "receipt_lost",
            extra={"message_id": in_flight.delivery.id, "group": in_flight.consumer.group, "begun": in_flight.begun},
        )

    def _abandon(self, batch: Sequence[InFlightDelivery]) -> None:
        """Stop extending deliveries whose handlers exceeded their time: the broker will redeliver them."""
        for in_flight in batch:
            self._count("overdue", in_flight)
            logger.error(
                "handler_overdue", extra={"message_id": in_flight.delivery.id, "group": in_flight.consumer.group}
            )

    def _nack_waiting(self, batch: Sequence[InFlightDelivery]) -> None:
        """Nack deliveries that waited too long behind a slow handler, for other consumers."""
        if not batch:
            return
        for in_flight in batch:
            self._count("handed_back", in_flight)
        receipts = [in_flight.delivery.receipt for in_flight in batch]
        try:
            self._broker.nack(receipts, delay_ms=0, reason="waited behind a slow handler", counts=False)
        except OutboxError as error:
            logger.warning("nack_failed", extra={"receipts": len(receipts), "error": str(error)})

    def _count(self, event: str, in_flight: InFlightDelivery) -> None:
        self._telemetry.counted(event, in_flight.delivery.topic, in_flight.consumer.group)


def _is_over(in_flight: InFlightDelivery, now_ms: int) -> bool:
    """Returns whether a delivery must not be held any longer. Pure."""
    bound_ms = in_flight.consumer.handle_ms_max if in_flight.begun else in_flight.consumer.invisible_ms
    return now_ms - in_flight.since_ms >= bound_ms
