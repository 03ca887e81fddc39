"""A node's operations on the shards that it owns. It never asks another node, so a request goes one hop at most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from outbox_broker.cluster.ownership_lease import ShardPermit
from outbox_broker.cluster.shard_host import RunningShard
from outbox_core.messages.message import CancelStatus, PublishResult, Record
from outbox_core.protocol.wire import RefusedMessage, RetryOutcome

Part = TypeVar("Part")
Result = TypeVar("Result")


class ShardService(Protocol):
    """The schedule of one shard; its reads are as outbox_broker.http.service_ports.ForProducers describes them."""

    def begin_publish(self, batch: Sequence[Record]) -> Callable[[], list[PublishResult]]:
        """Send a batch to the storage; returns what waits until it is durable, and returns one result a message."""

    def begin_cancel(
        self, message_ids: Sequence[str], *, topics: Sequence[str] | None
    ) -> Callable[[], list[CancelStatus]]:
        """Send cancels to the storage; returns what waits until they are durable, and returns one status an id."""

    def scheduled(
        self, topic: str | None = None, *, from_ms: int | None = None, to_ms: int | None = None, bucket: str = "minute"
    ) -> list[tuple[int, int]]:
        """Returns (start of the bucket, number of messages due)."""

    def scheduled_message(
        self, message_id: str, *, topics: Sequence[str] | None = None
    ) -> Mapping[str, object] | None:  # fmt: skip
        """Returns id, topic and due time of a scheduled message."""

    def knows(self, topic: str, message_id: str) -> bool:
        """Returns whether a message is scheduled, was dispatched lately, or is canceled."""

    def due_within(self, spans_ms: Sequence[int]) -> list[int]:
        """Returns how many messages are due within each span, and in all."""

    def topic_counts(self) -> Mapping[str, int]:
        """Returns how many messages are scheduled, by topic."""

    def refused(self, *, topics: Sequence[str] | None = None) -> list[RefusedMessage]:
        """Returns what the target refused for good."""

    def retry_refused(self, message_ids: Sequence[str], *, topics: Sequence[str] | None = None) -> list[RetryOutcome]:
        """Send it once more; returns one outcome an id."""


class ServedShard(RunningShard, Protocol):
    """A running shard with its schedule."""

    @property
    def permit(self) -> ShardPermit:
        """What its owner checks before it acts."""

    @property
    def service(self) -> ShardService:
        """Its schedule."""


Wanted = tuple[str, list[str] | None]
"""An id, and the patterns of the topics to search for it; None: all."""
Identity = tuple[str, str]
"""A topic, and an id on it."""


class OwnedShardOperations:
    """Thread-safe. Raises NotOwner, with nothing done, if one of the shards is not served by this node."""

    def __init__(self, get: Callable[[str], ServedShard]) -> None:
        """`get`: see ShardHost.get."""
        self._get = get

    def publish(self, batch: Sequence[tuple[str, Record]]) -> list[PublishResult]:
        """Store messages in the shards named with them; returns one result each, in order."""
        return _of_all(batch, self._services, lambda service, part: service.begin_publish(part))

    def cancel(self, ids: Sequence[tuple[str, str]], *, topics: Sequence[str] | None) -> list[CancelStatus]:
        """Cancel messages, each in the shard named with it; returns one status each, in order."""
        return _of_all(ids, self._services, lambda service, part: service.begin_cancel(part, topics=topics))

    def find(self, wanted: Sequence[tuple[str, Wanted]]) -> list[Mapping[str, object] | None]:
        """Returns the scheduled message under each id on the topics given with it, each in the shard named with it."""
        services = self._services({shard for shard, _ in wanted})
        return [services[shard].scheduled_message(one, topics=topics) for shard, (one, topics) in wanted]

    def known(self, messages: Sequence[tuple[str, Identity]]) -> list[bool]:
        """Returns whether each message is scheduled, was dispatched lately, or is canceled in the shard named first."""
        services = self._services({shard for shard, _ in messages})
        return [services[shard].knows(topic, message_id) for shard, (topic, message_id) in messages]

    def scheduled(
        self, shards: Iterable[str], topic: str | None, *, from_ms: int | None, to_ms: int | None, bucket: str
    ) -> list[tuple[int, int]]:
        """Returns the histogram of these shards together."""
        services = self._services(shards).values()
        parts = [one.scheduled(topic, from_ms=from_ms, to_ms=to_ms, bucket=bucket) for one in services]
        return sum_counts(parts)

    def refused(self, shards: Iterable[str], *, topics: Sequence[str] | None) -> list[RefusedMessage]:
        """Returns what the target refused for good of these shards."""
        return [refused for one in self._services(shards).values() for refused in one.refused(topics=topics)]

    def retry_refused(self, ids: Sequence[tuple[str, str]], *, topics: Sequence[str] | None) -> list[RetryOutcome]:
        """Send messages once more, each of the shard named with it; returns one outcome each, in order."""
        services = self._services({shard for shard, _ in ids})
        return [services[shard].retry_refused([one], topics=topics)[0] for shard, one in ids]

    def topic_counts(self, shards: Iterable[str]) -> dict[str, int]:
        """Returns how many messages these shards have scheduled, by topic."""
        return sum_topics(one.topic_counts() for one in self._services(shards).values())

    def _services(self, shards: Iterable[str]) -> dict[str, ShardService]:
        return {shard: self._get(shard).service for shard in shards}


def sum_counts(parts: Iterable[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Returns the sum of histograms."""
    total: defaultdict[int, int] = defaultdict(int)
    for part in parts:
        for at_ms, count in part:
            total[at_ms] += count
    return sorted(total.items())


def sum_topics(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the sum of counts by topic."""
    total: defaultdict[str, int] = defaultdict(int)
    for part in parts:
        for topic, count in part.items():
            total[topic] += count
    return dict(total)


def _of_all(
    entries: Sequence[tuple[str, Part]],
    services: Callable[[Iterable[str]], Mapping[str, ShardService]],
    begin: Callable[[ShardService, list[Part]], Callable[[], list[Result]]],
) -> list[Result]:
    """Have each entry stored by the shard named with it; returns the results in order.

    What all shards store is on its way before the first one is waited for: a request to many takes the time of one.
    """
    places: defaultdict[str, list[int]] = defaultdict(list)
    for index, (shard, _) in enumerate(entries):
        places[shard].append(index)
    found = services(places)
    finishes = {
        shard: begin(found[shard], [entries[index][1] for index in indexes]) for shard, indexes in places.items()
    }
    results: dict[int, Result] = {}
    for shard, indexes in places.items():
        results |= zip(indexes, finishes[shard](), strict=True)
    return [results[index] for index in range(len(entries))]
