"""A publisher that records which messages were in doubt, so that a test can say where duplicates come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from broker_adapter.publishing.publish_only_broker import MessagePublisher
from outbox_core.common.errors import BrokerError
from outbox_core.messages.inspection import Inspection
from outbox_core.messages.message import Message, PublishResult


class RecordedPublisher:
    """A MessagePublisher over another. `in_doubt` counts, by id, publishes that ended without an answer."""

    def __init__(self, publisher: MessagePublisher, in_doubt: Counter[str]) -> None:
        self.product = publisher.product
        self.capabilities = publisher.capabilities
        self._publisher = publisher
        self._in_doubt = in_doubt

    def publish(self, batch: Sequence[Message], *, timeout_ms: int) -> list[PublishResult]:
        """As the other does."""
        try:
            return self._publisher.publish(batch, timeout_ms=timeout_ms)
        except BrokerError:
            self._in_doubt.update(one.id for one in batch)
            raise

    def inspect(self, topics: Sequence[str], *, timeout_ms: int) -> Inspection:
        """As the other does."""
        return self._publisher.inspect(topics, timeout_ms=timeout_ms)

    def close(self) -> None:
        """As the other does."""
        self._publisher.close()
