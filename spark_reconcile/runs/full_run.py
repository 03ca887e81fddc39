"""A full run, from settings to published results. Each step has a module of its own."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.classify.key_spelling_differences import with_key_spelling_differences
from spark_reconcile.classify.window_placement import NO_WINDOW, by_bucket
from spark_reconcile.compare.file_digest_cache import FOLDER as DIGESTS
from spark_reconcile.core.chart_time_axis import TimeAxis
from spark_reconcile.core.errors import OutputBusy, OutputFailed, SourceFailed
from spark_reconcile.core.parallel_jobs import in_parallel
from spark_reconcile.core.settings import Settings
from spark_reconcile.diagnosis.diagnosis import diagnose
from spark_reconcile.load.completeness_bound import reach_of
from spark_reconcile.load.evidence import SEGMENTS, read_all
from spark_reconcile.load.read_plan import SourcePlan, check_sources
from spark_reconcile.load.rule_topic_check import check_rule_topics
from spark_reconcile.load.spark_session import one_partition, pinned_session, running_session, spark_session
from spark_reconcile.recheck.recheck import recheck
from spark_reconcile.recheck.run_context import Pause, RunContext
from spark_reconcile.report.writer import publish
from spark_reconcile.results.latencies import latencies_of, sampled_hours
from spark_reconcile.results.output_folder import Staging, remove_runs, staging
from spark_reconcile.results.run_figures import axis_of, flow_events, hourly, inputs
from spark_reconcile.results.summary import Summary
from spark_reconcile.results.time_series import Flow
from spark_reconcile.results.verdict_tables import business_verdicts, verdicts, write_whole_tables
from spark_reconcile.results.window_totals import Tally, summary_of, tally_verdicts, trouble_of
from spark_reconcile.runs.lost_evidence_check import check_evidence, keep_totals
from spark_reconcile.sources.segment_cache import remove_damaged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Say = Callable[[str], None]
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
    settings: Settings,
    *,
    master: str | None = None,
    now_ms: int | None = None,
    session: SparkSession | None = None,
    say: Say = lambda _: None,
    pause: Pause = wait,
) -> Summary:
    """Reconcile once, and publish tables, summary and report; `say` is called for each step, `pause` before a recheck.

    A given session is used and not stopped. Raises ConfigurationError and SchemaMissing (correct the settings),
    OutputBusy (another run writes there), NotComparable and DatabaseUnavailable (a source cannot be evaluated); then
    nothing is published.
    """
    judged_at_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    return with_sound_caches(
        settings.output,
        lambda: _run_once(settings, master=master, now_ms=judged_at_ms, session=session, say=say, pause=pause),
    )


def _run_once(
    settings: Settings, *, master: str | None, now_ms: int, session: SparkSession | None, say: Say, pause: Pause
) -> Summary:
    judged_at_ms = now_ms
    plan = check_sources(settings, reach=reach_of(settings, now_ms=judged_at_ms), now_ms=judged_at_ms)
    settings = plan.allowing(settings)
    with only_run(settings.output), staging(settings.output, now_ms=judged_at_ms) as stage:
        say("starting Spark")
        watch = StepTimer()
        with open_session(session, master, stage, plan=plan) as spark:
            watch.lap("start")
            with worker_errors():
                evidence = read_all(spark, settings, plan, now_ms=judged_at_ms, say=say)
                watch.lap("read")
                check_rule_topics(settings, evidence.counts, now_ms=judged_at_ms)
                job = RunContext(
                    session=spark, settings=settings, plan=plan, evidence=evidence, now_ms=judged_at_ms, full=True,
                    say=say, pause=pause,
                )  # fmt: skip
                with one_partition(spark, is_few=evidence.is_few):
                    return _reconcile(job, stage=stage, watch=watch)


def _reconcile(job: RunContext, *, stage: Staging, watch: StepTimer) -> Summary:
    evidence, axis = job.evidence, axis_of(job.evidence)
    placement = by_bucket(axis)
    try:
        shortened = check_evidence(evidence, job.settings, job.plan, now_ms=job.now_ms)
        job.say(f"giving verdicts on {evidence.row_count:,} rows")
        first = job.judge(evidence, placement)
        found = recheck(job, evidence, first, placement)
        tables = verdicts(found.judged), business_verdicts(found.judged, job.settings)
        table, business = with_key_spelling_differences(
            *in_parallel(*(frame.localCheckpoint for frame in tables)), is_few=evidence.is_few,
            equal_keys=job.equal_keys,
        )  # fmt: skip
        watch.lap("judge")
        job.say("counting the verdicts")
        summary = _count(job, found.cleared, table, business, axis, stage=stage)
        causes = diagnose(
            lambda: (table, business), evidence=evidence, settings=job.settings, verdict_counts=summary.verdict_counts,
            inputs=summary.inputs,
        )  # fmt: skip
    finally:
        evidence.release()
    first.release()
    watch.lap("count")
    job.say("writing the report")
    summary = replace(
        summary, causes=causes, took_seconds=watch.laps, clocks=job.plan.clocks, shortened=shortened
    )  # fmt: skip
    publish(summary, job.settings, stage=stage)
    keep_totals(evidence, job.settings, job.plan, now_ms=job.now_ms)
    remove_runs(job.settings.output, keep_days=job.settings.keep_days, newest=stage.run_id)
    return summary


def _count(
    job: RunContext, cleared: Mapping[int, int], table: DataFrame, business: DataFrame, axis: TimeAxis, *,
    stage: Staging,
) -> Summary:  # fmt: skip
    """Count the verdicts of the run by bucket of the axis, as a run by the hour does by hour; concurrently, write the
    tables.
    """
    tallies = {start: Tally() for start in (NO_WINDOW, *axis.starts)}
    hours, events, *_ = in_parallel(
        lambda: sampled_hours(job.evidence, None),
        lambda: flow_events(table, axis),
        lambda: tally_verdicts(tallies, table, business),
        lambda: write_whole_tables(table, business, stage.table),
        lambda: hourly(table).coalesce(1).write.parquet(stage.table("aggregates")),
    )
    for start, count in cleared.items():
        tallies[start].resolved = count
    results = {start: tally.as_result() for start, tally in tallies.items()}
    return replace(
        summary_of(results.values(), run_id=stage.run_id, judged_at_ms=job.now_ms),
        latencies=latencies_of(hours.values()),
        inputs=inputs(job.evidence, job.settings),
        folder=str(stage.final),
        grace=job.settings.grace,
        flow=Flow(axis=axis, events=events, trouble=trouble_of({start: results[start] for start in axis.starts}, axis)),
    )


@contextmanager
def open_session(
    session: SparkSession | None, master: str | None, stage: Staging, *, plan: SourcePlan
) -> Iterator[SparkSession]:
    """Yields a session in which the settings hold on which verdicts depend: beside the given one, or beside one that
    this process runs already, which stay as they are, or a new one.
    """
    given = session or running_session()
    if given is not None:
        yield pinned_session(given)
        return
    with spark_session(master, log=stage.folder / "spark.log", size=plan.size) as started:
        yield started


def with_sound_caches(output: Path, reconcile: Callable[[], Summary]) -> Summary:
    """Reconcile; if Spark fails on a source, and a file of the output folder's own caches is damaged, remove that, and
    reconcile once more: it is made again.
    """
    try:
        return reconcile()
    except SourceFailed:
        with only_run(output):
            damaged = [cache for cache in (SEGMENTS, DIGESTS) if remove_damaged(output / cache)]
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
        told, java = _ERROR_LINE.findall(text), _JAVA_LINE.findall(text)
        # Java's first line may name the file, and its last line has the cause.
        what = told[-1] if told else ": ".join(dict.fromkeys(java[:1] + java[-1:])) or text.splitlines()[0]
        raise SourceFailed(f"a source failed while it was read, so nothing is judged: {what}") from error


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


class StepTimer:
    """Measures the duration of each step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        """Record the duration of the step that ends now."""
        now = time.monotonic()
        self.laps[name] = round(now - self._since, 2)
        self._since = now
