"""The kinds of work that requests ask for, each with a bound of its own."""

from __future__ import annotations

from enum import StrEnum


class WorkClass(StrEnum):
    """How a route is worked on, which also says which bound keeps it in check."""

    PUBLISH = "publish"
    SETTLE = "settle"
    """Acks and the like, and all that is short."""
    PAGE = "page"
    """A page of what is stored."""
    PULL = "pull"
    READ = "read"
    OPERATE = "operate"

    @property
    def waits(self) -> bool:
        """Whether it waits for messages."""
        return self in {WorkClass.PULL, WorkClass.READ}
