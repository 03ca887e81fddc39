"""The shapes of the HTTP protocol, version 1, shared by server and clients. The engine has the rules.

Unknown fields of a request are rejected, so that a misspelt one is an error and not a default; responses may get new
fields, and clients ignore unknown ones. Times are integer milliseconds since the epoch, durations milliseconds.
In JSON a body is text ("utf8"), or base64 text. In MessagePack a message is an array, message.Record, whose body is
`bin`, and what carries messages is an array, too: its shape says which.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from outbox_core.messages import limits
from outbox_core.messages.broadcast_port import Start
from outbox_core.messages.message import (
    AckStatus,
    CancelStatus,
    DeadFilter,
    ExtendStatus,
    NackStatus,
    PublishStatus,
)

JSON_TYPE: Final = "application/json"
MSGPACK_TYPE: Final = "application/msgpack"
TIME_MS_MAX: Final = limits.TIME_MS_MAX
JSON_BYTES_MAX: Final = 4 * 1024 * 1024
"""A publish of several messages has no more in JSON: it is decoded in one call, which holds the interpreter."""

TimeMs = Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]
DurationMs = Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]
# Documentation only: Message and the server check these limits, so that each has one error text.
TopicName = Annotated[str, Meta(extra_json_schema={"pattern": r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}$"})]
MessageId = Annotated[str, Meta(extra_json_schema={"pattern": "^[A-Za-z0-9._:-]{1,64}$"})]
Key = Annotated[str, Meta(description="1 to 1,024 bytes in UTF-8", extra_json_schema={"minLength": 1})]
Headers = Annotated[
    dict[str, str],
    Meta(
        description="Names are HTTP tokens of up to 128 characters; 32 KiB in all",
        extra_json_schema={"maxProperties": 64, "propertyNames": {"pattern": "^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}$"}},
    ),
]
Batch = Meta(extra_json_schema={"maxItems": limits.BATCH_MESSAGES_MAX})


class Encoding(StrEnum):
    """How a body is written in JSON."""

    UTF8 = "utf8"
    BASE64 = "base64"


class Request(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The base of requests."""


class _Answer(Struct, frozen=True, kw_only=True):
    """The base of responses."""


# -- publish ----------------------------------------------------------------------------------------------------------


class JsonMessage(Request, frozen=True, kw_only=True):
    """One message of a publish; without an id the server generates one, and cannot recognise a repeat."""

    topic: TopicName
    body: str
    id: MessageId | None = None
    key: Key | None = None
    headers: Headers | None = None
    encoding: Encoding | None = None
    created_at_ms: TimeMs | None = None
    deliver_at_ms: TimeMs | None = None
    delay_ms: DurationMs | None = None


class PublishRequest(Request, frozen=True, kw_only=True):
    """POST /v1/publish in JSON; in MessagePack it is an array of message.Record. The sender must be allowed to publish
    to each topic that is named.
    """

    messages: Annotated[list[JsonMessage], Batch]


class PublishOutcome(_Answer, frozen=True, kw_only=True):
    """The outcome of one message; `error` is the reason why it was rejected."""

    id: str
    status: PublishStatus
    error: str | None = None


class PublishAnswer(_Answer, frozen=True, kw_only=True):
    """One outcome a message, in the request's order."""

    results: list[PublishOutcome]


# -- consume ----------------------------------------------------------------------------------------------------------


class PullRequest(Request, frozen=True, kw_only=True):
    """POST .../groups/{group}/pull. `consumer` names the client in the broker's log."""

    max_messages: Annotated[int, Meta(ge=1, le=limits.PULL_MESSAGES_MAX)] = 100
    wait_ms: Annotated[int, Meta(ge=0, le=limits.PULL_WAIT_MS_MAX)] = 0
    invisible_ms: Annotated[int, Meta(ge=limits.INVISIBLE_MS_MIN, le=limits.INVISIBLE_MS_MAX)] = (
        limits.INVISIBLE_MS_DEFAULT
    )
    consumer: Annotated[str, Meta(max_length=255)] | None = None
    begins: bool = False


class JsonRecord(_Answer, frozen=True, kw_only=True):
    """A message in an answer in JSON; in MessagePack it is a message.Record."""

    id: str
    topic: str
    key: str | None
    headers: dict[str, str]
    body: str
    encoding: Encoding
    created_at_ms: int
    deliver_at_ms: int | None


class JsonDelivery(JsonRecord, frozen=True, kw_only=True, omit_defaults=True):
    """One delivery; settle it with `receipt`. `expired`: the invisible time of a delivery ran out, and no consumer has
    tried it since.

    In MessagePack it is a message.Delivery.
    """

    receipt: str
    attempt: int
    expired: bool = False


class PullAnswer(_Answer, frozen=True, kw_only=True):
    """The deliveries, oldest first; empty if no message was ready within `wait_ms`. In MessagePack the list alone."""

    deliveries: list[JsonDelivery]


class ReadRequest(Request, frozen=True, kw_only=True):
    """POST /v1/topics/{topic}/read: from `offset` on; without one, from `start`."""

    offset: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)] | None = None
    start: Start = "latest"
    max_messages: Annotated[int, Meta(ge=1, le=limits.PULL_MESSAGES_MAX)] = 100
    wait_ms: Annotated[int, Meta(ge=0, le=limits.PULL_WAIT_MS_MAX)] = 0


class ReadAnswer(_Answer, frozen=True, kw_only=True):
    """The messages from `offset` up to `next_offset`, where the next read begins; empty if none came in time. There is
    nothing to settle. In MessagePack it is a broadcast_port.TopicRead.
    """

    messages: list[JsonRecord]
    offset: int
    next_offset: int


class AckRequest(Request, frozen=True, kw_only=True):
    """POST .../groups/{group}/ack."""

    receipts: Annotated[list[str], Batch]


class NackRequest(Request, frozen=True, kw_only=True):
    """POST .../groups/{group}/nack. Without `delay_ms` the group's backoff decides."""

    receipts: Annotated[list[str], Batch]
    delay_ms: Annotated[int, Meta(ge=0, le=limits.DELAY_MAX_MS)] | None = None
    reason: Annotated[str, Meta(max_length=limits.REASON_CHARS_MAX)] | None = None
    counts: bool = True


class ExtendRequest(Request, frozen=True, kw_only=True):
    """POST .../groups/{group}/extend."""

    receipts: Annotated[list[str], Batch]
    invisible_ms: Annotated[int, Meta(ge=limits.INVISIBLE_MS_MIN, le=limits.INVISIBLE_MS_MAX)]
    begun: bool = False


class AckOutcome(_Answer, frozen=True, kw_only=True):
    """The outcome of one acknowledgement."""

    receipt: str
    status: AckStatus


class AckAnswer(_Answer, frozen=True, kw_only=True):
    """One outcome a receipt, in the request's order."""

    results: list[AckOutcome]


class NackOutcome(_Answer, frozen=True, kw_only=True):
    """The outcome of one negative acknowledgement."""

    receipt: str
    status: NackStatus


class NackAnswer(_Answer, frozen=True, kw_only=True):
    """One outcome a receipt, in the request's order."""

    results: list[NackOutcome]


class ExtendOutcome(_Answer, frozen=True, kw_only=True):
    """The outcome of one extension."""

    receipt: str
    status: ExtendStatus


class ExtendAnswer(_Answer, frozen=True, kw_only=True):
    """One outcome a receipt, in the request's order."""

    results: list[ExtendOutcome]


# -- schedule ---------------------------------------------------------------------------------------------------------


class CancelRequest(Request, frozen=True, kw_only=True):
    """POST /v1/scheduled/cancel."""

    ids: Annotated[list[MessageId], Batch]


class CancelOutcome(_Answer, frozen=True, kw_only=True):
    """The outcome of one cancel."""

    id: str
    status: CancelStatus


class CancelAnswer(_Answer, frozen=True, kw_only=True):
    """One outcome an id, in the request's order."""

    results: list[CancelOutcome]


class RefusedMessage(_Answer, frozen=True, kw_only=True):
    """A message that the target of a delay service refused for good: it stays until it is retried, or canceled."""

    id: str
    topic: str
    reason: str


class RefusedAnswer(_Answer, frozen=True, kw_only=True):
    """GET /v1/refused: those that are remembered, at most a thousand of each process or shard."""

    messages: list[RefusedMessage]


class RetryRequest(Request, frozen=True, kw_only=True):
    """POST /v1/refused/retry."""

    ids: Annotated[list[MessageId], Batch]


class RetryOutcome(_Answer, frozen=True, kw_only=True):
    """`sent`: the target has it, and it is scheduled no more. `refused` or `deferred`: it stays, for the reason in
    `error`. `unknown`: no message of this id was refused.
    """

    id: str
    status: str
    error: str | None = None


class RetryAnswer(_Answer, frozen=True, kw_only=True):
    """One outcome an id, in the request's order."""

    results: list[RetryOutcome]


class ScheduledQuery(Request, frozen=True, kw_only=True):
    """The query of GET /v1/scheduled."""

    topic: str | None = None
    from_ms: TimeMs | None = None
    to_ms: TimeMs | None = None
    bucket: Literal["minute", "hour", "day"] = "minute"


class ScheduledCount(_Answer, frozen=True, kw_only=True):
    """The number of messages that are due in the bucket that begins at `at_ms`."""

    at_ms: int
    messages: int


class ScheduledAnswer(_Answer, frozen=True, kw_only=True):
    """Counts of scheduled messages by due time; `next_from_ms` is where the next page begins, if any."""

    bucket: Literal["minute", "hour", "day"]
    counts: list[ScheduledCount]
    next_from_ms: int | None = None


class ScheduledMessage(_Answer, frozen=True, kw_only=True):
    """A message that waits for its due time. `refused`: why the target of a delay service refused it for good, which
    somebody has to retry (POST /v1/refused/retry) or to cancel.
    """

    id: str
    topic: str
    deliver_at_ms: int
    refused: str | None = None


# -- recurring messages -----------------------------------------------------------------------------------------------


class RecurringSettings(Request, frozen=True, kw_only=True):
    """PUT /v1/recurring/{name}: the message, and when it is published. `cron` has five fields, in the zone `tz`.

    `paused`: it is added as one that is paused.
    """

    topic: TopicName
    cron: Annotated[str, Meta(max_length=limits.CRON_CHARS_MAX)]
    tz: Annotated[str, Meta(max_length=limits.TZ_CHARS_MAX)] = "UTC"
    key: Key | None = None
    headers: Headers | None = None
    body: str = ""
    encoding: Encoding | None = None
    catch_up: Annotated[int, Meta(ge=1, le=limits.RECURRING_CATCH_UP_MAX)] = 1
    paused: bool = False


class RecurringQuery(Request, frozen=True, kw_only=True):
    """The query of GET /v1/recurring/{name}: how many of its next occurrences are told."""

    runs: Annotated[int, Meta(ge=1, le=limits.RECURRING_RUNS_MAX)] = 5


class RecurringAnswer(_Answer, frozen=True, kw_only=True):
    """A recurring message; key, headers and body are null in a list, and for a token that may only `read`.

    `generation`: its number, another one after it was deleted and added again. `fired_to_ms`: its occurrences up to
    then are over, by its addition at first. `next_ms`: when it occurs next, empty while it is paused. `failure`: why
    what is due could not be published yet.
    """

    name: str
    topic: str
    cron: str
    tz: str
    catch_up: int
    paused: bool
    generation: int
    added_at_ms: int
    fired_to_ms: int
    next_ms: list[int]
    failure: str | None = None
    key: str | None = None
    headers: dict[str, str] | None = None
    body: str | None = None
    encoding: Encoding | None = None


class RecurringListAnswer(_Answer, frozen=True, kw_only=True):
    """A page of recurring messages, by name. `next`: the cursor of the next page, if any."""

    recurring: list[RecurringAnswer]
    next: str | None = None


# -- groups and topics ------------------------------------------------------------------------------------------------


class StartAt(Struct, frozen=True, forbid_unknown_fields=True):
    """The start of a group at a time."""

    at_ms: TimeMs


class BackoffSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The backoff between a group's retries."""

    initial_ms: Annotated[int, Meta(ge=1, le=limits.DELAY_MAX_MS)] = 1_000
    multiplier: Annotated[float, Meta(ge=1, le=1000)] = 2.0
    max_ms: Annotated[int, Meta(ge=1, le=limits.DELAY_MAX_MS)] = 5 * 60 * 1000


class GroupSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PUT /v1/topics/{topic}/groups/{group}, and the settings that GET returns."""

    start: Literal["earliest", "latest"] | StartAt = "earliest"
    filter: str | None = None
    max_attempts: Annotated[int, Meta(ge=1, le=1000)] = limits.ATTEMPTS_MAX_DEFAULT
    backoff: BackoffSettings = BackoffSettings()
    ordered: bool = False


class SeekRequest(Request, frozen=True, kw_only=True):
    """POST .../groups/{group}/seek: to a time or to an offset, one of the two."""

    to_ms: TimeMs | None = None
    to_offset: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)] | None = None


# -- dead letters -----------------------------------------------------------------------------------------------------


class Failures(_Answer, frozen=True, kw_only=True):
    """A number of consecutive attempts that failed with the same reason."""

    reason: str
    attempts: int


class JsonDeadLetter(_Answer, frozen=True, kw_only=True):
    """A dead letter of a group; key, headers and body are null for a token that may only `read`.

    In MessagePack it is a message.DeadLetter, which says whether it has them.
    """

    id: str
    topic: str
    group: str
    attempts: int
    reason: str
    dead_at_ms: int
    history: list[Failures] = []
    key: str | None = None
    headers: dict[str, str] | None = None
    body: str | None = None
    encoding: Encoding | None = None


class DeadAnswer(_Answer, frozen=True, kw_only=True):
    """One page of dead letters, oldest first. `next`: the cursor of the next page, if any.

    In MessagePack it is an array: `next`, and the list of message.DeadLetter.
    """

    dead: list[JsonDeadLetter]
    next: str | None = None


class RedriveRequest(Request, frozen=True, kw_only=True):
    """POST .../dead/redrive: `{"ids": [...]}` or `{"all": true}`."""

    ids: list[str] | None = None
    all: bool = False
    per_second: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class RedriveAnswer(_Answer, frozen=True, kw_only=True):
    """The number of dead letters that were redriven."""

    redriven: int


class StopRedriveAnswer(_Answer, frozen=True, kw_only=True):
    """The number of redriven messages that are dead letters again."""

    stopped: int


class DeadCountRequest(Request, frozen=True, kw_only=True):
    """POST .../dead/count: `{"ids": [...]}`, `{"where": {...}}` or `{"all": true}`."""

    ids: list[str] | None = None
    where: DeadFilter | None = None
    all: bool = False


class DiscardRequest(DeadCountRequest, frozen=True, kw_only=True):
    """POST .../dead/discard: which ones as for a count. `dead_before_ms`: only those that died before, as it said."""

    why: Annotated[str, Meta(min_length=1, max_length=limits.REASON_CHARS_MAX)]
    dead_before_ms: TimeMs | None = None


class DiscardAnswer(_Answer, frozen=True, kw_only=True):
    """The number of dead letters that were discarded."""

    discarded: int


class JsonEdit(Request, frozen=True, kw_only=True):
    """What is changed in a dead letter: at least one of these. `headers` are set, and the others stay."""

    body: str | None = None
    encoding: Encoding | None = None
    headers: Headers | None = None
    remove_headers: list[str] = []


class JsonLetterEdit(JsonEdit, frozen=True, kw_only=True):
    """The same of the dead letter that has this id."""

    id: str


class EditRequest(Request, frozen=True, kw_only=True):
    """POST .../dead/edit: `edits`; or `edit`, without a body, with `where` or `all`, for a page of those, from `after`
    on.

    `operation`: a name of the client's that tells a repeat of this request from another one. `dead_before_ms` goes with
    `edit`: only those that died before, as a count said.
    """

    operation: MessageId
    why: Annotated[str, Meta(min_length=1, max_length=limits.REASON_CHARS_MAX)]
    edits: Annotated[list[JsonLetterEdit], Batch] | None = None
    edit: JsonEdit | None = None
    where: DeadFilter | None = None
    all: bool = False
    dead_before_ms: TimeMs | None = None
    after: Annotated[int, Meta(ge=0, le=TIME_MS_MAX)] = 0


# -- all routes -------------------------------------------------------------------------------------------------------


class NoRequest(Request, frozen=True, kw_only=True):
    """The body of a request that has no fields: empty, or `{}`."""


class NoAnswer(_Answer, frozen=True, kw_only=True):
    """A response without fields: the request has succeeded."""


class DeleteQuery(Request, frozen=True, kw_only=True):
    """`force`: delete it even if it is in use."""

    force: bool = False


class PurgeRequest(Request, frozen=True, kw_only=True):
    """POST /v1/topics/{topic}/purge. `scheduled`: what is scheduled is canceled; `dead`: dead letters are discarded."""

    scheduled: bool = False
    dead: bool = False


class PurgeAnswer(_Answer, frozen=True, kw_only=True):
    """What the groups of a topic together do not get any more, and what was kept."""

    groups: int
    waiting: int
    """Messages that were not delivered, or waited for another attempt; one of two groups counts twice."""
    in_flight: int
    """Messages that consumers held: their receipts are stale."""
    scheduled_canceled: int
    scheduled_kept: int
    dead_discarded: int
    dead_kept: int


class PageQuery(Request, frozen=True, kw_only=True):
    """A page of a list: `after` is the cursor that the previous page returned as `next`."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    after: Annotated[str, Meta(max_length=1024)] | None = None


class TopicsAnswer(_Answer, frozen=True, kw_only=True):
    """Names of topics, sorted."""

    topics: list[str]
    next: str | None = None


class TopicAnswer(_Answer, frozen=True, kw_only=True):
    """A topic's statistics and the names of its groups."""

    topic: str
    figures: dict[str, int]
    groups: list[str]


class GroupStall(_Answer, frozen=True, kw_only=True):
    """Why nothing is delivered to a group in which messages wait.

    `since_ms`: when that was first seen after the last delivery, after the broker's start at the earliest.
    `next_visible_ms`: when the first message in flight, or waiting for another attempt, becomes visible.
    """

    reason: str
    since_ms: int
    waiting: int
    in_flight: int
    next_visible_ms: int | None = None


class GroupAnswer(_Answer, frozen=True, kw_only=True):
    """A group's statistics and settings; `stall` where messages wait and none is delivered. `resume_offset`: the first
    that the group may still get, in flight or waiting for another attempt; dead letters do not count.
    """

    topic: str
    group: str
    figures: dict[str, int]
    settings: GroupSettings
    paused: bool
    resume_offset: int
    stall: GroupStall | None = None


# -- the broker as a whole ------------------------------------------------------------------------------------------


class CordonRequest(Request, frozen=True, kw_only=True):
    """POST /v1/cordon. `reason` is shown to whoever asks for the status, and to publishers."""

    reason: Annotated[str, Meta(max_length=500)] = ""


class CordonNote(_Answer, frozen=True, kw_only=True):
    """Since when the broker takes no new messages, and why."""

    since_ms: int
    reason: str


class SnapshotRequest(Request, frozen=True, kw_only=True):
    """POST /v1/snapshot. `token`: by which the backup that asks recognises what was made for it."""

    token: Annotated[str, Meta(min_length=1, max_length=64)]


class SnapshotSegment(_Answer, frozen=True, kw_only=True):
    """A segment that bookies keep, as its head says it, and where it ended at the moment; None: where it ends."""

    name: str
    kind: int
    epoch: int
    first: int
    created_at_ms: int
    end: int | None


class SnapshotAnswer(_Answer, frozen=True, kw_only=True):
    """Of which moment the snapshot is, and what is in it: files of the data folder, or segments that bookies keep, of
    which `size_bytes` counts what is known.
    """

    at_ms: int
    files: int
    size_bytes: int
    segments: list[SnapshotSegment] = []


class GroupRemainder(_Answer, frozen=True, kw_only=True):
    """What a group has still to get: not delivered or waiting for another attempt, and in flight; its dead letters.
    `oldest_unacked_age_ms`: of what is ready or in flight, 0 if there is nothing.
    """

    group: str
    ready: int
    in_flight: int
    dead: int
    oldest_unacked_age_ms: int = 0


class TopicRemainder(_Answer, frozen=True, kw_only=True):
    """What is left of a topic: what is scheduled, and what its groups have."""

    topic: str
    scheduled: int
    groups: list[GroupRemainder]


class StatusAnswer(_Answer, frozen=True, kw_only=True):
    """Whether the broker takes new messages (`cordon` is null), and what it still has to deliver: of all topics, then
    by topic, those of which nothing is left left out. `drained`: nothing ready, in flight or scheduled.
    `oldest_unacked_age_ms`: of the messages that are ready or in flight, null if there is none.
    """

    cordon: CordonNote | None
    drained: bool
    ready: int
    in_flight: int
    scheduled: int
    dead: int
    topics: list[TopicRemainder]
    oldest_unacked_age_ms: int | None = None
    next: str | None = None


class Check(_Answer, frozen=True, kw_only=True):
    """The result of one health check."""

    name: str
    status: Literal["ok", "failed"]
    observed: str | None = None
    hint: str | None = None


class HealthAnswer(_Answer, frozen=True, kw_only=True):
    """Whether the server can serve. `now_ms`: its clock; `roles`: those of the request's token, none where that is
    missing or unknown, all where no token is needed; `version`: of its release, for who has a role. `/livez` tells none
    of these.
    """

    status: Literal["ok", "failed"]
    checks: list[Check] = []
    now_ms: int | None = None
    roles: list[str] | None = None
    version: str | None = None
