"""Counts of the rows that a source returned, and which of their times are impossible: conditions for SQL and Spark.

Impossible are 0, negative times, those of a mistaken unit (seconds read as microseconds are in January 1970), and those
of a clock that was reset. Reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from spark_reconcile.core.time_arguments import utc_text


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCount:
    """The number of rows of an input for one topic (and group or rule), and their first and last time."""

    input_kind: str
    topic: str
    note: str
    rows: int
    first_ms: int
    last_ms: int
    last_sequence: int = -1
    """For the broker's logs: the highest sequence in a record."""
    impossible: int = 0
    """Rows whose time is impossible; `first_ms` and `last_ms` exclude them."""
    impossible_ms: int = 0
    impossible_of: str = ""
    """The smallest impossible time, and the id or key of its row."""
    backward: int = 0
    """Archive rows that were sent before they were created, by more than the permitted clock skew."""
    backward_of: str = ""


EARLIEST_MS: Final = 946_684_800_000
"""2000-01-01: no outbox is older."""
LATEST_MS: Final = 4_102_444_800_000
"""2100-01-01: later than any run."""
AHEAD_MS: Final = 24 * 60 * 60 * 1000
"""Limit of times in the future: no time zone that was taken for UTC exceeds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlausibleTimes:
    """Times from EARLIEST_MS to `latest_ms` are plausible. `skew_ms`: the permitted difference of two clocks."""

    latest_ms: int = LATEST_MS
    skew_ms: int = 0

    @staticmethod
    def at(now_ms: int, *, clocks: Mapping[str, int], skew_ms: int) -> PlausibleTimes:
        """Returns the limits at this time; `clocks`: by how many milliseconds databases' clocks are ahead."""
        return PlausibleTimes(latest_ms=now_ms + AHEAD_MS + max([0, *clocks.values()]), skew_ms=skew_ms)

    def of_table(self) -> dict[str, str]:
        """Returns aggregates over rows of INPUT_SCHEMA: first and last time, and counts of impossible times."""
        # An outbox row's `at_ms` is the time of its next try, which may be far in the future.
        clock = "if(input_kind = 'outbox', null, at_ms)"
        backward = f"input_kind = 'archive' and at_ms + {self.skew_ms}L < created_ms"
        return {
            **self._aggregates("at_ms", (clock, "created_ms"), of="coalesce(id, message_key, '')"),
            "backward": f"count_if({backward})",
            "backward_of": f"coalesce(min(id) filter (where {backward}), '')",
        }

    def of_log(self, log: str, *, rows: str) -> dict[str, str]:
        """Returns the same for the broker's `messages` or `actions`; a row of actions counts `rows` times."""
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
        """Returns the condition that a time in milliseconds is impossible, in Spark SQL; null is no time."""
        return f"coalesce({time} < {EARLIEST_MS}L or {time} > {self.latest_ms}L, false)"


def or_null(time: str, *, latest_ms: int = LATEST_MS) -> str:
    """Returns a time in milliseconds, in a database's SQL; null if it is impossible."""
    return f"CASE WHEN {time} >= {EARLIEST_MS} AND {time} <= {latest_ms} THEN {time} END"


def outside(column: str) -> str:
    """Returns the condition, in a database's SQL, that a column is outside of two bound values, earliest and latest.

    Every run reads rows with such a time, a sentinel of 2038 or 1970: they belong to no hour that will be evaluated.
    """
    return f"{column} < ? OR {column} > ?"


def note_on(counts: Iterable[InputCount]) -> str:
    """Returns a note on a source's impossible times; empty if there are none."""
    input_counts = list(counts)
    notes = []
    impossible = [count for count in input_counts if count.impossible]
    if impossible:
        first = min(impossible, key=lambda count: (count.impossible_ms, count.impossible_of))
        rows, all_rows = (sum(getattr(count, name) for count in input_counts) for name in ("impossible", "rows"))
        notes.append(
            f"{rows:,} of {all_rows:,} rows have a time that cannot be true, before 2000 or more than a day ahead "
            f"(the first: {first.impossible_of or 'a row without a key'} at {utc_text(first.impossible_ms)}); the "
            "times shown here and the charts leave them out"
        )
    backward = [count for count in input_counts if count.backward]
    if backward:
        notes.append(
            f"{sum(count.backward for count in backward):,} rows were sent before they were created (e.g. "
            f"{min(count.backward_of for count in backward)}): the database's clock was set back, or they were "
            "written by hand"
        )
    return "; ".join(notes)
