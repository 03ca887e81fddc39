"""Parses durations and sizes of a configuration: "250ms", "5s", "30d" to milliseconds; "64KiB", "1.5GiB" to bytes."""

from __future__ import annotations

import re
from typing import Final

UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_UNITS_BYTES: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)")


def parse_setting(name: str, value: object) -> object:
    """Returns a setting's value: a duration or a size as people write it, told by the setting's name, as a number; all
    else, and plain numbers, as it is. Raises ValueError, whose text gives the syntax.
    """
    if not isinstance(value, str) or (value.isascii() and value.isdigit()):
        return value
    if name.endswith("_ms"):
        return parse_duration_ms(value)
    return parse_size_bytes(value) if name.endswith(("_bytes", "_bytes_max")) else value


def parse_duration_ms(text: object) -> int:
    """Parses a duration to milliseconds. Raises ValueError, whose text gives the syntax."""
    matched = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    if matched is None:
        raise ValueError('a duration is a number and a unit, as "250ms", "5s", "2m", "1h" or "30d"')
    return round(float(matched[1]) * UNITS_MS[matched[2]])


def parse_size_bytes(text: object) -> int:
    """Parses a size to bytes. Raises ValueError, whose text gives the syntax."""
    matched = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if matched is None:
        raise ValueError('a size is a number and a unit, as "512B", "64KiB", "256MiB" or "1.5GiB"')
    return round(float(matched[1]) * _UNITS_BYTES[matched[2]])
