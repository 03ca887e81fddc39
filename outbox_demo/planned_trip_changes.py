"""Which booked trips are canceled or moved before they depart, and when their reminders are due then. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, assert_never

from outbox_demo.accelerated_clock import AcceleratedClock

MOVED_BY: Final = timedelta(hours=1)
"""By the trips' time."""
POSTPONED_BY: Final = timedelta(days=1)
"""By ours: the reminder is due after the run."""


class TripChange(StrEnum):
    """What becomes of a booked trip."""

    CANCELED = "canceled"
    EARLIER = "earlier"
    LATER = "later"
    POSTPONED = "postponed"


_BY_LAST_DIGIT: Final = {
    0: TripChange.CANCELED,
    3: TripChange.EARLIER,
    5: TripChange.LATER,
    7: TripChange.POSTPONED,
}


def change_of(order_id: int) -> TripChange | None:
    """Returns the change of an order's trip: four of ten have one."""
    return _BY_LAST_DIGIT.get(order_id % 10)


def changed_reminder_at(change: TripChange, *, departs_at_us: int, clock: AcceleratedClock) -> datetime | None:
    """Returns when, by our clock, the reminder is due instead; None: there is none."""
    moved_us = int(MOVED_BY.total_seconds() * 1_000_000)
    match change:
        case TripChange.CANCELED:
            return None
        case TripChange.EARLIER:
            return clock.reminder_at(departs_at_us - moved_us)
        case TripChange.LATER:
            return clock.reminder_at(departs_at_us + moved_us)
        case TripChange.POSTPONED:
            return clock.reminder_at(departs_at_us) + POSTPONED_BY
        case _:
            assert_never(change)
