"""The messages of a publish as the server reads them: parts without bounds stay encoded until they have been checked.

MessagePack may have anything in a body's place, where a list of empty maps takes seventy times its bytes in memory; a
map of many short headers takes twenty times its bytes, in JSON too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from outbox_broker.http.content_negotiation import LONG_BYTES, Codec
from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.limits import HEADERS_BYTES_MAX
from outbox_core.protocol.wire import Batch, Headers, NewMessage, PackedMessage, Request
from outbox_core.protocol.wire_multi_topic_publish import MultiTopicMessage, PackedMultiTopicMessage

_HeadersDecoder = Callable[[msgspec.Raw], dict[str, str] | None]

ENCODED_HEADERS_BYTES_MAX: Final = LONG_BYTES
"""More than any headers within their bound take, however they are written."""
_NOTHING: Final = msgspec.Raw()
_BIN_HEADS: Final = frozenset({0xC4, 0xC5, 0xC6})
_STR_HEADS: Final = frozenset({*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB})
_decode_bin: Final = msgspec.msgpack.Decoder(bytes).decode
_decode_str: Final = msgspec.msgpack.Decoder(str).decode
_decode_json_headers: Final[_HeadersDecoder] = msgspec.json.Decoder(Headers | None).decode
_decode_packed_headers: Final[_HeadersDecoder] = msgspec.msgpack.Decoder(Headers | None).decode


class ReceivedNewMessage(NewMessage, frozen=True, kw_only=True):
    """A wire.NewMessage of a long request."""

    headers: msgspec.Raw = _NOTHING  # type: ignore[assignment]  # decoded_headers() has what they are


class ReceivedMultiTopicMessage(MultiTopicMessage, frozen=True, kw_only=True):
    """A wire_multi_topic_publish.MultiTopicMessage of a long request."""

    headers: msgspec.Raw = _NOTHING  # type: ignore[assignment]


class ReceivedPackedMessage(PackedMessage, frozen=True, kw_only=True):
    """A wire.PackedMessage."""

    body: msgspec.Raw
    headers: msgspec.Raw = _NOTHING  # type: ignore[assignment]


class ReceivedPackedPublishRequest(Request, frozen=True, kw_only=True):
    """A wire.PackedPublishRequest."""

    messages: Annotated[list[ReceivedPackedMessage], Batch]


class ReceivedPackedMultiTopicMessage(PackedMultiTopicMessage, frozen=True, kw_only=True):
    """A wire_multi_topic_publish.PackedMultiTopicMessage."""

    body: msgspec.Raw
    headers: msgspec.Raw = _NOTHING  # type: ignore[assignment]


class ReceivedPackedMultiTopicPublishRequest(Request, frozen=True, kw_only=True):
    """A wire_multi_topic_publish.PackedMultiTopicPublishRequest."""

    messages: Annotated[list[ReceivedPackedMultiTopicMessage], Batch]


def decoded_body(body: object) -> object:
    """Returns a body that was left encoded as text or bytes; None if it is neither. Raises UnicodeDecodeError."""
    if not isinstance(body, msgspec.Raw):
        return body
    head = memoryview(body)[0]
    if head in _BIN_HEADS:
        return _decode_bin(body)
    return _decode_str(body) if head in _STR_HEADS else None


def decoded_headers(headers: object, codec: Codec) -> dict[str, str]:
    """Returns headers that may have been left encoded. Raises InvalidMessage, or what msgspec raises."""
    if not isinstance(headers, msgspec.Raw):
        return headers or {}  # type: ignore[return-value]  # as they were decoded
    size_bytes = len(memoryview(headers))
    if not size_bytes:
        return {}
    if size_bytes > ENCODED_HEADERS_BYTES_MAX:
        raise InvalidMessage(f"the headers have more than the {HEADERS_BYTES_MAX:,} bytes allowed")
    return (_decode_json_headers(headers) if codec is Codec.JSON else _decode_packed_headers(headers)) or {}
