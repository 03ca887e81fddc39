"""Journal records of what operators did with dead letters."""

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
