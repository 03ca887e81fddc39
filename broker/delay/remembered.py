"""The cancels of late: so that one which came before its publish still wins, and a repeated one gets the same answer.

Bounded by count and by time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Final

CANCEL_MEMORY_MS: Final = 7 * 24 * 3_600_000
"""How long a cancel waits for its publish; the compensator resends within minutes of an outage's end."""


class RememberedCancels:
    """The newest ids that were canceled, with when, and whether there was a message that it stopped."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        # A plain dict steps over all that was deleted at its front to find its first key.
        self._ids: OrderedDict[str, tuple[int, bool]] = OrderedDict()

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def has_any(self, message_ids: Iterable[str]) -> bool:
        """Whether one of these is remembered."""
        return bool(self._ids) and not self._ids.keys().isdisjoint(message_ids)

    def has_stopped(self, message_id: str) -> bool:
        """Whether the cancel of a remembered id stopped a message."""
        return self._ids[message_id][1]

    def add(self, ids: Iterable[str], *, at_ms: int, stopped: bool) -> None:
        """Remember ids; the oldest are forgotten where there are too many, and those of more than a week ago."""
        for message_id in ids:
            self._ids.pop(message_id, None)
            self._ids[message_id] = (at_ms, stopped)
        excess = max(0, len(self._ids) - self._count_max)
        for message_id in list(islice(self._ids, excess)):
            del self._ids[message_id]
        while self._ids:
            oldest = next(iter(self._ids))
            if self._ids[oldest][0] >= at_ms - CANCEL_MEMORY_MS:
                return
            del self._ids[oldest]

    def stop(self, ids: Iterable[str]) -> None:
        """The messages of these have come, and were stopped."""
        for message_id in ids:
            if message_id in self._ids:
                self._ids[message_id] = (self._ids[message_id][0], True)

    def stored(self) -> list[tuple[str, int, bool]]:
        """All of them, oldest first, as they are written down."""
        return [(message_id, at_ms, stopped) for message_id, (at_ms, stopped) in self._ids.items()]

    def restore(self, stored: Iterable[tuple[str, int, bool]]) -> None:
        """Remember what was written down."""
        self._ids = OrderedDict((message_id, (at_ms, stopped)) for message_id, at_ms, stopped in stored)
