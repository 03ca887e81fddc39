"""An incremental run by windows, from settings to the published report. window_evaluation evaluates the windows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.compare.file_digest_cache import FileDigestCache
from spark_reconcile.core.chart_time_axis import TimeAxis
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.core.settings import Settings
from spark_reconcile.core.source_counts import LegCount
from spark_reconcile.core.time_arguments import utc_text
from spark_reconcile.core.time_buckets import HOUR_MS, PERIOD_MS, slot_start
from spark_reconcile.diagnosis.diagnosis import diagnose, window_tables
from spark_reconcile.diagnosis.rows_of_other_hours import with_displaced_rows
from spark_reconcile.load.completeness_bound import Reach, reach_of
from spark_reconcile.load.evidence import Evidence, read_all
from spark_reconcile.load.read_plan import SourcePlan, check_sources
from spark_reconcile.load.rule_topic_check import check_rule_topics
from spark_reconcile.load.spark_session import one_partition
from spark_reconcile.recheck.run_context import Pause, RunContext
from spark_reconcile.report.writer import publish, write_aggregates
from spark_reconcile.results.latencies import keep_hours, latencies_of, sampled_hours
from spark_reconcile.results.output_folder import Staging, remove_runs, staging
from spark_reconcile.results.retention_gaps import first_looked_at_late, reaches, unjudged, with_notes
from spark_reconcile.results.retention_hold_writer import write_needed
from spark_reconcile.results.run_figures import inputs
from spark_reconcile.results.summary import Summary
from spark_reconcile.results.time_series import Flow
from spark_reconcile.results.window_selection import closed_windows, span_of
from spark_reconcile.results.window_store import Checkpoint, Window, WindowStore
from spark_reconcile.results.window_totals import counts_of, published_topics, summary_of, trouble_of, verdict_counts_of
from spark_reconcile.runs.full_run import Say, StepTimer, only_run, open_session, wait, with_sound_caches, worker_errors
from spark_reconcile.runs.lost_evidence_check import check_evidence, keep_totals
from spark_reconcile.runs.overdue_outside_windows import overdue_outside
from spark_reconcile.runs.window_evaluation import DigestComparison, compare, judge_windows
from spark_reconcile.sources.sql_statements import Leg

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run_windows(
    settings: Settings, *, since_ms: int, until_ms: int | None = None, full: bool = False, master: str | None = None,
    now_ms: int | None = None, session: SparkSession | None = None, say: Say = lambda _: None, pause: Pause = wait,
    checkpoint: Checkpoint = lambda _: None,
) -> Summary:  # fmt: skip
    """Reconcile the closed hours that overlap [since_ms, until_ms); publish them, and a report on all of them.

    Hours without pending verdicts whose records did not change since their evaluation are not evaluated again. `full`:
    all are evaluated, and every row is classified, whatever the digests say. After a kill at any point, the next run
    gives the same tables. Raises like run().
    """
    judged_at_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    return with_sound_caches(
        settings.output,
        lambda: _run_once(
            settings, since_ms=since_ms, until_ms=judged_at_ms if until_ms is None else until_ms, full=full,
            master=master, now_ms=judged_at_ms, session=session, say=say, pause=pause, checkpoint=checkpoint,
        ),
    )  # fmt: skip


def _run_once(
    settings: Settings, *, since_ms: int, until_ms: int, full: bool, master: str | None, now_ms: int,
    session: SparkSession | None, say: Say, pause: Pause, checkpoint: Checkpoint,
) -> Summary:  # fmt: skip
    judged_at_ms, until = now_ms, until_ms
    grace_ms = settings.grace.ms
    reach = reach_of(settings, now_ms=judged_at_ms)
    over = closed_windows(since_ms, until, now_ms=judged_at_ms, grace_ms=grace_ms)
    windows = [start for start in over if start + HOUR_MS + grace_ms <= reach.least_ms]
    if not windows:
        raise _none_closed(over, reach)
    slack_ms = int(settings.grace.slack_seconds * 1000)
    plan = check_sources(settings, reach=reach, span=span_of(windows, slack_ms=slack_ms), now_ms=judged_at_ms)
    if plan.slack_seconds > settings.grace.slack_seconds:
        settings = replace(settings, grace=replace(settings.grace, slack_seconds=plan.slack_seconds))
        slack_ms = int(settings.grace.slack_seconds * 1000)
        plan = check_sources(settings, reach=reach, span=span_of(windows, slack_ms=slack_ms), now_ms=judged_at_ms)
    settings = plan.allowing(settings)
    with only_run(settings.output), staging(settings.output, now_ms=judged_at_ms) as stage:
        store = WindowStore(settings.output, checkpoint=checkpoint)
        say("starting Spark")
        with open_session(session, master, stage, plan=plan) as spark, worker_errors():
            job = _job(spark, settings, plan, windows, now_ms=judged_at_ms, full=full, say=say, pause=pause)
            _remember_topics(job.evidence, store)
            check_rule_topics(settings, job.evidence.counts, now_ms=judged_at_ms)
            with one_partition(spark, is_few=job.evidence.is_few):
                return _run(job, windows, store, stage=stage, not_closed=_not_closed(windows, until))


def _job(
    spark: SparkSession, settings: Settings, plan: SourcePlan, windows: Sequence[int], *, now_ms: int, full: bool,
    say: Say, pause: Pause,
) -> RunContext:  # fmt: skip
    span = span_of(windows, slack_ms=int(settings.grace.slack_seconds * 1000))
    evidence = read_all(spark, settings, plan, now_ms=now_ms, say=say, span=span)
    return RunContext(
        session=spark, settings=settings, plan=plan, evidence=evidence, now_ms=now_ms, full=full, say=say, pause=pause,
        span=span,
    )  # fmt: skip


def _remember_topics(evidence: Evidence, store: WindowStore) -> None:
    """Add topics of earlier windows to the known ones: this time range may have no messages of them."""
    topics = published_topics(window.result for window in store.windows.values())
    evidence.counts += [
        LegCount(leg=Leg.ARCHIVE, topic=topic, note="", rows=0, first_ms=0, last_ms=0) for topic in sorted(topics)
    ]


def _run(job: RunContext, windows: Sequence[int], store: WindowStore, *, stage: Staging, not_closed: int) -> Summary:
    watch, sources = StepTimer(), inputs(job.evidence, job.settings)
    now = reaches(sources)
    begun = store.begun(now)
    job = replace(job, late=first_looked_at_late(windows, store.windows, begun, now))
    try:
        shortened = check_evidence(job.evidence, job.settings, job.plan, now_ms=job.now_ms)
        job.say(f"comparing digests of {job.evidence.row_count:,} rows in {len(windows):,} windows")
        compared = compare(job, FileDigestCache(job.settings.output, job.settings.limits, checkpoint=store.checkpoint))
        judged = judge_windows(job, windows, compared, store=store)
        overdue = overdue_outside(job, windows, table=stage.table("overdue"))
        watch.lap("judge")
        shown = {start: store.windows[start] for start in windows}
        flow, hours = _flow(compared, windows, shown), sampled_hours(job.evidence, windows)
        causes = diagnose(
            lambda: window_tables(job.session, store, windows), evidence=job.evidence, settings=job.settings,
            verdict_counts=verdict_counts_of(window.result for window in shown.values()), inputs=sources,
            displaced=partial(with_displaced_rows, job.session, job.settings, job.evidence),
        )  # fmt: skip
    finally:
        job.evidence.release()
    watch.lap("count")
    gone = unjudged(windows, store.windows, begun, inputs=sources)
    summary = replace(
        summary_of([*(one.result for one in shown.values()), overdue], run_id=stage.run_id, judged_at_ms=job.now_ms),
        latencies=latencies_of(hours.values()),
        causes=causes,
        inputs=with_notes(sources, gone),
        unjudged=gone,
        shortened=shortened,
        folder=str(stage.final),
        windows=replace(
            counts_of(shown, before=[one.result for start, one in store.windows.items() if start < windows[0]]),
            judged=len(judged),
            not_closed=not_closed,
            outside=overdue["looked_at"],
        ),
        clocks=job.plan.clocks,
        took_seconds=watch.laps,
        grace=job.settings.grace,
        flow=flow,
    )
    job.say("writing the report")
    keep_hours({start: store.folder(start) for start in windows}, hours)
    write_aggregates(stage.folder / "aggregates", {start: window.result for start, window in shown.items()})
    publish(summary, job.settings, stage=stage)
    keep_totals(job.evidence, job.settings, job.plan, now_ms=job.now_ms)
    write_needed(job.settings.output, store.windows.keys(), sources, slack_ms=job.slack_ms, now_ms=job.now_ms)
    remove_runs(job.settings.output, keep_days=job.settings.keep_days, newest=stage.run_id)
    return summary


def _flow(compared: DigestComparison, windows: Sequence[int], shown: dict[int, Window]) -> Flow:
    """Returns the time series from the digests: by the times in ids, so that all sources have the same axis."""
    axis = TimeAxis.over(windows[0], windows[-1] + HOUR_MS - 1)
    names = {"messages": "stored", "delivered": "handed out", "acked": "acknowledged"}
    events: dict[str, dict[int, int]] = {name: {} for name in names.values()}
    if compared.buckets is None:
        timed = compared.clean_parts.selectExpr("'messages' as leg", f"period * {PERIOD_MS}L as begins", "n")
    else:
        named = compared.buckets.where(f"leg in ({', '.join(repr(leg) for leg in names)}) and slot != ''")
        timed = named.selectExpr("leg", f"{slot_start('slot')} as begins", "n")
    placed = timed.selectExpr("leg", f"(begins - {axis.start_ms}L) div {axis.width_ms}L as bucket", "n")
    for row in placed.groupBy("leg", "bucket").agg({"n": "sum"}).collect():
        if 0 <= row["bucket"] < axis.buckets:
            events[names[row["leg"]]][row["bucket"]] = row["sum(n)"]
    trouble = trouble_of({start: window.result for start, window in shown.items()}, axis)
    return Flow(axis=axis, events=events, trouble=trouble)


def _none_closed(over: Sequence[int], reach: Reach) -> Exception:
    """Returns why no hour is evaluated: the range is too new, or a source is not complete for the hours `over`."""
    if not over:
        return ConfigurationError(
            "no hour in this span is over, with its grace time: name an earlier --since, or try again later"
        )
    until = utc_text(reach.least_ms)
    return NotComparable(
        f"a source is complete until {until} only, so no hour in this span is whole in it: let the replica come after, "
        "read another, or name an earlier --since"
    )


def _not_closed(windows: Sequence[int], until_ms: int) -> int:
    return max(0, -(-(until_ms - windows[-1] - HOUR_MS) // HOUR_MS))
