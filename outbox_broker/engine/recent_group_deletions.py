"""Remembers recent deletions of consumer groups: a pull that waited for one ends, and does not create it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outbox_core.common.errors import GroupDeleted

DELETED_MAX: Final = 10_000
"""How many deletions of groups are remembered, for pulls that were waiting."""


class RecentGroupDeletions:
    """Deletions of groups, numbered from 1 in order since the start."""

    def __init__(self) -> None:
        self.deletions = 0
        """The number of deletions so far: a pull that may wait captures it at its start."""
        self._deleted_in: dict[tuple[str, str], int] = {}

    def note(self, topic: str, groups: Sequence[str]) -> None:
        """Record the deletion of groups of a topic. Under the lock."""
        self.deletions += 1
        for group in groups:
            self._deleted_in.pop((topic, group), None)
            self._deleted_in[topic, group] = self.deletions
        while len(self._deleted_in) > DELETED_MAX:
            del self._deleted_in[next(iter(self._deleted_in))]

    def refuse_if_deleted(self, topic: str, group: str, *, since: int | None) -> None:
        """Raise GroupDeleted if a group was deleted after deletion number `since`; None: the pull has not waited."""
        if since is not None and self._deleted_in.get((topic, group), 0) > since:
            raise group_deleted(topic, group)


def group_deleted(topic: str, group: str) -> GroupDeleted:
    """Returns the error that ends a pull whose group was deleted meanwhile."""
    return GroupDeleted(f"the consumer group {group} of {topic} was deleted while the pull waited")
