"""Converts messages and deliveries to the shapes of wire, and back. Pure."""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import Any, Final

from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.broadcast_port import TopicRead
from outbox_core.messages.message import DeadEdit, DeadLetter, Delivery, GroupConfig, Message, Record
from outbox_core.messages.recurring_message import RecurringMessage
from outbox_core.protocol.wire import (
    BackoffSettings,
    Encoding,
    Failures,
    GroupSettings,
    JsonDeadLetter,
    JsonDelivery,
    JsonEdit,
    JsonLetterEdit,
    JsonMessage,
    JsonRecord,
    ReadAnswer,
    RecurringSettings,
    StartAt,
)

_LONG_BYTES: Final = 4 * 1024
_ESCAPED_PART: Final = 10
"""One byte in this many may be escaped, so that escapes lengthen a text by half at most."""
_JSON_OVERHEAD_BYTES: Final = 640
"""More than names, id, topic and times of a message take."""
_CONTROLS: Final = bytes(set(range(32)) - set(b"\b\t\n\f\r"))


def body_bytes(body: str, encoding: Encoding | None) -> bytes:
    """Decodes a body from JSON. Raises InvalidMessage."""
    return _base64(body) if encoding is Encoding.BASE64 else _utf8(body)


def text_body(body: bytes) -> tuple[str, Encoding]:
    """Encodes a body for JSON: as text if it is UTF-8, else as base64; also as base64 if it is long and JSON would
    escape many of its bytes, to six bytes each.
    """
    if len(body) >= _LONG_BYTES and _ESCAPED_PART * _escaped(body) > len(body):
        return _base64_text(body)
    try:
        return body.decode(), Encoding.UTF8
    except UnicodeDecodeError:
        return _base64_text(body)


def json_message(message: Message) -> JsonMessage:
    """Returns a message as a client sends it in JSON."""
    body, encoding = text_body(message.body)
    return JsonMessage(
        id=message.id,
        topic=message.topic,
        body=body,
        encoding=encoding,
        key=message.key,
        headers=dict(message.headers) if message.headers else None,
        created_at_ms=message.created_at_ms or None,
        deliver_at_ms=message.deliver_at_ms,
    )


def json_bytes_max(message: Message) -> int:
    """The most that json_message() takes, encoded: six bytes for each of a text, three of a body that may be base64."""
    text = sum([len(name) + len(value.encode()) for name, value in message.headers.items()], len(message.key or ""))
    body = len(message.body) * (6 if len(message.body) < _LONG_BYTES else 3)
    return body + 6 * text + _JSON_OVERHEAD_BYTES


def json_record(message: Record) -> JsonRecord:
    """Returns a message as the server sends it in JSON."""
    return JsonRecord(**_answered(message))


def json_delivery(delivery: Delivery) -> JsonDelivery:
    """Returns a delivery as the server sends it in JSON."""
    return JsonDelivery(
        receipt=delivery.receipt, attempt=delivery.attempt, expired=delivery.expired, **_answered(delivery.message)
    )


def json_dead_letter(letter: DeadLetter) -> JsonDeadLetter:
    """Returns a dead letter as the server sends it in JSON."""
    contents = _contents(letter.message) if letter.has_contents else {}
    return JsonDeadLetter(
        id=letter.id, topic=letter.topic, group=letter.group, attempts=letter.attempts, reason=letter.reason,
        dead_at_ms=letter.dead_at_ms,
        history=[Failures(reason=reason, attempts=attempts) for reason, attempts in letter.history], **contents,
    )  # fmt: skip


def record_of(answered: JsonRecord) -> Record:
    """Returns the message that a client decodes from an answer in JSON. Raises InvalidMessage."""
    return Record(
        id=answered.id, topic=answered.topic, key=answered.key, headers=answered.headers,
        body=body_bytes(answered.body, answered.encoding), created_at_ms=answered.created_at_ms,
        deliver_at_ms=answered.deliver_at_ms,
    )  # fmt: skip


def delivery_of(answered: JsonDelivery) -> Delivery:
    """Returns the delivery that a client decodes from an answer in JSON. Raises InvalidMessage."""
    return Delivery(
        receipt=answered.receipt, attempt=answered.attempt, message=record_of(answered), expired=answered.expired
    )


def topic_read_of(answered: ReadAnswer) -> TopicRead:
    """Returns what a client reads from an answer in JSON. Raises InvalidMessage."""
    return TopicRead(
        messages=[record_of(message) for message in answered.messages], offset=answered.offset,
        next_offset=answered.next_offset,
    )  # fmt: skip


def dead_letter_of(answered: JsonDeadLetter) -> DeadLetter:
    """Returns the dead letter that a client decodes from an answer in JSON. Raises InvalidMessage."""
    message = Record(
        id=answered.id, topic=answered.topic, key=answered.key, headers=answered.headers or {},
        body=b"" if answered.body is None else body_bytes(answered.body, answered.encoding),
    )  # fmt: skip
    return DeadLetter(
        message=message, group=answered.group, attempts=answered.attempts, reason=answered.reason,
        dead_at_ms=answered.dead_at_ms, history=tuple((entry.reason, entry.attempts) for entry in answered.history),
        has_contents=answered.body is not None,
    )  # fmt: skip


def json_letter_edit(message_id: str, edit: DeadEdit) -> JsonLetterEdit:
    """Returns an edit of the dead letter of this id as a client sends it in JSON."""
    return JsonLetterEdit(id=message_id, **_edit(edit))


def json_edit(edit: DeadEdit) -> JsonEdit:
    """Returns an edit as a client sends it in JSON."""
    return JsonEdit(**_edit(edit))


def dead_edit_of(sent: JsonEdit) -> DeadEdit:
    """Returns the edit that a server decodes from a request in JSON. Raises InvalidMessage."""
    return DeadEdit(
        body=None if sent.body is None else body_bytes(sent.body, sent.encoding), headers=sent.headers or {},
        remove_headers=tuple(sent.remove_headers),
    )  # fmt: skip


def _edit(edit: DeadEdit) -> dict[str, Any]:
    body, encoding = (None, None) if edit.body is None else text_body(edit.body)
    return {
        "body": body, "encoding": encoding, "headers": dict(edit.headers) or None,
        "remove_headers": list(edit.remove_headers),
    }  # fmt: skip


def _base64_text(body: bytes) -> tuple[str, Encoding]:
    return b64encode(body).decode("ascii"), Encoding.BASE64


def _escaped(body: bytes) -> int:
    """Returns how many of its bytes JSON escapes to six bytes."""
    return len(body) - len(body.translate(None, _CONTROLS))


def _answered(message: Record) -> dict[str, Any]:
    return {
        "id": message.id, "topic": message.topic, "created_at_ms": message.created_at_ms,
        "deliver_at_ms": message.deliver_at_ms, **_contents(message),
    }  # fmt: skip


def _contents(message: Record) -> dict[str, Any]:
    body, encoding = text_body(message.body)
    return {"key": message.key, "headers": dict(message.headers), "body": body, "encoding": encoding}


def _utf8(body: str) -> bytes:
    try:
        return body.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage("the body cannot be written as UTF-8") from error


def _base64(body: str) -> bytes:
    try:
        return b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMessage(f"the body is not base64: {error}") from error


def group_config_of(settings: GroupSettings) -> GroupConfig:
    """Converts settings from the wire; raises InvalidMessage if they contradict each other."""
    start, backoff = settings.start, settings.backoff
    return GroupConfig(
        start="at" if isinstance(start, StartAt) else start,
        start_at_ms=start.at_ms if isinstance(start, StartAt) else None,
        filter=settings.filter,
        max_attempts=settings.max_attempts,
        backoff_initial_ms=backoff.initial_ms,
        backoff_multiplier=backoff.multiplier,
        backoff_max_ms=backoff.max_ms,
        ordered=settings.ordered,
    )


def group_settings_of(config: GroupConfig) -> GroupSettings:
    """Converts the settings of a group to the wire."""
    start: str | StartAt = config.start if config.start_at_ms is None else StartAt(at_ms=config.start_at_ms)
    return GroupSettings(
        start=start,  # type: ignore[arg-type]  # GroupConfig has checked that it is one of the two words
        filter=config.filter,
        max_attempts=config.max_attempts,
        backoff=BackoffSettings(
            initial_ms=config.backoff_initial_ms,
            multiplier=config.backoff_multiplier,
            max_ms=config.backoff_max_ms,
        ),
        ordered=config.ordered,
    )


def recurring_message_of(settings: RecurringSettings) -> RecurringMessage:
    """Converts a recurring message from the wire. Raises InvalidMessage if its body is not what it is said to be."""
    return RecurringMessage(
        topic=settings.topic, cron=settings.cron, tz=settings.tz, key=settings.key, headers=settings.headers or {},
        body=body_bytes(settings.body, settings.encoding), catch_up=settings.catch_up,
    )  # fmt: skip


def recurring_settings_of(message: RecurringMessage, *, paused: bool = False) -> RecurringSettings:
    """Converts a recurring message to the wire."""
    body, encoding = text_body(message.body)
    return RecurringSettings(
        topic=message.topic, cron=message.cron, tz=message.tz, key=message.key, headers=dict(message.headers) or None,
        body=body, encoding=encoding, catch_up=message.catch_up, paused=paused,
    )  # fmt: skip
