"""How many topics one client may have: what is counted, and what is allowed. Not who the client is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from outbox_core.common.errors import ConfigurationError

SHARE: Final = 10
"""One client may have one in so many of the server's topics, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class TopicQuota:
    """The topics that these patterns cover may be so many; None: the server's `topics_max`, divided by SHARE."""

    patterns: tuple[str, ...]
    topics_max: int | None = None

    def __post_init__(self) -> None:
        if self.topics_max is not None and self.topics_max < 1:
            raise ConfigurationError("topics_max must be at least 1")

    def limit(self, server_max: int) -> int:
        """How many are allowed on a server that takes so many in all."""
        return max(1, server_max // SHARE) if self.topics_max is None else self.topics_max


class Coverage:
    """How many of the topics that there are each set of patterns covers. Counted once, then kept: under the lock."""

    def __init__(self, topics: Collection[str]) -> None:
        self._topics = topics
        self._counts: dict[tuple[str, ...], int] = {}

    def count(self, patterns: tuple[str, ...]) -> int:
        """How many topics these patterns cover."""
        found = self._counts.get(patterns)
        if found is None:
            found = self._counts[patterns] = sum(is_covered(one, patterns) for one in self._topics)
        return found

    def made(self, topic: str) -> None:
        """There is a topic more."""
        self._add(topic, 1)

    def deleted(self, topic: str) -> None:
        """There is a topic less."""
        self._add(topic, -1)

    def _add(self, topic: str, more: int) -> None:
        for patterns in self._counts:
            if is_covered(topic, patterns):
                self._counts[patterns] += more


def is_covered(topic: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the patterns matches a topic."""
    return any(fnmatchcase(topic, one) for one in patterns)
