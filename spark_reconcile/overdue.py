"""What still stands in the outbox, of hours that a run by the hour does not judge: it is told whatever its age.

Messages older than the span, and those of the hour that goes on, as soon as the grace time is over. The broker's log
and the outbox are all that is asked of them: the archive and the business rows of their hours are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_reconcile.bringing import in_one_place
from spark_reconcile.digests import Legs
from spark_reconcile.in_memory import in_memory
from spark_reconcile.looking import Job, look
from spark_reconcile.planning import Plan
from spark_reconcile.slots import HOUR_MS, hour
from spark_reconcile.sources.statements import Leg
from spark_reconcile.verdict import Scope
from spark_reconcile.verdict_files import write_verdicts
from spark_reconcile.window_results import Tally, tally_examples, tally_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def overdue_outside(job: Job, windows: Sequence[int], *, table: str) -> Mapping[str, Any]:
    """Numbers, as a window has them, of what is unsent or parked outside of these windows.

    Judged by the same rules, and looked at twice. Where there is any, its verdicts are written as `table`.
    """
    tally = Tally()
    rows = _standing(job, windows)
    hours = [] if rows is None else rows.selectExpr(f"{hour('created_ms')} as hour_ms").distinct().collect()
    if rows is not None and hours:
        batch = sorted(row["hour_ms"] for row in hours)
        with in_memory() as memory:
            legs = in_one_place(memory, _legs(job, rows), job.session)
            looked = look(_without_the_rest(job), legs, batch)
            # Whose row is gone by the second look was sent meanwhile: its hour will tell.
            found = looked.table.where(f"scope = '{Scope.MESSAGE}' and outbox > 0")
            write_verdicts(found, Path(table))
            tallies = dict.fromkeys(batch, tally)
            tally_rows(tallies, found)
            tally_examples(tallies, found, looked.business.where("false"))
    return tally.as_result()


def _standing(job: Job, windows: Sequence[int]) -> DataFrame | None:
    """Rows of the live tables that are older than the grace time; None: there are none."""
    if not any(one.leg == Leg.OUTBOX and one.rows for one in job.evidence.counts):
        return None
    outside = f"not (created_ms between {windows[0]}L and {windows[-1] + HOUR_MS - 1}L)"
    old = f"created_ms <= {job.now_ms - int(job.settings.grace.seconds * 1000)}L"
    return job.evidence.rows.where(f"leg = '{Leg.OUTBOX}' and {outside} and {old}").localCheckpoint()


def _legs(job: Job, rows: DataFrame) -> Legs:
    """These rows, and what the broker has of their messages."""
    from pyspark.sql.functions import broadcast

    ids = broadcast(rows.selectExpr("id as id").distinct())
    evidence = job.evidence
    return Legs(
        rows=rows,
        messages=evidence.messages.join(ids, "id", "left_semi").localCheckpoint(),
        actions=evidence.actions.join(ids, "id", "left_semi").localCheckpoint(),
        inboxes=evidence.inboxes.where("false"),
    )


def _without_the_rest(job: Job) -> Job:
    """No business row is asked for, as none of these hours was read; the second look reads the live tables alone."""
    evidence = replace(job.evidence, groups=(), business_reaches={})
    return replace(job, evidence=evidence, plan=_live_tables(job.plan))


def _live_tables(plan: Plan) -> Plan:
    reads = [
        replace(read, statements=tuple(one for one in read.statements if one.leg is Leg.OUTBOX)) for read in plan.rest
    ]
    return replace(plan, inboxes=(), rest=tuple(read for read in reads if read.statements))
