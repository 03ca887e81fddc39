"""Reports overdue rows of the outbox, of any age, in hours that a run by the hour does not evaluate.

These are messages older than the time range, and those of the current hour, after the grace time. Their evidence is
only the broker's log and the outbox: the archive and the business rows of their hours are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_reconcile.compare.id_digests import Legs
from spark_reconcile.core.time_buckets import HOUR_MS, hour
from spark_reconcile.load.read_plan import SourcePlan
from spark_reconcile.recheck.run_context import RunContext
from spark_reconcile.results.verdict_tables import write_verdicts
from spark_reconcile.results.window_totals import Tally, tally_verdicts
from spark_reconcile.rules.verdict_rule import Scope
from spark_reconcile.runs.window_classification import window_verdicts
from spark_reconcile.sources.sql_statements import Leg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def overdue_outside(job: RunContext, windows: Sequence[int], *, table: str) -> Mapping[str, Any]:
    """Returns totals, like those of a window, of rows that are unsent or parked outside of these windows.

    They are classified by the same rules, and rechecked. If there are any, their verdicts are written as `table`.
    """
    tally = Tally()
    rows = _standing(job, windows)
    hours = [] if rows is None else rows.selectExpr(f"{hour('created_ms')} as hour_ms").distinct().collect()
    if rows is not None and hours:
        batch = sorted(row["hour_ms"] for row in hours)
        judged = window_verdicts(_without_the_rest(job), _legs(job, rows), batch)
        # Messages without a row at the recheck were sent meanwhile: they are evaluated with their hour.
        found = judged.table.where(f"scope = '{Scope.MESSAGE}' and outbox > 0")
        write_verdicts(found, Path(table))
        tally_verdicts(dict.fromkeys(batch, tally), found, judged.business.where("false"))
    return tally.as_result()


def _standing(job: RunContext, windows: Sequence[int]) -> DataFrame | None:
    """Returns rows of the live tables that are older than the grace time; None: there are none."""
    if not any(one.leg == Leg.OUTBOX and one.rows for one in job.evidence.counts):
        return None
    outside = f"not (created_ms between {windows[0]}L and {windows[-1] + HOUR_MS - 1}L)"
    old = f"created_ms <= {job.now_ms - job.settings.grace.ms}L"
    return job.evidence.rows.where(f"leg = '{Leg.OUTBOX}' and {outside} and {old}").localCheckpoint()


def _legs(job: RunContext, rows: DataFrame) -> Legs:
    """Returns these rows, and the broker's records of their messages."""
    from pyspark.sql.functions import broadcast

    ids = broadcast(rows.selectExpr("id as id").distinct())
    evidence = job.evidence
    return Legs(
        rows=rows,
        messages=evidence.messages.join(ids, "id", "left_semi").localCheckpoint(),
        actions=evidence.actions.join(ids, "id", "left_semi").localCheckpoint(),
        inboxes=evidence.inboxes.where("false"),
    )


def _without_the_rest(job: RunContext) -> RunContext:
    """Returns the job without business rules, since these hours were not read; the recheck reads only live tables."""
    evidence = replace(job.evidence, groups=(), business_reaches={})
    return replace(job, evidence=evidence, plan=_live_tables(job.plan))


def _live_tables(plan: SourcePlan) -> SourcePlan:
    reads = [
        replace(read, statements=tuple(one for one in read.statements if one.leg is Leg.OUTBOX)) for read in plan.rest
    ]
    return replace(plan, inboxes=(), rest=tuple(read for read in reads if read.statements))
