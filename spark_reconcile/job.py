"""One reconciliation, from settings to published results.

Each step is a function of its own; what they do is elsewhere.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from messaging.errors import DatabaseUnavailable, StorageFailed
from spark_reconcile.config import Settings
from spark_reconcile.evidence import Tables, business_verdicts, judged, message_evidence
from spark_reconcile.legs import Legs, check_sources
from spark_reconcile.report import Figures, write_report
from spark_reconcile.session import spark_session
from spark_reconcile.summary import PERCENTILES, Summary
from spark_reconcile.verdict import Policy, Severity, Verdict, severity_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EXAMPLES_MAX: Final = 20
DAY_MS: Final = 24 * 60 * 60 * 1000
RETENTION_MARGIN_MS: Final = 60 * 60 * 1000
"""The purge goes on while a run reads, by another clock: what is this close to its end may be gone already."""
_HOPS: Final = {
    "commit to broker": ("created_ms", "stored_ms"),
    "due to first hand-out": ("greatest(due_ms, stored_ms)", "first_delivery_ms"),
    "hand-out to acknowledgement": ("first_delivery_ms", "acked_ms"),
}


@dataclass(frozen=True, slots=True)
class _Run:
    """One run's identity and folders."""

    run_id: str
    now_ms: int
    staging: Path
    published: Path


def run(
    settings: Settings, *, say: Callable[[str], None] = lambda _: None, session: SparkSession | None = None
) -> Summary:
    """Reconcile, and publish tables, summary and report; `say` is told each step. A `session` given is not stopped.

    Sources are checked before any work. Results appear whole or not at all: they are written aside, then renamed, then
    named by the manifest. Raises OutboxError with the cure when a source cannot be judged.
    """
    check_sources(settings)
    one = _new_run(settings)
    say("starting Spark")
    try:
        spark = session or spark_session(settings.master)
        try:
            with _worker_errors():
                return _reconciled(spark, settings, one, say=say)
        finally:
            if session is None:
                spark.stop()
    finally:
        shutil.rmtree(one.staging, ignore_errors=True)


def _reconciled(spark: SparkSession, settings: Settings, one: _Run, *, say: Callable[[str], None]) -> Summary:
    tables = _read(spark, settings, one, say=say)
    say("joining evidence, giving verdicts")
    policy = _policy(settings, now_ms=one.now_ms)
    messages = _written(message_evidence(tables), one, "messages")
    groups = [inbox.group for inbox in settings.inboxes]
    verdicts = _written(judged(messages, tables, inbox_groups=groups, policy=policy), one, "verdicts")
    business = _written(business_verdicts(messages, tables.business, policy=policy), one, "business_verdicts")
    summary = _summarize(one, messages, verdicts, business)
    say("writing the report")
    figures = _figures(verdicts, business)
    write_report(one.staging / "report.html", summary=summary, settings=settings, figures=figures)
    return _publish(one, summary, settings)


def _policy(settings: Settings, *, now_ms: int) -> Policy:
    def since_ms(days: float | None) -> int:
        return 0 if days is None else now_ms - int(days * DAY_MS) + RETENTION_MARGIN_MS

    return Policy(
        now_ms=now_ms,
        fresh_after_ms=now_ms - int((settings.grace.seconds + settings.grace.clock_skew_seconds) * 1000),
        late_after_ms=int(settings.grace.late_after_seconds * 1000),
        archive_since_ms=since_ms(settings.database.archive_days),
        inbox_since_ms=since_ms(settings.database.inbox_days),
    )


@contextmanager
def _worker_errors() -> Iterator[None]:
    """Say in one line what a worker said of a source, in place of Spark's long account of it."""
    try:
        yield
    except Exception as error:  # PySpark raises its own errors, or Py4J's, as the stage has it
        damage = _said(error, "SegmentDamaged")
        if damage is not None:
            raise StorageFailed(f"the broker's log is damaged, nothing can be judged: {damage}") from error
        unread = _said(error, "DatabaseUnavailable")
        if unread is not None:
            raise DatabaseUnavailable(unread) from error
        raise


def _said(error: BaseException, kind: str) -> str | None:
    found = re.search(rf"\b{kind}: ([^\n]*)", str(error))
    return found.group(1) if found else None


def _new_run(settings: Settings) -> _Run:
    now_ms = settings.now_ms if settings.now_ms is not None else time.time_ns() // 1_000_000
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_ms / 1000))
    run_id = f"{stamp}-{secrets.token_hex(3)}"
    folder = Path(settings.output.folder)
    staging = folder / f".staging-{run_id}"
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise StorageFailed(f"cannot write results to {folder}: {error.strerror}; set [output] folder") from error
    return _Run(run_id, now_ms, staging, folder / run_id)


def _read(session: SparkSession, settings: Settings, one: _Run, *, say: Callable[[str], None]) -> Tables:
    """Every leg, in causal order from the consumer back to the business (see legs)."""
    legs = Legs(session, settings, staging=one.staging / "legs")
    read: dict[str, DataFrame] = {}
    for name in ("inboxes", "actions", "stored", "outbox", "archive", "business"):
        say(f"reading {name}")
        read[name] = getattr(legs, name)()
    return Tables(**read)


def _written(frame: DataFrame, one: _Run, name: str) -> DataFrame:
    path = str(one.staging / name)
    frame.write.mode("overwrite").parquet(path)
    return frame.sparkSession.read.parquet(path)


def _summarize(one: _Run, messages: DataFrame, verdicts: DataFrame, business: DataFrame) -> Summary:
    books = [
        row.asDict()
        for row in verdicts.groupBy("topic", "group", "verdict").count().orderBy("topic", "group", "verdict").collect()
    ]
    totals = verdicts.selectExpr(
        "count(*) as message_groups",
        "coalesce(sum(if(deliveries > 0, 1, 0)), 0) as delivered",
        "coalesce(sum(greatest(deliveries - 1, 0)), 0) as redelivered",
        "coalesce(sum(greatest(repeated, 0)), 0) as repeated",
        "coalesce(sum(if(verdict is null, 1, 0)), 0) as unexplained",
    ).collect()[0]
    counted = messages.selectExpr("count(*) as messages", "coalesce(sum(deduplicated), 0) as deduplicated").collect()[0]
    by_business = {row["verdict"]: row["count"] for row in business.groupBy("verdict").count().collect()}
    by_verdict: dict[str, int] = {}
    for book in books:
        by_verdict[book["verdict"]] = by_verdict.get(book["verdict"], 0) + book["count"]
    return Summary(
        run_id=one.run_id,
        judged_at_ms=one.now_ms,
        business_rows=sum(by_business.values()),
        messages=counted["messages"],
        message_groups=totals["message_groups"],
        delivered=totals["delivered"],
        redelivered=totals["redelivered"],
        deduplicated=totals["repeated"] + counted["deduplicated"],
        unexplained=totals["unexplained"],
        verdicts=by_verdict,
        business_verdicts=by_business,
        books=books,
        latencies=_latencies(verdicts),
        folder=str(one.published),
    )


def _latencies(verdicts: DataFrame) -> list[dict[str, Any]]:
    """Percentiles of each hop, by topic, in milliseconds."""
    shares = ", ".join(str(share / 100) for share in PERCENTILES)
    hops = [
        verdicts.where(f"{end} > 0 and {start} > 0 and stored > 0").selectExpr(
            f"{number} as number", "topic", f"greatest({end} - {start}, 0) as took_ms"
        )
        for number, (start, end) in enumerate(_HOPS.values())
    ]
    united = reduce(lambda one, other: one.unionByName(other), hops).groupBy("number", "topic")
    found = united.agg(_expression(f"percentile_approx(took_ms, array({shares}), 1000)").alias("p"))
    names = list(_HOPS)
    return [
        {
            "hop": names[row["number"]],
            "topic": row["topic"],
            **dict(zip((f"p{p}" for p in PERCENTILES), row["p"], strict=True)),
        }
        for row in found.orderBy("number", "topic").collect()
    ]


def _figures(verdicts: DataFrame, business: DataFrame) -> Figures:
    """What the report draws: the flow over time, trouble over time, the worst examples."""
    bad = [verdict.value for verdict in Verdict if severity_of(verdict) in {Severity.WARN, Severity.ERROR}]
    named = ", ".join(f"'{name}'" for name in bad)
    span = verdicts.selectExpr("min(created_ms) as low", "max(greatest(stored_ms, acked_ms)) as high").collect()[0]
    low, high = span["low"] or 0, span["high"] or 0
    bucket_ms = max(1, (high - low) // 60 + 1)

    def over_time(column: str, frame: DataFrame) -> dict[int, int]:
        bucketed = frame.where(f"{column} > 0").selectExpr(f"({column} - {low}) div {bucket_ms} as bucket")
        return {row["bucket"]: row["count"] for row in bucketed.groupBy("bucket").count().collect()}

    published = verdicts.dropDuplicates(["id"])
    trouble = (
        verdicts.where(f"verdict in ({named})")
        .selectExpr("verdict", f"(created_ms - {low}) div {bucket_ms} as bucket")
        .groupBy("verdict", "bucket")
        .count()
        .collect()
    )
    examples = _examples(verdicts.where(f"verdict in ({named})"), order="created_ms, id, `group`")
    return Figures(
        from_ms=low,
        bucket_ms=bucket_ms,
        stored=over_time("stored_ms", published),
        delivered=over_time("first_delivery_ms", verdicts),
        trouble=[row.asDict() for row in trouble],
        examples=examples,
        business_examples=_examples(business.where("verdict not in ('settled', 'pending')"), order="at_ms, key"),
    )


def _examples(rows: DataFrame, *, order: str) -> list[dict[str, Any]]:
    """The first few of each verdict, so that many of one kind hide none of another."""
    placed = rows.selectExpr("*", f"row_number() over (partition by verdict order by {order}) as place")
    shown = placed.where(f"place <= {EXAMPLES_MAX}").orderBy("verdict", "place")
    return [row.asDict() for row in shown.collect()]


def _publish(one: _Run, summary: Summary, settings: Settings) -> Summary:
    """Make the results visible: first their folder under its own name, then the manifest that says it is the newest."""
    shutil.rmtree(one.staging / "legs", ignore_errors=True)
    (one.staging / "run.json").write_text(json.dumps(summary.as_dict(), indent=2))
    one.staging.rename(one.published)
    manifest = Path(settings.output.folder) / "manifest.json"
    fresh = manifest.with_suffix(f".{one.run_id}")
    fresh.write_text(json.dumps({"newest": one.run_id, "balanced": summary.balanced}))
    fresh.replace(manifest)
    return summary


def _expression(text: str) -> Any:
    from pyspark.sql.functions import expr

    return expr(text)
