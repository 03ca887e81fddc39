"""Classifies and rechecks the rows of a batch of windows that compare.drill_down has selected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spark_reconcile.classify.key_spelling_differences import with_key_spelling_differences
from spark_reconcile.classify.window_placement import by_hour
from spark_reconcile.compare.id_digests import Legs
from spark_reconcile.core.parallel_jobs import in_parallel
from spark_reconcile.recheck.recheck import recheck
from spark_reconcile.recheck.run_context import RunContext
from spark_reconcile.results.verdict_tables import business_verdicts, verdicts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowVerdicts:
    """Tables of verdicts on messages and deliveries and on business rows, each row in its window (`window_ms`); and the
    number of suspects that the recheck cleared, by window.
    """

    table: DataFrame
    business: DataFrame
    cleared: Mapping[int, int]


def window_verdicts(job: RunContext, legs: Legs, batch: Sequence[int]) -> WindowVerdicts:
    """Classify these rows. Only verdicts of the batch's windows are returned: other rows are evidence."""
    evidence = replace(
        job.evidence, rows=legs.rows, messages=legs.messages, actions=legs.actions, inboxes=legs.inboxes, tables=()
    )
    placement = by_hour(batch, slack_ms=job.slack_ms)
    first = job.judge(evidence, placement).checkpointed()
    found = recheck(job, evidence, first, placement)
    # Checkpoints: writing, counting and examples would each plan the recheck's unions again.
    tables = verdicts(found.judged), business_verdicts(found.judged, job.settings)
    table, business = with_key_spelling_differences(
        *in_parallel(*(frame.localCheckpoint for frame in tables)), is_few=evidence.is_few, equal_keys=job.equal_keys
    )
    return WindowVerdicts(table=table, business=business, cleared=found.cleared)
