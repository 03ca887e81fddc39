"""The demo's clock: it runs faster than real time, so that a week of departures fits into a minute.

Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

REMINDER_BEFORE_DEPARTURE = timedelta(hours=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratedClock:
    """A linear map from the trips' time to ours: `trips_start_us` maps to `starts_at_us`, `speed` times as fast."""

    trips_start_us: int
    starts_at_us: int
    speed: float

    @staticmethod
    def fit(*, first_us: int, last_us: int, starts_at_us: int, seconds: float) -> AcceleratedClock:
        """Returns a clock by which departures from `first_us` to `last_us` are within `seconds` from the start."""
        speed = max(1.0, (last_us - first_us) / 1_000_000 / seconds)
        return AcceleratedClock(trips_start_us=first_us, starts_at_us=starts_at_us, speed=speed)

    def ours(self, trips_us: int) -> datetime:
        """Converts a time of the trips to our clock."""
        us = self.starts_at_us + int((trips_us - self.trips_start_us) / self.speed)
        return datetime.fromtimestamp(us / 1_000_000, UTC)

    def reminder_at(self, departs_at_us: int) -> datetime:
        """Returns when, by our clock, the reminder of a departure is due: two hours before it, by the trips' time."""
        return self.ours(departs_at_us - int(REMINDER_BEFORE_DEPARTURE.total_seconds() * 1_000_000))
