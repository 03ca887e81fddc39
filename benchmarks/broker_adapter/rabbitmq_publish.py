"""Publishes to RabbitMQ by the adapter, and by the plainest fast programs with its client, at equal durability.

    python -m benchmarks.broker_adapter.rabbitmq_publish --json > rabbitmq.json

All publish 512 bytes, persistent and mandatory, to one durable queue, in batches of 500 whose confirms are awaited
together, and one at a time. pika's BlockingConnection awaits each confirm by itself; its SelectConnection sends a batch
and then reads the confirms. Rounds are rotated, figures are medians, in messages a second; the ratio is to the faster
plain program of each kind.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pika

from benchmarks.broker_adapter.publish_rounds import BODY, TOPIC, Publisher, arguments, compare, report
from tests.broker_adapter.http.test_tls import certificate
from tests.broker_adapter.rabbitmq.rabbitmq_engine import PASSWORD, USER, RabbitMqEngine
from tests.broker_adapter.rabbitmq.rabbitmq_server import HOST, RabbitMqServer


def properties(number: int) -> pika.BasicProperties:
    """Those of one message."""
    return pika.BasicProperties(message_id=f"p{number}", delivery_mode=pika.DeliveryMode.Persistent.value)


class Blocking:
    """pika.BlockingConnection: each publish returns with its confirm."""

    name = "plain_blocking"

    def __init__(self, server: pika.ConnectionParameters, ids: Iterator[int]) -> None:
        self._connection = pika.BlockingConnection(server)
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()
        self._ids = ids

    def publish(self, count: int) -> None:
        """Publish one after the other."""
        for _ in range(count):
            self._channel.basic_publish("", TOPIC, BODY, properties=properties(next(self._ids)), mandatory=True)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Pipelined:
    """pika.SelectConnection: all are sent, then the confirms are counted."""

    name = "plain_pipelined"

    def __init__(self, server: pika.ConnectionParameters, ids: Iterator[int]) -> None:
        self._ids = ids
        self._sent = 0
        self._unconfirmed: set[int] = set()
        self._channel: Any = None
        self._connection: Any = pika.SelectConnection(server, on_open_callback=self._on_open)
        self._connection.ioloop.start()

    def publish(self, count: int) -> None:
        """Publish all, and run the loop until they are confirmed."""
        for _ in range(count):
            self._channel.basic_publish("", TOPIC, BODY, properties=properties(next(self._ids)), mandatory=True)
        self._unconfirmed = set(range(self._sent + 1, self._sent + count + 1))
        self._sent += count
        self._connection.ioloop.start()

    def close(self) -> None:
        """Close the connection."""
        self._connection.add_on_close_callback(lambda *_: self._connection.ioloop.stop())
        self._connection.close()
        self._connection.ioloop.start()

    def _on_open(self, connection: Any) -> None:
        self._channel = connection.channel(on_open_callback=self._on_channel)

    def _on_channel(self, channel: Any) -> None:
        channel.confirm_delivery(self._on_confirmed, callback=lambda _: self._connection.ioloop.stop())

    def _on_confirmed(self, frame: Any) -> None:
        assert isinstance(frame.method, pika.spec.Basic.Ack)
        tag = frame.method.delivery_tag
        if frame.method.multiple:
            self._unconfirmed = {one for one in self._unconfirmed if one > tag}
        else:
            self._unconfirmed.discard(tag)
        if not self._unconfirmed:
            self._connection.ioloop.stop()


def run(chosen: argparse.Namespace) -> Mapping[str, Any]:
    """All rounds, on a server of their own."""
    with tempfile.TemporaryDirectory(dir=chosen.folder, ignore_cleanup_errors=True) as folder:
        server = RabbitMqServer(Path(folder) / "server", tls=certificate(Path(folder), address=HOST))
        try:
            server.start()
            server.add_user(USER, PASSWORD, tags="monitoring")
            server.declare(TOPIC)
            return compare(RabbitMqEngine(server).url, lambda ids: plain(server.port, ids), chosen)
        finally:
            server.kill()


def plain(port: int, ids: Iterator[int]) -> Sequence[Publisher]:
    """By both kinds of connection of the client."""
    login = pika.PlainCredentials(USER, PASSWORD)
    server = pika.ConnectionParameters(host=HOST, port=port, credentials=login)
    return [Blocking(server, ids), Pipelined(server, ids)]


def main() -> None:
    chosen = arguments(__doc__, batches=10, singles=300).parse_args()
    report("RabbitMQ", run(chosen), chosen)


if __name__ == "__main__":
    main()
