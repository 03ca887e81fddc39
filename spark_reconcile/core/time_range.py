"""Time ranges of the rows that are read."""

from __future__ import annotations

from typing import Final

import msgspec

EVER_MS: Final = 1 << 53
"""Later than any time."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """The range [since_ms, until_ms)."""

    since_ms: int
    until_ms: int
