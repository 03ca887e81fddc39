"""Publishes batches of messages as records of Kafka, and converts delivery reports to results."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Final

from confluent_kafka import KafkaError

from broker_adapter.kafka.client_settings import KafkaServers
from broker_adapter.kafka.errors import exception_for, explained, treatment_of
from broker_adapter.kafka.producer_connection import ANY_PARTITION, KafkaRecord, ProducerConnection
from broker_adapter.kafka.topic_durability import inspect_topics
from broker_adapter.publishing.client_pool import ClientPool
from broker_adapter.publishing.message_headers import headers_with_type
from broker_adapter.publishing.treatment import ONE_MESSAGE, refused_result
from outbox_core.common.clock import Clock
from outbox_core.messages.capabilities import Capability
from outbox_core.messages.durability_inspection import Inspection
from outbox_core.messages.message import Message, PublishResult, PublishStatus

ATTRIBUTE_PREFIX: Final = "ce_"
TIMESTAMP_AGE_MS_MAX: Final = 3_600_000
"""Kafka deletes by a record's timestamp: one that is older than this gets the time of sending."""

NumberedRecord = tuple[int, KafkaRecord]
"""A record with its place in the batch."""


class KafkaPublisher:
    """A Publisher. A message is stored when all in-sync replicas of its partition have it."""

    product = "Apache Kafka"
    capabilities: frozenset[Capability] = frozenset()

    def __init__(self, pool: ClientPool[ProducerConnection], servers: KafkaServers, *, clock: Clock) -> None:
        self._pool = pool
        self._servers = servers
        self._clock = clock

    def publish(self, batch: Sequence[Message], *, timeout_ms: int) -> list[PublishResult]:
        """Store a batch; one result a message, in order."""
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        with self._pool.client() as connection:
            errors = self._store(connection, batch, deadline_ms=deadline_ms)
        return [_result(message, error) for message, error in zip(batch, errors, strict=True)]

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

    def _store(
        self, connection: ProducerConnection, batch: Sequence[Message], *, deadline_ms: int
    ) -> list[KafkaError | None]:
        topics = {topic: self._partitions(connection, topic, deadline_ms) for topic in {one.topic for one in batch}}
        errors: list[KafkaError | None] = [None] * len(batch)
        records: dict[int, KafkaRecord] = {}
        now_ms = self._clock.now_ms()
        for number, message in enumerate(batch):
            partitions = topics[message.topic]
            if isinstance(partitions, int):
                records[number] = _record(message, partitions, now_ms=now_ms)
            else:
                errors[number] = partitions
        refused: list[NumberedRecord] = []
        reports = connection.store(list(records.values()), deadline_ms=deadline_ms)
        for (number, record), report in zip(records.items(), reports, strict=True):
            errors[number] = report
            if _is_too_large(report):
                refused.append((number, record))
        for number, report in _reports_of_parts(connection, refused, deadline_ms=deadline_ms):
            errors[number] = report
        return errors

    def _partitions(self, connection: ProducerConnection, topic: str, deadline_ms: int) -> int | KafkaError:
        """Returns a topic's number of partitions, or why nothing can be sent to it."""
        found = connection.topic(topic, deadline_ms=deadline_ms)
        if found.error is None:
            return len(found.partitions)
        if treatment_of(found.error) not in ONE_MESSAGE:
            raise exception_for(found.error, what=f"Kafka at {self._servers.place}")
        return found.error


def _reports_of_parts(
    connection: ProducerConnection, numbered: Sequence[NumberedRecord], *, deadline_ms: int
) -> Iterator[tuple[int, KafkaError | None]]:
    """Store records that were too large, and yield the report of each. A server measures what librdkafka sent together,
    so most are small. Parts of them grow until one is too large again, since each part costs a round trip.
    """
    size, size_max = 1, len(numbered)
    while numbered:
        part, rest = numbered[:size], numbered[size:]
        reports = connection.store([record for _, record in part], deadline_ms=deadline_ms)
        answered = [(one, report) for one, report in zip(part, reports, strict=True)]
        refused = [one for one, report in answered if _is_too_large(report) and len(part) > 1]
        yield from ((number, report) for (number, _), report in answered if not _is_too_large(report) or not refused)
        numbered = [*refused, *rest]
        if refused:
            size = size_max = len(part) // 2
        elif _is_too_large(reports[0]):  # it was this one, and not its neighbours
            size, size_max = 1, len(numbered)
        else:
            size = min(2 * size, size_max)


def _is_too_large(report: KafkaError | None) -> bool:
    return report is not None and report.code() == KafkaError.MSG_SIZE_TOO_LARGE


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


def _result(message: Message, error: KafkaError | None) -> PublishResult:
    if error is None:
        return PublishResult(message.id, PublishStatus.STORED)
    return refused_result(message, treatment_of(error), explained(error))
