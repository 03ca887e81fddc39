"""PullShare: how a pull is shared between messages that failed before and fresh ones. Pure.

Without it a group whose messages fail as fast as they are retried would see nothing fresh until all of them are dead
letters.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PullShare:
    """The places of one pull. At least half of them are for fresh messages, if so many wait; a pull of one alternates.
    What one kind leaves goes to the other.
    """

    count_max: int
    retries: int
    """How many messages wait to be delivered again."""
    fresh_first: bool
    """Whether a pull of one is for a fresh message."""
    fresh_max: int = 0
    """How many fresh messages the group may have in flight in addition."""

    @property
    def retries_min(self) -> int:
        """Returns how many retries are delivered however many fresh messages wait."""
        reserved = self.count_max // 2 if self.count_max > 1 else int(not self.fresh_first)
        return min(self.retries, reserved)

    @property
    def fresh_most(self) -> int:
        """Returns how many fresh messages may be delivered."""
        return min(self.fresh_max, self.count_max - self.retries_min)
