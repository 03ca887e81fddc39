"""Where in time a message belongs, by its id alone: what every record of it carries. Expressions for Spark; no data.

The ids that the outbox makes begin with 48 bits of milliseconds (UUIDv7, RFC 9562) as hex digits. So a prefix of the
id is a stretch of time, the same in every source, whatever its clock and whenever it saw the message: nine digits are
a slot of 4.096 seconds. Ids that a user makes may carry no time: they have no slot, are never settled in bulk, and
belong where the outbox's row says that it was created. A period, a quarter of an hour, is of a row's own time:
business rows have no id. Rows of a period are parted by their keys, so that a part holds all that is said of a key.
"""

from __future__ import annotations

from typing import Final

from spark_reconcile.core.time_range import Span

SLOT_DIGITS: Final = 9
SLOT_MS: Final = 1 << 12
HOUR_MS: Final = 3_600_000
PERIOD_MS: Final = HOUR_MS // 4
PARTS: Final = 256
"""What a topic has in a period is compared in so many parts, by key."""
NO_SLOT: Final = ""
NO_PERIOD: Final = -1

KEYED: Final = "xxhash64(coalesce(if(message_key = '', null, message_key), id, ''))"
"""A row's key as a number; of a message without one its id."""
PART: Final = f"pmod({KEYED}, {PARTS})"
"""In which part of its period a row is compared."""


def slot(column: str = "id") -> str:
    """The slot of an id; NO_SLOT where it carries no time."""
    return f"if({_timed(column)}, substring({column}, 1, {SLOT_DIGITS}), '{NO_SLOT}')"


def slot_start(column: str) -> str:
    """When a slot begins, in milliseconds: -1 for NO_SLOT."""
    return f"if({column} = '{NO_SLOT}', -1L, cast(conv({column}, 16, 10) as bigint) * {SLOT_MS}L)"


def period(time: str) -> str:
    """The period of a time in milliseconds, by number; NO_PERIOD of none."""
    return f"coalesce(({time}) div {PERIOD_MS}, {NO_PERIOD}L)"


def hour(time: str) -> str:
    """The beginning of the hour of a time in milliseconds."""
    return f"({time}) div {HOUR_MS} * {HOUR_MS}L"


def within(span: Span | None) -> str:
    """Whether a row was made in a span; None: ever."""
    return "true" if span is None else f"(created_ms >= {span.since_ms}L and created_ms < {span.until_ms}L)"


def window_of_message(created: str, *, otherwise: str, slack_ms: int, slot: str = "slot") -> str:
    """The window of a message whose id has this `slot`: by the time at which it was `created`, as far as a record
    tells it.

    Else by the time in the id; by the time `otherwise` where that is none, or one that cannot be true.
    """
    begins = slot_start(slot)
    true = f"{slot} != '{NO_SLOT}' and ({otherwise} <= 0 or abs({begins} - ({otherwise})) <= {slack_ms}L)"
    return hour(f"if({created} > 0, {created}, if({true}, {begins}, {otherwise}))")


def _timed(column: str) -> str:
    """Whether an id looks like one that begins with a time; what begins with a sign would be no number of 64 bits."""
    return f"length({column}) = 32 and substring({column}, 13, 1) = '7' and substring({column}, 1, 1) >= '0'"
