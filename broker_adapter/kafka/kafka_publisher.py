"""Publishes batches of messages as records of Kafka, and converts delivery reports to results."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Final

from confluent_kafka import KafkaError

from broker_adapter.kafka.client_settings import KafkaServers
from broker_adapter.kafka.errors import exception_for, explained, treatment_of
from broker_adapter.kafka.record_sender import ANY_PARTITION, KafkaRecord, KafkaRecordSender, KafkaReport
from broker_adapter.kafka.topic_durability import inspect_topics
from broker_adapter.publishing.client_pool import ClientPool
from broker_adapter.publishing.message_headers import headers_with_type
from broker_adapter.publishing.treatment import ONE_MESSAGE, refused_result
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerRefused
from outbox_core.messages.broker_port import Capability, Inspection
from outbox_core.messages.message import Message, PublishResult, PublishStatus

ATTRIBUTE_PREFIX: Final = "ce_"
TIMESTAMP_AGE_MS_MAX: Final = 3_600_000
"""Kafka deletes by a record's timestamp: one that is older than this gets the time of sending.

Retention drops a segment whose newest timestamp is older than `retention.ms`, however lately it was written: a message
that waited for a month would be gone before it was read. More than an hour ahead is refused (INVALID_TIMESTAMP).
"""


class KafkaPublisher:
    """A Publisher. A message is stored when all in-sync replicas of its partition have it."""

    product = "Apache Kafka"
    capabilities: frozenset[Capability] = frozenset()

    def __init__(self, pool: ClientPool[KafkaRecordSender], servers: KafkaServers, *, clock: Clock) -> None:
        self._pool = pool
        self._servers = servers
        self._clock = clock

    def publish(self, batch: Sequence[Message], *, timeout_ms: int) -> list[PublishResult]:
        """Store a batch; one result a message, in order."""
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        with self._pool.client() as connection:
            reports = self._store(connection, batch, deadline_ms=deadline_ms)
            results = dict(_results(batch, reports))
            for report in reports:
                if report.error is not None and treatment_of(report.error) not in ONE_MESSAGE:
                    raise connection.failure(report.error).with_answered(results)
        shared = [report.error for report in reports if report.error is not None and report.is_shared]
        if len(results) < len(batch) and shared:
            text = f"Kafka at {self._servers.addresses}: {explained(min(shared, key=_says_less))}"
            raise BrokerRefused(text).with_answered(results)
        return [results[index] for index in range(len(batch))]

    def inspect(self, topics: Sequence[str], *, timeout_ms: int) -> Inspection:
        """Ask the servers how topics are replicated."""
        return inspect_topics(
            self._pool,
            topics,
            servers=self._servers,
            product=self.product,
            clock=self._clock,
            timeout_ms=timeout_ms,
        )

    def close(self) -> None:
        """End the producers. Idempotent."""
        self._pool.close()

    def _store(self, connection: KafkaRecordSender, batch: Sequence[Message], *, deadline_ms: int) -> list[KafkaReport]:
        topics = {
            topic: self._partitions(connection, topic, deadline_ms) for topic in {message.topic for message in batch}
        }
        reports: dict[int, KafkaReport] = {}
        records: dict[int, KafkaRecord] = {}
        now_ms = self._clock.now_ms()
        for index, message in enumerate(batch):
            partitions = topics[message.topic]
            if isinstance(partitions, int):
                records[index] = _record(message, partitions, now_ms=now_ms)
            else:
                reports[index] = KafkaReport(partitions, was_sent=False)
        reports.update(zip(records, connection.store(list(records.values()), deadline_ms=deadline_ms), strict=True))
        return [reports[index] for index in range(len(batch))]

    def _partitions(self, connection: KafkaRecordSender, topic: str, deadline_ms: int) -> int | KafkaError:
        """Returns a topic's number of partitions, or why nothing can be sent to it."""
        metadata = connection.topic(topic, deadline_ms=deadline_ms)
        if metadata.error is None:
            return len(metadata.partitions)
        if treatment_of(metadata.error) not in ONE_MESSAGE:
            raise exception_for(metadata.error, what=f"Kafka at {self._servers.addresses}")
        return metadata.error


def _record(message: Message, partitions: int, *, now_ms: int) -> KafkaRecord:
    headers = headers_with_type(message, attribute_prefix=ATTRIBUTE_PREFIX)
    return KafkaRecord(
        topic=message.topic,
        key=None if message.key is None else message.key.encode(),
        value=message.body,
        headers=[(name, value.encode()) for name, value in headers.items()],
        timestamp_ms=_timestamp_ms(message, now_ms=now_ms),
        partition=_partition(message, partitions),
    )


def _timestamp_ms(message: Message, *, now_ms: int) -> int:
    return message.created_at_ms if now_ms - TIMESTAMP_AGE_MS_MAX <= message.created_at_ms <= now_ms else now_ms


def _partition(message: Message, partitions: int) -> int:
    """Returns the partition: by the key, as Kafka does; without a key by the id, so that a repeated message goes to the
    consumer of its first copy, after that one and never concurrently.
    """
    return ANY_PARTITION if message.key is not None else zlib.crc32(message.id.encode()) % partitions


def _results(batch: Sequence[Message], reports: Sequence[KafkaReport]) -> Iterator[tuple[int, PublishResult]]:
    """Yields the results that are known, by index: none where the batch has to go again, in parts or later."""
    is_one = sum(report.is_shared for report in reports) == 1
    for index, (message, report) in enumerate(zip(batch, reports, strict=True)):
        if report.error is None:
            yield index, PublishResult(message.id, PublishStatus.STORED)
        elif treatment_of(report.error) in ONE_MESSAGE and (is_one or not report.is_shared):
            yield index, refused_result(message, treatment_of(report.error), explained(report.error))


def _says_less(error: KafkaError) -> bool:
    return error.code() == KafkaError._INVALID_DIFFERENT_RECORD  # noqa: SLF001
