"""How many rows a source gave, and of which times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LegCount:
    """How many rows a leg had for one topic (and group or rule), and the times they span."""

    leg: str
    topic: str
    note: str
    rows: int
    first_ms: int
    last_ms: int
    last_place: int = -1
    """Of the broker's logs: the last sequence that is named."""
    impossible: int = 0
    """Rows whose time cannot be true; `first_ms` and `last_ms` leave them out."""
    impossible_ms: int = 0
    impossible_of: str = ""
    """The least of these times, and the id or key of its row."""
    backward: int = 0
    """Rows of the archive that were sent before they were created, by more than clocks may differ."""
    backward_of: str = ""
