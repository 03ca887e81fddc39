"""A rate limit: how many operations may start in which second, given those already granted. Time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SECOND_MS: Final = 1_000
USED_UP: Final = 1 << 31
"""More than any rate: how many operations of a full second are granted, where nobody knows."""


@dataclass(slots=True)
class RateLimit:
    """`used` operations of the second that begins at `second_ms` are granted, and all earlier seconds are used up."""

    second_ms: int = 0
    used: int = 0

    def next_ms(self, now_ms: int, *, per_second: int | None, count_max: int) -> tuple[int, int]:
        """Grant up to `count_max` waiting operations: returns when they may start, and how many of them.

        All operations of one second start when it begins. `per_second` None: all start now.
        """
        if per_second is None:
            return now_ms, count_max
        if now_ms >= self.second_ms + SECOND_MS:
            self.second_ms, self.used = now_ms, 0
        elif self.used >= per_second:
            self.second_ms, self.used = self.second_ms + SECOND_MS, 0
        count = min(count_max, per_second - self.used)
        self.used += count
        return max(now_ms, self.second_ms), count

    def withdraw(self, now_ms: int) -> None:
        """Take back what was granted for seconds that have not begun; the one that runs stays used up."""
        if self.second_ms > now_ms:
            self.second_ms -= -(-(self.second_ms - now_ms) // SECOND_MS) * SECOND_MS
            self.used = USED_UP
