"""Bulk path for common publishes: MessagePack, binary bodies, explicit ids, immediate delivery.

Any other batch, or one out of bounds, is passed to the general path, which validates each message and names the
position, at about three times the cost a message. In batches of 500 with bodies of 512 bytes a message costs the server
4.3 us, 5.1 without this path; messages are msgspec Structs, made in a quarter of a frozen dataclass's time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from outbox_broker.http.content_negotiation import LONG_BYTES
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.incremental_batch_decoding import TooManyMessages, packed_entries
from outbox_broker.http.request_context import Call
from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.limits import HEADERS_MAX
from outbox_core.messages.message import check_headers, check_key
from outbox_core.protocol.wire import TimeMs

_IDS: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}(?:\n[A-Za-z0-9._:-]{1,64})*", re.ASCII)
"""Message ids, one per line: a whole batch is validated with one match."""


class PlainMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """A wire.PackedMessage for the bulk path."""

    body: bytes
    id: str
    key: str | None = None
    headers: Annotated[dict[str, str], msgspec.Meta(max_length=HEADERS_MAX)] | None = None
    encoding: Literal["binary"] | None = None
    created_at_ms: TimeMs | None = None


class PlainMessageInPlace(PlainMessage, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """The same, with a body that is a view of the request's."""

    body: memoryview  # type: ignore[assignment]  # it is written to the log as bytes are


class PlainPublishRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A wire.PackedPublishRequest with messages for the bulk path only."""

    messages: list[PlainMessage]


_read: Final = msgspec.msgpack.Decoder(PlainPublishRequest).decode
_read_in_place: Final = msgspec.msgpack.Decoder(PlainMessageInPlace).decode


def publish_plain(call: Call) -> list[str] | None:
    """Store a batch as received, and return its ids; None, with nothing stored, if it does not fit the bulk path."""
    try:
        sent = _messages_of(call.body)
    except (TooManyMessages, msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        return None
    ids = [message.id for message in sent]
    if not _is_in_bounds(sent, ids, settings=call.services.settings):
        return None
    return ids if call.served.producers.publish_plain(call.topic, sent, ids) else None


def _messages_of(body: bytes | bytearray) -> Sequence[PlainMessage]:
    if len(body) <= LONG_BYTES:
        return _read(body).messages
    return [_read_in_place(entry) for entry in packed_entries(body)]


def _is_in_bounds(sent: Sequence[PlainMessage], ids: Sequence[str], *, settings: HttpSettings) -> bool:
    text = "\n".join(ids)
    if not _IDS.fullmatch(text) or text.count("\n") != len(sent) - 1 or len(sent) > settings.batch_messages_max:
        return False
    if max(len(message.body) for message in sent) > settings.body_bytes_max:
        return False
    try:
        for key in {message.key for message in sent} - {None}:
            check_key(key or "")
        for headers in [message.headers for message in sent if message.headers]:
            check_headers(headers)
    except InvalidMessage:
        return False
    return True
