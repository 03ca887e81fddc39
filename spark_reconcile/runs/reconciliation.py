"""A reconciliation, from settings to published results: over all windows at once, or by the hour.

Both are one run. Its sources are checked, read once, and compared with what earlier runs noted; rows get their verdicts
by the same rules; findings are read and evaluated once more; verdicts are counted by window, and the results published.
They differ in two points. A whole run evaluates every row; its windows are the buckets of the report's axis, and beside
them NO_WINDOW, of rows whose time is not known. By the hour, digests (counts and sums of hashes) are compared first,
and only rows on which the sources do not agree, in hours that are new, changed or open, are evaluated; results are
published hour by hour, so that a killed run is simply started again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.classify.classification import ClassifiedEvidence
from spark_reconcile.classify.key_spelling_differences import with_key_spelling_differences
from spark_reconcile.classify.window_placement import NO_WINDOW, WindowPlacement, among_windows, by_bucket, by_hour
from spark_reconcile.compare.drill_down import Mismatches, drill_down, windows_beside
from spark_reconcile.compare.file_digest_cache import FOLDER as DIGESTS
from spark_reconcile.compare.file_digest_cache import CachedDigests, FileDigestCache
from spark_reconcile.compare.id_digests import Inputs, Tolerance, buckets, clean_buckets
from spark_reconcile.compare.key_digests import MESSAGES, clean_parts, digest, parts, sums_of
from spark_reconcile.core.dataframes import among, in_parallel, union
from spark_reconcile.core.errors import NotComparable, OutputBusy, OutputFailed, SourceFailed
from spark_reconcile.core.plausible_times import EARLIEST_MS, LATEST_MS, InputCount
from spark_reconcile.core.settings import Settings
from spark_reconcile.core.time_arguments import utc_text
from spark_reconcile.core.time_buckets import HOUR_MS, NO_PERIOD, PERIOD_MS, Span, TimeAxis, hour, slot_start
from spark_reconcile.diagnosis.diagnosis import Tables, diagnose, window_tables, with_displaced_rows
from spark_reconcile.load.completeness_bound import Reach, reach_of
from spark_reconcile.load.name_checks import check_rule_topics
from spark_reconcile.load.read_plan import SourcePlan, check_sources
from spark_reconcile.load.source_reader import SEGMENTS, Evidence, read_all
from spark_reconcile.load.spark_session import one_partition, pinned_session, running_session, spark_session
from spark_reconcile.recheck.recheck import recheck
from spark_reconcile.recheck.run_context import Pause, RunContext
from spark_reconcile.report.writer import publish, write_aggregates
from spark_reconcile.results.evidence_retention import first_looked_at_late, reaches, unjudged, with_notes, write_needed
from spark_reconcile.results.latencies import Hour, keep_hours, latencies_of, sampled_hours
from spark_reconcile.results.output_folder import Staging, remove_runs, staging
from spark_reconcile.results.run_figures import axis_of, flow_events, hourly, inputs
from spark_reconcile.results.summary import Flow, InputExtent, Summary, UnjudgedHours, WindowCounts
from spark_reconcile.results.verdict_tables import (
    business_verdicts,
    verdicts,
    write_by_window,
    write_verdicts,
    write_whole_tables,
)
from spark_reconcile.results.window_store import (
    Checkpoint,
    Window,
    WindowStore,
    batches,
    closed_windows,
    span_of,
    to_evaluate,
)
from spark_reconcile.results.window_totals import (
    Tally,
    bulk_of,
    changes_of,
    counts_of,
    published_topics,
    summary_of,
    tally_bulk,
    tally_verdicts,
    trouble_of,
    verdict_counts_of,
)
from spark_reconcile.rules.verdict_rule import Scope
from spark_reconcile.runs.lost_evidence_check import check_evidence, keep_totals
from spark_reconcile.runs.run_progress import RunProgress, Shows, first_measures
from spark_reconcile.runs.window_fingerprints import fingerprints
from spark_reconcile.sources.parquet_file_identity import Files
from spark_reconcile.sources.segment_cache import remove_damaged
from spark_reconcile.sources.sql_statements import InputKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

Say = Callable[[str], None]
FEW_ROWS_MAX: Final = 100_000
"""Up to so many selected rows are classified with the Spark settings for few rows: a second engine for them (SQLite)
took half of the time, and had to be tested on every expression (decision 87)."""
NEAR_ROWS_MAX: Final = 500_000
"""Up to so many messages of the selected files are drilled down with the Spark settings for few rows."""
KEPT_SHARE_MAX: Final = 0.1
"""Rows of mismatching parts are cached up to this share of a batch's messages; above, they are scanned again."""
_LOCK: Final = ".lock"
_ERROR_LINE: Final = re.compile(
    r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Missing|Unavailable|Invalid|Comparable): (.+)$", re.MULTILINE
)
_DISK_FULL: Final = os.strerror(errno.ENOSPC)
_JAVA_LINE: Final = re.compile(r"^(?:Caused by: |: )[\w.$]+: (.+)$", re.MULTILINE)


def wait(seconds: float) -> None:
    """Wait before the recheck."""
    threading.Event().wait(seconds)


def run(
    settings: Settings, *, master: str | None = None, now_ms: int | None = None, session: SparkSession | None = None,
    say: Say = lambda _: None, pause: Pause = wait, shows: Shows | None = None,
) -> Summary:  # fmt: skip
    """Reconcile once, over all windows, and publish tables, summary and report; `say` is called for each step, `pause`
    before a recheck, `shows` each second with how much is done.

    A given session is used and not stopped. Raises ConfigurationError and SchemaMissing (correct the settings),
    OutputBusy (another run writes there), NotComparable and DatabaseUnavailable (a source cannot be evaluated); then
    nothing is published.
    """
    progress = RunProgress(settings.output, by_the_hour=False, say=say, shows=shows)
    request = _Asked(master=master, now_ms=_time_ms(now_ms), session=session, progress=progress, pause=pause)
    return with_sound_caches(settings.output, lambda: _run_once(settings, request))


def run_windows(
    settings: Settings, *, since_ms: int, until_ms: int | None = None, full: bool = False, master: str | None = None,
    now_ms: int | None = None, session: SparkSession | None = None, say: Say = lambda _: None, pause: Pause = wait,
    checkpoint: Checkpoint = lambda _: None, shows: Shows | None = None,
) -> Summary:  # fmt: skip
    """Reconcile the closed hours that overlap [since_ms, until_ms); publish them, and a report on all of them.

    Hours without pending verdicts whose records did not change since their evaluation are not evaluated again. `full`:
    all are evaluated, and every row is classified, whatever the digests say. After a kill at any point, the next run
    gives the same tables. Raises like run().
    """
    judged_at_ms = _time_ms(now_ms)
    progress = RunProgress(settings.output, by_the_hour=True, say=say, shows=shows)
    request = _Asked(
        master=master, now_ms=judged_at_ms, session=session, progress=progress, pause=pause, full=full,
        checkpoint=checkpoint,
        hours=Span(since_ms=since_ms, until_ms=judged_at_ms if until_ms is None else until_ms),
    )  # fmt: skip
    return with_sound_caches(settings.output, lambda: _run_once(settings, request))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The arguments of a run. `hours`: judge the closed hours of this range; None: all windows at once."""

    master: str | None
    now_ms: int
    session: SparkSession | None
    progress: RunProgress
    pause: Pause
    hours: Span | None = None
    full: bool = True
    checkpoint: Checkpoint = lambda _: None


def _time_ms(now_ms: int | None) -> int:
    return time.time_ns() // 1_000_000 if now_ms is None else now_ms


# -- one run: plan, read, evaluate, publish --------------------------------------------------------------------------


def _run_once(settings: Settings, request: _Asked) -> Summary:
    reach = reach_of(settings, now_ms=request.now_ms)
    windows = [] if request.hours is None else _closed(settings, request.hours, reach, now_ms=request.now_ms)
    settings, plan = _planned(settings, windows, reach, now_ms=request.now_ms)
    with only_run(settings.output), staging(settings.output, now_ms=request.now_ms) as stage:
        # An index that cannot be read is told before Spark starts.
        store = WindowStore(settings.output, checkpoint=request.checkpoint) if windows else None
        progress = request.progress
        progress.start(first_measures(plan))
        progress.begin("starting Spark")
        with (
            open_session(request.session, request.master, stage, plan=plan) as spark,
            worker_errors(),
            progress.watching(spark),
        ):
            progress.end_phase("start")
            span = _span(settings, windows)
            evidence = read_all(spark, settings, plan, now_ms=request.now_ms, say=progress.begin, span=span)
            progress.end_phase("read")
            job = RunContext(
                session=spark, settings=settings, plan=plan, evidence=evidence, now_ms=request.now_ms,
                full=request.full, say=progress.begin, pause=request.pause, span=span,
            )  # fmt: skip
            if store is not None:
                _remember_topics(evidence, store)
            check_rule_topics(settings, evidence.counts, now_ms=request.now_ms)
            with one_partition(spark, is_few=evidence.is_few):
                by_the_hour = None if store is None else _Hours(windows=windows, store=store, asked=request.hours)
                summary = _reconcile(job, by_the_hour, stage=stage, progress=progress)
                progress.end()
                return summary


def _closed(settings: Settings, span: Span, reach: Reach, *, now_ms: int) -> list[int]:
    """Returns the hours of the range that are over and for which every source is complete (at least one)."""
    grace_ms = settings.grace.ms
    over = closed_windows(span.since_ms, span.until_ms, now_ms=now_ms, grace_ms=grace_ms)
    windows = [start for start in over if start + HOUR_MS + grace_ms <= reach.least_ms]
    if not windows:
        raise _none_closed(over, reach)
    return windows


def _planned(settings: Settings, windows: Sequence[int], reach: Reach, *, now_ms: int) -> tuple[Settings, SourcePlan]:
    """Checks the sources; returns the settings with what the databases' clocks require."""
    plan = check_sources(settings, reach=reach, span=_span(settings, windows), now_ms=now_ms)
    if windows and plan.slack_seconds > settings.grace.slack_seconds:
        settings = replace(settings, grace=replace(settings.grace, slack_seconds=plan.slack_seconds))
        plan = check_sources(settings, reach=reach, span=_span(settings, windows), now_ms=now_ms)
    return plan.allowing(settings), plan


def _span(settings: Settings, windows: Sequence[int]) -> Span | None:
    """Returns the range of time that is read for these windows; None: all of time."""
    return span_of(windows, slack_ms=int(settings.grace.slack_seconds * 1000)) if windows else None


def _remember_topics(evidence: Evidence, store: WindowStore) -> None:
    """Add topics of earlier windows to the known ones: this time range may have no messages of them."""
    topics = published_topics(window.result for window in store.windows.values())
    evidence.counts += [
        InputCount(input_kind=InputKind.ARCHIVE, topic=topic, note="", rows=0, first_ms=0, last_ms=0)
        for topic in sorted(topics)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hours:
    """The hours that a run judges, where their results are kept, and the range that was asked for."""

    windows: Sequence[int]
    store: WindowStore
    asked: Span | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluated:
    """The verdicts of a run: counts by window, its tables, and the series of its charts."""

    results: Sequence[Mapping[str, Any]]
    tables: Tables
    flow: Flow
    hours: Mapping[int, Hour]
    """Latencies by window."""
    counts: WindowCounts | None = None
    unjudged: Sequence[UnjudgedHours] = ()
    first: ClassifiedEvidence | None = None
    """Cached frames, on which the tables depend."""


def _reconcile(job: RunContext, hours: _Hours | None, *, stage: Staging, progress: RunProgress) -> Summary:
    try:
        shortened = check_evidence(job.evidence, job.settings, job.plan, now_ms=job.now_ms, is_whole=hours is None)
        sources = inputs(job.evidence, job.settings)
        if hours is None:
            evaluated = _evaluate_all(job, stage=stage, progress=progress)
        else:
            evaluated = _evaluate_hours(job, hours, sources, stage=stage, progress=progress)
        causes = diagnose(
            evaluated.tables, evidence=job.evidence, settings=job.settings,
            verdict_counts=verdict_counts_of(evaluated.results), inputs=sources,
            displaced=None if hours is None else partial(
                with_displaced_rows, job.session, job.settings, job.evidence
            ),
        )  # fmt: skip
    finally:
        job.evidence.release()
    if evaluated.first is not None:
        evaluated.first.release()
    progress.end_phase("count")
    job.say("writing the report")
    summary = replace(
        summary_of(evaluated.results, run_id=stage.run_id, judged_at_ms=job.now_ms),
        latencies=latencies_of(evaluated.hours.values()),
        causes=causes,
        inputs=with_notes(sources, evaluated.unjudged),
        unjudged=list(evaluated.unjudged),
        shortened=shortened,
        folder=str(stage.final),
        windows=evaluated.counts,
        clocks=job.plan.clocks,
        took_seconds=progress.took_seconds,
        spark_tasks=progress.spark_tasks,
        grace=job.settings.grace,
        flow=evaluated.flow,
    )
    publish(summary, job.settings, stage=stage)
    keep_totals(job.evidence, job.settings, job.plan, now_ms=job.now_ms, is_whole=hours is None)
    if hours is not None:
        needed = hours.store.windows.keys()
        write_needed(job.settings.output, needed, sources, slack_ms=job.slack_ms, now_ms=job.now_ms)
    remove_runs(job.settings.output, keep_days=job.settings.keep_days, newest=stage.run_id)
    return summary


# -- verdicts: the same for all windows, for a batch of hours, and for what is overdue -------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowVerdicts:
    """Tables of verdicts on messages and deliveries and on business rows, each row in its window (`window_ms`); and the
    number of suspects that the recheck cleared, by window.
    """

    table: DataFrame
    business: DataFrame
    cleared: Mapping[int, int]
    first: ClassifiedEvidence


def _verdicts(job: RunContext, evidence: Evidence, placement: WindowPlacement) -> WindowVerdicts:
    """Classify these rows, and look at the findings once more. Verdicts in other windows are left out."""
    first = job.classify(evidence, placement)
    if evidence is not job.evidence:
        # Of selected rows, plans are longer than their execution; a second copy of all rows would cost more.
        first = first.checkpointed()
    rechecked = recheck(job, evidence, first, placement)
    # Checkpoints: writing, counting and examples would each plan the recheck's unions again.
    tables = verdicts(rechecked.classified), business_verdicts(rechecked.classified, job.settings)
    table, business = with_key_spelling_differences(
        *in_parallel(*(frame.localCheckpoint for frame in tables)), is_few=evidence.is_few, equal_keys=job.equal_keys
    )
    return WindowVerdicts(table=table, business=business, cleared=rechecked.cleared, first=first)


def _among(job: RunContext, inputs: Inputs, batch: Sequence[int]) -> WindowVerdicts:
    """Classify these rows. Only verdicts of the batch's windows are returned: other rows are evidence."""
    evidence = replace(
        job.evidence,
        rows=inputs.rows,
        messages=inputs.messages,
        actions=inputs.actions,
        inboxes=inputs.inboxes,
        tables=(),
    )
    return _verdicts(job, evidence, by_hour(batch, slack_ms=job.slack_ms))


def _count(tallies: Mapping[int, Tally], window_verdicts: WindowVerdicts) -> None:
    tally_verdicts(tallies, window_verdicts.table, window_verdicts.business)
    for start, count in window_verdicts.cleared.items():
        tallies[start].resolved = count


# -- all windows at once ---------------------------------------------------------------------------------------------


def _evaluate_all(job: RunContext, *, stage: Staging, progress: RunProgress) -> _Evaluated:
    """Judge every row, count by bucket of the axis, and, concurrently, write the tables."""
    axis = axis_of(job.evidence)
    job.say(f"giving verdicts on {job.evidence.row_count:,} rows")
    window_verdicts = _verdicts(job, job.evidence, by_bucket(axis))
    progress.end_phase("judge")
    job.say("counting the verdicts")
    tallies = {start: Tally() for start in (NO_WINDOW, *axis.starts)}
    hours, events, *_ = in_parallel(
        lambda: sampled_hours(job.evidence, None),
        lambda: flow_events(window_verdicts.table, axis),
        lambda: _count(tallies, window_verdicts),
        lambda: write_whole_tables(window_verdicts.table, window_verdicts.business, stage.table),
        lambda: hourly(window_verdicts.table).coalesce(1).write.parquet(stage.table("aggregates")),
    )
    results = {start: tally.as_result() for start, tally in tallies.items()}
    return _Evaluated(
        results=list(results.values()),
        tables=lambda: (window_verdicts.table, window_verdicts.business),
        flow=Flow(axis=axis, events=events, trouble=trouble_of({start: results[start] for start in axis.starts}, axis)),
        hours=hours,
        first=window_verdicts.first,
    )


# -- by the hour -----------------------------------------------------------------------------------------------------


def _evaluate_hours(
    job: RunContext, hours: _Hours, sources: Sequence[InputExtent], *, stage: Staging, progress: RunProgress
) -> _Evaluated:
    windows, store = hours.windows, hours.store
    now = reaches(sources)
    begun = store.begun(now)
    job = replace(job, late=first_looked_at_late(windows, store.windows, begun, now))
    job.say(f"comparing digests of {job.evidence.row_count:,} rows in {len(windows):,} windows")
    compared = compare(job, FileDigestCache(job.settings.output, job.settings.limits, checkpoint=store.checkpoint))
    evaluated = evaluate_windows(job, windows, compared, store=store)
    overdue = _overdue_outside(job, windows, table=stage.table("overdue"))
    progress.end_phase("judge")
    shown = {start: store.windows[start] for start in windows}
    latencies = sampled_hours(job.evidence, windows)
    keep_hours({start: store.folder(start) for start in windows}, latencies)
    write_aggregates(stage.folder / "aggregates", {start: window.result for start, window in shown.items()})
    until_ms = windows[-1] if hours.asked is None else hours.asked.until_ms
    before = [window.result for start, window in store.windows.items() if start < windows[0]]
    return _Evaluated(
        results=[*(window.result for window in shown.values()), overdue],
        tables=lambda: window_tables(job.session, store, windows),
        flow=_flow(compared, windows, shown),
        hours=latencies,
        counts=replace(
            counts_of(shown, before=before), judged=len(evaluated), not_closed=_not_closed(windows, until_ms),
            outside=overdue["looked_at"],
        ),
        unjudged=unjudged(windows, store.windows, begun, inputs=sources),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestComparison:
    """The compared digests by key and by id: which parts and buckets are clean.

    `buckets` and `clean_buckets` are None if there are no records by id alone. All are checkpoints: nested plans that
    are joined repeatedly take longer to plan than to execute.
    """

    clean_parts: DataFrame
    sums: Sequence[Row]
    """The sums of `clean_parts` by window."""
    buckets: DataFrame | None
    clean_buckets: DataFrame | None
    known: CachedDigests


def compare(job: RunContext, kept: FileDigestCache) -> DigestComparison:
    """Compute and compare the digests of all inputs; files with cached digests are not read."""
    evidence = job.evidence
    inputs = inputs_of(evidence)
    by_id = evidence.groups or any(count.input_kind in {"actions", InputKind.INBOX} for count in evidence.counts)
    cached = kept.known(job.session, evidence.files)
    summed = clean_parts(_summed(job, cached), covered=job.covered)
    if not by_id:
        clean = summed.localCheckpoint()
        return DigestComparison(clean_parts=clean, sums=sums_of(clean), buckets=None, clean_buckets=None, known=cached)
    tolerance = Tolerance(late_after_ms=int(job.settings.grace.late_after_seconds * 1000), slack_ms=job.slack_ms)
    clean, slotted = in_parallel(summed.localCheckpoint, buckets(inputs, tolerance=tolerance).localCheckpoint)
    sums, agreed = in_parallel(
        lambda: sums_of(clean),
        clean_buckets(job.session, slotted, evidence.groups, late_ms=tolerance.late_after_ms).localCheckpoint,
    )
    return DigestComparison(clean_parts=clean, sums=sums, buckets=slotted, clean_buckets=agreed, known=cached)


def _summed(job: RunContext, cached: CachedDigests) -> DataFrame:
    """Returns the digests of all inputs, cached or computed now."""
    evidence = job.evidence
    rows, messages = evidence.loose or (evidence.rows, evidence.messages)
    digests = [] if rows is None else [
        digest(rows.where(f"input_kind = '{input_kind}'"), input_kind)
        for input_kind in (InputKind.BUSINESS, InputKind.ARCHIVE, InputKind.OUTBOX)
    ]  # fmt: skip
    digests += [] if messages is None else [digest(messages, MESSAGES)]
    digests += [digest(files.read(names), files.input_kind) for files, names in _not_known(evidence, cached)]
    topics = sorted({count.topic for count in evidence.counts if count.topic} | set(job.covered))
    if cached.sums is not None:
        digests.append(cached.sums.where(_touched(job.span)))
    return parts(job.session, digests, topics=topics)


def _not_known(evidence: Evidence, cached: CachedDigests) -> list[tuple[Files, list[str]]]:
    """Returns, for each input, the files without a cached digest."""
    named = set(cached.names.values())
    undigested = [(files, [name for name in files.names if name not in named]) for files in evidence.files]
    return [(files, names) for files, names in undigested if names]


def evaluate_windows(
    job: RunContext, windows: Sequence[int], compared: DigestComparison, *, store: WindowStore
) -> list[int]:
    """Evaluate those of the windows that need it, and publish their results; returns these windows.

    A key's verdict belongs to the hour of its latest row: if a key is classified, its other hours are evaluated, too.
    """
    job = replace(job, span=span_of(windows, slack_ms=job.slack_ms))
    prints = fingerprints(job, sums=compared.sums, buckets=compared.buckets, inputs=inputs_of(job.evidence))
    stale = list(windows) if job.full else to_evaluate(windows, store.windows, prints)
    closed, evaluated = set(windows).difference(stale), set(stale)
    for some in batches(stale, size=job.settings.limits.windows_a_batch):
        chosen = _chosen(job, some, compared)
        with _configured(job, few=chosen.few):
            more = _reopened(job, chosen.inputs, some, closed)
        batch = [*some, *more]
        if more:
            chosen = _chosen(job, batch, compared)
        job.say(f"judging {len(batch):,} of {len(windows):,} windows")
        with _configured(job, few=chosen.few):
            _evaluate_batch(job, batch, compared, prints, chosen, store=store)
        evaluated.update(batch)
    return sorted(evaluated)


def inputs_of(evidence: Evidence) -> Inputs:
    """Returns the evidence's rows."""
    return Inputs(rows=evidence.rows, messages=evidence.messages, actions=evidence.actions, inboxes=evidence.inboxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The rows to classify. `changes`: as in SelectedRows; None: every row is classified. `few`: with the Spark
    settings for few rows.
    """

    inputs: Inputs
    changes: DataFrame | None
    few: bool


def _chosen(job: RunContext, batch: Sequence[int], compared: DigestComparison) -> _Chosen:
    """Selects the rows of the batch to classify."""
    whole = inputs_of(job.evidence)
    # Without an archive no key matches.
    if job.full or all(count.input_kind != InputKind.ARCHIVE for count in job.evidence.counts):
        return _Chosen(inputs=whole, changes=None, few=False)
    windows = _windows_to_drill_down(job, compared, batch)
    mismatches, messages = _unclean(job, compared, batch, windows)
    near = _near(job, compared, windows)
    with _configured(job, few=near is not None and messages <= NEAR_ROWS_MAX):
        has_unsent = any(count.input_kind == InputKind.OUTBOX and count.rows for count in job.evidence.counts)
        rows = drill_down(
            near or whole, whole, mismatches, covered=job.covered, has_unsent=has_unsent, is_few=job.evidence.is_few
        )
    return _Chosen(inputs=rows.inputs, changes=rows.changes, few=job.evidence.is_few or _are_few(rows.inputs))


def _are_few(inputs: Inputs) -> bool:
    """Whether at most FEW_ROWS_MAX rows were selected."""
    frames = (inputs.rows, inputs.messages, inputs.actions, inputs.inboxes)
    rows: list[int] = in_parallel(*(frame.count for frame in frames))
    return sum(rows) <= FEW_ROWS_MAX


def _configured(job: RunContext, *, few: bool) -> AbstractContextManager[None]:
    return job.few_rows() if few else nullcontext()


def _near(job: RunContext, compared: DigestComparison, windows: Collection[int]) -> Inputs | None:
    """Returns all rows without files known to have none of these windows; None: there are no such files."""
    evidence, hours = job.evidence, compared.known.hours
    whole = inputs_of(evidence)
    if evidence.loose is None or compared.known.sums is None or compared.buckets is not None:
        return None
    periods = {NO_PERIOD, *windows}
    far = {name for name, some in hours.items() if periods.isdisjoint(some)}
    rows, messages = evidence.loose
    of_rows, of_messages = ([frame] if frame is not None else [] for frame in (rows, messages))
    for files in evidence.files:
        some = [name for name in files.names if name not in far]
        if some:
            (of_messages if files.input_kind == MESSAGES else of_rows).append(files.read(some).where(files.shown))
    return replace(
        whole,
        rows=union(*of_rows) if of_rows else whole.rows.where("false"),
        messages=union(*of_messages) if of_messages else whole.messages.where("false"),
    )


def _reopened(job: RunContext, inputs: Inputs, batch: Sequence[int], closed: set[int]) -> list[int]:
    """Returns the closed windows that have rows with a key of the batch: they are evaluated with it."""
    if not closed:
        return []
    return sorted(closed & windows_beside(inputs, among_windows("window_ms", batch), covered=job.covered))


def _evaluate_batch(
    job: RunContext, batch: Sequence[int], compared: DigestComparison, prints: Mapping[int, str], chosen: _Chosen, *,
    store: WindowStore,
) -> None:  # fmt: skip
    job.say(f"giving verdicts in {len(batch):,} windows")
    window_verdicts = _among(job, chosen.inputs, batch)
    job.say("writing the tables of verdicts")
    _write(window_verdicts, batch, store=store)
    tallies = _tallies(job, batch, compared, window_verdicts, chosen.changes)
    store.publish({start: _window(tallies[start], prints.get(start, ""), job, start) for start in batch})


def _unclean(
    job: RunContext, compared: DigestComparison, batch: Sequence[int], windows: Collection[int]
) -> tuple[Mismatches, int]:
    """Returns the mismatching parts of these windows and buckets of the batch, and the windows' number of messages."""
    mine = [row for row in compared.sums if row["window_ms"] in windows]
    messages = sum(row["n"] for row in mine)
    apart = sum(row["n"] for row in mine if not row["clean"])
    slots = None
    if compared.clean_buckets is not None:
        near = f"astray or {among_windows('first_window', batch)} or {among_windows('last_window', batch)}"
        slots = compared.clean_buckets.where(f"not clean and ({near})")
    unclean = Mismatches(
        parts=compared.clean_parts.where(f"not clean and {among_windows('window_ms', sorted(windows))}"),
        asked=apart, much=apart > KEPT_SHARE_MAX * messages, buckets=slots, span=job.span,
    )  # fmt: skip
    return unclean, messages


def _windows_to_drill_down(job: RunContext, compared: DigestComparison, batch: Sequence[int]) -> set[int]:
    """Returns the windows of the batch, and those of the time range in which parts mismatch: a verdict of the batch may
    be on a key whose row in another hour disagrees. Outside of the time range only the broker's log is read: no part
    could match there.
    """
    apart = {row["window_ms"] for row in compared.sums if not row["clean"] and _touches(row, job.span)}
    return apart.union(batch)


def _tallies(
    job: RunContext,
    batch: Sequence[int],
    compared: DigestComparison,
    evaluated: WindowVerdicts,
    changes: DataFrame | None,
) -> dict[int, Tally]:
    """Returns the numbers of each window. `changes`: corrections of what was settled in bulk; None: nothing was."""
    tallies = {start: Tally() for start in batch}
    if changes is not None:
        for bulk in (bulk_of(compared.sums), changes_of(changes)):
            tally_bulk(tallies, bulk, job.evidence.groups, job.settings.rules)
    _count(tallies, evaluated)
    return tallies


def _window(tally: Tally, fingerprint: str, job: RunContext, start: int) -> Window:
    return Window(
        fingerprint=fingerprint,
        version=f"{fingerprint[:12] or 'empty'}-{job.now_ms}",
        judged_at_ms=job.now_ms,
        open=tally.open,
        result=tally.as_result(),
        late=job.late.get(start, []),
    )


def _write(window_verdicts: WindowVerdicts, batch: Sequence[int], *, store: WindowStore) -> None:
    """Write each window's tables to a folder of its own, in the staging folder."""
    stage = store.staging()
    for name, frame in (("verdicts", window_verdicts.table), ("business_verdicts", window_verdicts.business)):
        store.checkpoint(f"write {name}")
        write_by_window(frame, name, batch, stage=stage)


def _touched(span: Span | None) -> str:
    """SQL condition: the period of a cached part overlaps the time range."""
    if span is None:
        return "true"
    begins = f"period * {PERIOD_MS}L"
    return f"(period = {NO_PERIOD} or {begins} + {PERIOD_MS}L > {span.since_ms}L and {begins} < {span.until_ms}L)"


def _touches(row: Row, span: Span | None) -> bool:
    """Whether the hour of sums overlaps the time range; sums of rows without a time that can be true may."""
    if span is None or row["timeless"] or not EARLIEST_MS <= row["window_ms"] <= LATEST_MS:
        return True
    return bool(span.since_ms // HOUR_MS * HOUR_MS <= row["window_ms"] < span.until_ms)


def _flow(compared: DigestComparison, windows: Sequence[int], shown: dict[int, Window]) -> Flow:
    """Returns the time series from the digests: by the times in ids, so that all sources have the same axis."""
    axis = TimeAxis.over(windows[0], windows[-1] + HOUR_MS - 1)
    names = {"messages": "stored", "delivered": "delivered", "acked": "acknowledged"}
    events: dict[str, dict[int, int]] = {name: {} for name in names.values()}
    if compared.buckets is None:
        timed = compared.clean_parts.selectExpr("'messages' as input_kind", f"period * {PERIOD_MS}L as begins", "n")
    else:
        named = compared.buckets.where(f"{among('input_kind', names)} and slot != ''")
        timed = named.selectExpr("input_kind", f"{slot_start('slot')} as begins", "n")
    placed = timed.selectExpr("input_kind", f"(begins - {axis.start_ms}L) div {axis.width_ms}L as bucket", "n")
    for row in placed.groupBy("input_kind", "bucket").agg({"n": "sum"}).collect():
        if 0 <= row["bucket"] < axis.buckets:
            events[names[row["input_kind"]]][row["bucket"]] = row["sum(n)"]
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


# -- what is overdue in hours that are not evaluated -----------------------------------------------------------------
#
# Rows of the outbox of any age: messages older than the time range, and those of the current hour, after the grace
# time. Their evidence is only the broker's log and the outbox: archive and business rows of their hours are not read.


def _overdue_outside(job: RunContext, windows: Sequence[int], *, table: str) -> Mapping[str, Any]:
    """Returns totals, like those of a window, of rows that are unsent or parked outside of these windows.

    They are classified by the same rules, and rechecked. If there are any, their verdicts are written as `table`.
    """
    tally = Tally()
    rows = _standing(job, windows)
    hours = [] if rows is None else rows.selectExpr(f"{hour('created_ms')} as hour_ms").distinct().collect()
    if rows is not None and hours:
        batch = sorted(row["hour_ms"] for row in hours)
        evaluated = _among(_without_the_rest(job), _records_of(job, rows), batch)
        # Messages without a row at the recheck were sent meanwhile: they are evaluated with their hour.
        overdue = evaluated.table.where(f"scope = '{Scope.MESSAGE}' and outbox > 0")
        write_verdicts(overdue, Path(table))
        tally_verdicts(dict.fromkeys(batch, tally), overdue, evaluated.business.where("false"))
    return tally.as_result()


def _standing(job: RunContext, windows: Sequence[int]) -> DataFrame | None:
    """Returns rows of the live tables that are older than the grace time, or of a time that cannot be true, which no
    hour will come to; None: there are none.
    """
    if not any(count.input_kind == InputKind.OUTBOX and count.rows for count in job.evidence.counts):
        return None
    outside = f"not (created_ms between {windows[0]}L and {windows[-1] + HOUR_MS - 1}L)"
    old = f"(created_ms <= {job.now_ms - job.settings.grace.ms}L or created_ms > {job.evidence.latest_ms}L)"
    return job.evidence.rows.where(f"input_kind = '{InputKind.OUTBOX}' and {outside} and {old}").localCheckpoint()


def _records_of(job: RunContext, rows: DataFrame) -> Inputs:
    """Returns these rows, and the broker's records of their messages."""
    from pyspark.sql.functions import broadcast

    ids = broadcast(rows.selectExpr("id as id").distinct())
    evidence = job.evidence
    return Inputs(
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
        replace(
            read,
            statements=tuple(statement for statement in read.statements if statement.input_kind is InputKind.OUTBOX),
        )
        for read in plan.rest
    ]
    return replace(plan, inboxes=(), rest=tuple(read for read in reads if read.statements))


# -- session, errors, one run at a time ------------------------------------------------------------------------------


@contextmanager
def open_session(
    session: SparkSession | None, master: str | None, stage: Staging, *, plan: SourcePlan
) -> Iterator[SparkSession]:
    """Yields a session in which the settings hold on which verdicts depend: beside the given one, or beside one that
    this process runs already, which stay as they are, or a new one.
    """
    existing = session or running_session()
    if existing is not None:
        yield pinned_session(existing)
        return
    with spark_session(master, log=stage.folder / "spark.log", size=plan.size) as started:
        yield started


def with_sound_caches(output: Path, reconcile: Callable[[], Summary]) -> Summary:
    """Reconcile; if Spark fails on a source, and a file of the output folder's own caches is damaged, remove that, and
    reconcile once more: it is made again.
    """
    try:
        return reconcile()
    except SourceFailed as error:
        error_text = str(error)
        with only_run(output):
            damaged = [cache for cache in (SEGMENTS, DIGESTS) if remove_damaged(output / cache, error=error_text)]
            if not damaged:
                raise
        return reconcile()


@contextmanager
def worker_errors() -> Iterator[None]:
    """Translates errors of Spark's workers, wrapped in two stack traces, to the one relevant line."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        # Errors in Java itself (an unreadable file, a dead process) PySpark passes on as Py4J errors.
        text = str(error)
        if _DISK_FULL in text:
            raise OutputFailed(
                f"cannot write the results, or what Spark puts aside: {_DISK_FULL}; make room in the output folder and "
                "in SPARK_LOCAL_DIRS, and start it again"
            ) from error
        errors, java = _ERROR_LINE.findall(text), _JAVA_LINE.findall(text)
        # Java's first line may name the file, and its last line has the cause.
        cause = errors[-1] if errors else ": ".join(dict.fromkeys(java[:1] + java[-1:])) or text.splitlines()[0]
        raise SourceFailed(f"a source failed while it was read, so nothing is judged: {cause}") from error


@contextmanager
def only_run(output: Path) -> Iterator[None]:
    """Lock the output folder for one run at a time; the system releases the lock of a dead process."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / _LOCK).open("w", encoding="ascii")
    except OSError as error:
        raise ConfigurationError(f"cannot write to {output}: {error.strerror}; name another [output] folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputBusy(f"another run writes to {output}; wait for its end") from error
        yield
