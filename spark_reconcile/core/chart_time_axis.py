"""The time axis of the report's charts: equal buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from spark_reconcile.core.time_buckets import HOUR_MS

BUCKETS_MAX: Final = 60
_WIDTHS_MS: Final = (
    200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 600_000, 1_800_000, HOUR_MS, 3 * HOUR_MS,
    6 * HOUR_MS, 12 * HOUR_MS, 24 * HOUR_MS, 7 * 24 * HOUR_MS, 14 * 24 * HOUR_MS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """A time range in at most BUCKETS_MAX + 1 equal buckets."""

    start_ms: int
    width_ms: int
    buckets: int

    @staticmethod
    def over(first_ms: int, last_ms: int) -> TimeAxis:
        """Returns an axis whose buckets begin at round times."""
        span_ms = max(last_ms - first_ms, 1)
        width_ms = next((width for width in _WIDTHS_MS if span_ms <= width * BUCKETS_MAX), span_ms // BUCKETS_MAX + 1)
        start_ms = first_ms // width_ms * width_ms
        return TimeAxis(start_ms, width_ms, (last_ms - start_ms) // width_ms + 1)

    @property
    def starts(self) -> range:
        """Start times of the buckets, in milliseconds."""
        return range(self.start_ms, self.start_ms + self.buckets * self.width_ms, self.width_ms)
