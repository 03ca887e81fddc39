"""Durations as people write them in configuration: "250ms", "5s", "2m", "1h", "30d". In code they are milliseconds."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import BeforeValidator, Field

_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_WRITTEN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")


def parse_duration_ms(text: object) -> int:
    """Milliseconds of a written duration. Raises ValueError, whose text says how to write it."""
    found = _WRITTEN.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        raise ValueError('a duration is a number and a unit, as "250ms", "5s", "2m", "1h" or "30d"')
    return round(float(found[1]) * _UNITS_MS[found[2]])


DurationMs = Annotated[int, BeforeValidator(parse_duration_ms), Field(ge=1)]
