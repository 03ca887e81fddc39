"""The port that assigns sources to this instance, and its implementation for a compensator that runs alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outbox_core.assignment.even_assignment import Resource


class Assignment(Protocol):
    """Decides which sources this instance serves. Called periodically from one thread.

    Two instances may be assigned the same source for a few beats: rows are claimed by compare-and-set, so overlap costs
    a statement, not a duplicate. Each source is assigned to at least one live instance that knows it, except for the
    time until the death of an instance is noticed.
    """

    def beat(self, sources: Sequence[Resource]) -> frozenset[str]:
        """Record that this instance is alive and knows these sources; returns the names of those assigned to it.

        Idempotent. Does not raise if the registry is unavailable: the assignment stays as it was. Raises UsageError
        (missing tables, a refused user) when the first beat cannot work.
        """

    def leave(self) -> None:
        """Release all sources, at stop: others take them at their next beat. Idempotent, final, never raises."""

    @property
    def instance(self) -> str:
        """The id of this process in the registry; empty without one, and before it is known."""

    @property
    def failed_beats(self) -> int:
        """How many of the latest beats failed in a row; 0 if the last one succeeded."""

    @property
    def problem(self) -> str | None:
        """Why the last beat failed; None if it succeeded."""


class UnleasedAssignment:
    """Assigns every source to this instance, without leases. Several such compensators poll the same sources."""

    def beat(self, sources: Sequence[Resource]) -> frozenset[str]:
        """All of `sources`."""
        return frozenset(source.name for source in sources)

    def leave(self) -> None:
        """Does nothing: no leases are held."""

    @property
    def instance(self) -> str:
        """Always empty: there is no registry."""
        return ""

    @property
    def failed_beats(self) -> int:
        """Always 0: no database is used."""
        return 0

    @property
    def problem(self) -> str | None:
        """Always None."""
        return None
