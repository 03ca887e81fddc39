"""Measures how far a source's times are from those of related records: percentiles of differences, of sampled rows.

Times written by database clocks are compared with the broker's single clock: an archive row is written right after the
broker stored its message, and an inbox row between delivery and acknowledgement. A business row's times are compared
with its message's. One aggregation in Spark; results.common_causes interprets the differences.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from spark_reconcile.core.dataframes import grouped, union
from spark_reconcile.sources.sql_statements import CANCELS, Leg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_reconcile.load.evidence import Evidence

SAMPLED_ROWS: Final = 20_000
"""Approximate number of rows of a source that are compared, sampled by a hash of their ids or keys."""
STEPS: Final = 200
"""Percentiles are computed at each half percent."""
_UNDER_KEY: Final = ("topic", "message_key")
_MESSAGE: Final = ("topic", "id")


class ComparedTimes(StrEnum):
    """The compared times of each source."""

    ARCHIVE = "archive"
    INBOX = "inbox"
    BUSINESS_TIME = "business time"
    BUSINESS_DUE = "business due time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """By how many milliseconds the times of `rows` rows are ahead: STEPS + 1 percentiles, in order. `of`: a group, or
    the number of a business rule.
    """

    compared: ComparedTimes
    of: str
    rows: int
    percentiles_ms: Sequence[int]


def measured_differences(evidence: Evidence, times: Collection[ComparedTimes]) -> list[Differences]:
    """Returns the differences of the wanted sources (at least one); none for a source without rows to compare."""
    frames = [_FRAMES[compared](evidence) for compared in ComparedTimes if compared in times]
    shares = ", ".join(f"{step / STEPS}D" for step in range(STEPS + 1))
    percentiles = grouped(
        union(*frames), "compared", "of",
        n="count(*)", steps=f"percentile_approx(difference_ms, array({shares}), 10000)",
    )  # fmt: skip
    return [
        Differences(
            compared=ComparedTimes(row["compared"]), of=row["of"], rows=row["n"], percentiles_ms=list(row["steps"])
        )
        for row in sorted(percentiles.collect())
    ]


def _archive(evidence: Evidence) -> DataFrame:
    """When the archive row was written minus when the broker stored its message; of messages sent at the first try."""
    once = f"leg = '{Leg.ARCHIVE}' and topic != '{CANCELS}' and attempts <= 1 and coalesce(note, '') != 'duplicate'"
    sampled = _sampled("id", _rows(evidence, Leg.ARCHIVE))
    sent = evidence.rows.where(f"{once} and {sampled}").select(*_MESSAGE, "at_ms")
    stored = evidence.messages.where(f"stored_ms is not null and {sampled}").select(*_MESSAGE, "stored_ms")
    return _difference(sent.join(stored, list(_MESSAGE)), ComparedTimes.ARCHIVE, "''", "at_ms - stored_ms")


def _inbox(evidence: Evidence) -> DataFrame:
    """How far the time of the inbox row is outside of the time from delivery to acknowledgement; 0 if within."""
    sampled = _sampled("id", _rows(evidence, Leg.INBOX))
    effects = evidence.inboxes.where(f"leg = '{Leg.INBOX}' and {sampled}").select(*_MESSAGE, "consumer_group", "at_ms")
    taken = evidence.actions.where(f"kind in ('delivered', 'acked') and {sampled}")
    delivered = grouped(
        taken, *_MESSAGE, "consumer_group",
        handed_ms="min(if(kind = 'delivered', at_ms, null))", acked_ms="min(if(kind = 'acked', at_ms, null))",
    ).where("handed_ms is not null and acked_ms is not null")  # fmt: skip
    apart = "if(at_ms < handed_ms, at_ms - handed_ms, greatest(at_ms - acked_ms, 0L))"
    return _difference(
        effects.join(delivered, [*_MESSAGE, "consumer_group"]), ComparedTimes.INBOX, "consumer_group", apart
    )


def _business_time(evidence: Evidence) -> DataFrame:
    return _difference(_asked_and_sent(evidence), ComparedTimes.BUSINESS_TIME, "rule", "asked_ms - sent_ms")


def _business_due(evidence: Evidence) -> DataFrame:
    return _difference(_asked_and_sent(evidence), ComparedTimes.BUSINESS_DUE, "rule", "asked_due_ms - sent_due_ms")


def _asked_and_sent(evidence: Evidence) -> DataFrame:
    """Pairs of business and archive rows that are the only ones with their key, with the times of both."""
    sampled = f"message_key != '' and {_sampled('message_key', _rows(evidence, Leg.BUSINESS))}"
    rows = evidence.rows.where(sampled)
    asked = grouped(
        rows.where(f"leg = '{Leg.BUSINESS}'"), *_UNDER_KEY,
        rule="min(note)", n="count(*)", asked_ms="min(created_ms)", asked_due_ms="min(deliver_at_ms)",
    )  # fmt: skip
    sent = grouped(
        rows.where(f"leg = '{Leg.ARCHIVE}'"), *_UNDER_KEY,
        sent_n="count(*)", sent_ms="min(created_ms)", sent_due_ms="min(deliver_at_ms)",
    )  # fmt: skip
    return asked.where("n = 1").join(sent.where("sent_n = 1"), list(_UNDER_KEY))


def _difference(frame: DataFrame, compared: ComparedTimes, of: str, value: str) -> DataFrame:
    named = frame.selectExpr(f"'{compared}' as compared", f"cast({of} as string) as of", f"{value} as difference_ms")
    return named.where("difference_ms is not null")


_FRAMES: Final = {
    ComparedTimes.ARCHIVE: _archive,
    ComparedTimes.INBOX: _inbox,
    ComparedTimes.BUSINESS_TIME: _business_time,
    ComparedTimes.BUSINESS_DUE: _business_due,
}


def _rows(evidence: Evidence, leg: Leg) -> int:
    return sum(count.rows for count in evidence.counts if count.leg == leg)


def _sampled(column: str, rows: int) -> str:
    """SQL condition: a row is sampled; the same ids, or keys, in every source."""
    return f"pmod(xxhash64({column}), {max(1, rows // SAMPLED_ROWS)}) = 0"
