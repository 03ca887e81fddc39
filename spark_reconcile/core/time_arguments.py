"""Parses times of the command line to milliseconds since the epoch, and formats them. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.durations_and_sizes import UNITS_MS

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_AGE: Final = re.compile(r"(\d{1,9})(s|m|h|d)", re.ASCII)


def moment_ms(text: str, *, now_ms: int) -> int:
    """Parses `2026-11-01`, `2026-11-01T12:00:00Z` (UTC without a zone), or a time ago: `15m`, `2h`, `7d`."""
    if _AGE.fullmatch(text):
        return now_ms - length_ms(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{text!r} is no time: write 2026-11-01, 2026-11-01T12:00:00Z, or so long ago: 15m, 2h, 7d"
        ) from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def utc_text(time_ms: int) -> str:
    """Formats a time in milliseconds as ISO 8601 in UTC, to the second; as a number beyond the calendar."""
    try:
        return (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="seconds")
    except OverflowError:
        return f"{time_ms} ms"


def length_ms(text: str) -> int:
    """Parses a duration: a number and one of s, m, h, d."""
    age_match = _AGE.fullmatch(text)
    if age_match is None:
        raise ConfigurationError(f"{text!r} is no length of time: a number and one of s, m, h, d, like 48h")
    return int(age_match[1]) * UNITS_MS[age_match[2]]
