"""A message's id, key, times, content type and CloudEvents attributes, for engines that carry headers of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote

from outbox_core.messages.message import CONTENT_TYPE, Message

ID_HEADER: Final = "outbox-id"
KEY_HEADER: Final = "outbox-key"
CREATED_HEADER: Final = "outbox-created-at-ms"
CLOUDEVENTS_HEADER_PREFIX: Final = "ce-"
"""Of an attribute in a message's headers: the HTTP protocol binding, values percent-encoded."""


def outbox_headers(message: Message) -> dict[str, str]:
    """The headers that are added to a message: its id, its key if any, and the producer's time in
    milliseconds.
    """
    headers = {ID_HEADER: message.id}
    if message.key is not None:
        headers[KEY_HEADER] = message.key
    if message.created_at_ms:
        headers[CREATED_HEADER] = str(message.created_at_ms)
    return headers


def engine_headers(message: Message, *, attribute_prefix: str) -> dict[str, str]:
    """All headers but the content type, with CloudEvents attributes as a binding other than HTTP's has them: under
    `attribute_prefix`, values as they are, not percent-encoded.
    """
    headers = {
        _bound_name(name, attribute_prefix): unquote(value) if _is_attribute(name) else value
        for name, value in message.headers.items()
        if name.lower() != CONTENT_TYPE
    }
    return {**headers, **outbox_headers(message)}


def plain_headers(message: Message) -> dict[str, str]:
    """All headers as the message has them, but the content type: for an engine whose CloudEvents binding is HTTP's, or
    that has none.
    """
    headers = {name: value for name, value in message.headers.items() if name.lower() != CONTENT_TYPE}
    return {**headers, **outbox_headers(message)}


def headers_with_type(message: Message, *, attribute_prefix: str | None) -> dict[str, str]:
    """All headers, the content type among them under its own name, for an engine that has no field for it.

    `attribute_prefix`: as of engine_headers(); None: attributes as the message has them.
    """
    if attribute_prefix is None:
        headers = plain_headers(message)
    else:
        headers = engine_headers(message, attribute_prefix=attribute_prefix)
    kind = content_type(message.headers)
    if kind is not None:
        headers[CONTENT_TYPE] = kind
    return headers


def content_type(headers: Mapping[str, str]) -> str | None:
    """The message's content type."""
    return next((value for name, value in headers.items() if name.lower() == CONTENT_TYPE), None)


def _is_attribute(name: str) -> bool:
    return name.lower().startswith(CLOUDEVENTS_HEADER_PREFIX)


def _bound_name(name: str, attribute_prefix: str) -> str:
    return attribute_prefix + name[len(CLOUDEVENTS_HEADER_PREFIX) :].lower() if _is_attribute(name) else name
