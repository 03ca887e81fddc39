"""Pulsar's topics by pulsar-client, as the demo's consumers read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pulsar

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.pulsar.client_settings import ClientSettings
from broker_adapter.pulsar.durability_inspection import AdminApi
from broker_adapter.pulsar.open_client import pulsar_client
from outbox_core.common.errors import ConfigurationError
from outbox_demo.foreign_client_port import WAIT_MS, ReceivedMessage
from outbox_demo.plan import RunTopics

MAKE_SECONDS_MAX: Final = 60.0


class PulsarTopics:
    """A ForeignClient: a shared subscription for each group. Topics are made and removed by the admin API."""

    def __init__(self, url: BrokerUrl, topics: RunTopics) -> None:
        self._settings = ClientSettings.of(url, timeout_ms=url.timeout_ms)
        if self._settings.admin_url is None:
            raise ConfigurationError("the demo makes topics by Pulsar's admin API: name it by ?admin=http://HOST:8080")
        self._timeout_s = url.timeout_ms / 1_000
        self._topics = topics
        self._admin = AdminApi(self._settings)
        self._client = pulsar_client(self._settings)

    def make_topics(self) -> None:
        """Topics, and their subscriptions before the first message: Pulsar keeps nothing without one."""
        for topic in self._topics.names:
            self._admin.create_topic(topic, timeout_s=MAKE_SECONDS_MAX)
        for topic, group in self._topics.subscriptions:
            self._admin.create_subscription(topic, group, timeout_s=MAKE_SECONDS_MAX)

    def deliveries(self, group: str) -> Iterator[ReceivedMessage]:
        """Receive; the server delivers again what was not acknowledged when the connection ends."""
        topics = {self._settings.topic_url(topic): topic for topic in self._topics.read_by(group)}
        consumer = self._client.subscribe(list(topics), group, consumer_type=pulsar.ConsumerType.Shared)
        while True:
            try:
                message = consumer.receive(WAIT_MS)
            except pulsar.Timeout:
                continue
            yield ReceivedMessage(
                id=message.properties()["outbox-id"], topic=topics[message.topic_name()], body=message.data(),
                receipt=(consumer, message),
            )  # fmt: skip

    def acknowledge(self, message: ReceivedMessage) -> None:
        """Acknowledge this one, and none before it."""
        consumer, received = message.receipt
        consumer.acknowledge(received)

    def unsettled(self) -> int:
        """The backlog of each subscription."""
        backlogs = [
            self._ask("GET", topic, "/stats").json()["subscriptions"][group]["msgBacklog"]
            for topic, group in self._topics.subscriptions
        ]
        return sum(backlogs)

    def remove_topics(self) -> None:
        """Delete the topics with their subscriptions."""
        for topic in self._topics.names:
            self._ask("DELETE", topic, "?force=true")

    def close(self) -> None:
        """End the client: its threads must not outlive the interpreter."""
        self._client.shutdown()

    def _ask(self, method: str, topic: str, path_rest: str = "") -> Any:
        return self._admin.ask(method, f"{self._admin.topic_path(topic)}{path_rest}", timeout_s=self._timeout_s)
