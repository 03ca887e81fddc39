"""The protocol between nodes: its shapes, its routes, and what a node answers, from its own shards alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from outbox_broker.cluster.owned_shard_operations import Identity, OwnedShardOperations, Wanted
from outbox_broker.cluster.shard_names import GENERATIONS_MAX
from outbox_broker.http.access_control import Role
from outbox_broker.http.admission_limits import WorkClass
from outbox_broker.http.received_records import ReceivedRecord, check_bounds
from outbox_broker.http.request_context import Call
from outbox_broker.http.routes import Route
from outbox_core.messages import limits
from outbox_core.messages.message import CancelStatus, PublishResult, PublishStatus
from outbox_core.protocol.wire import RefusedAnswer, RetryAnswer

PUBLISH: Final = "/v1/peer/publish"
CANCEL: Final = "/v1/peer/cancel"
FIND: Final = "/v1/peer/find"
KNOWN: Final = "/v1/peer/known"
COUNTS: Final = "/v1/peer/counts"
TOPICS: Final = "/v1/peer/topics"
REFUSED: Final = "/v1/peer/refused"
RETRY: Final = "/v1/peer/retry"

_SHARDS_MAX: Final = 65_536
Entries = Meta(max_length=limits.BATCH_MESSAGES_MAX * GENERATIONS_MAX)
Shards = Annotated[list[str], Meta(max_length=_SHARDS_MAX)]


class PeerPublish(msgspec.Struct, frozen=True):
    """POST /v1/peer/publish: (shard, message) each."""

    messages: Annotated[list[tuple[str, ReceivedRecord]], Entries]


class PeerResult(msgspec.Struct, frozen=True, array_like=True):
    """What became of one message."""

    id: str
    status: PublishStatus
    error: str | None

    def result(self) -> PublishResult:
        """Returns the result."""
        return PublishResult(self.id, self.status, self.error)


class PeerResults(msgspec.Struct, frozen=True):
    """One result a message, in order."""

    results: list[PeerResult]


class PeerCancel(msgspec.Struct, frozen=True):
    """POST /v1/peer/cancel: (shard, id) each. `topics`: the patterns that the sender's token covers."""

    ids: Annotated[list[tuple[str, str]], Entries]
    topics: list[str] | None


class PeerStatuses(msgspec.Struct, frozen=True):
    """One status an id, in order."""

    statuses: list[CancelStatus]


class PeerFind(msgspec.Struct, frozen=True):
    """POST /v1/peer/find: (shard, (id, patterns of the topics to search)) each."""

    wanted: Annotated[list[tuple[str, Wanted]], Entries]


class PeerFound(msgspec.Struct, frozen=True):
    """(id, topic, due time) or none for each id, in order."""

    found: list[tuple[str, str, int] | None]


class PeerIdentities(msgspec.Struct, frozen=True):
    """POST /v1/peer/known: (shard, (topic, id)) each."""

    messages: Annotated[list[tuple[str, Identity]], Entries]


class PeerKnown(msgspec.Struct, frozen=True):
    """Whether each message is scheduled, was dispatched lately, or is canceled, in order."""

    known: list[bool]


class PeerCounts(msgspec.Struct, frozen=True):
    """POST /v1/peer/counts: a histogram of these shards."""

    shards: Shards
    topic: str | None
    from_ms: int | None
    to_ms: int | None
    bucket: str


class PeerHistogram(msgspec.Struct, frozen=True):
    """(start of the bucket, messages due)."""

    counts: list[tuple[int, int]]


class PeerTopics(msgspec.Struct, frozen=True):
    """POST /v1/peer/topics: what these shards have scheduled, by topic."""

    shards: Shards


class PeerTopicCounts(msgspec.Struct, frozen=True):
    """Topic -> number of messages."""

    topics: dict[str, int]


class PeerRefused(msgspec.Struct, frozen=True):
    """POST /v1/peer/refused: what the target refused for good of these shards, on topics of these patterns."""

    shards: Shards
    topics: list[str] | None


def peer_routes(local: OwnedShardOperations) -> tuple[Route, ...]:
    """Returns the routes by which other nodes use the shards of this one. All need the nodes' token."""
    answers = _Answers(local)
    return (
        _route(PUBLISH, answers.publish, PeerPublish, PeerResults, work=WorkClass.PUBLISH),
        _route(CANCEL, answers.cancel, PeerCancel, PeerStatuses),
        _route(FIND, answers.find, PeerFind, PeerFound),
        _route(KNOWN, answers.known, PeerIdentities, PeerKnown),
        _route(COUNTS, answers.counts, PeerCounts, PeerHistogram, work=WorkClass.PAGE),
        _route(REFUSED, answers.refused, PeerRefused, RefusedAnswer, work=WorkClass.PAGE),
        _route(RETRY, answers.retry_refused, PeerCancel, RetryAnswer, work=WorkClass.PUBLISH),
        _route(TOPICS, answers.topics, PeerTopics, PeerTopicCounts, work=WorkClass.PAGE),
    )


class _Answers:
    def __init__(self, local: OwnedShardOperations) -> None:
        self._local = local

    def publish(self, call: Call) -> PeerResults:
        messages = call.read(PeerPublish).messages
        check_bounds(call, [record for _, record in messages], where=lambda index: f"$.messages[{index}][1]")
        results = self._local.publish(messages)
        return PeerResults([PeerResult(result.id, result.status, result.error) for result in results])

    def cancel(self, call: Call) -> PeerStatuses:
        request = call.read(PeerCancel)
        return PeerStatuses(self._local.cancel(request.ids, topics=request.topics))

    def find(self, call: Call) -> PeerFound:
        found = self._local.find(call.read(PeerFind).wanted)
        return PeerFound(
            [
                None if one is None else (str(one["id"]), str(one["topic"]), int(str(one["deliver_at_ms"])))
                for one in found
            ]
        )

    def known(self, call: Call) -> PeerKnown:
        return PeerKnown(self._local.known(call.read(PeerIdentities).messages))

    def counts(self, call: Call) -> PeerHistogram:
        request = call.read(PeerCounts)
        return PeerHistogram(
            self._local.scheduled(
                request.shards, request.topic, from_ms=request.from_ms, to_ms=request.to_ms, bucket=request.bucket
            )
        )

    def refused(self, call: Call) -> RefusedAnswer:
        request = call.read(PeerRefused)
        return RefusedAnswer(messages=self._local.refused(request.shards, topics=request.topics))

    def retry_refused(self, call: Call) -> RetryAnswer:
        request = call.read(PeerCancel)
        return RetryAnswer(results=self._local.retry_refused(request.ids, topics=request.topics))

    def topics(self, call: Call) -> PeerTopicCounts:
        return PeerTopicCounts(self._local.topic_counts(call.read(PeerTopics).shards))


def _route(
    path: str,
    handler: Callable[[Call], msgspec.Struct],
    body: type[msgspec.Struct],
    answer: type[msgspec.Struct],
    *,
    work: WorkClass = WorkClass.SETTLE,
) -> Route:
    return Route(
        method="POST", path=path, role=Role.ADMIN, summary=answer.__doc__ or "", answer=answer, handler=handler,
        body=body, body_bytes_max=None, work=work,
    )  # fmt: skip
