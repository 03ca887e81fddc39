"""The inputs of a run, as its summary lists them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InputExtent:
    """One source: rows, their time range, since when it is complete (0: the beginning, None: never), and until when.

    `complete_until_ms` None: until the time it was read.
    """

    source: str
    what: str
    rows: int
    first_ms: int
    last_ms: int
    complete_since_ms: int | None
    complete_until_ms: int | None = None
    note: str = ""
    """Remarks for users on how it was read."""
