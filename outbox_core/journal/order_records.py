"""The journal record of the messages that an ordered group has passed."""

from __future__ import annotations

import msgspec


class Filed(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="filed"):
    """A group advanced past messages, to `position`; for an ordered group, runs are (first sequence, hashes of keys).

    The hash 0 means no key, -1 a message that the group does not receive.
    """

    topic: str
    group: str
    at_ms: int
    position: int
    runs: list[tuple[int, list[int]]]
