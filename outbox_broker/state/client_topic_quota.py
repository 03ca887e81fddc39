"""How many topics one client may create: counting and limits. Does not identify clients.

A client's topics are those that its patterns match: nothing records who created a topic, so a restart changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from outbox_core.common.errors import ConfigurationError

SHARE: Final = 10
"""By default one client may have 1/SHARE of the server's topics."""


@dataclass(frozen=True, slots=True)
class ClientTopicQuota:
    """Limit of the number of topics that match these patterns; None: the server's `topics_max`, divided by SHARE."""

    patterns: tuple[str, ...]
    topics_max: int | None = None

    def __post_init__(self) -> None:
        if self.topics_max is not None and self.topics_max < 1:
            raise ConfigurationError("topics_max must be at least 1")

    def limit(self, server_max: int) -> int:
        """Returns the limit on a server that allows `server_max` topics in all."""
        return max(1, server_max // SHARE) if self.topics_max is None else self.topics_max


class Coverage:
    """Counts the existing topics that match each set of patterns. Counted once, then updated: under the lock."""

    def __init__(self, topics: Collection[str]) -> None:
        self._topics = topics
        self._counts: dict[tuple[str, ...], int] = {}

    def count(self, patterns: tuple[str, ...]) -> int:
        """Returns how many topics match these patterns."""
        count = self._counts.get(patterns)
        if count is None:
            count = self._counts[patterns] = sum(is_covered(topic, patterns) for topic in self._topics)
        return count

    def made(self, topic: str) -> None:
        """Count a new topic."""
        self._add(topic, 1)

    def deleted(self, topic: str) -> None:
        """Count a deleted topic."""
        self._add(topic, -1)

    def _add(self, topic: str, more: int) -> None:
        for patterns in self._counts:
            if is_covered(topic, patterns):
                self._counts[patterns] += more


def is_covered(topic: str, patterns: tuple[str, ...]) -> bool:
    """Returns whether one of the patterns matches a topic."""
    return any(fnmatchcase(topic, pattern) for pattern in patterns)
