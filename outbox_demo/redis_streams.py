"""Redis streams by redis-py, as the demo's consumers read them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.redis.redis_options import RedisOptions
from outbox_demo.foreign_client_port import MESSAGES_MAX, REDELIVERED_AFTER_MS, WAIT_MS, ReceivedMessage
from outbox_demo.plan import RunTopics
from outbox_demo.redis_client import is_cluster, open_redis


class RedisStreams:
    """A ForeignClient: a stream for each topic, with consumer groups, on one server or a cluster."""

    def __init__(self, url: BrokerUrl, topics: RunTopics) -> None:
        self._client = open_redis(url)
        self._is_cluster = is_cluster(url)
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
                stream_entries
                for part in parts
                for stream_entries in self._client.xreadgroup(
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


def _received(topic: str, group: str, entry: tuple[bytes, dict[bytes, bytes]]) -> ReceivedMessage:
    entry_id, fields = entry
    return ReceivedMessage(id=fields[b"id"].decode(), topic=topic, body=fields[b"body"], receipt=(group, entry_id))
