"""The ids seen lately, so that a repeated publish is recognised; and cancels that came before their publish.

Bounded.
"""

from __future__ import annotations

from collections import OrderedDict


class RecentIds:
    """The newest `count_max` ids, in order of arrival."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        # A plain dict steps over all that was deleted at its front to find its first key.
        self._ids: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, message_id: str) -> None:
        """Remember an id; the oldest one is forgotten when there is no more room."""
        self._ids[message_id] = None
        if len(self._ids) > self._count_max:
            self._ids.popitem(last=False)
