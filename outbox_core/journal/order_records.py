"""What an ordered group writes down of the messages that it came past: a record of the journal."""

from __future__ import annotations

import msgspec


class Filed(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="filed"):
    """A group came past messages, up to `position`; of an ordered one runs are (first sequence, hashes of keys).

    0 stands for no key, -1 for what the group has nothing to do with.
    """

    topic: str
    group: str
    at_ms: int
    position: int
    runs: list[tuple[int, list[int]]]
