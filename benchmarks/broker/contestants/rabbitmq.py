"""RabbitMQ's quorum queues through pika's asynchronous connection: asynchronous confirms, acks of many messages.

pika's blocking channel awaits a confirm for every message, so it is not used: this is the client's fast mode.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pika

from benchmarks.broker.contestants.shape import BATCH, BODY, Contestant, age_s, stamped

PREFETCH = 2 * BATCH
_PERSISTENT = pika.BasicProperties(delivery_mode=2)


class RabbitMq:
    """One connection, one channel, and an event loop that runs while a result is awaited."""

    def __init__(self, address: str) -> None:
        self._connection: Any = pika.SelectConnection(
            pika.URLParameters(address), on_open_callback=self._stop, on_open_error_callback=self._failed
        )
        self._error: BaseException | None = None
        self._run()
        self._channel: Any = None
        self._sent = self._lowest = 0
        self._unconfirmed: set[int] = set()
        self._on_confirmed: Callable[[], None] = lambda: None
        self._connection.channel(on_open_callback=self._opened)
        self._run()
        self._channel.confirm_delivery(self._confirm, callback=self._stop)
        self._run()

    def begin(self, topic: str) -> None:
        """A quorum queue; it is the group as well."""
        self._channel.queue_declare(topic, durable=True, arguments={"x-queue-type": "quorum"}, callback=self._stop)
        self._run()

    def end(self, topic: str) -> None:
        """Drop the queue."""
        self._channel.queue_delete(topic, callback=self._stop)
        self._run()

    def publish(self, topic: str, *, count: int, in_flight: int) -> None:
        """Batch after batch, as soon as no more than the others in flight are unconfirmed."""
        for start in range(0, count, BATCH):
            for _ in range(min(BATCH, count - start)):
                self._send(topic, BODY)
            self._until_unconfirmed((in_flight - 1) * BATCH)
        self._until_unconfirmed(0)

    def consume(self, topic: str, *, count: int) -> None:
        """A consumer with a prefetch of two batches; one acknowledgement settles a batch."""
        seen = 0

        def handle(_channel: object, method: Any, _properties: object, _body: bytes) -> None:
            nonlocal seen
            seen += 1
            if seen % BATCH == 0 or seen == count:
                self._channel.basic_ack(method.delivery_tag, multiple=True)
            if seen == count:
                self._stop()

        self._consume(topic, handle, prefetch=PREFETCH)

    def publish_singles(self, topic: str, *, count: int, workers: int) -> None:
        """So many unconfirmed at any time: a confirm is what sends the next one."""
        wanted = self._sent + count

        def more() -> None:
            while self._sent < wanted and len(self._unconfirmed) < workers:
                self._send(topic, BODY)
            if not self._unconfirmed:
                self._stop()

        self._on_confirmed = more
        more()
        self._run()
        self._on_confirmed = lambda: None

    def publish_in_threads(self, topic: str, *, count: int, workers: int) -> None:
        """A connection of pika's is for one thread."""
        self.publish_singles(topic, count=count, workers=workers)

    def publish_paced(self, topic: str, *, count: int, per_second: int) -> None:
        """Sent when due by the loop's timer, confirmed in the end."""
        start = time.monotonic() + 0.05
        number = 0

        def send() -> None:
            nonlocal number
            while number < count and start + number / per_second <= time.monotonic():
                self._send(topic, stamped(start + number / per_second))
                number += 1
            if number == count:
                self._stop()
            else:
                self._connection.ioloop.call_later(max(0.0, start + number / per_second - time.monotonic()), send)

        send()
        self._run()
        self._until_unconfirmed(0)

    def receive(self, topic: str, *, count: int, on_waiting: Callable[[], None]) -> list[float]:
        """A consumer that acknowledges each."""
        ages: list[float] = []

        def handle(_channel: object, method: Any, _properties: object, body: bytes) -> None:
            ages.append(age_s(body))
            self._channel.basic_ack(method.delivery_tag)
            if len(ages) == count:
                self._stop()

        self._consume(topic, handle, prefetch=PREFETCH, on_waiting=on_waiting)
        return ages

    def close(self) -> None:
        """Close the connection."""
        self._connection.add_on_close_callback(self._stop)
        self._connection.close()
        self._connection.ioloop.start()

    def _consume(
        self, topic: str, handle: Callable[..., None], *, prefetch: int, on_waiting: Callable[[], None] | None = None
    ) -> None:
        self._channel.basic_qos(prefetch_count=prefetch, callback=self._stop)
        self._run()
        consuming = (lambda _frame: on_waiting()) if on_waiting is not None else None
        tag = self._channel.basic_consume(topic, handle, callback=consuming)
        self._run()
        self._channel.basic_cancel(tag, callback=self._stop)
        self._run()

    def _send(self, topic: str, body: bytes) -> None:
        self._channel.basic_publish("", topic, body, properties=_PERSISTENT)
        self._sent += 1
        self._unconfirmed.add(self._sent)  # a channel counts its publishes from 1, and confirms by these numbers

    def _confirm(self, frame: Any) -> None:
        if isinstance(frame.method, pika.spec.Basic.Nack):
            self._error = RuntimeError("RabbitMQ refused a message")
            self._stop()
            return
        tag = frame.method.delivery_tag
        if frame.method.multiple:
            self._unconfirmed.difference_update(range(self._lowest, tag + 1))
            self._lowest = tag + 1
        else:
            self._unconfirmed.discard(tag)
        self._on_confirmed()

    def _until_unconfirmed(self, left: int) -> None:
        if len(self._unconfirmed) <= left:
            return

        def look() -> None:
            if len(self._unconfirmed) <= left:
                self._stop()

        self._on_confirmed = look
        self._run()
        self._on_confirmed = lambda: None

    def _opened(self, channel: Any) -> None:
        self._channel = channel
        self._stop()

    def _failed(self, _connection: object, error: BaseException) -> None:
        self._error = error
        self._stop()

    def _run(self) -> None:
        self._connection.ioloop.start()
        if self._error is not None:
            raise self._error

    def _stop(self, *_arguments: object) -> None:
        self._connection.ioloop.stop()


def make(address: str) -> Contestant:
    """A client of the RabbitMQ at a URL."""
    return RabbitMq(address)
