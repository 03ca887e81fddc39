"""Kafka's topics by confluent-kafka, as the demo's consumers read them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from broker_adapter.kafka.client_settings import client_settings
from broker_adapter.publishing.broker_url import BrokerUrl
from outbox_demo.foreign_client_port import MESSAGES_MAX, REDELIVERED_AFTER_MS, WAIT_MS, ReceivedMessage
from outbox_demo.plan import RunTopics

PARTITIONS: Final = 3
REPLICAS: Final = -1
"""As many as the servers have by default."""
COMMIT_EVERY_MS: Final = 200
SESSION_MS: Final = REDELIVERED_AFTER_MS + 1_000
"""Servers take no less than 6 s by default."""
REMOVE_SECONDS_MAX: Final = 60.0
REMOVE_POLL_SECONDS: Final = 0.5


class KafkaTopics:
    """A ForeignClient: consumer groups whose offsets are committed after the effects."""

    def __init__(self, url: BrokerUrl, topics: RunTopics) -> None:
        self._settings: dict[str, Any] = {**client_settings(url, timeout_ms=url.timeout_ms)}
        self._timeout_s = url.timeout_ms / 1_000
        self._topics = topics
        self._admin = AdminClient(self._settings)
        self._consumers: list[Consumer] = []

    def make_topics(self) -> None:
        """Topics alone: a group is made by its first consumer, which begins at their beginning."""
        new = [NewTopic(name, PARTITIONS, REPLICAS) for name in self._topics.names]
        _wait_for(self._admin.create_topics(new, operation_timeout=self._timeout_s))

    def deliveries(self, group: str) -> Iterator[ReceivedMessage]:
        """Poll; a partition whose consumer has died goes to another, from the committed offset on."""
        consumer = Consumer(
            {
                **self._settings,
                "group.id": self._group(group),
                "auto.offset.reset": "earliest",
                "enable.auto.offset.store": False,
                "auto.commit.interval.ms": COMMIT_EVERY_MS,
                "session.timeout.ms": SESSION_MS,
            }
        )
        self._consumers.append(consumer)
        consumer.subscribe(list(self._topics.read_by(group)))
        while True:
            for message in consumer.consume(MESSAGES_MAX, timeout=WAIT_MS / 1_000):
                if (error := message.error()) is not None:
                    raise KafkaException(error)
                headers: dict[str, Any] = dict(message.headers() or [])
                yield ReceivedMessage(
                    id=headers["outbox-id"].decode(), topic=message.topic() or "", body=message.value() or b"",
                    receipt=(consumer, message),
                )  # fmt: skip

    def acknowledge(self, message: ReceivedMessage) -> None:
        """Let the offset be committed, in a moment and with those of other messages."""
        consumer, read = message.receipt
        consumer.store_offsets(read)

    def unsettled(self) -> int:
        """The lag of each group: the ends of its partitions less the committed offsets."""
        return sum(self._lag(group) for group in self._topics.groups)

    def remove_topics(self) -> None:
        """Delete the groups, each when the session of its last member has ended, and the topics."""
        deadline = time.monotonic() + REMOVE_SECONDS_MAX
        while self._delete_groups() and time.monotonic() < deadline:
            threading.Event().wait(REMOVE_POLL_SECONDS)
        _wait_for(self._admin.delete_topics(list(self._topics.names), operation_timeout=self._timeout_s))

    def close(self) -> None:
        """Close the consumers, if any."""
        for consumer in self._consumers:
            consumer.close()

    def _delete_groups(self) -> bool:
        """Whether one of them still has a member."""
        deleted = self._admin.delete_consumer_groups([self._group(group) for group in self._topics.groups])
        errors = [deletion.exception(self._timeout_s) for deletion in deleted.values()]
        return any(error is not None and error.args[0].code() == KafkaError.NON_EMPTY_GROUP for error in errors)

    def _lag(self, group: str) -> int:
        partitions = [TopicPartition(name, n) for name in self._topics.read_by(group) for n in range(PARTITIONS)]
        query = ConsumerGroupTopicPartitions(self._group(group), partitions)
        committed = self._admin.list_consumer_group_offsets([query])[query.group_id].result(self._timeout_s)
        latest: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        ends = self._admin.list_offsets(dict.fromkeys(partitions, latest))
        end = sum(int(end_offset.result(self._timeout_s).offset) for end_offset in ends.values())
        return end - sum(max(0, int(partition.offset)) for partition in committed.topic_partitions)

    def _group(self, group: str) -> str:
        return f"{self._topics.run}.{group}"


def _wait_for(futures: dict[str, Any]) -> None:
    for future in futures.values():
        future.result()
