"""Kafka as the conformance tests of publishers see it, read by its own plain consumer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final

from confluent_kafka import Consumer, Message, TopicPartition

from outbox_core.messages.message import PublishStatus
from tests.broker_adapter.publishing.engine_under_test import PlainMessage, Poison
from tests.engines.kafka.kafka_cluster import PASSWORD, USER, KafkaCluster

READ_SECONDS_MAX: Final = 120
MOMENT_SECONDS: Final = 0.3
TOO_LARGE_BYTES: Final = 2_000_000


class KafkaEngine:
    """An EngineUnderTest on a cluster."""

    wrong_password_url: str | None
    too_large_bytes: int | None = TOO_LARGE_BYTES
    makes_topics = False
    attribute_prefix = "ce_"

    def __init__(self, cluster: KafkaCluster) -> None:
        self.cluster = cluster
        self.url = f"kafka://{cluster.addresses()}"
        self.login_url = f"kafka://{USER}:{PASSWORD}@{cluster.addresses('SASL_PLAINTEXT')}"
        self.wrong_password_url = f"kafka://{USER}:wrong-password@{cluster.addresses('SASL_PLAINTEXT')}"

    def make_topic(self, topic: str) -> None:
        """Of one partition, on every node."""
        self.cluster.make_topic(topic)

    def read(self, topic: str, *, count: int) -> list[PlainMessage]:
        """Waits for `count` messages, and for more a moment longer."""
        with self._consumer(topic, partition=0) as consumer:
            return [_plain(one) for one in _read(consumer, count)]

    def read_partitions(self, topic: str) -> list[list[PlainMessage]]:
        """All that each partition has now, in order."""
        return [self._read_partition(topic, number) for number in range(self.cluster.partitions(topic))]

    def _read_partition(self, topic: str, number: int) -> list[PlainMessage]:
        with self._consumer(topic, partition=number) as consumer:
            _, end = consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=READ_SECONDS_MAX)
            return [_plain(one) for one in _read_up_to(consumer, end)]

    @contextlib.contextmanager
    def _consumer(self, topic: str, *, partition: int) -> Iterator[Consumer]:
        settings = {"bootstrap.servers": self.cluster.addresses(), "group.id": "plain", "log_level": 0}
        consumer = Consumer({**settings, "auto.offset.reset": "earliest", "enable.auto.commit": False})
        try:
            consumer.assign([TopicPartition(topic, partition, 0)])
            yield consumer
        finally:
            consumer.close()

    def poisons(self, topic: str) -> list[Poison]:
        """What the servers answer for a record, or for its topic."""
        compacted, small, plain = f"{topic}.compacted", f"{topic}.small", f"{topic}.plain"
        self.cluster.make_topic(compacted, settings={"cleanup.policy": "compact"})
        self.cluster.make_topic(small, settings={"max.message.bytes": "2000"})
        self.make_topic(plain)
        deferred = PublishStatus.DEFERRED
        return [
            Poison(topic=compacted, parts={"key": None}, says="key"),
            Poison(topic=small, parts={"body": b"x" * 3_000}, says="size"),
            Poison(topic=plain, parts={"body": b"x" * TOO_LARGE_BYTES}, says="large"),
            Poison(topic=f"{topic}.missing", beside=plain, status=deferred, says="unknown topic"),
            Poison(topic="t" * 250, beside=plain, says="topic"),
        ]

    def kill(self) -> None:
        """End all nodes by SIGKILL."""
        self.cluster.kill9()

    def start(self) -> None:
        """Start them again."""
        self.cluster.start()


def _read(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + READ_SECONDS_MAX
    while len(found) < count and time.monotonic() < deadline:
        found += [one for one in consumer.consume(count, timeout=0.5) if one.error() is None]
    return found + [one for one in consumer.consume(count + 1, timeout=MOMENT_SECONDS) if one.error() is None]


def _read_up_to(consumer: Consumer, end: int) -> list[Message]:
    """All records before the offset `end`. Without transactions each offset is a record's."""
    found: list[Message] = []
    deadline = time.monotonic() + READ_SECONDS_MAX
    while end and (not found or (found[-1].offset() or 0) + 1 < end):
        assert time.monotonic() < deadline, f"read {len(found)} of a partition that ends at {end}"
        found += [one for one in consumer.consume(500, timeout=0.5) if one.error() is None]
    return found


def _plain(one: Message) -> PlainMessage:
    headers = {name: value.decode() for name, value in one.headers() or []}
    key = one.key()
    return PlainMessage(
        id=headers["outbox-id"],
        key=None if key is None else key.decode(),
        body=one.value() or b"",
        content_type=headers.pop("content-type", None),
        headers=headers,
    )
