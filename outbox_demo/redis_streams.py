"""Redis streams by redis-py, as the demo's consumers read them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import redis

from broker_adapter.publishing.broker_url import BrokerUrl
from outbox_demo.foreign_client import MESSAGES_MAX, REDELIVERED_AFTER_MS, WAIT_MS, Received
from outbox_demo.plan import GROUPS


class RedisStreams:
    """A ForeignClient: a stream for each topic, with consumer groups."""

    def __init__(self, url: BrokerUrl) -> None:
        [(host, port)] = url.hosts
        options: dict[str, Any] = {}
        if url.scheme == "rediss":
            options = {"ssl": True, "ssl_ca_certs": url.file("ca_file"), "ssl_certfile": url.file("cert_file")}
            options["ssl_keyfile"] = url.file("key_file")
        self._client: Any = redis.Redis(
            host=host, port=port, username=url.user, password=url.password, db=int(url.path or 0), protocol=2, **options
        )
        self._prefix = url.options["prefix"]

    def make_topics(self) -> None:
        """XGROUP CREATE makes the streams, too."""
        for topic, group in GROUPS:
            self._client.xgroup_create(self._stream(topic), group, id="0", mkstream=True)

    def deliveries(self, group: str) -> Iterator[Received]:
        """XAUTOCLAIM for what was left behind, XREADGROUP for what is new."""
        topics = {self._stream(topic).encode(): topic for topic, reader in GROUPS if reader == group}
        consumer = f"{group}-{os.getpid()}"
        while True:
            for stream, topic in topics.items():
                _, entries, _ = self._client.xautoclaim(
                    stream, group, consumer, min_idle_time=REDELIVERED_AFTER_MS, count=MESSAGES_MAX
                )
                yield from (_received(topic, group, entry) for entry in entries)
            new = self._client.xreadgroup(
                group, consumer, dict.fromkeys(topics, ">"), count=MESSAGES_MAX, block=WAIT_MS
            )
            for stream, entries in new or []:
                yield from (_received(topics[stream], group, entry) for entry in entries)

    def acknowledge(self, message: Received) -> None:
        """XACK."""
        self._client.xack(self._stream(message.topic), *message.receipt)

    def unsettled(self) -> int:
        """Entries that are pending in a group, and those that it has not read."""
        streams = {self._stream(topic) for topic, _ in GROUPS}
        groups = [group for stream in streams for group in self._client.xinfo_groups(stream)]
        return sum(group["pending"] + group["lag"] for group in groups)

    def remove_topics(self) -> None:
        """Delete the streams, and the ids that the publisher remembers beside them."""
        for stream in {self._stream(topic) for topic, _ in GROUPS}:
            self._client.delete(stream, f"{stream}:ids")

    def close(self) -> None:
        """Close the pool."""
        self._client.close()

    def _stream(self, topic: str) -> str:
        return f"{self._prefix}{{{topic}}}"


def _received(topic: str, group: str, entry: tuple[bytes, dict[bytes, bytes]]) -> Received:
    place, fields = entry
    return Received(id=fields[b"id"].decode(), topic=topic, body=fields[b"body"], receipt=(group, place))
