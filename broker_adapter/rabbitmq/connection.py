"""One connection to a server of RabbitMQ, on a thread of its own, which answers heartbeats while nobody publishes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

import pika
from pika.adapters.select_connection import IOLoop
from pika.channel import Channel
from pika.exceptions import AMQPError, ChannelClosed, ChannelClosedByBroker, StreamLostError

from broker_adapter.rabbitmq.channel import Answer, ConfirmChannel, ConfirmOutcome
from broker_adapter.rabbitmq.message_conversion import AmqpFrame
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

T = TypeVar("T")

CLOSE_SECONDS_MAX: Final = 0.5
"""How long a server may take to agree to the end of a connection."""
JOIN_SECONDS_MAX: Final = 10.0


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
