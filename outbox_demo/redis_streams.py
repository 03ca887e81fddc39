"""Redis streams by redis-py, as the demo's consumers read them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import redis

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.redis.redis_options import RedisOptions
from outbox_demo.foreign_client import MESSAGES_MAX, REDELIVERED_AFTER_MS, WAIT_MS, ReceivedMessage
from outbox_demo.plan import RunTopics


class RedisStreams:
    """A ForeignClient: a stream for each topic, with consumer groups, on one server or a cluster."""

    def __init__(self, url: BrokerUrl, topics: RunTopics) -> None:
        self._client = _connect(url)
        self._is_cluster = _is_cluster(url)
        self._keys = RedisOptions.of_url(url)
        self._topics = topics

    def make_topics(self) -> None:
        """XGROUP CREATE makes the streams, too."""
        for topic, group in self._topics.subscriptions:
            self._client.xgroup_create(self._keys.stream_key(topic), group, id="0", mkstream=True)

    def deliveries(self, group: str) -> Iterator[ReceivedMessage]:
        """XAUTOCLAIM for what was left behind, XREADGROUP for what is new."""
        topics = {self._keys.stream_key(topic).encode(): topic for topic in self._topics.read_by(group)}
        consumer = f"{group}-{os.getpid()}"
        # A command to a cluster is about the streams of one node, so there each stream is read by itself.
        parts = [[stream] for stream in topics] if self._is_cluster else [list(topics)]
        wait_ms: int | None = None
        while True:
            for stream, topic in topics.items():
                _, entries, _ = self._client.xautoclaim(
                    stream, group, consumer, min_idle_time=REDELIVERED_AFTER_MS, count=MESSAGES_MAX
                )
                yield from (_received(topic, group, entry) for entry in entries)
            new = [
                found
                for part in parts
                for found in self._client.xreadgroup(
                    group, consumer, dict.fromkeys(part, ">"), count=MESSAGES_MAX, block=wait_ms
                )
                or []
            ]
            for stream, entries in new:
                yield from (_received(topics[stream], group, entry) for entry in entries)
            wait_ms = None if new else WAIT_MS // len(parts)

    def acknowledge(self, message: ReceivedMessage) -> None:
        """XACK."""
        self._client.xack(self._keys.stream_key(message.topic), *message.receipt)

    def unsettled(self) -> int:
        """Entries that are pending in a group, and those that it has not read: of some that were deleted before it
        came to them Redis does not tell how many are left.
        """
        streams = [self._keys.stream_key(topic) for topic in self._topics.names]
        groups = [group for stream in streams for group in self._client.xinfo_groups(stream)]
        return sum(group["pending"] + (1 if group["lag"] is None else group["lag"]) for group in groups)

    def remove_topics(self) -> None:
        """Delete the streams, and the ids that the publisher remembers beside them."""
        for topic in self._topics.names:
            self._client.delete(self._keys.stream_key(topic), self._keys.ids_key(topic))

    def close(self) -> None:
        """Close the pool."""
        self._client.close()


def _connect(url: BrokerUrl) -> Any:
    options: dict[str, Any] = {"username": url.user, "password": url.password, "protocol": 2}
    if url.scheme.startswith("rediss"):
        options |= {"ssl": True, "ssl_ca_certs": url.file("ca_file"), "ssl_certfile": url.file("cert_file")}
        options["ssl_keyfile"] = url.file("key_file")
    if _is_cluster(url):
        cluster: Any = redis.cluster
        nodes = [cluster.ClusterNode(host, port) for host, port in url.hosts]
        return cluster.RedisCluster(startup_nodes=nodes, **options)
    [(host, port)] = url.hosts
    return redis.Redis(host=host, port=port, db=int(url.path or 0), **options)


def _is_cluster(url: BrokerUrl) -> bool:
    return "+cluster" in url.scheme


def _received(topic: str, group: str, entry: tuple[bytes, dict[bytes, bytes]]) -> ReceivedMessage:
    place, fields = entry
    return ReceivedMessage(id=fields[b"id"].decode(), topic=topic, body=fields[b"body"], receipt=(group, place))
