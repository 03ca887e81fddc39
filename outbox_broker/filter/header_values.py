"""Parses the text of a header as a number or a truth value."""

from __future__ import annotations

import math
import re
from typing import Final

NUMBER_CHARS_MAX: Final = 64
"""A longer text is not a number: parsing it would take time quadratic in its length."""

_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII).fullmatch
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII).fullmatch
_TRUTHS: Final = {"true": True, "false": False}


def number_of(text: str) -> float | None:
    """Parses `-7`, `3.5`, `.5`, `1e-3`; None for every other text.

    Integers are exact whatever their size, everything else is an IEEE double. Surrounding blanks, NaN, Infinity,
    hexadecimal digits and `1_000` are rejected: programs that write them do not agree about them.
    """
    if len(text) > NUMBER_CHARS_MAX:
        return None
    if (text.isdecimal() and text.isascii()) or _INTEGER(text):
        return int(text)
    if _DECIMAL(text):
        number = float(text)
        return number if math.isfinite(number) else None
    return None


def truth_of(text: str) -> bool | None:
    """Parses `true` and `false` in any case; None for every other text."""
    return _TRUTHS.get(text.lower()) if len(text) <= 5 else None
