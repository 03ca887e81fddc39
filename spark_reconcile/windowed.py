"""Reconciliation by the hour: judge the windows that are new, changed or still moving, and leave the others alone.

A cheap pass compares counts and sums of hashes by parts of the keys and slots of the ids; only what disagrees is looked
at row by row; what that finds is looked at again. Results are shown window by window: a run that is killed is simply
started again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Final

from spark_reconcile.digests import Legs, Tolerance, buckets, clean_buckets, union
from spark_reconcile.drilling import Drilled, Unclean, drilled
from spark_reconcile.fingerprints import fingerprints
from spark_reconcile.looking import Job, Looked, look
from spark_reconcile.parts import among, clean_parts, parts
from spark_reconcile.reading import Evidence, in_parallel
from spark_reconcile.session import few_rows
from spark_reconcile.slots import HOUR_MS, NO_PERIOD, hour
from spark_reconcile.sources.statements import Leg, Span
from spark_reconcile.window_results import (
    Tally,
    bulk_of,
    changes_of,
    tally_bulk,
    tally_business,
    tally_examples,
    tally_rows,
)
from spark_reconcile.window_store import Window, WindowStore
from spark_reconcile.windows import batches, span_of, to_judge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEPT_SHARE_MAX: Final = 0.1
"""Up to so much of the messages, those in parts that disagree are kept by Spark; more are scanned again."""

FEW_ROWS_MAX: Final = 100_000
"""Up to so many rows, looking at them costs less than compiling code for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The cheap pass: digests by key and by id, and which parts and buckets are clean.

    `buckets` and `clean_buckets` are None where nothing is known by id alone. These are checkpoints: plans that contain
    one another, joined again and again, take longer to plan than to run.
    """

    parts: DataFrame
    clean_parts: DataFrame
    buckets: DataFrame | None
    clean_buckets: DataFrame | None


def judge_windows(job: Job, windows: Sequence[int], compared: Compared, *, store: WindowStore) -> list[int]:
    """Judge those of the windows that need it, and show their results; returns which they were.

    A key's verdict is of the hour of its latest row: what was found under a key opens its other hours, too.
    """
    job = replace(job, span=span_of(windows, slack_ms=job.slack_ms))
    prints = fingerprints(job, parts=compared.parts, buckets=compared.buckets, legs=legs_of(job.evidence))
    stale = to_judge(windows, store.windows, prints)
    closed, judged = set(windows).difference(stale), set(stale)
    for batch in batches(stale):
        chosen = _chosen(job, batch, compared)
        more = _reopened(job, chosen, batch, closed)
        if more:
            chosen = _chosen(job, [*batch, *more], compared)
        job.say(f"judging {len(batch) + len(more):,} of {len(windows):,} windows")
        _judge_batch(job, [*batch, *more], compared, prints, chosen, store=store)
        judged.update(more)
    return sorted(judged)


def compare(job: Job) -> Compared:
    """The cheap pass over all legs."""
    evidence = job.evidence
    legs = legs_of(evidence)
    by_id = evidence.groups or any(one.leg in {"actions", Leg.INBOX} for one in evidence.counts)
    topics = sorted({one.topic for one in evidence.counts if one.topic} | set(job.covered))
    summed = parts(job.session, legs, topics=topics).localCheckpoint
    if not by_id:
        found = summed()
        return Compared(
            parts=found, clean_parts=clean_parts(found, covered=job.covered).localCheckpoint(), buckets=None,
            clean_buckets=None,
        )  # fmt: skip
    tolerance = Tolerance(late_after_ms=int(job.settings.grace.late_after_seconds * 1000), slack_ms=job.slack_ms)
    found, slotted = in_parallel(summed, buckets(legs, tolerance=tolerance).localCheckpoint)
    clean, agreed = in_parallel(
        clean_parts(found, covered=job.covered).localCheckpoint,
        clean_buckets(job.session, slotted, evidence.groups, late_ms=tolerance.late_after_ms).localCheckpoint,
    )
    return Compared(parts=found, clean_parts=clean, buckets=slotted, clean_buckets=agreed)


def legs_of(evidence: Evidence) -> Legs:
    """The evidence's rows."""
    return Legs(rows=evidence.rows, messages=evidence.messages, actions=evidence.actions, inboxes=evidence.inboxes)


def _chosen(job: Job, batch: Sequence[int], compared: Compared) -> Drilled | None:
    """The rows that must be looked at; None: all."""
    # Without an archive no key agrees.
    if job.full or all(one.leg != Leg.ARCHIVE for one in job.evidence.counts):
        return None
    much = _share(compared.clean_parts, batch) > KEPT_SHARE_MAX
    return drilled(legs_of(job.evidence), _unclean(job, compared, batch), covered=job.covered, much=much)


def _reopened(job: Job, chosen: Drilled | None, batch: Sequence[int], closed: set[int]) -> list[int]:
    """Of the closed windows those in which something stands under a key that is looked at in the batch."""
    from pyspark.sql.functions import expr

    if not closed:
        return []
    legs = chosen.legs if chosen else legs_of(job.evidence)
    keyed = f"{among('topic', job.covered)} and coalesce(message_key, '') != ''"
    placed = [
        frame.where(keyed).selectExpr("topic", "message_key", f"{hour('created_ms')} as window_ms")
        for frame in (legs.rows, legs.messages)
    ]
    keys = union(*placed).groupBy("topic", "message_key").agg(
        expr(f"max({_within('window_ms', batch)})").alias("looked_at"), expr("collect_set(window_ms)").alias("windows")
    )  # fmt: skip
    found = keys.where("looked_at").selectExpr("explode(windows) as window_ms").distinct().collect()
    return sorted(closed.intersection(row["window_ms"] for row in found))


def _judge_batch(
    job: Job, batch: Sequence[int], compared: Compared, prints: Mapping[int, str], chosen: Drilled | None, *,
    store: WindowStore,
) -> None:  # fmt: skip
    few = chosen is not None and _rows(chosen.legs) <= FEW_ROWS_MAX
    with few_rows(job.session) if few else nullcontext():
        job.say("giving verdicts")
        looked = look(job, chosen.legs if chosen else legs_of(job.evidence), batch)
        job.say("writing tables")
        _write(looked, batch, store=store)
        tallies = _tallies(job, batch, compared, looked, chosen)
    store.publish({start: _window(tallies[start], prints.get(start, ""), job.now_ms) for start in batch})


def _unclean(job: Job, compared: Compared, batch: Sequence[int]) -> Unclean:
    """All parts of the span that disagree, as keys may stand in two of them; and buckets that may concern the batch.

    Of other times the broker's log is read alone: there no part could agree.
    """
    read = "true" if job.span is None else _touches(job.span)
    asked = f"{_within('window_ms', batch)} as asked"
    found = compared.clean_parts.where(f"not clean and {read}").selectExpr("*", asked)
    if compared.clean_buckets is None:
        return Unclean(parts=found, buckets=None, span=job.span)
    near = f"astray or {_within('first_window', batch)} or {_within('last_window', batch)}"
    return Unclean(parts=found, buckets=compared.clean_buckets.where(f"not clean and ({near})"), span=job.span)


def _tallies(
    job: Job, batch: Sequence[int], compared: Compared, looked: Looked, chosen: Drilled | None
) -> dict[int, Tally]:
    """The numbers of each window. `chosen`: these rows were looked at, and the rest was settled in bulk."""
    tallies = {start: Tally() for start in batch}
    if chosen is not None:
        within = _within("window_ms", batch)
        bulk = bulk_of(compared.parts, compared.clean_parts).where(within).unionByName(changes_of(chosen.changes))
        tally_bulk(tallies, bulk, job.evidence.groups, job.settings.rules)
    tally_rows(tallies, looked.table)
    tally_business(tallies, looked.business)
    tally_examples(tallies, looked.table, looked.business)
    for start, count in looked.resolved.items():
        tallies[start].resolved = count
    return tallies


def _rows(legs: Legs) -> int:
    """How many rows are looked at."""
    frames = (legs.rows, legs.messages, legs.actions, legs.inboxes)
    return reduce(lambda one, other: one.union(other), (frame.select("id") for frame in frames)).count()


def _window(tally: Tally, fingerprint: str, now_ms: int) -> Window:
    return Window(
        fingerprint=fingerprint,
        version=f"{fingerprint[:12] or 'empty'}-{now_ms}",
        judged_at_ms=now_ms,
        open=tally.open,
        result=tally.as_result(),
    )


def _write(looked: Looked, batch: Sequence[int], *, store: WindowStore) -> None:
    """Each window's tables in a folder of its own, in the staging area."""
    stage = store.staging()
    for name, frame in (("verdicts", looked.table), ("business_verdicts", looked.business)):
        store.checkpoint(f"write {name}")
        whole = stage / f".{name}"
        frame.repartition("window_ms").write.partitionBy("window_ms").parquet(str(whole))
        for start in batch:
            part = whole / f"window_ms={start}"
            if part.exists():
                (stage / str(start)).mkdir(exist_ok=True)
                part.rename(stage / str(start) / name)


def _share(parts: DataFrame, batch: Sequence[int]) -> float:
    """How much of the messages lies in parts that disagree."""
    from pyspark.sql.functions import expr

    sums = parts.where(_within("window_ms", batch)).agg(
        expr("coalesce(sum(if(clean, 0L, n)), 0L)"), expr("coalesce(sum(n), 0L)")
    )
    ((unclean, everything),) = sums.collect()
    return unclean / everything if everything else 0.0


def _touches(span: Span) -> str:
    """Whether a part's hour touches the span; what names no time may be of it."""
    first = hour(f"{span.since_ms}L")
    return f"(period = {NO_PERIOD} or window_ms >= {first} and window_ms < {span.until_ms}L)"


def _within(column: str, windows: Sequence[int]) -> str:
    """Whether a time is the beginning of one of these windows; runs of windows are compared by their ends."""
    runs: list[list[int]] = []
    for start in windows:
        if runs and start == runs[-1][1] + HOUR_MS:
            runs[-1][1] = start
        else:
            runs.append([start, start])
    return f"({' or '.join(f'{column} between {low}L and {high}L' for low, high in runs)})"
