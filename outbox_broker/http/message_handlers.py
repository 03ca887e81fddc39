"""Handlers of messages: publish, cancel, and queries of the schedule. They run in worker threads."""

from __future__ import annotations

from typing import Final

import msgspec

from outbox_broker.http.access_control import Role, authorize
from outbox_broker.http.content_negotiation import Codec, encode_uniform_results
from outbox_broker.http.received_records import check_topic_name, json_records, packed_records
from outbox_broker.http.request_context import Call
from outbox_broker.http.responses import Problem
from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.message import (
    PublishStatus,
    check_message_id,
)
from outbox_core.protocol.problem import ProblemKind
from outbox_core.protocol.wire import (
    CancelAnswer,
    CancelOutcome,
    CancelRequest,
    PublishAnswer,
    PublishOutcome,
    RefusedAnswer,
    RetryAnswer,
    RetryRequest,
    ScheduledAnswer,
    ScheduledCount,
    ScheduledMessage,
    ScheduledQuery,
)

_BUCKET_MS: Final = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}


def publish(call: Call) -> PublishAnswer | msgspec.Raw:
    """Store a batch whose messages name their topics, each of which the sender must be allowed to publish to; all of it
    is validated before any of it is stored.
    """
    records = packed_records(call) if call.body_codec is Codec.MSGPACK else json_records(call)
    for topic in dict.fromkeys([record.topic for record in records]):
        authorize(call.principal, Role.PUBLISH, topic)
    results = call.producers.publish(records, quota=call.principal.quota)
    if call.is_packed and [result.status for result in results].count(PublishStatus.STORED) == len(results):
        ids = [result.id for result in results]
        packed = encode_uniform_results("id", ids, {"status": PublishStatus.STORED, "error": None})
        if packed is not None:
            return packed
    return PublishAnswer(
        results=[PublishOutcome(id=result.id, status=result.status, error=result.error) for result in results]
    )


# -- scheduled messages ------------------------------------------------------------------------------------------------


def cancel(call: Call) -> CancelAnswer:
    """Cancel scheduled messages on the topics that the token covers: other topics are invisible to it."""
    ids = call.read(CancelRequest).ids
    call.check_batch(ids, where="$.ids")
    for index, message_id in enumerate(ids):
        _check_id(message_id, where=f"$.ids[{index}]")
    statuses = call.producers.cancel(ids, topics=call.principal.topics)
    return CancelAnswer(
        results=[CancelOutcome(id=message_id, status=status) for message_id, status in zip(ids, statuses, strict=True)]
    )


def scheduled(call: Call) -> ScheduledAnswer:
    """Count scheduled messages per minute, hour or day, a bounded page of them."""
    query = call.read_query(ScheduledQuery)
    if query.topic is not None:
        check_topic_name(query.topic, where="query.topic")
    call.require(Role.READ, query.topic)
    counts = call.producers.scheduled(query.topic, from_ms=query.from_ms, to_ms=query.to_ms, bucket=query.bucket)
    page = counts[: call.services.settings.scheduled_buckets_max]
    return ScheduledAnswer(
        bucket=query.bucket,
        counts=[ScheduledCount(at_ms=at_ms, messages=count) for at_ms, count in page],
        next_from_ms=page[-1][0] + _BUCKET_MS[query.bucket] if len(page) < len(counts) else None,
    )


def scheduled_message(call: Call) -> ScheduledMessage:
    """Returns one scheduled message; not found if the token does not cover its topic."""
    message = call.producers.scheduled_message(_check_id(call.item, where="path.id"), topics=call.principal.topics)
    if message is None:
        raise Problem(ProblemKind.NOT_FOUND, f"no message is scheduled under the id {call.item}")
    refused = message.get("refused")
    return ScheduledMessage(
        id=call.item,
        topic=str(message["topic"]),
        deliver_at_ms=int(str(message["deliver_at_ms"])),
        refused=None if refused is None else str(refused),
    )


def refused(call: Call) -> RefusedAnswer:
    """List what a delay service's target refused for good, on the topics that the token covers."""
    refusals = call.served.needed(call.served.refusals)
    return RefusedAnswer(messages=refusals.refused(topics=call.principal.topics))


def retry_refused(call: Call) -> RetryAnswer:
    """Publish refused messages once more, on the topics that the token covers."""
    ids = call.read(RetryRequest).ids
    call.check_batch(ids, where="$.ids")
    for index, message_id in enumerate(ids):
        _check_id(message_id, where=f"$.ids[{index}]")
    refusals = call.served.needed(call.served.refusals)
    return RetryAnswer(results=refusals.retry_refused(ids, topics=call.principal.topics))


def _check_id(message_id: str, *, where: str) -> str:
    try:
        return check_message_id(message_id)
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_MESSAGE, str(error), where=where) from error
