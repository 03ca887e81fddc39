"""The one connection of a process to RabbitMQ, on a thread of its own, which answers heartbeats when nobody sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from random import Random
from typing import Any, Final, TypeVar

import pika
from pika.adapters.select_connection import IOLoop
from pika.channel import Channel
from pika.exceptions import AMQPError, ChannelClosed, ChannelClosedByBroker, StreamLostError

from broker_adapter.rabbitmq.message_conversion import AmqpFrame
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.process_fork import notice_fork, reset_in_children

logger: EventLogger = EventLogger(__name__)

T = TypeVar("T")

CLOSE_SECONDS_MAX: Final = 0.5
"""How long a server may take to agree to the end of a connection."""
JOIN_SECONDS_MAX: Final = 10.0


class ProcessConnection:
    """Keeps the one connection of a process: opened on demand, and again after it was lost. Thread-safe. A forked child
    gets a connection of its own, and leaves its parent's alone.
    """

    def __init__(self, servers: Sequence[pika.ConnectionParameters], *, random: Random | None = None) -> None:
        self._servers = servers
        self._random = random or Random()
        self._lock = threading.Lock()
        self._connection: RabbitMqConnection | None = None
        self._of_parents: list[RabbitMqConnection] = []
        self._is_closed = False
        reset_in_children(self)

    def opened(self, *, timeout_s: float) -> RabbitMqConnection:
        """The connection, to any of the servers, tried in random order.

        Raises exceptions of the client, TimeoutError, and ConfigurationError once closed.
        """
        notice_fork()
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(timeout_s, 0)):
            raise TimeoutError("no connection in time")
        try:
            if self._is_closed:
                raise ConfigurationError("this broker was closed; connect again")
            if self._connection is None or not self._connection.is_open:
                self._connection = None
                servers = self._random.sample(self._servers, len(self._servers))
                self._connection = RabbitMqConnection.open(servers, timeout_s=deadline - time.monotonic())
            return self._connection
        finally:
            self._lock.release()

    def drop(self, connection: RabbitMqConnection) -> None:
        """Close one whose state is in doubt."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
        connection.close()

    def close(self) -> None:
        """End the connection of this process. Idempotent."""
        notice_fork()
        with self._lock:
            self._is_closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def reset_after_fork(self) -> None:
        """Start without a thread in a forked child. The parent's connection is kept, so that nothing closes it."""
        self._lock = threading.Lock()
        if self._connection is not None:
            self._of_parents.append(self._connection)
            self._connection = None


class _AmqpConnection(pika.SelectConnection):
    """Can be ended without the server, which pika does by itself only for a heartbeat that was missed."""

    def abort(self) -> None:
        """End it at once."""
        if not self.is_closed:
            self._terminate_stream(StreamLostError("the server did not agree to the end of the connection in time"))


class RabbitMqConnection:
    """Thread-safe. It never reconnects, so that nothing is sent that a caller has given up: make a new one.

    Its methods raise exceptions of the client, and TimeoutError.
    """

    def __init__(self, servers: Sequence[pika.ConnectionParameters]) -> None:
        self.confirmed_bytes_max = 0
        """Of the largest body that this server took."""
        self._servers = servers
        self._lock = threading.Lock()
        self._loop = IOLoop()
        self._amqp: _AmqpConnection  # once it is opened
        self._free: list[ConfirmChannel] = []
        self._opened: Future[None] = Future()
        self._under_way: set[Future[Any]] = {self._opened}
        self._lost: Exception | None = None
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="outbox-rabbitmq", daemon=True)

    @classmethod
    def open(cls, servers: Sequence[pika.ConnectionParameters], *, timeout_s: float) -> RabbitMqConnection:
        """Connect to the first server that answers, and log in."""
        connection = cls(servers)
        connection._thread.start()
        try:
            connection._opened.result(timeout_s)
        except BaseException:
            connection._begin_end()
            raise
        return connection

    @property
    def is_open(self) -> bool:
        """Whether it can be used, as far as is known."""
        return self._lost is None

    @property
    def server(self) -> tuple[str, str]:
        """The server's product and version."""
        properties = self._amqp.server_properties or {}
        return str(properties.get("product", "")), str(properties.get("version", ""))

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame, and so the bound of all properties of a message."""
        return self._amqp.params.frame_max

    def send(self, exchange: str, frames: Sequence[AmqpFrame], *, timeout_s: float) -> Answer:
        """Publish in this order, and wait for the confirms. After a time-out anything may be stored, even later."""
        answer: Answer = self._call(partial(self._send, exchange, frames), timeout_s=timeout_s)
        sizes = (
            len(frame.body)
            for frame, outcome in zip(frames, answer.outcomes, strict=True)
            if outcome is ConfirmOutcome.CONFIRMED
        )
        self.confirmed_bytes_max = max(self.confirmed_bytes_max, *sizes, 0)
        return answer

    def why_no_queue(self, name: str, *, timeout_s: float) -> ChannelClosedByBroker | None:
        """Returns the server's reason if a queue cannot be used, commonly that it does not exist; None if it can."""
        refusal: ChannelClosedByBroker | None = self._call(partial(self._declare_passively, name), timeout_s=timeout_s)
        return refusal

    def close(self) -> None:
        """End the connection and the thread; what is under way fails. Idempotent."""
        self._begin_end()
        self._thread.join(JOIN_SECONDS_MAX)

    def _begin_end(self) -> None:
        with self._lock:
            if self._lost is None:
                self._loop.add_callback_threadsafe(self._end)

    def _call(self, begin: Callable[[Future[T]], None], *, timeout_s: float) -> T:
        """Begin something on the connection's thread, and wait until its future is completed."""
        done: Future[T] = Future()
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._under_way.add(done)
            self._loop.add_callback_threadsafe(partial(self._begin, begin, done))
        try:
            return done.result(timeout_s)
        finally:
            with self._lock:
                self._under_way.discard(done)

    # -- on the connection's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            _AmqpConnection.create_connection(self._servers, on_done=self._on_connected, custom_ioloop=self._loop)
            self._loop.start()
        except Exception as error:  # the thread's boundary: waiting callers must learn of it
            logger.exception("rabbitmq_connection_failed")
            self._lose(error)
        finally:
            self._loop.close()

    def _begin(self, begin: Callable[[Future[T]], None], done: Future[T]) -> None:
        try:
            begin(done)
        except AMQPError as error:  # it is being closed
            done.set_exception(error)

    def _on_connected(self, connection_or_error: Any) -> None:
        if not isinstance(connection_or_error, _AmqpConnection):
            self._lose(connection_or_error)
            return
        self._amqp = connection_or_error
        connection_or_error.add_on_close_callback(lambda _, reason: self._lose(reason))
        self._complete(self._opened, None)
        if self._is_ending:
            self._end()

    def _lose(self, error: Exception) -> None:
        """Nothing is sent any more: what waits for an answer gets none."""
        with self._lock:
            self._lost = error
            under_way, self._under_way = self._under_way, set()
        for done in under_way:
            if not done.done():
                done.set_exception(error)
        self._loop.stop()

    def _end(self) -> None:
        """One that is being opened ends when it is, or by its own time-out: pika cannot abort the handshake."""
        self._is_ending = True
        if self._lost is None and self._opened.done() and self._amqp.is_open:
            self._loop.call_later(CLOSE_SECONDS_MAX, self._amqp.abort)
            self._amqp.close()

    def _send(self, exchange: str, frames: Sequence[AmqpFrame], done: Future[Answer]) -> None:
        self._free = [channel for channel in self._free if channel.is_open]
        channel = self._free.pop() if self._free else ConfirmChannel(self._amqp, on_free=self._free_again)
        channel.send(exchange, frames, done)

    def _free_again(self, channel: ConfirmChannel) -> None:
        self._free.append(channel)

    def _declare_passively(self, queue: str, done: Future[ChannelClosedByBroker | None]) -> None:
        def on_open(channel: Channel) -> None:
            channel.queue_declare(queue, passive=True, callback=lambda _: channel.close())

        def on_closed(_: Channel, reason: Exception) -> None:
            if isinstance(reason, ChannelClosed):  # and not by the connection's loss
                self._complete(done, reason if isinstance(reason, ChannelClosedByBroker) else None)

        self._amqp.channel(on_open_callback=on_open).add_on_close_callback(on_closed)

    def _complete(self, done: Future[T], result: T) -> None:
        if not done.done():
            done.set_result(result)


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
    """A channel in confirm mode, which answers each message, for one batch at a time. Used in the thread of its
    connection only. Does not interpret the answers.
    """

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
