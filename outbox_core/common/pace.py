"""At most so many a second: when the next one may go, given what was promised before. Time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SECOND_MS: Final = 1_000


@dataclass(slots=True)
class Pace:
    """`used` places of the second that begins at `second_ms` are given away, and all places before."""

    second_ms: int = 0
    used: int = 0

    def next_ms(self, now_ms: int, *, per_second: int | None, count_max: int) -> tuple[int, int]:
        """When the next ones may go, and how many of those that wait: so many go as a second begins. None: at once."""
        if per_second is None:
            return now_ms, count_max
        if now_ms >= self.second_ms + SECOND_MS:
            self.second_ms, self.used = now_ms, 0
        elif self.used >= per_second:
            self.second_ms, self.used = self.second_ms + SECOND_MS, 0
        count = min(count_max, per_second - self.used)
        self.used += count
        return max(now_ms, self.second_ms), count
