"""Bodies of publishes to one topic, in both codecs. Not a test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


def of_topic(topic: str, *messages: Mapping[str, Any]) -> dict[str, Any]:
    """What is sent in JSON, of messages that do not say their topic."""
    return {"messages": [{"topic": topic, **message} for message in messages]}


def packed(topic: str, messages: Iterable[Mapping[str, Any]]) -> bytes:
    """The same in MessagePack, by the protocol's documentation; a message may name its own topic."""
    return msgspec.msgpack.encode([_record({"topic": topic, **message}) for message in messages])


def _record(message: Mapping[str, Any]) -> list[Any]:
    body = message["body"]
    return [
        message["id"], message["topic"], message.get("key"), message.get("headers", {}),
        body.encode() if isinstance(body, str) else body, message.get("created_at_ms", 0), message.get("deliver_at_ms"),
    ]  # fmt: skip
