"""Time ranges, and Spark expressions that assign messages to time buckets by their id alone, which every record of a
message has.

The ids that the outbox makes begin with 48 bits of milliseconds (UUIDv7, RFC 9562) as hex digits. So a prefix of the id
is a time range, the same in every source, whatever its clock and whenever it saw the message: nine digits are a slot of
4.096 seconds. No other time is in all records, and two clocks never agree on the edge of an hour. Ids made by users may
carry no time: they have no slot, are never settled in bulk, and belong to the creation time in the outbox's row. A
period, a quarter of an hour, is based on a row's own time: business rows have no id. Rows of a period are partitioned
by their keys, so that a part has all records of a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

EVER_MS: Final = 1 << 53
"""Later than any time."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """The range [since_ms, until_ms) of the rows that are read."""

    since_ms: int
    until_ms: int


SLOT_DIGITS: Final = 9
SLOT_MS: Final = 1 << 12
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
PERIOD_MS: Final = HOUR_MS // 4
PARTS: Final = 256
"""Number of parts, by key, in which a topic's records of a period are compared."""
NO_SLOT: Final = ""
NO_PERIOD: Final = -1

KEYED: Final = "xxhash64(coalesce(if(message_key = '', null, message_key), id, ''))"
"""Hash of a row's key; for a message without a key, of its id."""
PART: Final = f"pmod({KEYED}, {PARTS})"
"""The part of its period in which a row is compared."""


def slot(column: str = "id") -> str:
    """Returns SQL for the slot of an id; NO_SLOT if it carries no time."""
    return f"if({_timed(column)}, substring({column}, 1, {SLOT_DIGITS}), '{NO_SLOT}')"


def slot_start(column: str) -> str:
    """Returns SQL for the start of a slot, in milliseconds: -1 for NO_SLOT."""
    return f"if({column} = '{NO_SLOT}', -1L, cast(conv({column}, 16, 10) as bigint) * {SLOT_MS}L)"


def period(time: str) -> str:
    """Returns SQL for the period number of a time in milliseconds; NO_PERIOD for null."""
    return f"coalesce(({time}) div {PERIOD_MS}, {NO_PERIOD}L)"


def hour(time: str) -> str:
    """Returns SQL for the start of the hour of a time in milliseconds."""
    return f"({time}) div {HOUR_MS} * {HOUR_MS}L"


def within(span: Span | None) -> str:
    """Returns an SQL condition: a row was created in a time range; None: at any time."""
    return "true" if span is None else f"(created_ms >= {span.since_ms}L and created_ms < {span.until_ms}L)"


def window_of_message(created: str, *, otherwise: str, slack_ms: int, slot: str = "slot") -> str:
    """Returns SQL for the window of a message whose id has this `slot`: by the time at which it was `created`, if a
    record has it.

    Else by the time in the id; by the time `otherwise` if the id has none, or an impossible one.
    """
    begins = slot_start(slot)
    true = f"{slot} != '{NO_SLOT}' and ({otherwise} <= 0 or abs({begins} - ({otherwise})) <= {slack_ms}L)"
    return hour(f"if({created} > 0, {created}, if({true}, {begins}, {otherwise}))")


def _timed(column: str) -> str:
    """SQL condition: an id looks like one that begins with a time; a leading sign would not give a 64-bit number."""
    return f"length({column}) = 32 and substring({column}, 13, 1) = '7' and substring({column}, 1, 1) >= '0'"


BUCKETS_MAX: Final = 60
_WIDTHS_MS: Final = (
    200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 600_000, 1_800_000, HOUR_MS, 3 * HOUR_MS,
    6 * HOUR_MS, 12 * HOUR_MS, 24 * HOUR_MS, 7 * 24 * HOUR_MS, 14 * 24 * HOUR_MS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The time axis of the report's charts: a range in at most BUCKETS_MAX + 1 equal buckets."""

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
