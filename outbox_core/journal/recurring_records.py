"""Journal records of recurring messages."""

from __future__ import annotations

import msgspec


class AddedRecurring(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="added_recurring"):
    """A recurring message was added: it occurs after `at_ms`. `generation` is no other one's, of any name."""

    name: str
    at_ms: int
    generation: int
    topic: str
    cron: str
    tz: str
    key: str | None
    headers: dict[str, str]
    body: bytes
    catch_up: int


class PausedRecurring(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="paused_recurring"):
    """A recurring message was paused or resumed."""

    name: str
    at_ms: int
    paused: bool


class DeletedRecurring(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="deleted_recurring"):
    """A recurring message was deleted; what it has published stays."""

    name: str
    at_ms: int


class FiredRecurring(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="fired_recurring"):
    """The occurrences of a recurring message up to `to_ms` are over: the messages of the newest ones, `times_ms`, are
    durable, and `missed` others were passed over.
    """

    name: str
    at_ms: int
    to_ms: int
    times_ms: list[int]
    missed: int
