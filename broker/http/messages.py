"""Handlers of messages on their way in: publish, cancel, and what is scheduled. They run in worker threads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, cast

from broker.http.access import Role
from broker.http.call import Call
from broker.http.codec import Codec
from broker.http.problems import Problem
from broker.publishing import Publishable
from messaging.errors import InvalidMessage
from messaging.ids import new_message_id
from messaging.message import (
    CancelStatus,
    Message,
    PublishStatus,
    check_headers,
    check_key,
    check_message_id,
    check_topic,
)
from messaging.problem import ProblemKind
from messaging.wire import (
    CancelAnswer,
    CancelOutcome,
    CancelRequest,
    Encoding,
    PackedPublishRequest,
    PublishAnswer,
    PublishedMessage,
    PublishOutcome,
    PublishRequest,
    ScheduledAnswer,
    ScheduledCount,
    ScheduledMessage,
    ScheduledQuery,
)
from messaging.wire_messages import body_bytes

_IDS: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}(?:\n[A-Za-z0-9._:-]{1,64})*", re.ASCII)
"""Message ids, one a line: a batch of them is checked at once."""
_AS_IT_IS: Final = frozenset({None, Encoding.BINARY})
_BUCKET_MS = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}


def publish(call: Call) -> PublishAnswer:
    """Store a batch; all of it is checked before any of it is stored."""
    sent: Sequence[PublishedMessage]
    if call.body_codec is Codec.JSON:
        sent = call.read(PublishRequest).messages
    else:
        sent = call.read(PackedPublishRequest).messages
    call.check_batch(sent, where="$.messages")
    if _is_plain(call, sent) and call.engine.publish_plain(call.topic, cast("Sequence[Publishable]", sent)):
        return PublishAnswer(results=[_stored(one) for one in sent])
    now_ms = call.services.clock.now_ms()
    batch = [_message(call, one, number=number, now_ms=now_ms) for number, one in enumerate(sent)]
    results = call.engine.publish(batch)
    return PublishAnswer(
        results=[PublishOutcome(id=result.id, status=result.status, error=result.error) for result in results]
    )


def _is_plain(call: Call, sent: Sequence[PublishedMessage]) -> bool:
    """Whether all of a batch may be stored as it came off the wire: bodies as they are, ids given, for now, in bounds.

    What is out of bounds is no plain batch either: it is looked at one by one, to say where.
    """
    if call.body_codec is Codec.JSON or not sent:
        return False
    limit = call.services.settings.body_bytes_max
    try:
        text = "\n".join([one.id for one in sent])  # type: ignore[misc]  # None is a TypeError
        if not _IDS.fullmatch(text) or text.count("\n") != len(sent) - 1:
            return False
        for one in sent:
            body: object = one.body
            if not isinstance(body, bytes) or len(body) > limit or one.encoding not in _AS_IT_IS:
                return False
            if one.deliver_at_ms is not None or one.delay_ms is not None:
                return False
            if one.key is not None:
                check_key(one.key)
            if one.headers:
                check_headers(one.headers)
    except (TypeError, InvalidMessage):
        return False
    return True


def _stored(sent: PublishedMessage) -> PublishOutcome:
    return PublishOutcome(id=sent.id or "", status=PublishStatus.STORED)


def cancel(call: Call) -> CancelAnswer:
    """Cancel scheduled messages. A token that is limited to some topics cannot touch those of others: unknown to it."""
    ids = call.read(CancelRequest).ids
    call.check_batch(ids, where="$.ids")
    for number, message_id in enumerate(ids):
        _check_id(message_id, where=f"$.ids[{number}]")
    statuses = dict.fromkeys(ids, CancelStatus.UNKNOWN)
    allowed = [message_id for message_id in statuses if _may_cancel(call, message_id)]
    statuses.update(zip(allowed, call.engine.cancel(allowed), strict=True))
    return CancelAnswer(results=[CancelOutcome(id=message_id, status=statuses[message_id]) for message_id in ids])


def scheduled(call: Call) -> ScheduledAnswer:
    """What fires when: counts per minute, hour or day, a bounded page of them."""
    query = call.read_query(ScheduledQuery)
    if query.topic is not None:
        _check_topic(query.topic, where="query.topic")
    call.require(Role.READ, query.topic)
    counts = call.engine.scheduled(query.topic, from_ms=query.from_ms, to_ms=query.to_ms, bucket=query.bucket)
    page = counts[: call.services.settings.scheduled_buckets_max]
    return ScheduledAnswer(
        bucket=query.bucket,
        counts=[ScheduledCount(at_ms=at_ms, messages=count) for at_ms, count in page],
        next_from_ms=page[-1][0] + _BUCKET_MS[query.bucket] if len(page) < len(counts) else None,
    )


def scheduled_message(call: Call) -> ScheduledMessage:
    """One scheduled message; to a token whose topics do not cover it, it is not there."""
    found = call.engine.scheduled_message(_check_id(call.item, where="path.id"))
    if found is None or not call.principal.covers(str(found["topic"])):
        raise Problem(ProblemKind.NOT_FOUND, f"no message is scheduled under the id {call.item}")
    return ScheduledMessage(id=call.item, topic=str(found["topic"]), deliver_at_ms=int(str(found["deliver_at_ms"])))


def _message(call: Call, sent: PublishedMessage, *, number: int, now_ms: int) -> Message:
    where = f"$.messages[{number}]"
    try:
        body = body_bytes(sent.body, sent.encoding)
        limit = call.services.settings.body_bytes_max
        if len(body) > limit:
            raise Problem(
                ProblemKind.MESSAGE_TOO_LARGE,
                f"the body has {len(body):,} bytes, more than the {limit:,} allowed; "
                "store it elsewhere and publish a reference",
                where=f"{where}.body",
                bound=("body_bytes_max", limit),
            )
        return Message(
            id=new_message_id() if sent.id is None else sent.id,
            topic=call.topic,
            body=body,
            key=sent.key,
            headers=sent.headers or {},
            created_at_ms=now_ms if sent.created_at_ms is None else sent.created_at_ms,
            deliver_at_ms=_deliver_at_ms(sent, now_ms=now_ms),
        )
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_MESSAGE, str(error), where=where) from error


def _deliver_at_ms(sent: PublishedMessage, *, now_ms: int) -> int | None:
    if sent.delay_ms is None:
        return sent.deliver_at_ms
    if sent.deliver_at_ms is not None:
        raise InvalidMessage("deliver_at_ms and delay_ms exclude each other")
    return now_ms + sent.delay_ms


def _may_cancel(call: Call, message_id: str) -> bool:
    if call.principal.covers_all:
        return True
    found = call.engine.scheduled_message(message_id)
    return found is None or call.principal.covers(str(found["topic"]))


def _check_topic(topic: str, *, where: str) -> None:
    try:
        check_topic(topic)
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_NAME, str(error), where=where) from error


def _check_id(message_id: str, *, where: str) -> str:
    try:
        return check_message_id(message_id)
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_MESSAGE, str(error), where=where) from error
