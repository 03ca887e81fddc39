"""Formats texts and times for people at a terminal. Not for logs or programs."""

from __future__ import annotations

from datetime import UTC, datetime


def escaped(text: str, *, but: str = "") -> str:
    """Returns the text with unprintable characters escaped, so that no message can send control codes to a terminal."""
    return "".join(char if char.isprintable() or char in but else repr(char)[1:-1] for char in text)


def utc_text(time_ms: int) -> str:
    """Returns a time in UTC, to the millisecond; the bare number if no calendar date matches it."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):  # written by other code
        return f"{time_ms} ms"
