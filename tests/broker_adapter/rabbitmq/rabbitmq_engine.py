"""The server as the conformance tests of publishers ask for it, and queues read by the plain client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

import pika
from pika.adapters.blocking_connection import BlockingChannel

from outbox_core.messages.message import PublishStatus
from tests.broker_adapter.publishing.engine_under_test import PlainMessage, Poison
from tests.broker_adapter.rabbitmq.rabbitmq_server import HOST, MESSAGE_BYTES_MAX, RabbitMqServer

USER: Final = "app"
PASSWORD: Final = "p@ss/wörd"
READ_SECONDS_MAX: Final = 120
MORE_SECONDS: Final = 0.05


class RabbitMqEngine:
    """A server with a user who may publish to each exchange and ask the management API, and no more."""

    makes_topics = False
    attribute_prefix = "cloudEvents_"
    too_large_bytes: int | None = MESSAGE_BYTES_MAX + 1

    def __init__(self, server: RabbitMqServer, *, keeps_topics: bool = False) -> None:
        """`keeps_topics`: whether a topic survives a kill from the moment that it is made."""
        self.server = server
        self._keeps_topics = keeps_topics

    @property
    def url(self) -> str:
        """With all options that show a well set server."""
        return self.url_of(USER, PASSWORD) + f"?management={quote(self.server.management_url)}"

    @property
    def wrong_password_url(self) -> str | None:
        """The same user with another password."""
        return self.url_of(USER, "wrong-password")

    def url_of(self, user: str, password: str) -> str:
        """A user's, without options."""
        return f"rabbitmq://{user}:{quote(password, safe='')}@{HOST}:{self.server.port}"

    def make_topic(self, topic: str) -> None:
        """A durable queue of this name. RabbitMQ 3.10 may write its declaration down two seconds later."""
        self.server.declare(topic)
        if self._keeps_topics:
            self.server.control("eval", "mnesia:sync_log().")

    def read(self, topic: str, *, count: int) -> list[PlainMessage]:
        """Get and acknowledge."""
        with self.plain_channel() as channel:
            return list(read_queue(channel, topic, count=count))

    def poisons(self, topic: str) -> list[Poison]:
        """What the server ends a channel for, what it returns, and what AMQP cannot carry."""
        poisoned, full = f"{topic}.poisoned", f"{topic}.full"
        self.make_topic(poisoned)
        self.server.declare(full, x_max_length=0, x_overflow="reject-publish")
        deferred = PublishStatus.DEFERRED
        return [
            Poison(topic=poisoned, parts={"headers": {"CC": "bob@example.com"}}, says="header CC"),
            Poison(topic=poisoned, parts={"headers": {"BCC": "bob@example.com"}}, says="header BCC"),
            Poison(topic=poisoned, parts={"headers": {"content-type": "x" * 256}}, says="content type"),
            Poison(topic=poisoned, parts={"body": b"x" * (MESSAGE_BYTES_MAX + 1)}, says="size"),
            Poison(topic=f"{topic}.missing", beside=poisoned, status=deferred, says="no queue takes"),
            Poison(topic=full, beside=poisoned, status=deferred, says="x-max-length"),
        ]

    def kill(self) -> None:
        """By SIGKILL."""
        self.server.kill()

    def start(self) -> None:
        """Again."""
        self.server.start()

    @contextlib.contextmanager
    def plain_channel(self) -> Iterator[BlockingChannel]:
        """A channel of the plain client, as the administrator."""
        login = pika.PlainCredentials("admin", "admin-secret")
        connection = pika.BlockingConnection(pika.ConnectionParameters(HOST, self.server.port, credentials=login))
        try:
            yield connection.channel()
        finally:
            connection.close()


def read_queue(channel: BlockingChannel, queue: str, *, count: int) -> Iterator[PlainMessage]:
    """Wait for `count` messages, and for more a moment longer."""
    deadline, read = time.monotonic() + READ_SECONDS_MAX, 0
    while time.monotonic() < deadline:
        method, properties, body = channel.basic_get(queue)
        if method is not None:
            read += 1
            yield plain_message(properties, body)
            channel.basic_ack(method.delivery_tag)
        elif read >= count:
            return
        else:
            channel.connection.process_data_events(MORE_SECONDS)


def plain_message(properties: Any, body: bytes) -> PlainMessage:
    """A message as the adapter's guide says that it is read."""
    return PlainMessage(
        id=properties.message_id,
        key=properties.headers.get("outbox-key"),
        body=body,
        content_type=properties.content_type,
        headers=properties.headers,
    )
