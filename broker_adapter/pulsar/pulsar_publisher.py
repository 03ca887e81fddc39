"""Publishes batches of messages to Pulsar, and converts receipts to results."""

from __future__ import annotations

from collections.abc import Sequence

from broker_adapter.publishing.client_pool import ClientPool
from broker_adapter.publishing.message_headers import headers_with_type
from broker_adapter.publishing.treatment import refused_result
from broker_adapter.pulsar.client_settings import ClientSettings
from broker_adapter.pulsar.durability_inspection import NOT_CHECKED, AdminApi, inspect_topics
from broker_adapter.pulsar.errors import explained, treatment_of
from broker_adapter.pulsar.record_sender import PulsarRecord, PulsarRecordSender
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError
from outbox_core.messages.broker_port import Capability, Inspection
from outbox_core.messages.message import Message, PublishResult, PublishStatus


class PulsarPublisher:
    """A Publisher. A message is stored when as many bookies have it as the namespace's ack quorum says.

    It does not declare deduplication: Pulsar compares growing numbers of a producer's name, and not ids. A number of
    our own would begin anew with each process, which is when a message is in doubt. Nor delay: Pulsar's is up to a
    second early, holds for shared subscriptions alone, and its cancel never tells whether it came in time.
    """

    product = "Apache Pulsar"
    capabilities: frozenset[Capability] = frozenset()

    def __init__(
        self, pool: ClientPool[PulsarRecordSender], admin: AdminApi | None, *, settings: ClientSettings, clock: Clock
    ) -> None:
        self._pool = pool
        self._admin = admin
        self._settings = settings
        self._clock = clock

    def publish(self, batch: Sequence[Message], *, timeout_ms: int) -> list[PublishResult]:
        """Store a batch; one result a message, in order."""
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        records = [_record(message, self._settings) for message in batch]
        answers: dict[int, str | None] = {}
        try:
            with self._pool.client() as connection:
                connection.store(records, answers, deadline_ms=deadline_ms)
        except BrokerError as error:
            error.with_answered({index: _result(batch[index], answer) for index, answer in answers.items()})
            raise
        return [_result(message, answers[index]) for index, message in enumerate(batch)]

    def inspect(self, topics: Sequence[str], *, timeout_ms: int) -> Inspection:
        """Ask the admin API for the namespace's persistence and the topics' subscriptions."""
        if self._admin is None:
            return Inspection(product=self.product, version="not known without admin=", weaknesses=(NOT_CHECKED,))
        return inspect_topics(
            self._admin,
            topics,
            namespace=self._settings.namespace,
            product=self.product,
            clock=self._clock,
            timeout_ms=timeout_ms,
        )

    def close(self) -> None:
        """End the clients. Idempotent."""
        self._pool.close()


def _record(message: Message, settings: ClientSettings) -> PulsarRecord:
    return PulsarRecord(
        topic=settings.topic_url(message.topic),
        key=message.key,
        body=message.body,
        properties=headers_with_type(message, attribute_prefix=None),
        event_timestamp_ms=max(0, message.created_at_ms) or None,  # unsigned
    )


def _result(message: Message, answer: str | None) -> PublishResult:
    if answer is None:
        return PublishResult(message.id, PublishStatus.STORED)
    return refused_result(message, treatment_of(answer), explained(answer))
