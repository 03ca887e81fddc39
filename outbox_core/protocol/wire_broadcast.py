"""The shapes of broadcast reads: POST /v1/topics/{topic}/read. Extends wire."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from outbox_core.messages import limits
from outbox_core.messages.broadcast_port import NO_RECEIPT, Start
from outbox_core.messages.message import Delivery
from outbox_core.protocol.wire import TIME_MS_MAX, Encoding, Request
from outbox_core.protocol.wire_conversion import body_bytes, text_body

Offset = Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]


class ReadRequest(Request, frozen=True, kw_only=True):
    """A read of a topic from `offset` on; without one, from `start`."""

    offset: Offset | None = None
    start: Start = "latest"
    max_messages: Annotated[int, Meta(ge=1, le=limits.PULL_MESSAGES_MAX)] = 100
    wait_ms: Annotated[int, Meta(ge=0, le=limits.PULL_WAIT_MS_MAX)] = 0


class ReadMessage(Struct, frozen=True, kw_only=True):
    """One message of a topic; there is nothing to settle."""

    id: str
    topic: str
    key: str | None
    headers: dict[str, str]
    body: str
    encoding: Encoding
    created_at_ms: int
    deliver_at_ms: int | None


class PackedReadMessage(ReadMessage, frozen=True, kw_only=True):
    """The same in MessagePack: the body is `bin`, the encoding "binary"."""

    body: Any


class ReadAnswer(Struct, frozen=True, kw_only=True):
    """The messages from `offset` up to `next_offset`, where the next read begins; empty if none came in time."""

    messages: list[ReadMessage]
    offset: int
    next_offset: int


class PackedReadAnswer(Struct, frozen=True, kw_only=True):
    """The same in MessagePack."""

    messages: list[PackedReadMessage]
    offset: int
    next_offset: int


def read_message(delivery: Delivery, *, packed: bool) -> ReadMessage:
    """Returns a message that was read, as the server sends it."""
    fields: dict[str, Any] = {
        "id": delivery.id, "topic": delivery.topic, "key": delivery.key, "headers": dict(delivery.headers),
        "created_at_ms": delivery.created_at_ms, "deliver_at_ms": delivery.deliver_at_ms,
    }  # fmt: skip
    if packed:
        return PackedReadMessage(body=delivery.body, encoding=Encoding.BINARY, **fields)
    body, encoding = text_body(delivery.body)
    return ReadMessage(body=body, encoding=encoding, **fields)


def delivery_read(message: ReadMessage) -> Delivery:
    """Returns the delivery that a client decodes from a response, in either codec."""
    return Delivery(
        receipt=NO_RECEIPT, id=message.id, topic=message.topic, body=body_bytes(message.body, message.encoding),
        key=message.key, headers=message.headers, attempt=1, created_at_ms=message.created_at_ms,
        deliver_at_ms=message.deliver_at_ms,
    )  # fmt: skip
