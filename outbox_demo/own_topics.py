"""Topics of a broker of this project, as the demo's consumers read them where another engine is under demonstration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

from broker_adapter.publishing.broker_url import BrokerUrl
from outbox_core import Broker, Delivery, GroupConfig, connect
from outbox_core.messages.broker_port import TopicAdmin
from outbox_demo.foreign_client_port import MESSAGES_MAX, REDELIVERED_AFTER_MS, WAIT_MS, ReceivedMessage
from outbox_demo.plan import RunTopics


class OwnTopics:
    """A ForeignClient by HTTP."""

    def __init__(self, url: BrokerUrl, topics: RunTopics) -> None:
        self._broker: Broker = connect(f"{url.scheme}://{url.addresses}", timeout_ms=url.timeout_ms)
        self._topics = topics

    def make_topics(self) -> None:
        """The declaration of a group makes its topic, too."""
        for topic, group in self._topics.subscriptions:
            self._broker.admin.declare_group(topic, group, GroupConfig())

    def deliveries(self, group: str) -> Iterator[ReceivedMessage]:
        """Pull from one topic after the other, waiting where the one before had nothing; what is not acknowledged in
        time comes again.
        """
        topics = self._topics.read_by(group)
        deliveries: Sequence[Delivery] = ()
        for topic in cycle(topics):
            wait_ms = 0 if deliveries else WAIT_MS // len(topics)
            deliveries = self._broker.pull(
                topic, group, max_messages=MESSAGES_MAX, wait_ms=wait_ms, invisible_ms=REDELIVERED_AFTER_MS
            )
            for delivery in deliveries:
                yield ReceivedMessage(
                    id=delivery.id, topic=delivery.topic, body=delivery.body, receipt=delivery.receipt
                )

    def acknowledge(self, message: ReceivedMessage) -> None:
        """Acknowledge the delivery; a stale receipt does nothing, and the message comes again."""
        self._broker.ack([message.receipt])

    def unsettled(self) -> int:
        """Messages that a group has not been given, or has not acknowledged."""
        group_figures = [self._broker.admin.figures(topic, group) for topic, group in self._topics.subscriptions]
        return sum(figures["backlog"] + figures["in_flight"] for figures in group_figures)

    def remove_topics(self) -> None:
        """Delete them with their groups."""
        admin = self._broker.admin
        if isinstance(admin, TopicAdmin):
            for topic in self._topics.names:
                admin.delete_topic(topic, force=True)

    def close(self) -> None:
        """Close the connections."""
        self._broker.close()
