"""DeliverySettler: sends acks and nacks to the broker. Acks are retried a few times, nacks are not.

If a settlement fails in the end, the message is redelivered when its invisible time ends: it is repeated, which an
inbox makes harmless, and never lost.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import Final

from outbox.consumers.in_flight import InFlightDelivery
from outbox.telemetry import Settlement, Telemetry
from outbox_core.common.backoff import Backoff
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

    def ack(self, held: Sequence[InFlightDelivery]) -> bool:
        """Acknowledge deliveries of one topic and group; returns False if the broker could not be reached."""
        if not held:
            return True
        for in_flight in held:
            in_flight.settling = True
        receipts = [in_flight.delivery.receipt for in_flight in held]
        for attempt in range(1, ACK_TRIES_MAX + 1):
            try:
                with self._span(Settlement.ACK, held):
                    statuses = self._broker.ack(receipts)
            except OutboxError as error:
                logger.warning("ack_failed", extra={"messages": len(held), "attempt": attempt, "error": str(error)})
                if not error.retryable or attempt == ACK_TRIES_MAX:
                    break
                self._never.wait(ACK_BACKOFF.delay_ms(attempt, self._random) / 1000)
            else:
                self._count_stale(held, statuses)
                return True
        self._count("ack_failed", held)
        return False

    def nack(self, held: Sequence[InFlightDelivery], *, delay_ms: int | None, reason: str, counts: bool) -> bool:
        """Nack deliveries of one topic and group; returns False if the broker could not be reached."""
        if not held:
            return True
        for in_flight in held:
            in_flight.settling = True
        try:
            with self._span(Settlement.NACK, held):
                self._broker.nack(
                    [in_flight.delivery.receipt for in_flight in held], delay_ms=delay_ms, reason=reason, counts=counts
                )
        except OutboxError as error:
            logger.warning("nack_failed", extra={"messages": len(held), "error": str(error)})
            self._count("nack_failed", held)
            return False
        return True

    def _span(self, settlement: Settlement, held: Sequence[InFlightDelivery]) -> AbstractContextManager[None]:
        return self._telemetry.settling(
            settlement, [in_flight.delivery for in_flight in held], group=held[0].consumer.group
        )

    def _count_stale(self, held: Sequence[InFlightDelivery], statuses: Sequence[AckStatus]) -> None:
        """Counts acks that came too late: another consumer has, or had, the message as well."""
        stale = [in_flight for in_flight, status in zip(held, statuses, strict=True) if status is AckStatus.STALE]
        if stale:
            self._count("ack_stale", stale)
            logger.warning("ack_stale", extra={"message_ids": [in_flight.delivery.id for in_flight in stale]})

    def _count(self, event: str, held: Sequence[InFlightDelivery]) -> None:
        self._telemetry.counted(event, held[0].delivery.topic, held[0].consumer.group, by=len(held))
