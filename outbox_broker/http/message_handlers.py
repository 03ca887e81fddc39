"""Handlers of messages: publish, cancel, and queries of the schedule. They run in worker threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from outbox_broker.http.access_control import Role, authorize
from outbox_broker.http.content_negotiation import LONG_BYTES, Codec
from outbox_broker.http.incremental_batch_decoding import WHERE
from outbox_broker.http.plain_batch_publish import publish_plain
from outbox_broker.http.problems import Problem, of_decoding
from outbox_broker.http.received_messages import (
    ReceivedMultiTopicMessage,
    ReceivedNewMessage,
    ReceivedPackedMessage,
    ReceivedPackedMultiTopicMessage,
    ReceivedPackedMultiTopicPublishRequest,
    ReceivedPackedPublishRequest,
    decoded_body,
    decoded_headers,
)
from outbox_broker.http.request_context import Call, Entry
from outbox_broker.http.uniform_result_encoding import encode_uniform_results
from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.message import (
    Message,
    PublishStatus,
    check_message_id,
    check_topic,
)
from outbox_core.protocol.problem import ProblemKind
from outbox_core.protocol.wire import (
    CancelAnswer,
    CancelOutcome,
    CancelRequest,
    NewMessage,
    PublishAnswer,
    PublishOutcome,
    PublishRequest,
    RefusedAnswer,
    RetryAnswer,
    RetryRequest,
    ScheduledAnswer,
    ScheduledCount,
    ScheduledMessage,
    ScheduledQuery,
)
from outbox_core.protocol.wire_conversion import body_bytes
from outbox_core.protocol.wire_multi_topic_publish import (
    MultiTopicMessage,
    MultiTopicPublishRequest,
)

_BUCKET_MS = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}


def publish(call: Call) -> PublishAnswer | msgspec.Raw:
    """Store a batch; all of it is validated before any of it is stored."""
    stored = None if call.body_codec is Codec.JSON else publish_plain(call)
    if stored is not None:
        return _all_stored(call, stored)
    return _store(call, ((message, call.topic) for message in _published(call)))


def publish_addressed(call: Call) -> PublishAnswer | msgspec.Raw:
    """Store a batch whose messages name their topics, each of which the sender must be allowed to publish to; all of it
    is validated before any of it is stored.
    """
    return _store(call, _allowed(call, _addressed(call)))


def cancel(call: Call) -> CancelAnswer:
    """Cancel scheduled messages on the topics that the token covers: other topics are invisible to it."""
    ids = call.read(CancelRequest).ids
    call.check_batch(ids, where="$.ids")
    for index, message_id in enumerate(ids):
        _check_id(message_id, where=f"$.ids[{index}]")
    statuses = call.served.producers.cancel(ids, topics=call.principal.topics)
    return CancelAnswer(
        results=[CancelOutcome(id=message_id, status=status) for message_id, status in zip(ids, statuses, strict=True)]
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


def scheduled(call: Call) -> ScheduledAnswer:
    """Count scheduled messages per minute, hour or day, a bounded page of them."""
    query = call.read_query(ScheduledQuery)
    if query.topic is not None:
        _check_topic(query.topic, where="query.topic")
    call.require(Role.READ, query.topic)
    counts = call.served.producers.scheduled(query.topic, from_ms=query.from_ms, to_ms=query.to_ms, bucket=query.bucket)
    page = counts[: call.services.settings.scheduled_buckets_max]
    return ScheduledAnswer(
        bucket=query.bucket,
        counts=[ScheduledCount(at_ms=at_ms, messages=count) for at_ms, count in page],
        next_from_ms=page[-1][0] + _BUCKET_MS[query.bucket] if len(page) < len(counts) else None,
    )


def scheduled_message(call: Call) -> ScheduledMessage:
    """Returns one scheduled message; not found if the token does not cover its topic."""
    message = call.served.producers.scheduled_message(
        _check_id(call.item, where="path.id"), topics=call.principal.topics
    )
    if message is None:
        raise Problem(ProblemKind.NOT_FOUND, f"no message is scheduled under the id {call.item}")
    refused = message.get("refused")
    return ScheduledMessage(
        id=call.item,
        topic=str(message["topic"]),
        deliver_at_ms=int(str(message["deliver_at_ms"])),
        refused=None if refused is None else str(refused),
    )


def _published(call: Call) -> Iterable[NewMessage]:
    if call.body_codec is Codec.JSON:
        return _sent(call, ReceivedNewMessage, lambda: call.read(PublishRequest).messages)
    return _sent(call, ReceivedPackedMessage, lambda: call.read(ReceivedPackedPublishRequest).messages)


def _addressed(call: Call) -> Iterable[MultiTopicMessage | ReceivedPackedMultiTopicMessage]:
    if call.body_codec is Codec.JSON:
        return _sent(call, ReceivedMultiTopicMessage, lambda: call.read(MultiTopicPublishRequest).messages)
    return _sent(
        call, ReceivedPackedMultiTopicMessage, lambda: call.read(ReceivedPackedMultiTopicPublishRequest).messages
    )


def _sent(call: Call, entry: type[Entry], read_whole: Callable[[], Sequence[Entry]]) -> Iterable[Entry]:
    """Yields the messages of a publish; those of a large one as they are decoded."""
    if len(call.body) > LONG_BYTES:
        return call.read_messages(entry)
    sent = read_whole()
    call.check_batch(sent, where=WHERE)
    return sent


def _allowed(
    call: Call, sent: Iterable[MultiTopicMessage | ReceivedPackedMultiTopicMessage]
) -> Iterator[tuple[NewMessage, str]]:
    """Yields messages with their topics. Raises Problem at the first topic to which the sender may not publish."""
    allowed: set[str] = set()
    for index, message in enumerate(sent):
        if message.topic not in allowed:
            _check_topic(message.topic, where=f"{WHERE}[{index}].topic")
            authorize(call.principal, Role.PUBLISH, message.topic)
            allowed.add(message.topic)
        yield message, message.topic


def _store(call: Call, sent: Iterable[tuple[NewMessage, str]]) -> PublishAnswer | msgspec.Raw:
    now_ms = call.services.clock.now_ms()
    batch = [
        _message(call, message, topic=topic, index=index, now_ms=now_ms) for index, (message, topic) in enumerate(sent)
    ]
    results = call.served.producers.publish(batch, quota=call.principal.quota)
    if all(result.status is PublishStatus.STORED for result in results):
        return _all_stored(call, [result.id for result in results])
    return PublishAnswer(
        results=[PublishOutcome(id=result.id, status=result.status, error=result.error) for result in results]
    )


def _all_stored(call: Call, ids: Sequence[str]) -> PublishAnswer | msgspec.Raw:
    packed = (
        encode_uniform_results("id", ids, {"status": PublishStatus.STORED, "error": None}) if call.is_packed else None
    )
    if packed is not None:
        return packed
    return PublishAnswer(results=[PublishOutcome(id=message_id, status=PublishStatus.STORED) for message_id in ids])


def _message(call: Call, sent: NewMessage, *, topic: str, index: int, now_ms: int) -> Message:
    where = f"{WHERE}[{index}]"
    try:
        body = body_bytes(decoded_body(sent.body), sent.encoding)
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
            topic=topic,
            body=body,
            key=sent.key,
            headers=_headers(call, sent, where=where),
            created_at_ms=now_ms if sent.created_at_ms is None else sent.created_at_ms,
            deliver_at_ms=_deliver_at_ms(sent, now_ms=now_ms),
        )
    except InvalidMessage as error:
        raise Problem(ProblemKind.INVALID_MESSAGE, str(error), where=where) from error
    except UnicodeDecodeError as error:
        raise of_decoding(error) from error


def _headers(call: Call, sent: NewMessage, *, where: str) -> Mapping[str, str]:
    try:
        return decoded_headers(sent.headers, call.body_codec)
    except msgspec.ValidationError as error:
        raise of_decoding(error, within=f"{where}.headers") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem(ProblemKind.MALFORMED_BODY, f"the headers of {where}: {error}") from error


def _deliver_at_ms(sent: NewMessage, *, now_ms: int) -> int | None:
    if sent.delay_ms is None:
        return sent.deliver_at_ms
    if sent.deliver_at_ms is not None:
        raise InvalidMessage("deliver_at_ms and delay_ms exclude each other")
    return now_ms + sent.delay_ms


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
