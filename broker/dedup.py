"""The ids seen lately, so that a repeated publish is recognised; and cancels that came before their publish.

Bounded.
"""

from __future__ import annotations


class RecentIds:
    """The newest `count_max` ids, in order of arrival."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._ids: dict[str, None] = {}

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, message_id: str) -> None:
        """Remember an id; the oldest one is forgotten when there is no more room."""
        self._ids[message_id] = None
        if len(self._ids) > self._count_max:
            del self._ids[next(iter(self._ids))]
