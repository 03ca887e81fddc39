"""RabbitMQ's queues by pika, as the demo's consumers read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pika

from broker_adapter.publishing.broker_url import BrokerUrl, tls_context
from broker_adapter.rabbitmq.open_broker import GUEST, TLS_SCHEMES
from outbox_demo.foreign_client_port import MESSAGES_MAX, WAIT_MS, ReceivedMessage
from outbox_demo.plan import RunTopics


class RabbitMqQueues:
    """A ForeignClient: a quorum queue for each group, bound to the exchange by the topics that the group reads."""

    def __init__(self, url: BrokerUrl, topics: RunTopics) -> None:
        self._exchange = url.options["exchange"]
        self._topics = topics
        self._connection = pika.BlockingConnection([_parameters(url, host, port) for host, port in url.hosts])
        self._channel: Any = self._connection.channel()

    def make_topics(self) -> None:
        """Queues and bindings."""
        for group in self._topics.groups:
            self._channel.queue_declare(self._queue(group), durable=True, arguments={"x-queue-type": "quorum"})
        for topic, group in self._topics.subscriptions:
            self._channel.queue_bind(self._queue(group), self._exchange, routing_key=topic)

    def deliveries(self, group: str) -> Iterator[ReceivedMessage]:
        """Consume; the server delivers again what was not acknowledged when the connection ends."""
        self._channel.basic_qos(prefetch_count=MESSAGES_MAX)
        for method, properties, body in self._channel.consume(self._queue(group), inactivity_timeout=WAIT_MS / 1_000):
            if method is not None:
                yield ReceivedMessage(
                    id=properties.message_id, topic=method.routing_key, body=body, receipt=method.delivery_tag
                )

    def acknowledge(self, message: ReceivedMessage) -> None:
        """Ack."""
        self._channel.basic_ack(message.receipt)

    def unsettled(self) -> int:
        """Messages that were not delivered: AMQP tells no more."""
        queues = [self._channel.queue_declare(self._queue(group), passive=True) for group in self._topics.groups]
        return sum(queue.method.message_count for queue in queues)

    def remove_topics(self) -> None:
        """Delete the queues, and so their bindings."""
        for group in self._topics.groups:
            self._channel.queue_delete(self._queue(group))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _queue(self, group: str) -> str:
        return f"{self._topics.run}.{group}"


def _parameters(url: BrokerUrl, host: str, port: int) -> pika.ConnectionParameters:
    """Returns parameters without heartbeats: the client answers them in its calls only, minutes apart in the demo."""
    tls = tls_context(url, tls_schemes=TLS_SCHEMES, ca_file=None)
    return pika.ConnectionParameters(
        host=host,
        port=port,
        virtual_host=url.path or "/",
        credentials=pika.PlainCredentials(url.user or GUEST, url.password or GUEST),
        ssl_options=None if tls is None else pika.SSLOptions(tls, server_hostname=host),
        heartbeat=0,
        client_properties={"connection_name": "outbox-demo"},
    )
