"""Answers requests for any shard: from this node's own, and from other nodes for the rest. Keeps nothing.

The ports of the HTTP server. Where a shard has no owner, or its owner is about to change, the whole request fails with
NotOwner, for a retry: publishes and cancels are idempotent by message id.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from outbox_broker.cluster.cluster_errors import NotOwner
from outbox_broker.cluster.coordinator import Coordinator
from outbox_broker.cluster.owned_shard_operations import (
    Identity,
    OwnedShardOperations,
    Wanted,
    sum_counts,
    sum_topics,
)
from outbox_broker.cluster.peer_client import PeerClient
from outbox_broker.state.client_topic_quota import ClientTopicQuota
from outbox_core.messages.broker_port import topic_figures
from outbox_core.messages.message import CancelStatus, PublishResult, PublishStatus, Record
from outbox_core.protocol.wire import RefusedMessage, RetryOutcome

FORWARDS_MAX: Final = 16
"""Requests to other nodes at a time, of all requests to this one."""
_RANK: Final = (CancelStatus.CANCELED, CancelStatus.TOO_LATE, CancelStatus.UNKNOWN)
Part = TypeVar("Part")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Owner:
    """A node by the URL for its peers; None: this node."""

    url: str | None


class RequestRouter:
    """ForProducers and Catalog over all shards of the cluster. Thread-safe."""

    def __init__(self, *, coordinator: Coordinator, local: OwnedShardOperations, peers: PeerClient) -> None:
        self._coordinator = coordinator
        self._local = local
        self._peers = peers
        self._forwards = ThreadPoolExecutor(FORWARDS_MAX, thread_name_prefix="forward")

    def close(self) -> None:
        """End the threads, after the requests in progress."""
        self._forwards.shutdown()
        self._peers.close()

    # -- what producers ask ------------------------------------------------------------------------------------------

    def publish(self, batch: Sequence[Record], *, quota: ClientTopicQuota | None = None) -> list[PublishResult]:
        """Store a batch in the newest generation; what an earlier one knows, canceled or not, is a duplicate."""
        del quota
        shards = self._coordinator.shards()
        known = self._known_before(batch)
        new = [message for message in batch if (message.topic, message.id) not in known]
        results = iter(
            self._split(
                [(shards.shard_of(message.id), message) for message in new],
                here=self._local.publish,
                there=self._peers.publish,
            )
        )
        return [
            PublishResult(message.id, PublishStatus.DUPLICATE)
            if (message.topic, message.id) in known
            else next(results)
            for message in batch
        ]

    def cancel(self, message_ids: Sequence[str], *, topics: Sequence[str] | None = None) -> list[CancelStatus]:
        """Cancel in every generation, the newest first: it remembers the cancel of a message that arrives later."""
        shards = self._coordinator.shards()
        newest = self._cancel([(shards.shard_of(one), one) for one in message_ids], topics)
        older = [(shard, one) for one in message_ids for shard in shards.older_shards_of(one)]
        found: defaultdict[str, list[CancelStatus]] = defaultdict(list)
        for (_, message_id), status in zip(older, self._cancel(older, topics), strict=True):
            found[message_id].append(status)
        return [
            min([status, *found[message_id]], key=_RANK.index)
            for message_id, status in zip(message_ids, newest, strict=True)
        ]

    def scheduled(
        self, topic: str | None = None, *, from_ms: int | None = None, to_ms: int | None = None, bucket: str = "minute"
    ) -> list[tuple[int, int]]:
        """Returns (start of the bucket, number of messages due), of all shards."""
        return sum_counts(
            self._on_each_node(
                here=lambda shards: self._local.scheduled(shards, topic, from_ms=from_ms, to_ms=to_ms, bucket=bucket),
                there=lambda url, shards: self._peers.scheduled(
                    url, shards, topic, from_ms=from_ms, to_ms=to_ms, bucket=bucket
                ),
            )
        )

    def scheduled_message(
        self, message_id: str, *, topics: Sequence[str] | None = None
    ) -> Mapping[str, object] | None:  # fmt: skip
        """Returns id, topic and due time of one scheduled message, of the newest generation that has it."""
        shards = self._coordinator.shards()
        places = [shards.shard_of(message_id), *shards.older_shards_of(message_id)]
        wanted = (message_id, None if topics is None else list(topics))
        found = self._find([(shard, wanted) for shard in places])
        return next((one for one in found if one is not None), None)

    # -- what the target refused -------------------------------------------------------------------------------------

    def refused(self, *, topics: Sequence[str] | None = None) -> list[RefusedMessage]:
        """Returns what the target refused for good, of all shards."""
        parts = self._on_each_node(
            here=lambda shards: self._local.refused(shards, topics=topics),
            there=lambda url, shards: self._peers.refused(url, shards, topics=topics),
        )
        return [refused for part in parts for refused in part]

    def retry_refused(self, message_ids: Sequence[str], *, topics: Sequence[str] | None = None) -> list[RetryOutcome]:
        """Send messages once more, in whichever generation has them; one outcome an id, in order."""
        shards = self._coordinator.shards()
        places = [(shard, one) for one in message_ids for shard in (shards.shard_of(one), *shards.older_shards_of(one))]
        outcomes: dict[str, RetryOutcome] = {}
        for (_, message_id), outcome in zip(places, self._retry_refused(places, topics), strict=True):
            if outcome.status != "unknown" or message_id not in outcomes:
                outcomes[message_id] = outcome
        return [outcomes[message_id] for message_id in message_ids]

    def _retry_refused(
        self, ids: Sequence[tuple[str, str]], topics: Sequence[str] | None
    ) -> list[RetryOutcome]:  # fmt: skip
        return self._split(
            ids,
            here=lambda part: self._local.retry_refused(part, topics=topics),
            there=lambda url, part: self._peers.retry_refused(url, part, topics=topics),
        )

    # -- the catalog -------------------------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Returns the topics with scheduled messages."""
        return sorted(self._topic_counts())

    def topic_figures(self, topic: str) -> Mapping[str, int]:
        """Returns what is scheduled; nothing else is stored here."""
        return topic_figures(stored=0, scheduled=self._topic_counts().get(topic, 0), groups=())

    def groups(self, _topic: str) -> list[str]:
        """Returns none: consumers pull from the target."""
        return []

    # -- by owner ----------------------------------------------------------------------------------------------------

    def _known_before(self, batch: Sequence[Record]) -> set[Identity]:
        """Returns those messages that an earlier generation has scheduled, dispatched lately, or knows a cancel of."""
        shards = self._coordinator.shards()
        older = [(shard, (one.topic, one.id)) for one in batch for shard in shards.older_shards_of(one.id)]
        if not older:
            return set()
        known = self._split(older, here=self._local.known, there=self._peers.known)
        return {identity for (_, identity), is_known in zip(older, known, strict=True) if is_known}

    def _cancel(self, ids: Sequence[tuple[str, str]], topics: Sequence[str] | None) -> list[CancelStatus]:
        return self._split(
            ids,
            here=lambda part: self._local.cancel(part, topics=topics),
            there=lambda url, part: self._peers.cancel(url, part, topics=topics),
        )

    def _find(self, wanted: Sequence[tuple[str, Wanted]]) -> list[Mapping[str, object] | None]:
        return self._split(wanted, here=self._local.find, there=self._peers.find)

    def _topic_counts(self) -> dict[str, int]:
        return sum_topics(self._on_each_node(here=self._local.topic_counts, there=self._peers.topic_counts))

    def _split(
        self,
        entries: Sequence[tuple[str, Part]],
        *,
        here: Callable[[Sequence[tuple[str, Part]]], list[Result]],
        there: Callable[[str, Sequence[tuple[str, Part]]], list[Result]],
    ) -> list[Result]:
        """Have each entry answered by the owner of the shard named with it; returns the answers in order."""
        places: defaultdict[_Owner, list[int]] = defaultdict(list)
        for index, (shard, _) in enumerate(entries):
            places[self._owner_of(shard)].append(index)
        parts = {owner: [entries[index] for index in indexes] for owner, indexes in places.items()}
        answers = self._ask(parts, here=here, there=there)
        results: dict[int, Result] = {}
        for owner, indexes in places.items():
            results |= zip(indexes, answers[owner], strict=True)
        return [results[index] for index in range(len(entries))]

    def _on_each_node(
        self, *, here: Callable[[Sequence[str]], Result], there: Callable[[str, Sequence[str]], Result]
    ) -> list[Result]:
        """Have the shards of every generation answered by their owners; returns one answer a node."""
        parts: defaultdict[_Owner, list[str]] = defaultdict(list)
        for shard in self._coordinator.shards().names():
            parts[self._owner_of(shard)].append(shard)
        return list(self._ask(parts, here=here, there=there).values())

    def _ask(
        self,
        parts: Mapping[_Owner, Sequence[Part]],
        *,
        here: Callable[[Sequence[Part]], Result],
        there: Callable[[str, Sequence[Part]], Result],
    ) -> dict[_Owner, Result]:
        try:
            remote = {
                owner: self._forwards.submit(there, owner.url, part)
                for owner, part in parts.items()
                if owner.url is not None
            }
        except RuntimeError as error:  # of the pool after close(), while the server completes what it has accepted
            raise NotOwner("this node is stopping: repeat the request, at another node") from error
        answers = {owner: here(part) for owner, part in parts.items() if owner.url is None}
        return answers | {owner: request.result() for owner, request in remote.items()}

    def _owner_of(self, shard: str) -> _Owner:
        is_own, record = self._coordinator.owner_of(shard)
        return _Owner(None if is_own else record.peer_url)
