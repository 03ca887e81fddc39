"""RocketMQ as the conformance tests of publishers see it, read by its own Java client."""

from __future__ import annotations

import threading
import time
from typing import Final

from outbox_core.messages.message import PublishStatus
from tests.broker_adapter.publishing.engine_under_test import PlainMessage, Poison
from tests.engines.rocketmq.java_client import QueuedMessage
from tests.engines.rocketmq.rocketmq_cluster import USER, RocketMqCluster

READ_SECONDS_MAX: Final = 120
MOMENT_SECONDS: Final = 0.3
TOO_LARGE_BYTES: Final = 5_000_000


class RocketMqEngine:
    """An EngineUnderTest on a cluster. Topics have the name that the adapter gives them: dots are underscores."""

    wrong_password_url: str | None
    too_large_bytes: int | None = TOO_LARGE_BYTES
    makes_topics = False
    attribute_prefix = "CE_"

    def __init__(self, cluster: RocketMqCluster) -> None:
        self.cluster = cluster
        self.url = cluster.url()
        self.wrong_password_url = cluster.url(login=f"{USER}:wrong-password@")

    def make_topic(self, topic: str, *, kind: str = "NORMAL", queues: int = 1) -> None:
        """Of one queue, so that it is read in the order of the log."""
        self.cluster.client.make_topic(_name(topic), kind=kind, queues=queues)

    def read(self, topic: str, *, count: int) -> list[PlainMessage]:
        """Waits for `count` messages, and for more a moment longer."""
        nothing, deadline = threading.Event(), time.monotonic() + READ_SECONDS_MAX
        while len(self.cluster.client.read(_name(topic))) < count and time.monotonic() < deadline:
            nothing.wait(MOMENT_SECONDS)
        nothing.wait(MOMENT_SECONDS)
        return [_plain(one) for one in self.cluster.client.read(_name(topic))]

    def read_queues(self, topic: str) -> list[list[PlainMessage]]:
        """All that each queue of the topic has now, in order."""
        queues: dict[int, list[PlainMessage]] = {}
        for one in self.cluster.client.read(_name(topic)):
            queues.setdefault(one.queue, []).append(_plain(one))
        return list(queues.values())

    def poisons(self, topic: str) -> list[Poison]:
        """What the proxy or the broker answers for a message, or for its topic."""
        poisoned = f"{topic}_poisoned"
        self.make_topic(poisoned)
        return [
            Poison(topic=poisoned, parts={"body": b""}, says="empty"),
            Poison(topic=poisoned, parts={"body": b"x" * TOO_LARGE_BYTES}, says="large"),
            Poison(topic=poisoned, parts={"headers": {"note": "x" * 30_000}}, says="propert"),
            Poison(topic=poisoned, parts={"headers": {"TAGS": "a"}}, says="propert"),
            Poison(topic=f"{topic}_missing", beside=poisoned, status=PublishStatus.DEFERRED, says="updateTopic"),
        ]

    def kill(self) -> None:
        """End the proxy and the broker by SIGKILL."""
        self.cluster.kill_proxy()
        self.cluster.kill_broker()

    def start(self) -> None:
        """Start them again."""
        self.cluster.start()


def _name(topic: str) -> str:
    return topic.replace(".", "_")


def _plain(one: QueuedMessage) -> PlainMessage:
    """As a consumer reads it who knows what the guide says of headers without a value."""
    headers = dict(one.properties)
    headers |= dict.fromkeys(filter(None, headers.pop("outbox-empty-headers", "").split(",")), "")
    assert one.id == one.keys == headers["outbox-id"]
    return PlainMessage(
        id=one.id,
        key=headers.get("outbox-key"),
        body=one.body,
        content_type=headers.pop("content-type", None),
        headers=headers,
        stored_at_ms=one.stored_at_ms,
    )
