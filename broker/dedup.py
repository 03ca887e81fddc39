"""The ids seen lately, so that a repeated publish is recognised; and cancels that came before their publish.

Bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice


class RecentIds:
    """The newest `count_max` ids, in order of arrival."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._ids: set[str] = set()
        self._order: deque[str] = deque()
        self.added = 0

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def has_any(self, message_ids: Iterable[str]) -> bool:
        """Whether one of these is remembered."""
        return not self._ids.isdisjoint(message_ids)

    def add(self, message_id: str) -> None:
        """Remember an id; the oldest one is forgotten when there is no more room."""
        if message_id not in self._ids:
            self._ids.add(message_id)
            self._order.append(message_id)
            self.added += 1
            self._forget_oldest()

    def add_new(self, message_ids: Collection[str]) -> None:
        """Remember ids of which none is remembered, nor twice among them."""
        self._ids.update(message_ids)
        self._order.extend(message_ids)
        self.added += len(message_ids)
        self._forget_oldest()

    def newest(self, count: int) -> list[str]:
        """The last so many that came, in order."""
        return list(islice(self._order, max(0, len(self._order) - count), None))

    def _forget_oldest(self) -> None:
        while len(self._order) > self._count_max:
            self._ids.discard(self._order.popleft())
