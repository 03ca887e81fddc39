"""The shapes of listing and redriving dead letters. Extends wire."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from outbox_core.protocol.wire import Encoding, Request


class Failures(Struct, frozen=True, kw_only=True):
    """A number of consecutive attempts that failed with the same reason."""

    reason: str
    attempts: int


class DeadMessage(Struct, frozen=True, kw_only=True):
    """A dead letter of a group; key, headers and body are null for a token that may only `read`."""

    id: str
    topic: str
    group: str
    attempts: int
    reason: str
    dead_at_ms: int
    history: list[Failures] = []
    key: str | None = None
    headers: dict[str, str] | None = None
    body: str | None = None
    encoding: Encoding | None = None


class PackedDeadMessage(DeadMessage, frozen=True, kw_only=True):
    """The same in MessagePack: the body is `bin`."""

    body: Any = None


class DeadAnswer(Struct, frozen=True, kw_only=True):
    """One page of dead letters, oldest first."""

    dead: list[DeadMessage]
    next: str | None = None


class PackedDeadAnswer(Struct, frozen=True, kw_only=True):
    """The same in MessagePack."""

    dead: list[PackedDeadMessage]
    next: str | None = None


class RedriveRequest(Request, frozen=True, kw_only=True):
    """POST .../dead/redrive: `{"ids": [...]}` or `{"all": true}`."""

    ids: list[str] | None = None
    all: bool = False
    per_second: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class RedriveAnswer(Struct, frozen=True, kw_only=True):
    """The number of dead letters that were redriven."""

    redriven: int
