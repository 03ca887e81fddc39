"""What the sources of a run gave, as its summary lists it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """What one source gave: rows, their span of time, since when it is complete (0: ever, None: never), and until when.

    `complete_until_ms` None: until it was read.
    """

    source: str
    what: str
    rows: int
    first_ms: int
    last_ms: int
    complete_since_ms: int | None
    complete_until_ms: int | None = None
    note: str = ""
    """What should be known of how it was read."""
