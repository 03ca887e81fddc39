"""A broker that records which messages were in doubt, so that a test can say where duplicates come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from broker_adapter.publishing.publish_only_broker import PublishOnlyBroker
from outbox_core.common.errors import BrokerError
from outbox_core.messages.broker_port import Broker, Capability, Inspection, capabilities_of
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishResult


def recorded_broker(url: str, in_doubt: Counter[str], *, timeout_ms: int) -> Broker:
    """The broker of a URL, with its publishes recorded."""
    return PublishOnlyBroker(PublishRecorder(connect(url, timeout_ms=timeout_ms), in_doubt), timeout_ms=timeout_ms)


class PublishRecorder:
    """A MessagePublisher over a Broker. `in_doubt` counts, by id, publishes that ended without an answer."""

    product = "recorded"

    def __init__(self, broker: Broker, in_doubt: Counter[str]) -> None:
        self._broker = broker
        self._in_doubt = in_doubt

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Those of the broker."""
        return capabilities_of(self._broker)

    def publish(self, batch: Sequence[Message], *, timeout_ms: int) -> list[PublishResult]:
        """As the broker does, within its own time-out."""
        try:
            return self._broker.publish(batch)
        except BrokerError:
            self._in_doubt.update(one.id for one in batch)
            raise

    def inspect(self, topics: Sequence[str], *, timeout_ms: int) -> Inspection:
        """Finds nothing: the broker inspects its servers itself."""
        return Inspection(product=self.product, version="", weaknesses=())

    def close(self) -> None:
        """Close the broker."""
        self._broker.close()
