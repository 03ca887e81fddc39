"""The port that assigns sources to this instance, and its implementation for a compensator that runs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from outbox_core.common.errors import ConfigurationError

SOURCE_NAME_CHARS_MAX: Final = 255
ZONE_CHARS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class SourceName:
    """One source: a name that is the same in every instance, and the zone whose instances should serve it, if any.

    Raises ConfigurationError for a name or zone that the lease table cannot hold.
    """

    name: str
    zone: str | None = None

    def __post_init__(self) -> None:
        check_word(self.name, "a source's name", chars_max=SOURCE_NAME_CHARS_MAX)
        check_zone(self.zone)


class Assignment(Protocol):
    """Decides which sources this instance serves. Called periodically from one thread.

    Two instances may be assigned the same source for a few beats: rows are claimed by compare-and-set, so overlap costs
    a statement, not a duplicate. Each source is assigned to at least one live instance that knows it, except for the
    time until the death of an instance is noticed.
    """

    def beat(self, sources: Sequence[SourceName]) -> frozenset[str]:
        """Record that this instance is alive and knows these sources; returns the names of those assigned to it.

        Idempotent. Does not raise if the database is unavailable: the assignment stays as it was. Raises UsageError
        (missing tables, a refused user) when the first beat cannot work.
        """

    def leave(self) -> None:
        """Release all sources, at stop: others take them at their next beat. Idempotent, final, never raises."""

    @property
    def failed_beats(self) -> int:
        """How many of the latest beats failed in a row; 0 if the last one succeeded."""


class UnleasedAssignment:
    """Assigns every source to this instance, without leases. Several such compensators poll the same sources."""

    def beat(self, sources: Sequence[SourceName]) -> frozenset[str]:
        """All of `sources`."""
        return frozenset(source.name for source in sources)

    def leave(self) -> None:
        """Does nothing: no leases are held."""

    @property
    def failed_beats(self) -> int:
        """Always 0: no database is used."""
        return 0


def check_zone(zone: str | None) -> None:
    """Raise ConfigurationError for a zone that the instance table cannot hold."""
    if zone is not None:
        check_word(zone, "a zone", chars_max=ZONE_CHARS_MAX)


def check_word(word: str, what: str, *, chars_max: int) -> None:
    """Raise ConfigurationError if a word is empty, too long or not printable ASCII."""
    if not 0 < len(word) <= chars_max or not word.isascii() or not word.isprintable():
        raise ConfigurationError(f"{what} is 1 to {chars_max} printable ASCII characters, not {word[:80]!r}")
