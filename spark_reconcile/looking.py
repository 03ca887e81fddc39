"""Judges the rows of a batch of windows, and the suspects among them once more. Which rows: see drilling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

from spark_reconcile.digests import Legs, union
from spark_reconcile.figures import business_verdicts, verdicts
from spark_reconcile.in_memory import beside, grouped
from spark_reconcile.judging import Judged, bounds_of, judge
from spark_reconcile.planning import Plan
from spark_reconcile.reading import Evidence
from spark_reconcile.second_look import Suspects, ids_frame, keys_frame, look_again, suspects_of
from spark_reconcile.settings import Settings
from spark_reconcile.slots import hour, slot, window_of_message
from spark_reconcile.sources.statements import Span
from spark_reconcile.verdict import FINDING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Pause = Callable[[float], None]
LookAgain = Callable[["SparkSession", Settings, Plan, Evidence, Suspects], Evidence]


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
    suspects = after_a_while(job, suspects_of(*first))
    if not suspects:
        return Looked(table=_confirmed(first[0], "false"), business=_confirmed(first[1], "false"), resolved={})
    return _second(job, evidence, suspects, batch, first=first)


def after_a_while(job: Job, suspects: Sequence[Suspects] | None) -> Sequence[Suspects]:
    """The suspects, when it is time to look again; where there are none or too many (None): none, and at once."""
    if suspects is None:
        job.say("too many suspects to look at each of them again: none is confirmed")
    if not suspects:
        return ()
    job.pause(job.settings.grace.confirm_after_seconds)
    return suspects


def part_by_part(job: Job, suspects: Sequence[Suspects]) -> Iterator[Suspects]:
    """Each part, told as its turn comes."""
    known = sum(len(part.ids) + len(part.keys) for part in suspects)
    for number, part in enumerate(suspects, start=1):
        job.say(f"looking again at {known:,} suspects, part {number} of {len(suspects)}")
        yield part


def _second(
    job: Job, looked: Evidence, suspects: Sequence[Suspects], batch: Sequence[int], *,
    first: tuple[DataFrame, DataFrame],
) -> Looked:  # fmt: skip
    """The first look's verdicts, with the suspects' replaced by those of the second, part by part."""
    found = [_part(job, looked, part, batch) for part in part_by_part(job, suspects)]
    tables, rows, ids, keys = (reduce(union, frames) for frames in zip(*found, strict=True))
    final = _confirmed(first[0], "false").join(ids.distinct(), "message_id", "left_anti").unionByName(tables)
    business = _confirmed(first[1], "false").join(keys, ["topic", "message_key"], "left_anti").unionByName(rows)
    final, business = final.localCheckpoint(), business.localCheckpoint()
    before, after = _findings(*first), _findings(final, business)
    resolved = {start: count - after.get(start, 0) for start, count in before.items() if count > after.get(start, 0)}
    return Looked(table=final, business=business, resolved=resolved)


def _part(
    job: Job, looked: Evidence, suspects: Suspects, batch: Sequence[int]
) -> tuple[DataFrame, DataFrame, DataFrame, DataFrame]:
    """Both tables of these suspects as they are by now, and the ids and keys that they speak for."""
    # What was drilled holds all that the logs had of the suspects: they are not searched again from their beginning.
    evidence = job.again(job.session, job.settings, job.plan, looked, suspects)
    again, table, business = _tables(job, evidence, batch)
    table, business = table.localCheckpoint(), business.localCheckpoint()
    again.release()
    evidence.release()
    engine = table.sparkSession
    ids, keys = ids_frame(engine, suspects.ids, name="message_id"), keys_frame(engine, suspects.keys)
    # What was stored meanwhile under these keys, too; of what stands under another's the rest was not read.
    under = table.where("broker > 0").join(keys, ["topic", "message_key"], "left_semi").select("message_id")
    looked_at = under.unionByName(ids).distinct().localCheckpoint()
    found = (
        _confirmed(table, FINDING).join(looked_at, "message_id", "left_semi"),
        _confirmed(business, FINDING).join(keys, ["topic", "message_key"], "left_semi"),
        looked_at,
        keys,
    )
    tables, rows, of_ids, of_keys = (beside(looked.rows, frame) for frame in found)
    return tables, rows, of_ids, of_keys


def _tables(job: Job, evidence: Evidence, batch: Sequence[int]) -> tuple[Judged, DataFrame, DataFrame]:
    """Verdicts of the batch's windows alone: what was read beside them is there as evidence."""
    judged = judge(evidence, bounds_of(job.settings.grace, evidence, now_ms=job.now_ms), span=job.span)
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
    found = table.where(FINDING).select("window_ms").unionByName(business.where(FINDING).select("window_ms"))
    return {row["window_ms"]: row["n"] for row in grouped(found, "window_ms", n="count(*)").collect()}
