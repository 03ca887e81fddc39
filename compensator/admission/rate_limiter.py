"""A token bucket that limits how many rows may be claimed. Decides only: neither waits nor reads a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BURST_MS: Final = 1_000
_SHARE: Final = 4
"""At least a quarter of the burst is taken at a time, so that a low rate does not lead to claims of single rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateOptions:
    """Rows a second, and the time for which unused tokens accumulate."""

    rows_per_second: float
    burst_ms: int = BURST_MS

    def __post_init__(self) -> None:
        if self.rows_per_second <= 0 or self.burst_ms < 1:
            raise ValueError("a rate limit needs more than 0 rows a second and a burst of at least 1 ms")

    @property
    def burst_rows(self) -> float:
        """The capacity of the bucket, in rows; at least one row, however low the rate."""
        return max(1.0, self.rows_per_second * self.burst_ms / 1_000)


class RateLimiter:
    """Permits at most `burst_rows + rate * t` rows in any time t. Not thread-safe: its owner serializes the calls."""

    def __init__(self, options: RateOptions, *, now_ms: int) -> None:
        self._options = options
        self._rows = options.burst_rows
        self._at_ms = now_ms

    def take(self, rows_max: int, *, now_ms: int) -> int:
        """Take up to `rows_max` tokens, one a row; 0: try again after wait_ms()."""
        self._fill(now_ms)
        if self._rows < self._enough(rows_max):
            return 0
        taken = min(rows_max, int(self._rows))
        self._rows -= taken
        return taken

    def give_back(self, rows: int) -> None:
        """Return the tokens of rows that were not claimed."""
        self._rows = min(self._options.burst_rows, self._rows + rows)

    def wait_ms(self, rows_max: int, *, now_ms: int) -> int:
        """Time until take() returns more than 0; 0 is now."""
        self._fill(now_ms)
        missing = self._enough(rows_max) - self._rows
        return 0 if missing <= 0 else max(1, int(missing * 1_000 / self._options.rows_per_second) + 1)

    def _enough(self, rows_max: int) -> float:
        return max(1.0, min(float(rows_max), self._options.burst_rows / _SHARE))

    def _fill(self, now_ms: int) -> None:
        gained = max(0, now_ms - self._at_ms) * self._options.rows_per_second / 1_000
        self._rows = min(self._options.burst_rows, self._rows + gained)
        self._at_ms = max(self._at_ms, now_ms)


def take_of_all(limits: Sequence[RateLimiter], rows_max: int, *, now_ms: int) -> int:
    """Take from all of these limits as many tokens as each of them allows; no limit is charged for more."""
    granted = rows_max
    taken: list[tuple[RateLimiter, int]] = []
    for limit in limits:
        granted = limit.take(granted, now_ms=now_ms)
        taken.append((limit, granted))
    for limit, rows in taken:
        limit.give_back(rows - granted)
    return granted


def wait_for_all(limits: Sequence[RateLimiter], rows_max: int, *, now_ms: int) -> int:
    """Time until take() returns more than 0 for each of these limits; 0 is now."""
    return max((limit.wait_ms(rows_max, now_ms=now_ms) for limit in limits), default=0)
