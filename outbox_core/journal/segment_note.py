"""The note beside a segment in a folder: up to which position it is known to be durable.

A segment's own bytes cannot tell it: a failed sync leaves pages that read as written. The broker writes the note, and
reconciliation reads it to tell a log that ends too early from one that has not been written further.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

NOTE_SUFFIX: Final = ".proven"


@dataclass(frozen=True, slots=True)
class SegmentNote:
    """Up to which position a segment was durable for a process without failed syncs, and the machine's start then. It
    may lag, and never leads.
    """

    end: int
    boot: str


def read_note(segment: Path) -> SegmentNote | None:
    """Returns the note of a segment's file; None if it has none, or a damaged one."""
    try:
        return parse_note(segment.with_suffix(NOTE_SUFFIX).read_bytes())
    except OSError:
        return None


def parse_note(data: bytes) -> SegmentNote | None:
    """Returns a note from its bytes; None if they are damaged."""
    try:
        end, _, boot = data.decode("ascii").strip().partition(" ")
        return SegmentNote(int(end), boot)
    except ValueError:
        return None


def encode_note(note: SegmentNote) -> bytes:
    """Returns the bytes of a note."""
    return f"{note.end} {note.boot}\n".encode("ascii")
