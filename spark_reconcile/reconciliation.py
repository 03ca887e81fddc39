"""One reconciliation, from settings to published results. Each step stands in a module of its own."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from messaging.errors import ConfigurationError
from spark_reconcile.confirming import confirmed
from spark_reconcile.errors import NotComparable, OutputBusy, OutputFailed
from spark_reconcile.figures import (
    axis_of,
    books_and_trouble,
    business_verdicts,
    examples,
    flow_events,
    hourly,
    inputs,
    totals_and_latencies,
    verdicts,
)
from spark_reconcile.flow import Flow
from spark_reconcile.judging import Judged, bounds_of, judge
from spark_reconcile.looking import Job, Pause
from spark_reconcile.output import Staging, staging
from spark_reconcile.planning import Plan, check_sources
from spark_reconcile.publishing import publish
from spark_reconcile.reaching import reach_of
from spark_reconcile.reading import Evidence, in_parallel, read_all
from spark_reconcile.session import register_sources, spark_session
from spark_reconcile.settings import Settings
from spark_reconcile.summary import Summary
from spark_reconcile.verdict import Scope

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
    """Let time pass before the second look."""
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
    """Reconcile once, and publish tables, summary and report; `say` is told each step, `pause` parts the two looks.

    A session that is passed in is used and left running. Raises ConfigurationError and SchemaMissing (mend the
    settings), OutputBusy (another run writes there), NotComparable and DatabaseUnavailable (a source cannot be judged);
    then nothing is published.
    """
    judged_at_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    plan = check_sources(settings, reach=reach_of(settings, now_ms=judged_at_ms))
    settings = plan.allowing(settings)
    with only_run(settings.output), staging(settings.output, now_ms=judged_at_ms) as stage:
        say("starting Spark")
        watch = Watch()
        with open_session(session, master, stage, plan=plan) as spark:
            watch.lap("start")
            with worker_errors():
                evidence = read_all(spark, settings, plan, now_ms=judged_at_ms, say=say)
                watch.lap("read")
                job = Job(
                    session=spark, settings=settings, plan=plan, evidence=evidence, now_ms=judged_at_ms, full=True,
                    say=say, pause=pause,
                )  # fmt: skip
                return _reconcile(job, stage=stage, watch=watch)


def _reconcile(job: Job, *, stage: Staging, watch: Watch) -> Summary:
    evidence, settings = job.evidence, job.settings
    try:
        job.say("giving verdicts")
        first = judge(evidence, bounds_of(settings.grace, evidence, now_ms=job.now_ms))
        judged, resolved = confirmed(job, first)
        table, business = verdicts(judged, "confirmed"), business_verdicts(judged, settings, "confirmed")
        table.write.parquet(stage.table("verdicts"))
        watch.lap("judge")
        job.say("counting")
        summary = _count(judged, table, business, evidence, settings, stage=stage, now_ms=job.now_ms)
    finally:
        evidence.release()
    first.release()
    watch.lap("count")
    job.say("writing the report")
    summary = replace(summary, resolved=resolved, took_seconds=watch.laps, clocks=job.plan.clocks)
    publish(summary, settings, stage=stage)
    return summary


def _count(
    judged: Judged, table: DataFrame, business: DataFrame, evidence: Evidence, settings: Settings, *, stage: Staging,
    now_ms: int,
) -> Summary:  # fmt: skip
    """The numbers of the run; the two small tables are written at the same time."""
    axis = axis_of(evidence)
    (books, trouble), (totals, latencies), found, events, *_ = in_parallel(
        lambda: books_and_trouble(table, business, axis),
        lambda: totals_and_latencies(judged),
        lambda: examples(table, business),
        lambda: flow_events(judged, axis),
        lambda: business.coalesce(1).write.parquet(stage.table("business_verdicts")),
        lambda: hourly(table).coalesce(1).write.parquet(stage.table("aggregates")),
    )
    return Summary(
        run_id=stage.run_id,
        judged_at_ms=now_ms,
        business_rows=sum(book.count for book in books if book.scope is Scope.BUSINESS),
        **asdict(totals),
        books=books,
        latencies=latencies,
        examples=found,
        inputs=inputs(evidence, settings),
        folder=str(stage.final),
        grace=settings.grace,
        flow=Flow(axis=axis, events=events, trouble=trouble),
    )


def open_session(
    session: SparkSession | None, master: str | None, stage: Staging, *, plan: Plan
) -> AbstractContextManager[SparkSession]:
    """The session that was passed in, or one of this run's own."""
    if session is None:
        return spark_session(master, log=stage.folder / "spark.log", size=plan.size)
    register_sources(session)
    return nullcontext(session)


@contextmanager
def worker_errors() -> Iterator[None]:
    """What fails in one of Spark's workers comes wrapped in two stack traces: say the one line that matters."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        # What fails in Java itself (an unreadable file, a process that died) PySpark hands on as Py4J has it.
        text = str(error)
        if _DISK_FULL in text:
            raise OutputFailed(
                f"cannot write the results, or what Spark puts aside: {_DISK_FULL}; make room in the output folder and "
                "in SPARK_LOCAL_DIRS, and start it again"
            ) from error
        told, java = _ERROR_LINE.findall(text), _JAVA_LINE.findall(text)
        # Java's first line may name the file, and its last says what is wrong with it.
        what = told[-1] if told else ": ".join(dict.fromkeys(java[:1] + java[-1:])) or text.splitlines()[0]
        raise NotComparable(f"a source failed while it was read, so nothing is judged: {what}") from error


@contextmanager
def only_run(output: Path) -> Iterator[None]:
    """One run at a time writes to an output folder; the system lets go of the lock of a process that dies."""
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


class Watch:
    """How long each step took."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        """The step that ends here."""
        now = time.monotonic()
        self.laps[name] = round(now - self._since, 2)
        self._since = now
