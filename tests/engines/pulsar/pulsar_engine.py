"""Pulsar as the conformance tests of publishers see it, read by its own plain consumer."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Final, Self

import pulsar

from tests.broker_adapter.publishing.engine_under_test import PlainMessage, Poison
from tests.engines.pulsar.pulsar_server import PulsarServer

SUBSCRIPTION: Final = "plain"
READ_MS_MAX: Final = 120_000
MOMENT_MS: Final = 300
TOO_LARGE_BYTES: Final = 6_000_000


class PulsarEngine:
    """An EngineUnderTest on a server. Its client is closed before Python ends, as Pulsar's must be."""

    wrong_password_url: str | None = None
    too_large_bytes: int | None = TOO_LARGE_BYTES
    makes_topics = True
    attribute_prefix = "ce-"

    def __init__(self, server: PulsarServer) -> None:
        self.server = server
        self.url = f"pulsar://{server.addresses}?admin={server.admin_url}"
        quiet = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)
        self.client = pulsar.Client(f"pulsar://{server.addresses}", logger=quiet)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.shutdown()

    def make_topic(self, topic: str) -> None:
        """With a subscription at its beginning, without which nothing is kept."""
        self.server.create_topic(topic)
        self.server.create_subscription(topic, SUBSCRIPTION)

    def read(self, topic: str, *, count: int) -> list[PlainMessage]:
        """Waits for `count` messages, and for more a moment longer; what was read is acknowledged."""
        consumer = self.client.subscribe(topic, SUBSCRIPTION)
        found: list[PlainMessage] = []
        try:
            while True:
                received = consumer.receive(READ_MS_MAX if len(found) < count else MOMENT_MS)
                consumer.acknowledge(received)
                found.append(_plain(received))
        except pulsar.Timeout:
            return found
        finally:
            consumer.close()

    def poisons(self, topic: str) -> list[Poison]:
        """What the client or the server answers for a message, or for its topic."""
        poisoned = f"{topic}.poisoned"
        self.make_topic(poisoned)
        return [Poison(topic=poisoned, parts={"body": b"x" * TOO_LARGE_BYTES}, says="size")]

    def kill(self) -> None:
        """End the server by SIGKILL."""
        self.server.kill9()

    def start(self) -> None:
        """Start it again."""
        self.server.start()


def _plain(received: pulsar.Message) -> PlainMessage:
    properties = dict(received.properties())
    return PlainMessage(
        id=properties["outbox-id"],
        key=received.partition_key() or None,
        body=received.data(),
        content_type=properties.pop("content-type", None),
        headers=properties,
        stored_at_ms=received.publish_timestamp(),  # when it was sent: never later than it was stored
    )
