"""Texts and times as people read them on a terminal. Not a log's lines, nor what programs read."""

from __future__ import annotations

from datetime import UTC, datetime


def plain(text: str, *, but: str = "") -> str:
    """The text with everything that is not printable spelled out, so that no message can steer a terminal."""
    return "".join(one if one.isprintable() or one in but else repr(one)[1:-1] for one in text)


def moment(time_ms: int) -> str:
    """A time in UTC, to the millisecond; the number alone where it is none that a calendar has."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):  # written by other code
        return f"{time_ms} ms"
