"""Converts messages and deliveries to the shapes of wire, and back. Pure."""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import Any, Final

from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.message import Delivery, GroupConfig, Message
from outbox_core.protocol.wire import (
    BackoffSettings,
    Encoding,
    GroupSettings,
    JsonMessage,
    PackedPulledMessage,
    PulledMessage,
    StartAt,
)

_LONG_BYTES: Final = 4 * 1024
_ESCAPED_PART: Final = 10
"""One byte in this many may be escaped, so that escapes lengthen a text by half at most."""
_JSON_OVERHEAD_BYTES: Final = 640
"""More than names, id, topic and times of a message take."""
_CONTROLS: Final = bytes(set(range(32)) - set(b"\b\t\n\f\r"))


def body_bytes(body: object, encoding: Encoding | None) -> bytes:
    """Decodes a body from the wire to bytes. Raises InvalidMessage."""
    match body, encoding:
        case bytes(), None | Encoding.BINARY:
            return body
        case str(), None | Encoding.UTF8:
            return _utf8(body)
        case str(), Encoding.BASE64:
            return _base64(body)
        case ((str() | bytes()), _):
            raise InvalidMessage(f"a body of this type cannot have the encoding {str(encoding)!r}")
        case _:
            raise InvalidMessage("the body must be text or, in MessagePack, bin; write objects as JSON text")


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


def pulled_message(delivery: Delivery) -> PulledMessage:
    """Returns a delivery as the server sends it in JSON."""
    body, encoding = text_body(delivery.body)
    return PulledMessage(body=body, encoding=encoding, **_delivery_fields(delivery))


def packed_pulled_message(delivery: Delivery) -> PackedPulledMessage:
    """Returns a delivery as the server sends it in MessagePack."""
    return PackedPulledMessage(body=delivery.body, encoding=Encoding.BINARY, **_delivery_fields(delivery))


def delivery_of(pulled: PulledMessage) -> Delivery:
    """Returns the delivery that a client decodes from a response, in either codec."""
    return Delivery(
        receipt=pulled.receipt,
        id=pulled.id,
        topic=pulled.topic,
        body=body_bytes(pulled.body, pulled.encoding),
        key=pulled.key,
        headers=pulled.headers,
        attempt=pulled.attempt,
        created_at_ms=pulled.created_at_ms,
        deliver_at_ms=pulled.deliver_at_ms,
        expired=pulled.expired,
    )


def _base64_text(body: bytes) -> tuple[str, Encoding]:
    return b64encode(body).decode("ascii"), Encoding.BASE64


def _escaped(body: bytes) -> int:
    """Returns how many of its bytes JSON escapes to six bytes."""
    return len(body) - len(body.translate(None, _CONTROLS))


def _delivery_fields(delivery: Delivery) -> dict[str, Any]:
    headers = delivery.headers
    return {
        "receipt": delivery.receipt,
        "id": delivery.id,
        "topic": delivery.topic,
        "key": delivery.key,
        "headers": headers if isinstance(headers, dict) else dict(headers),
        "attempt": delivery.attempt,
        "created_at_ms": delivery.created_at_ms,
        "deliver_at_ms": delivery.deliver_at_ms,
    }


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
