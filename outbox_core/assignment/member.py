"""A live member of a group, as its registration describes it. A value."""

from __future__ import annotations

from dataclasses import dataclass

from outbox_core.assignment.resource import check_zone
from outbox_core.common.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Member:
    """The zone in which a member runs, and how many resources it can have at most; None: no zone, no limit."""

    zone: str | None = None
    capacity: int | None = None

    def __post_init__(self) -> None:
        check_zone(self.zone)
        if self.capacity is not None and self.capacity < 0:
            raise ConfigurationError(f"a member's capacity is 0 or more, not {self.capacity}")

    def limit(self, unlimited: int) -> int:
        """Returns the capacity, or `unlimited` where it has none."""
        return unlimited if self.capacity is None else self.capacity
