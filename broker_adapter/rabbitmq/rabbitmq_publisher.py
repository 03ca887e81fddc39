"""Publishes batches to an exchange; each message is mandatory and confirmed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from pika import spec
from pika.exceptions import ChannelClosedByBroker

from broker_adapter.publishing.treatment import Treatment
from broker_adapter.rabbitmq.connection import Answer, ConfirmOutcome, ProcessConnection, RabbitMqConnection
from broker_adapter.rabbitmq.durability_inspection import Inspector
from broker_adapter.rabbitmq.errors import (
    CLIENT_ERRORS,
    CURES,
    NACK_CURE,
    exception_for,
    exception_for_code,
    explained,
    treatment_of,
)
from broker_adapter.rabbitmq.message_conversion import AmqpFrame, frame_of, header_bytes, refusal_of
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import BrokerRefused
from outbox_core.messages.broker_port import Capability, Inspection
from outbox_core.messages.message import Message, PublishResult, PublishStatus

T = TypeVar("T")
PIPELINED_BYTES: Final = 64 * 1024
"""A body up to this size is sent with others before it is known that the server takes such a size."""


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


class RabbitMqBatchResults:
    """A batch that is published to RabbitMQ: what may be sent together, the results that are known, and the frames that
    have none yet, in order. No I/O.
    """

    def __init__(self, messages: Sequence[Message], *, frame_bytes_max: int, addresses: str) -> None:
        """`frame_bytes_max`: what all properties of a message must fit in; `addresses`: the servers', for errors."""
        self.pending: dict[int, AmqpFrame] = {}
        """By the message's index in the batch."""
        self._messages = messages
        self._addresses = addresses
        self._results: dict[int, PublishResult] = {}
        for index, message in enumerate(messages):
            frame = frame_of(message)
            refusal = refusal_of(message)
            if refusal is None and header_bytes(frame) > frame_bytes_max:
                refusal = f"the headers are too large for the server's frame_max of {frame_bytes_max:,} bytes; raise it"
            if refusal is None:
                self.pending[index] = frame
            else:
                self._settle(index, PublishStatus.REJECTED, refusal)

    def next_run(self, *, confirmed_bytes_max: int) -> Mapping[int, AmqpFrame]:
        """The frames to send next, by index: those that are sent together, or one by itself.

        A server ends the channel for a message that is too large, and all that it did not confirm yet is in doubt: so
        one that is larger than any that it took before is sent when nothing else is under way.
        """
        together: dict[int, AmqpFrame] = {}
        for index, frame in self.pending.items():
            if len(frame.body) > max(PIPELINED_BYTES, confirmed_bytes_max):
                return together or {index: frame}
            together[index] = frame
        return together

    def settle(self, run: Mapping[int, AmqpFrame], answer: Answer) -> None:
        """Take the answer to a run.

        Raises NotAuthorized, StorageFailed and BrokerUnavailable for what is not about single messages, BrokerRefused
        for a message of several, which the server did not name; each with the results that are known.
        """
        for index, outcome in zip(run, answer.outcomes, strict=True):
            topic = self._messages[index].topic
            match outcome:
                case ConfirmOutcome.CONFIRMED:
                    self._settle(index, PublishStatus.STORED)
                case ConfirmOutcome.RETURNED:
                    text = f"no queue takes the topic {topic}; {CURES[spec.NO_ROUTE]}"
                    self._settle(index, PublishStatus.DEFERRED, text)
                case ConfirmOutcome.NACKED:
                    self._settle(index, PublishStatus.DEFERRED, f"a queue refused the topic {topic}: {NACK_CURE}")
                case None:
                    pass
        if answer.refusal is not None:
            self._refuse([index for index in run if index in self.pending], answer.refusal)

    def answered(self) -> dict[int, PublishResult]:
        """The results that are known, by index. After a message that waits, none of its key is reported as stored: it
        is sent again behind that one.
        """
        waiting: dict[tuple[str, str], str] = {}
        results: dict[int, PublishResult] = {}
        for index, result in sorted(self._results.items()):
            message = self._messages[index]
            results[index] = result
            if message.key is not None:
                order_key = message.topic, message.key
                if result.status is PublishStatus.DEFERRED:
                    waiting.setdefault(order_key, message.id)
                elif order_key in waiting and result.status is PublishStatus.STORED:
                    text = f"an older message of its key waits: {waiting[order_key]}"
                    results[index] = PublishResult(message.id, PublishStatus.DEFERRED, text)
        return results

    def in_order(self) -> list[PublishResult]:
        """All results, once nothing is pending."""
        return list(self.answered().values())

    def _refuse(self, indexes: Sequence[int], refusal: ChannelClosedByBroker) -> None:
        code, text = refusal.reply_code, refusal.reply_text
        match treatment_of(code):
            case Treatment.DEFERRED:  # the exchange, which is that of all
                for index in indexes:
                    self._settle(index, PublishStatus.DEFERRED, explained(code, text))
            case Treatment.REJECTED if len(indexes) == 1:
                self._settle(indexes[0], PublishStatus.REJECTED, explained(code, text))
            case Treatment.REJECTED:
                # The server took them in order up to the one that it refuses, and ended the channel with what it had
                # not confirmed yet: any of these may be stored.
                error = BrokerRefused(f"RabbitMQ at {self._addresses}: {explained(code, text)}")
                error.in_doubt = True
                raise error.with_answered(self.answered()) from refusal
            case _:
                raise exception_for_code(code, text, addresses=self._addresses).with_answered(
                    self.answered()
                ) from refusal

    def _settle(self, index: int, status: PublishStatus, error: str | None = None) -> None:
        self._results[index] = PublishResult(self._messages[index].id, status, error)
        self.pending.pop(index, None)
