"""Converts messages to the schedule's form, and publishes them to the target broker. No timing, no retries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from outbox_broker.schedule.delay_store import TimedMessage
from outbox_core.common.errors import (
    BrokerRefused,
    BrokerUnavailable,
    InvalidMessage,
    NotAuthenticated,
    NotAuthorized,
    NotSupported,
    StorageFailed,
)
from outbox_core.messages.message import DUE_HEADER, Message
from outbox_core.messages.publish_guard import PublishTarget
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


class _StoredMessage(msgspec.Struct, array_like=True, frozen=True):
    """The schedule's payload: a message without its id, topic and due time."""

    body: bytes
    key: str | None
    headers: dict[str, str]
    created_at_ms: int
    deliver_at_ms: int | None = None
    """What was asked for; what waits behind a refusal is due later. None where nothing was, or by older code."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_StoredMessage).decode


def timed(message: Message, now_ms: int) -> TimedMessage:
    """Returns a message in the schedule's form; without a due time it is due now."""
    stored = _StoredMessage(
        message.body, message.key, dict(message.headers), message.created_at_ms or now_ms, message.deliver_at_ms
    )
    due_ms = now_ms if message.deliver_at_ms is None else message.deliver_at_ms
    return TimedMessage(due_ms, message.id, message.topic, _encode(stored))


def published(one: TimedMessage) -> Message:
    """Returns a scheduled message as it was published. Raises InvalidMessage if it cannot be decoded."""
    stored = _stored(one)
    return msgspec.structs.replace(_for_now(one, stored, stored.headers), deliver_at_ms=stored.deliver_at_ms)


def publish_to_target(target: PublishTarget, batch: Sequence[TimedMessage]) -> list[TimedMessage]:
    """Publish to the target; returns the rejected messages, splitting the batch until the topic, or the message, at
    fault is isolated.

    Raises if the whole batch may be retried. Messages published twice in either case are dropped by the target by id.
    """
    try:
        results = target.publish([_message(one) for one in batch])
    except (BrokerUnavailable, NotAuthenticated, StorageFailed):
        raise
    except (NotAuthorized, NotSupported) as error:
        return _parted(target, _by_topic(batch), error)
    except (BrokerRefused, InvalidMessage) as error:
        return _parted(target, [[one] for one in batch], error)
    refused: list[TimedMessage] = []
    for one, result in zip(batch, results, strict=True):
        if not result.status.is_success:
            refused.append(one)
            _log_refused([one], str(result.error))
    return refused


def _parted(
    target: PublishTarget, parts: Sequence[Sequence[TimedMessage]], error: BrokerRefused | InvalidMessage
) -> list[TimedMessage]:
    if len(parts) != 1:
        return [one for part in parts for one in publish_to_target(target, part)]
    _log_refused(parts[0], str(error))
    return list(parts[0])


def _by_topic(batch: Sequence[TimedMessage]) -> list[list[TimedMessage]]:
    parts: defaultdict[str, list[TimedMessage]] = defaultdict(list)
    for one in batch:
        parts[one.topic].append(one)
    return list(parts.values())


def _log_refused(refused: Sequence[TimedMessage], error: str) -> None:
    first = refused[0]
    fields = {"topic": first.topic, "first_message_id": first.id, "messages": len(refused), "error": error}
    logger.warning("delivery_refused", extra=fields)


def _message(one: TimedMessage) -> Message:
    """Returns the message for the target: due now, under its original id.

    The requested due time is added as a header, unless that exceeds the limit of headers.
    """
    stored = _stored(one)
    if stored.deliver_at_ms is None:
        return _for_now(one, stored, stored.headers)
    try:
        return _for_now(one, stored, {**stored.headers, DUE_HEADER: str(stored.deliver_at_ms)})
    except InvalidMessage:
        return _for_now(one, stored, stored.headers)


def _stored(one: TimedMessage) -> _StoredMessage:
    try:
        return _decode(one.payload)
    except msgspec.DecodeError as error:  # this one alone is refused, and kept
        raise InvalidMessage(f"a scheduled message cannot be decoded: {error}") from error


def _for_now(one: TimedMessage, stored: _StoredMessage, headers: Mapping[str, str]) -> Message:
    return Message(
        id=one.id, topic=one.topic, body=stored.body, key=stored.key, headers=headers,
        created_at_ms=stored.created_at_ms,
    )  # fmt: skip
