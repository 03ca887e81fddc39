"""The port: of these sources, which are this instance's now. And its plain form, for a compensator without others."""

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

    Raises ConfigurationError for a name or zone that the lease table could not hold.
    """

    name: str
    zone: str | None = None

    def __post_init__(self) -> None:
        check_word(self.name, "a source's name", chars_max=SOURCE_NAME_CHARS_MAX)
        check_zone(self.zone)


class Assignment(Protocol):
    """Says which sources this instance serves. Called from one thread, again and again, a beat apart.

    Two instances may be told the same source for a few beats: rows are claimed by compare-and-set, so overlap costs a
    statement, not a duplicate. Each source is told to at least one live instance that knows it, but for the time that a
    death takes to be noticed.
    """

    def beat(self, sources: Sequence[SourceName]) -> frozenset[str]:
        """Say that this instance lives and knows these sources; returns the names of those that are its own now.

        Idempotent. Does not raise for a database that is out: what was this instance's stays so. Raises UsageError
        (missing tables, a refused user) when the first beat cannot work.
        """

    def leave(self) -> None:
        """Give up everything, at stop: the others take over at their next beat. Idempotent, final, never raises."""

    @property
    def failed_beats(self) -> int:
        """How many of the latest beats found no answer, one after the other; 0 while all is well."""


class AlwaysMine:
    """One compensator without leases: every source is its own. Many of these side by side do each other's work."""

    def beat(self, sources: Sequence[SourceName]) -> frozenset[str]:
        """All of them."""
        return frozenset(source.name for source in sources)

    def leave(self) -> None:
        """Nothing is held."""

    @property
    def failed_beats(self) -> int:
        """None: nothing is asked."""
        return 0


def check_zone(zone: str | None) -> None:
    """Raise ConfigurationError for a zone that the instance table could not hold."""
    if zone is not None:
        check_word(zone, "a zone", chars_max=ZONE_CHARS_MAX)


def check_word(word: str, what: str, *, chars_max: int) -> None:
    """Raise ConfigurationError where a word is empty, too long or not printable ASCII."""
    if not 0 < len(word) <= chars_max or not word.isascii() or not word.isprintable():
        raise ConfigurationError(f"{what} is 1 to {chars_max} printable ASCII characters, not {word[:80]!r}")
