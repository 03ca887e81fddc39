"""What the conformance tests of publishers need of an engine: a real server, and its own plain client to read with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outbox_core.messages.message import PublishStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMessage:
    """A message as the engine's own client reads it."""

    id: str
    key: str | None
    body: bytes
    content_type: str | None
    headers: Mapping[str, str]
    """All other headers, under their names on the engine."""
    stored_at_ms: int | None = None
    """When the server stored it, by its own clock; None where the engine does not record that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """A message that the engine, or the adapter in its place, refuses, whatever else is in its batch."""

    topic: str
    parts: Mapping[str, Any] = field(default_factory=dict)
    """What makes it refused, as fields of the message."""
    beside: str | None = None
    """The topic of its neighbours, which is there; by default the same."""
    status: PublishStatus = PublishStatus.REJECTED
    says: str
    """What the reason has in it."""


class EngineUnderTest(Protocol):
    """A real server of one engine. One for all tests of a session, but for those that stop it."""

    @property
    def url(self) -> str:
        """The broker URL that publishes to it durably, with options if it needs some."""

    @property
    def wrong_password_url(self) -> str | None:
        """The same with a login that the server refuses; None where this server knows no logins."""

    @property
    def too_large_bytes(self) -> int | None:
        """A body's size that the server, or its client, refuses for good; None where it takes all that we allow."""

    @property
    def makes_topics(self) -> bool:
        """Whether a publish to a topic that is not there makes it, by the adapter's stated rule."""

    @property
    def attribute_prefix(self) -> str:
        """Under which the engine's CloudEvents binding has attributes, e.g. `ce_`."""

    def make_topic(self, topic: str) -> None:
        """Make what a topic is on this engine, durable and ready to be read from its beginning."""

    def read(self, topic: str, *, count: int) -> list[PlainMessage]:
        """Read with the engine's plain client: waits for `count` messages, and for more a moment longer."""

    def poisons(self, topic: str) -> Sequence[Poison]:
        """One for each refusal that the engine knows, on new topics whose names begin with this one."""

    def kill(self) -> None:
        """End the server by SIGKILL."""

    def start(self) -> None:
        """Start it again, on the same data and port, and wait until it serves."""
