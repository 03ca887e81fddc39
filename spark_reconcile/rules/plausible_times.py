"""Which times a record can have, as conditions for SQL and Spark, and the note on a source that has others.

Such others are 0, negative times, those of a mistaken unit (seconds read as microseconds are of January 1970), and
those of a clock that was reset. Reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from spark_reconcile.rules.expressions import Fact, Predicate, Sum

if TYPE_CHECKING:
    from spark_reconcile.core.counts import LegCount

EARLIEST_MS: Final = 946_684_800_000
"""2000-01-01: no outbox is older."""
LATEST_MS: Final = 4_102_444_800_000
"""2100-01-01. A row whose time is later is read by every run, as it belongs to no hour that will be judged."""
AHEAD_MS: Final = 24 * 60 * 60 * 1000
"""No time zone that was taken for UTC puts a time further ahead."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlausibleTimes:
    """Times from EARLIEST_MS to `latest_ms` can be true. `skew_ms`: by so much two clocks may differ."""

    latest_ms: int = LATEST_MS
    skew_ms: int = 0

    @staticmethod
    def at(now_ms: int, *, clocks: Mapping[str, int], skew_ms: int) -> PlausibleTimes:
        """By this time; `clocks`: by how many milliseconds databases' clocks are ahead, where they are apart."""
        return PlausibleTimes(latest_ms=now_ms + AHEAD_MS + max([0, *clocks.values()]), skew_ms=skew_ms)

    def of_table(self) -> dict[str, str]:
        """Aggregates over rows of LEG_SCHEMA: the times that they span, and how many have others."""
        # An outbox row's `at_ms` is when it is sent next, which may be far ahead.
        clock = "if(leg = 'outbox', null, at_ms)"
        backward = f"leg = 'archive' and at_ms + {self.skew_ms}L < created_ms"
        return {
            **self._aggregates("at_ms", (clock, "created_ms"), of="coalesce(id, message_key, '')"),
            "backward": f"count_if({backward})",
            "backward_of": f"coalesce(min(id) filter (where {backward}), '')",
        }

    def of_log(self, log: str, *, rows: str) -> dict[str, str]:
        """The same of the broker's `messages` or `actions`; a row of actions is of as many as `rows` says."""
        if log == "messages":
            return self._aggregates("stored_ms", ("stored_ms", "created_ms"), of="coalesce(id, '')")
        return self._aggregates("at_ms", ("at_ms",), of="coalesce(id, consumer_group, '')", rows=rows)

    def _aggregates(self, time: str, checked: Sequence[str], *, of: str, rows: str = "1") -> dict[str, str]:
        true, wrong = f"filter (where not ({self._impossible(time)}))", " or ".join(map(self._impossible, checked))
        first = f"coalesce({', '.join(f'if({self._impossible(column)}, {column}, null)' for column in checked)})"
        return {
            "first_ms": f"coalesce(min({time}) {true}, 0L)",
            "last_ms": f"coalesce(max({time}) {true}, 0L)",
            "impossible": f"sum(if({wrong}, {rows}, 0))",
            "impossible_ms": f"coalesce(min({first}), 0L)",
            "impossible_of": f"coalesce(min_by({of}, {first}), '')",
        }

    def _impossible(self, time: str) -> str:
        """Whether a time in milliseconds cannot be true, in Spark SQL; null is no time."""
        return f"coalesce({time} < {EARLIEST_MS}L or {time} > {self.latest_ms}L, false)"


def newer(time: Fact, bound: Sum) -> Predicate:
    """Whether a fact is later than the bound and can be true: what is dated years ahead is not just on its way."""
    return (time > bound) & (time <= Fact("latest_ms"))


def or_null(time: str) -> str:
    """A time in milliseconds, in a database's SQL; null where no clock can have given it."""
    return f"CASE WHEN {time} >= {EARLIEST_MS} AND {time} < {LATEST_MS} THEN {time} END"


def outside(column: str) -> str:
    """Whether a column is out of two bound values, the earliest time and the latest, in a database's SQL."""
    return f"{column} < ? OR {column} >= ?"


def note_on(counts: Iterable[LegCount]) -> str:
    """What is to be known of a source's times; empty where all of them can be true."""
    legs = list(counts)
    found = []
    impossible = [leg for leg in legs if leg.impossible]
    if impossible:
        first = min(impossible, key=lambda leg: (leg.impossible_ms, leg.impossible_of))
        rows, all_rows = (sum(getattr(leg, name) for leg in legs) for name in ("impossible", "rows"))
        found.append(
            f"{rows:,} of {all_rows:,} rows have a time that cannot be true, before 2000 or more than a day ahead "
            f"(the first: {first.impossible_of or 'a row without a key'} at {_moment(first.impossible_ms)}); the times "
            "shown here and the charts leave them out"
        )
    backward = [leg for leg in legs if leg.backward]
    if backward:
        found.append(
            f"{sum(leg.backward for leg in backward):,} rows were sent before they were created (e.g. "
            f"{min(leg.backward_of for leg in backward)}): the database's clock was set back, or they were written by "
            "hand"
        )
    return "; ".join(found)


def _moment(time_ms: int) -> str:
    """A time, UTC; as a number where no calendar has it."""
    try:
        return (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="seconds")
    except OverflowError:
        return f"{time_ms} ms"
