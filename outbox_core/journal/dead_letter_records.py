"""Journal records of what operators did with dead letters, and of what keeps a redrive at its pace."""

from __future__ import annotations

import msgspec


class Discarded(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="discarded"):
    """Dead letters were discarded: the group never gets them again; entries are (first sequence, count).

    `by`: the name of the token that asked for it; `why`: the reason that its operator gave.
    """

    topic: str
    group: str
    at_ms: int
    entries: list[tuple[int, int]]
    by: str
    why: str


class Edited(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="edited"):
    """Dead letters were edited: at its sequence the group gets another message from now on, under an id of its own, and
    it is ready at once, as if redriven. Other groups get what was published.

    Entries are (sequence, offset and bytes of the frame in the message log that holds the edited message, its id). `by`
    and `why` as of Discarded.
    """

    topic: str
    group: str
    at_ms: int
    entries: list[tuple[int, int, int, str]]
    by: str
    why: str


class RedriveStopped(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="redrive_stopped"):
    """Redriven messages that waited for the redrive's rate became the dead letters again that they had been; entries
    are (first sequence, count). `by`: the name of the token that asked for it.
    """

    topic: str
    group: str
    at_ms: int
    entries: list[tuple[int, int]]
    by: str


class ClockStepped(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="clock_stepped"):
    """The broker's wall clock stepped by `by_ms`, either way: redriven messages that were not delivered yet become
    visible so much later, as long to wait as before.
    """

    at_ms: int
    by_ms: int
