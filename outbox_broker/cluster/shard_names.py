"""Shards by name, and the shard of a message. Pure.

The number of shards of a generation never changes. A cluster that needs more shards gets a new generation: publishes go
to the newest one, cancels and searches to every generation, the newest first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final
from zlib import crc32

from outbox_core.common.errors import ConfigurationError

SHARDS_MAX: Final = 4_096
"""Shards of one generation."""
GENERATIONS_MAX: Final = 16
_NAME: Final = re.compile(r"(0|[1-9][0-9]?)-([0-9]{4})")


def shard_name(generation: int, number: int) -> str:
    """Returns the name of a shard: its generation and four digits, as in `0-0007`."""
    return f"{generation}-{number:04d}"


BROKER_SHARD: Final = shard_name(0, 0)
"""A broker is one shard, of one generation."""


def is_shard_name(name: str) -> bool:
    """Returns whether a name has the form of a shard's."""
    return _NAME.fullmatch(name) is not None


def check_generations(generations: Sequence[int]) -> None:
    """Raise ConfigurationError unless these are the numbers of shards of one generation or more."""
    if not 0 < len(generations) <= GENERATIONS_MAX:
        raise ConfigurationError(f"a cluster has 1 to {GENERATIONS_MAX} generations of shards, not {len(generations)}")
    for shards in generations:
        if not 0 < shards <= SHARDS_MAX:
            raise ConfigurationError(f"a generation has 1 to {SHARDS_MAX:,} shards, not {shards}")


class ShardMap:
    """All shards of a cluster. `generations`: the number of shards of each generation, the oldest first."""

    def __init__(self, generations: Sequence[int]) -> None:
        check_generations(generations)
        self._generations = tuple(generations)

    @property
    def newest(self) -> int:
        """The number of the generation that publishes go to."""
        return len(self._generations) - 1

    def names(self) -> tuple[str, ...]:
        """Returns the names of all shards, by generation and number."""
        return tuple(
            shard_name(generation, number)
            for generation, shards in enumerate(self._generations)
            for number in range(shards)
        )

    def shard_of(self, message_id: str) -> str:
        """Returns the shard that a message with this id is published to."""
        return self._shard_of(message_id, self.newest)

    def older_shards_of(self, message_id: str) -> Iterator[str]:
        """Yields the shards of the earlier generations that may have a message with this id, the newest first."""
        for generation in range(self.newest - 1, -1, -1):
            yield self._shard_of(message_id, generation)

    def _shard_of(self, message_id: str, generation: int) -> str:
        return shard_name(generation, crc32(message_id.encode()) % self._generations[generation])
