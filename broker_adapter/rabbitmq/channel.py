"""Sends batches over a channel in confirm mode, which answers each message. Does not interpret the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pika
from pika.channel import Channel
from pika.exceptions import ChannelClosedByBroker

from broker_adapter.rabbitmq.message_conversion import AmqpFrame


class ConfirmOutcome(StrEnum):
    """The server's answer to one message."""

    CONFIRMED = "confirmed"
    """Each queue that it was routed to has it, on disk if the queue is durable."""
    RETURNED = "returned"
    """No queue is bound to its routing key."""
    NACKED = "nacked"
    """A queue that it was routed to refused it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An outcome for each message, in order, None where there is none: then `refusal` is why the server ended the
    channel, and such a message may have been stored.
    """

    outcomes: Sequence[ConfirmOutcome | None]
    refusal: ChannelClosedByBroker | None = None


class ConfirmChannel:
    """A channel with confirms, for one batch at a time. Used in the thread of its connection only."""

    def __init__(self, connection: pika.SelectConnection, *, on_free: Callable[[ConfirmChannel], None]) -> None:
        self._on_free = on_free
        self._is_ready = False
        self._sent = 0
        self._exchange = ""
        self._frames: Sequence[AmqpFrame] = ()
        self._outcomes: list[ConfirmOutcome | None] = []
        self._returned: set[int] = set()
        self._unanswered_from = 0
        self._done: Future[Answer] | None = None
        self._channel: Channel = connection.channel(on_open_callback=self._on_open)
        self._channel.add_on_close_callback(self._on_closed)
        self._channel.add_on_return_callback(self._on_returned)

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._channel.is_open

    def send(self, exchange: str, frames: Sequence[AmqpFrame], done: Future[Answer]) -> None:
        """Publish in this order, and complete `done` when all are answered, or the server has ended the channel."""
        self._exchange, self._frames, self._done = exchange, frames, done
        self._outcomes = [None] * len(frames)
        self._returned.clear()
        self._unanswered_from = 0
        if self._is_ready:
            self._publish()

    def _publish(self) -> None:
        for frame in self._frames:
            self._channel.basic_publish(
                self._exchange, frame.routing_key, frame.body, properties=frame.properties, mandatory=True
            )
        self._sent += len(self._frames)

    def _on_open(self, channel: Channel) -> None:
        channel.confirm_delivery(self._on_confirmed, callback=self._on_ready)

    def _on_ready(self, _frame: Any) -> None:
        self._is_ready = True
        self._publish()

    def _on_confirmed(self, frame: Any) -> None:
        """A channel numbers its messages from 1. A confirm may be for all up to its number."""
        confirmed_index = frame.method.delivery_tag - 1 - (self._sent - len(self._frames))
        is_ack = isinstance(frame.method, pika.spec.Basic.Ack)
        for index in range(self._unanswered_from if frame.method.multiple else confirmed_index, confirmed_index + 1):
            if self._outcomes[index] is None:
                accepted = ConfirmOutcome.RETURNED if index in self._returned else ConfirmOutcome.CONFIRMED
                self._outcomes[index] = accepted if is_ack else ConfirmOutcome.NACKED
        while self._unanswered_from < len(self._outcomes) and self._outcomes[self._unanswered_from] is not None:
            self._unanswered_from += 1
        if self._unanswered_from == len(self._outcomes):
            self._finish(Answer(outcomes=self._outcomes))
            self._on_free(self)

    def _on_returned(self, _channel: Channel, method: Any, properties: pika.BasicProperties, _body: bytes) -> None:
        """A returned message comes before its own confirm, and does not say its number: it is the oldest that is alike.

        An id may stand twice in a batch.
        """
        for index in range(self._unanswered_from, len(self._frames)):
            frame = self._frames[index]
            is_alike = (frame.properties.message_id, frame.routing_key) == (properties.message_id, method.routing_key)
            if is_alike and self._outcomes[index] is None and index not in self._returned:
                self._returned.add(index)
                return

    def _on_closed(self, _channel: Channel, reason: Exception) -> None:
        """A lost connection is its connection's to report."""
        if isinstance(reason, ChannelClosedByBroker):
            self._finish(Answer(outcomes=self._outcomes, refusal=reason))

    def _finish(self, answer: Answer) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_result(answer)
