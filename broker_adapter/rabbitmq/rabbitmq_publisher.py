"""Publishes batches to an exchange; each message is mandatory and confirmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from broker_adapter.rabbitmq.batch_results import RabbitMqBatchResults
from broker_adapter.rabbitmq.connection import RabbitMqConnection
from broker_adapter.rabbitmq.durability_inspection import Inspector
from broker_adapter.rabbitmq.errors import CLIENT_ERRORS, exception_for
from broker_adapter.rabbitmq.process_connection import ProcessConnection
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.messages.capabilities import Capability
from outbox_core.messages.durability_inspection import Inspection
from outbox_core.messages.message import Message, PublishResult

T = TypeVar("T")


class RabbitMqPublisher:
    """A MessagePublisher. A message is stored when each queue that it is routed to has confirmed it."""

    product = "RabbitMQ"
    capabilities: frozenset[Capability] = frozenset()

    def __init__(
        self,
        connection: ProcessConnection,
        inspector: Inspector,
        *,
        exchange: str,
        addresses: str,
        clock: Clock | None = None,
    ) -> None:
        """`exchange` is empty for the default one; `addresses`: the servers', for errors."""
        self._connection = connection
        self._inspector = inspector
        self._exchange = exchange
        self._addresses = addresses
        self._clock = clock or SystemClock()

    def publish(self, batch: Sequence[Message], *, timeout_ms: int) -> list[PublishResult]:
        """Publish a batch; one result a message, in order."""
        return self._ask(partial(self._publish, batch), timeout_ms=timeout_ms)

    def inspect(self, topics: Sequence[str], *, timeout_ms: int) -> Inspection:
        """Ask the server about the exchange and the queues of topics."""
        return self._ask(partial(self._inspect, topics), timeout_ms=timeout_ms)

    def close(self) -> None:
        """End the connection and its thread; idempotent."""
        self._connection.close()

    def _publish(
        self, messages: Sequence[Message], connection: RabbitMqConnection, left_s: Callable[[], float]
    ) -> list[PublishResult]:
        batch = RabbitMqBatchResults(messages, frame_bytes_max=connection.frame_bytes_max, addresses=self._addresses)
        while batch.pending:
            run = batch.next_run(confirmed_bytes_max=connection.confirmed_bytes_max)
            try:
                answer = connection.send(self._exchange, list(run.values()), timeout_s=left_s())
            except CLIENT_ERRORS as error:
                self._connection.drop(connection)
                raise exception_for(error, addresses=self._addresses).with_answered(batch.answered()) from error
            batch.settle(run, answer)
        return batch.in_order()

    def _inspect(
        self, topics: Sequence[str], connection: RabbitMqConnection, left_s: Callable[[], float]
    ) -> Inspection:
        product, version = connection.server
        weaknesses = self._inspector.weaknesses(topics, connection=connection, left_s=left_s)
        return Inspection(product=product, version=version, weaknesses=tuple(weaknesses))

    def _ask(self, work: Callable[[RabbitMqConnection, Callable[[], float]], T], *, timeout_ms: int) -> T:
        """Do something with the connection. One that answers too late is closed, since its state is in doubt."""
        end_ms = self._clock.monotonic_ms() + timeout_ms

        def left_s() -> float:
            return max(0.0, (end_ms - self._clock.monotonic_ms()) / 1000)

        connection: RabbitMqConnection | None = None
        try:
            connection = self._connection.opened(timeout_s=left_s())
            return work(connection, left_s)
        except CLIENT_ERRORS as error:
            if connection is not None:
                self._connection.drop(connection)
            raise exception_for(error, addresses=self._addresses) from error
