"""The classes of work that requests need, each with its own limit."""

from __future__ import annotations

from enum import StrEnum


class WorkClass(StrEnum):
    """How a route is executed, which also determines its limit."""

    PUBLISH = "publish"
    SETTLE = "settle"
    """Acks and similar short operations."""
    PAGE = "page"
    """A page of stored data."""
    PULL = "pull"
    READ = "read"
    OPERATE = "operate"

    @property
    def waits(self) -> bool:
        """Whether it waits for messages."""
        return self in {WorkClass.PULL, WorkClass.READ}
