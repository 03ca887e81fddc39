"""Reconciliation by the hour: judge the windows that are new, changed or still moving, and leave the others alone.

A cheap pass compares counts and sums of hashes by topic and slot; only what disagrees is looked at row by row; what
that finds is looked at again. Results are shown window by window: a run that is killed is simply started again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

from spark_reconcile.digests import APART_MS_MAX, Digests, Legs, Tolerance, clean_buckets, clean_keys, digests
from spark_reconcile.drilling import drilled
from spark_reconcile.fingerprints import fingerprints
from spark_reconcile.looking import Job, Looked, look
from spark_reconcile.reading import Evidence, in_parallel
from spark_reconcile.session import few_rows
from spark_reconcile.slots import HOUR_MS, PERIOD_MS, hour
from spark_reconcile.window_results import (
    Tally,
    in_clean_buckets,
    rows_in_clean_keys,
    tally_bulk,
    tally_business,
    tally_examples,
    tally_rows,
)
from spark_reconcile.window_store import Window, WindowStore
from spark_reconcile.windows import batches, to_judge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

UNCLEAN_SHARE_MAX: Final = 0.4
"""Where more of the buckets disagree, everything is looked at: picking rows would cost more than it spares."""

FEW_ROWS_MAX: Final = 100_000
"""Up to so many rows, looking at them costs less than compiling code for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The cheap pass: digests, and which buckets and key parts are clean.

    These are checkpoints: plans that contain one another, joined again and again, take longer to plan than to run.
    """

    digests: Digests
    buckets: DataFrame
    keys: DataFrame


def judge_windows(job: Job, windows: Sequence[int], compared: Compared, *, store: WindowStore) -> list[int]:
    """Judge those of the windows that need it, and show their results; returns which they were."""
    prints = fingerprints(job, compared.digests, legs_of(job.evidence))
    stale = to_judge(windows, store.windows, prints)
    for batch in batches(stale):
        job.say(f"judging {len(batch):,} of {len(windows):,} windows")
        _judge_batch(job, batch, compared, prints, store=store)
    return stale


def compare(job: Job) -> Compared:
    """The cheap pass over all legs."""
    evidence = job.evidence
    legs = legs_of(evidence)
    grace = job.settings.grace
    tolerance = Tolerance(late_after_ms=int(grace.late_after_seconds * 1000), slack_ms=job.slack_ms)
    found = digests(legs, covered=job.covered, tolerance=tolerance)
    buckets, keys = in_parallel(found.buckets.localCheckpoint, found.keys.localCheckpoint)
    clean, clean_parts = in_parallel(
        clean_buckets(job.session, buckets, evidence.groups, late_ms=tolerance.late_after_ms).localCheckpoint,
        clean_keys(keys).localCheckpoint,
    )
    return Compared(digests=Digests(buckets=buckets, keys=keys), buckets=clean, keys=clean_parts)


def legs_of(evidence: Evidence) -> Legs:
    """The evidence's rows."""
    return Legs(rows=evidence.rows, messages=evidence.messages, actions=evidence.actions, inboxes=evidence.inboxes)


def _judge_batch(
    job: Job, batch: Sequence[int], compared: Compared, prints: Mapping[int, str], *, store: WindowStore
) -> None:
    unclean = compared.buckets.where(f"not clean and (astray or {_within('window_ms', batch)})")
    first, last = (hour(f"period * {PERIOD_MS}L + {apart}L") for apart in (-APART_MS_MAX, PERIOD_MS + APART_MS_MAX))
    keys = compared.keys.where(f"not clean and ({_within(first, batch)} or {_within(last, batch)})")
    everything = job.full or _share(compared.buckets, batch) > UNCLEAN_SHARE_MAX
    legs = legs_of(job.evidence)
    chosen = legs if everything else drilled(legs, buckets=unclean, keys=keys, covered=job.covered)
    few = not everything and _rows(chosen) <= FEW_ROWS_MAX
    with few_rows(job.session) if few else nullcontext():
        job.say("giving verdicts")
        looked = look(job, chosen, batch)
        job.say("writing tables")
        _write(looked, batch, store=store)
        tallies = _tallies(job, batch, compared, looked, in_bulk=None if everything else chosen)
    store.publish({start: _window(tallies[start], prints.get(start, ""), job.now_ms) for start in batch})


def _tallies(
    job: Job, batch: Sequence[int], compared: Compared, looked: Looked, *, in_bulk: Legs | None
) -> dict[int, Tally]:
    """The numbers of each window. `in_bulk`: the rest was settled in bulk, and these rows were looked at."""
    tallies = {start: Tally() for start in batch}
    if in_bulk is not None:
        business = _business_in_bulk(compared, batch)
        tally_bulk(tallies, compared.buckets, business, job.evidence.groups, job.settings.rules)
        tally_rows(tallies, in_clean_buckets(looked.table, compared.buckets), sign=-1)
        overlap = rows_in_clean_keys(in_bulk.rows, compared.keys, job.settings.rules)
        tally_business(tallies, overlap, sign=-1)
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


def _business_in_bulk(compared: Compared, batch: Sequence[int]) -> DataFrame:
    clean = compared.keys.where("clean").select("topic", "period", "key_slot")
    business = compared.digests.keys.where(f"side = 'business' and {_within('window_ms', batch)}")
    return business.join(clean, ["topic", "period", "key_slot"], "left_semi")


def _share(buckets: DataFrame, batch: Sequence[int]) -> float:
    """How much of the messages lies in buckets that disagree."""
    from pyspark.sql.functions import expr

    sums = buckets.where(_within("window_ms", batch)).agg(
        expr("coalesce(sum(if(clean, 0L, n)), 0L)"), expr("coalesce(sum(n), 0L)")
    )
    ((unclean, everything),) = sums.collect()
    return unclean / everything if everything else 0.0


def _within(column: str, windows: Sequence[int]) -> str:
    """Whether a time is the beginning of one of these windows; runs of windows are compared by their ends."""
    runs: list[list[int]] = []
    for start in windows:
        if runs and start == runs[-1][1] + HOUR_MS:
            runs[-1][1] = start
        else:
            runs.append([start, start])
    return f"({' or '.join(f'{column} between {low}L and {high}L' for low, high in runs)})"
