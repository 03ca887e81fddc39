"""Judges the rows of a batch of windows, and the suspects among them once more. Which rows: see drilling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from spark_reconcile.digests import Legs
from spark_reconcile.figures import business_verdicts, verdicts
from spark_reconcile.judging import Judged, bounds_of, judge
from spark_reconcile.planning import Plan
from spark_reconcile.reading import Evidence
from spark_reconcile.second_look import Suspects, look_again, suspects_of
from spark_reconcile.settings import Settings
from spark_reconcile.slots import hour, slot, window_of_message
from spark_reconcile.sources.statements import Span
from spark_reconcile.verdict import Severity

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Pause = Callable[[float], None]
LookAgain = Callable[["SparkSession", Settings, Plan, Evidence, Suspects], Evidence]
_FINDING = f"severity = '{Severity.FINDING}'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What does not change while a run goes from batch to batch."""

    session: SparkSession
    settings: Settings
    plan: Plan
    evidence: Evidence
    now_ms: int
    full: bool
    say: Callable[[str], None]
    pause: Pause
    again: LookAgain = look_again
    span: Span | None = None
    """The times of which all sources are read; None: not known yet."""
    late: Mapping[int, list[str]] = field(default_factory=dict)
    """Of windows the sources that were purged of them before they were judged for the first time."""

    @property
    def covered(self) -> list[str]:
        """The topics that a rule asks about."""
        return sorted({rule.topic for rule in self.settings.rules})

    @property
    def slack_ms(self) -> int:
        """How far ids and rows may be apart."""
        return int(self.settings.grace.slack_seconds * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """Verdict tables of a batch, each row in its window, and how many suspects the second look cleared, by window.

    In both tables `confirmed` says of a finding that the second look saw it, too.
    """

    table: DataFrame
    business: DataFrame
    resolved: Mapping[int, int]


def look(job: Job, legs: Legs, batch: Sequence[int]) -> Looked:
    """Judge the rows, then the suspects among them once more."""
    evidence = replace(
        job.evidence, rows=legs.rows, messages=legs.messages, actions=legs.actions, inboxes=legs.inboxes, tables=()
    )
    judged, table, business = _tables(job, evidence, batch)
    first = table.localCheckpoint(), business.localCheckpoint()
    judged.release()
    suspects = suspects_of(*first)
    if suspects.too_many:
        job.say("too many suspects to look at each of them again: none is confirmed")
    if suspects.too_many or not (suspects.ids or suspects.keys):
        return Looked(table=_confirmed(first[0], "false"), business=_confirmed(first[1], "false"), resolved={})
    job.say(f"looking again at {len(suspects.ids) + len(suspects.keys):,} suspects")
    job.pause(job.settings.grace.confirm_after_seconds)
    return _second(job, evidence, suspects, batch, first=first)


def _second(
    job: Job, looked: Evidence, suspects: Suspects, batch: Sequence[int], *, first: tuple[DataFrame, DataFrame]
) -> Looked:
    """The first look's verdicts, with the suspects' replaced by those of the second."""
    # What was drilled holds all that the logs had of the suspects: they are not searched again from their beginning.
    evidence = job.again(job.session, job.settings, job.plan, looked, suspects)
    again, table, business = _tables(job, evidence, batch)
    table, business = table.localCheckpoint(), business.localCheckpoint()
    again.release()
    evidence.release()
    ids = job.session.createDataFrame([(one,) for one in suspects.ids], "message_id string")
    keys = job.session.createDataFrame(list(suspects.keys), "topic string, message_key string")
    looked_at = table.where("broker > 0").select("message_id").unionByName(ids).distinct()
    final = (
        _confirmed(first[0], "false").join(looked_at, "message_id", "left_anti")
        .unionByName(_confirmed(table, _FINDING).join(looked_at, "message_id", "left_semi"))
        .localCheckpoint()
    )  # fmt: skip
    rows = (
        _confirmed(first[1], "false").join(keys, ["topic", "message_key"], "left_anti")
        .unionByName(_confirmed(business, _FINDING).join(keys, ["topic", "message_key"], "left_semi"))
        .localCheckpoint()
    )  # fmt: skip
    before, after = _findings(*first), _findings(final, rows)
    resolved = {start: count - after.get(start, 0) for start, count in before.items() if count > after.get(start, 0)}
    return Looked(table=final, business=rows, resolved=resolved)


def _tables(job: Job, evidence: Evidence, batch: Sequence[int]) -> tuple[Judged, DataFrame, DataFrame]:
    """Verdicts of the batch's windows alone: what was read beside them is there as evidence."""
    judged = judge(job.session, evidence, bounds_of(job.settings.grace, evidence, now_ms=job.now_ms), span=job.span)
    among = f"window_ms in ({', '.join(f'{start}L' for start in batch)})"
    time = "if(published_ms > 0, published_ms, if(stored_ms > 0, stored_ms, at_ms))"
    table = verdicts(judged).selectExpr("*", f"{slot('message_id')} as slot")
    created = "if(outbox + archive + broker > 0, published_ms, 0L)"
    window = window_of_message(created, otherwise=time, slack_ms=job.slack_ms)
    table = table.selectExpr("*", f"{window} as window_ms").drop("slot")
    business = business_verdicts(judged, job.settings).selectExpr("*", f"{hour('at_ms')} as window_ms")
    return judged, table.where(among), business.where(among)


def _confirmed(table: DataFrame, value: str) -> DataFrame:
    return table.selectExpr("*", f"({value}) as confirmed")


def _findings(table: DataFrame, business: DataFrame) -> dict[int, int]:
    found = table.where(_FINDING).select("window_ms").unionByName(business.where(_FINDING).select("window_ms"))
    return {row["window_ms"]: row["count"] for row in found.groupBy("window_ms").count().collect()}
