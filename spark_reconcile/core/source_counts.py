"""Counts of the rows that a source returned, and their times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LegCount:
    """The number of rows of a leg for one topic (and group or rule), and their first and last time."""

    leg: str
    topic: str
    note: str
    rows: int
    first_ms: int
    last_ms: int
    last_place: int = -1
    """For the broker's logs: the highest sequence in a record."""
    impossible: int = 0
    """Rows whose time is impossible; `first_ms` and `last_ms` exclude them."""
    impossible_ms: int = 0
    impossible_of: str = ""
    """The smallest impossible time, and the id or key of its row."""
    backward: int = 0
    """Archive rows that were sent before they were created, by more than the permitted clock skew."""
    backward_of: str = ""
