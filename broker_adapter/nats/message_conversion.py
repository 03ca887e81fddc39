"""Converts a message to NATS's subject, headers and body, or says why NATS cannot carry it."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from broker_adapter.nats.outstanding_publishes import NatsFrame
from broker_adapter.publishing.message_headers import CLOUDEVENTS_HEADER_PREFIX, headers_with_type
from outbox_core.messages.message import CONTENT_TYPE, Message

MESSAGE_ID_HEADER: Final = "Nats-Msg-Id"
"""By which a stream drops repeats within its duplicate window."""
RESERVED_PREFIX: Final = "nats-"
"""Of headers that JetStream obeys: Nats-Rollup would delete all that is stored."""

_SPEC_VERSION: Final = f"{CLOUDEVENTS_HEADER_PREFIX}specversion"
_DATA_CONTENT_TYPE: Final = f"{CLOUDEVENTS_HEADER_PREFIX}datacontenttype"
_PRINTABLE: Final = "!#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""What the CloudEvents NATS binding leaves as it is in an attribute, besides letters and digits."""
_VERSION_LINE: Final = len("NATS/1.0\r\n")
_LINE_EXTRA: Final = len(": \r\n")
_END: Final = len("\r\n")


def subject_of(topic: str, *, prefix: str) -> str:
    """The subject that a topic is: itself, behind the prefix and a dot where there is a prefix."""
    return f"{prefix}.{topic}" if prefix else topic


def refusal_of(message: Message) -> str | None:
    """Why NATS can never carry a message; None where it can."""
    topic = message.topic
    if topic.startswith(".") or topic.endswith(".") or ".." in topic:
        return f"the topic {topic!r} is no subject of NATS: no dot may begin or end it, or follow another; rename it"
    if message.key is not None and ("\r" in message.key or "\n" in message.key):
        return "the key has a line break, which NATS cannot carry: choose keys without"
    for name, value in message.headers.items():
        if name.lower().startswith(RESERVED_PREFIX):
            return f"the header {name} is JetStream's own; rename it"
        if "\r" in value or "\n" in value:
            return f"the header {name} has a line break, which NATS cannot carry; encode it"
    return None


def frame_of(message: Message, *, prefix: str) -> NatsFrame:
    """The message as it goes over the wire. CloudEvents attributes stand as the NATS binding (version 1.0.3) has them:
    under `ce-`, percent-encoded, with the content type as `ce-datacontenttype`, too.
    """
    headers = headers_with_type(message, attribute_prefix=None)
    kind = headers.get(CONTENT_TYPE)
    if kind is not None and _SPEC_VERSION in headers:
        headers.setdefault(_DATA_CONTENT_TYPE, quote(kind, safe=_PRINTABLE))
    headers[MESSAGE_ID_HEADER] = f"{message.topic}:{message.id}"
    return NatsFrame(subject=subject_of(message.topic, prefix=prefix), body=message.body, headers=headers)


def wire_bytes(frame: NatsFrame) -> int:
    """Bytes of headers and body together: what a server's max_payload bounds."""
    lines = (frame.headers or {}).items()
    return (
        _VERSION_LINE
        + sum(len(name) + len(value.encode()) + _LINE_EXTRA for name, value in lines)
        + _END
        + len(frame.body)
    )
