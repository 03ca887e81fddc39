"""Publish requests in MessagePack as the server reads them: a message's body stays encoded until its type is known.

MessagePack may have anything in a body's place, and a list of empty maps takes seventy times its bytes in memory.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from outbox_core.protocol.wire import Batch, PackedMessage, Request
from outbox_core.protocol.wire_multi_topic_publish import PackedMultiTopicMessage

_BIN_HEADS: Final = frozenset({0xC4, 0xC5, 0xC6})
_STR_HEADS: Final = frozenset({*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB})
_decode_bin: Final = msgspec.msgpack.Decoder(bytes).decode
_decode_str: Final = msgspec.msgpack.Decoder(str).decode


class ReceivedMessage(PackedMessage, frozen=True, kw_only=True):
    """A wire.PackedMessage."""

    body: msgspec.Raw


class ReceivedPublishRequest(Request, frozen=True, kw_only=True):
    """A wire.PackedPublishRequest."""

    messages: Annotated[list[ReceivedMessage], Batch]


class ReceivedMultiTopicMessage(PackedMultiTopicMessage, frozen=True, kw_only=True):
    """A wire_multi_topic_publish.PackedMultiTopicMessage."""

    body: msgspec.Raw


class ReceivedMultiTopicPublishRequest(Request, frozen=True, kw_only=True):
    """A wire_multi_topic_publish.PackedMultiTopicPublishRequest."""

    messages: Annotated[list[ReceivedMultiTopicMessage], Batch]


def decoded_body(body: object) -> object:
    """Returns a body that was left encoded as text or bytes; None if it is neither. Raises UnicodeDecodeError."""
    if not isinstance(body, msgspec.Raw):
        return body
    head = memoryview(body)[0]
    if head in _BIN_HEADS:
        return _decode_bin(body)
    return _decode_str(body) if head in _STR_HEADS else None
