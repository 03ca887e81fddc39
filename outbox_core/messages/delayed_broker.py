"""DelayedBroker: a broker without delayed delivery, combined with our delay service.

Messages without a due time go to the target directly. Those with one go to the delay service, which publishes them to
the same target when they are due, and so do cancels. A due time that has passed makes no difference: the message may be
a repeat, and only the delay service knows whether it has published it already, or whether it was canceled.
"""

from __future__ import annotations

from collections.abc import Sequence

from outbox_core.common.errors import BrokerError, BrokerRefused, ConfigurationError
from outbox_core.messages.broker_port import (
    Broker,
    BrokerAdmin,
    Capability,
    Inspectable,
    Inspection,
    WeaknessReporter,
    capabilities_of,
)
from outbox_core.messages.limits import INVISIBLE_MS_DEFAULT
from outbox_core.messages.message import (
    AckStatus,
    CancelStatus,
    Delivery,
    ExtendStatus,
    Message,
    NackStatus,
    PublishResult,
)


class DelayedBroker:
    """A Broker that publishes to `target`, and messages with a due time to `delay`. Thread-safe if both are."""

    def __init__(self, target: Broker, delay: Broker) -> None:
        """`delay`: a delay service whose own target is the same broker. close() closes both."""
        if Capability.DELAY not in capabilities_of(delay):
            raise ConfigurationError(
                "the broker named by delay= cannot delay: name a delay service, e.g. http://HOST:7799"
            )
        self._target = target
        self._delay = delay

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Returns the target's capabilities, with delay and cancel."""
        return capabilities_of(self._target) | {Capability.DELAY, Capability.CANCEL}

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Store a batch; one result a message, in order.

        If one of the two raises, the other is asked all the same: the error has its results.
        """
        immediate = [position for position, message in enumerate(batch) if message.deliver_at_ms is None]
        scheduled = [position for position, message in enumerate(batch) if message.deliver_at_ms is not None]
        results: dict[int, PublishResult] = {}
        failures: list[BrokerError] = []
        for broker, positions in ((self._target, immediate), (self._delay, scheduled)):
            try:
                answers = broker.publish([batch[position] for position in positions]) if positions else []
                results.update(zip(positions, answers, strict=True))
            except BrokerError as error:
                results.update((positions[at], result) for at, result in error.answered.items())
                failures.append(error)
        if failures:
            # An outage of one ends a batch, whatever the other refuses: that is refused again, with what is left.
            raise min(failures, key=lambda error: isinstance(error, BrokerRefused)).with_answered(results)
        return [results[position] for position in range(len(batch))]

    def pull(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 100,
        wait_ms: int = 0,
        invisible_ms: int = INVISIBLE_MS_DEFAULT,
        begins: bool = False,
    ) -> list[Delivery]:
        """Pull from the target."""
        return self._target.pull(
            topic, group, max_messages=max_messages, wait_ms=wait_ms, invisible_ms=invisible_ms, begins=begins
        )

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        """Acknowledge deliveries of the target."""
        return self._target.ack(receipts)

    def nack(
        self, receipts: Sequence[str], *, delay_ms: int | None = None, reason: str | None = None, counts: bool = True
    ) -> list[NackStatus]:
        """Return deliveries to the target."""
        return self._target.nack(receipts, delay_ms=delay_ms, reason=reason, counts=counts)

    def extend(self, receipts: Sequence[str], *, invisible_ms: int, begun: bool = False) -> list[ExtendStatus]:
        """Keep deliveries of the target invisible."""
        return self._target.extend(receipts, invisible_ms=invisible_ms, begun=begun)

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        """Cancel scheduled messages. For those that the delay service has passed on to the target it is too late."""
        return self._delay.cancel(message_ids)

    @property
    def admin(self) -> BrokerAdmin:
        """Returns the admin operations of the target."""
        return self._target.admin

    def inspect(self, topics: Sequence[str] = ()) -> Inspection:
        """Inspect the target's server."""
        if not isinstance(self._target, Inspectable):
            return Inspection(product="outbox-mq", version="")
        return self._target.inspect(topics)

    def report_weaknesses(self) -> None:
        """Log those of the target's server."""
        if isinstance(self._target, WeaknessReporter):
            self._target.report_weaknesses()

    def close(self) -> None:
        """Close both. Idempotent."""
        self._target.close()
        self._delay.close()
