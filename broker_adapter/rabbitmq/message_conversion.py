"""Converts a message to AMQP's routing key, properties and body, or says why AMQP cannot carry it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pika

from broker_adapter.publishing.message_headers import content_type, engine_headers
from outbox_core.messages.message import Message

ATTRIBUTE_PREFIX: Final = "cloudEvents_"
SHORT_STRING_BYTES_MAX: Final = 255
RESERVED_HEADERS: Final = frozenset({"CC", "BCC"})
"""Lists of further routing keys, the second one removed: a server ends the channel of whoever sends them as a text."""
_ENTRY_BYTES: Final = 6
"""Of a header besides its name and value: their lengths and the value's type."""
_PROPERTIES_BYTES_MAX: Final = 1_024
"""Of a content header besides the headers: the frame, the flags and the short properties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmqpFrame:
    """One message as AMQP takes it."""

    routing_key: str
    properties: pika.BasicProperties
    body: bytes


def refusal_of(message: Message) -> str | None:
    """Why AMQP can never carry a message; None where it can."""
    kind = content_type(message.headers)
    if kind is not None and len(kind.encode()) > SHORT_STRING_BYTES_MAX:
        return f"the content type has more than the {SHORT_STRING_BYTES_MAX} bytes of an AMQP property; shorten it"
    for name in RESERVED_HEADERS & message.headers.keys():
        return f"the header {name} is RabbitMQ's own, which takes a list of queues and no text; rename it"
    return None


def frame_of(message: Message) -> AmqpFrame:
    """The message as it goes over the wire: persistent, with its topic as the routing key and as the type, which it
    keeps when it is dead-lettered.
    """
    return AmqpFrame(
        routing_key=message.topic,
        properties=pika.BasicProperties(  # type: ignore[no-untyped-call]
            content_type=content_type(message.headers),
            headers=engine_headers(message, attribute_prefix=ATTRIBUTE_PREFIX),
            delivery_mode=pika.DeliveryMode.Persistent.value,
            message_id=message.id,
            timestamp=max(0, message.created_at_ms) // 1000 or None,  # unsigned: else the connection ends
            type=message.topic,
        ),
        body=message.body,
    )


def header_bytes(frame: AmqpFrame) -> int:
    """A bound of the frame that all properties must fit in."""
    headers = frame.properties.headers or {}
    return _PROPERTIES_BYTES_MAX + sum(
        len(name) + len(value.encode()) + _ENTRY_BYTES for name, value in headers.items()
    )
