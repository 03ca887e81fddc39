"""Reconciliation by the hour: judge the windows that are new, changed or still moving, and leave the others alone.

A cheap pass compares counts and sums of hashes by parts of the keys and slots of the ids; only what disagrees is looked
at row by row; what that finds is looked at again. Results are shown window by window: a run that is killed is simply
started again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Final

from spark_reconcile.bringing import FEW_ROWS_MAX, in_one_place
from spark_reconcile.digests import Legs, Tolerance, buckets, clean_buckets, union
from spark_reconcile.drilling import Drilled, drilled
from spark_reconcile.fingerprints import fingerprints
from spark_reconcile.in_memory import Memory, in_memory
from spark_reconcile.kept_digests import KeptDigests, Known
from spark_reconcile.looking import Job, Looked, look
from spark_reconcile.parts import MESSAGES, clean_parts, digest, parts, sums_of
from spark_reconcile.reading import Evidence, in_parallel
from spark_reconcile.session import few_rows
from spark_reconcile.slots import HOUR_MS, NO_PERIOD, PERIOD_MS
from spark_reconcile.sources.files import Files
from spark_reconcile.sources.statements import Leg, Span
from spark_reconcile.spread_keys import SpreadKeys, all_beside, reopened, spread_keys
from spark_reconcile.unclean import LEGS, Unclean, disagreeing
from spark_reconcile.verdict_files import write_by_window
from spark_reconcile.window_results import (
    Tally,
    bulk_of,
    changes_of,
    rest_of,
    tally_bulk,
    tally_business,
    tally_examples,
    tally_rows,
)
from spark_reconcile.window_store import Window, WindowStore
from spark_reconcile.windows import batches, span_of, to_judge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

NEAR_ROWS_MAX: Final = 500_000
"""Up to so many messages of files that were chosen are drilled as few rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The cheap pass: digests by key and by id, and which parts and buckets are clean.

    `buckets` and `clean_buckets` are None where nothing is known by id alone. These are checkpoints: plans that contain
    one another, joined again and again, take longer to plan than to run.
    """

    clean_parts: DataFrame
    sums: Sequence[Row]
    """Of these, by window."""
    buckets: DataFrame | None
    clean_buckets: DataFrame | None
    known: Known


def judge_windows(job: Job, windows: Sequence[int], compared: Compared, *, store: WindowStore) -> list[int]:
    """Judge those of the windows that need it, and show their results; returns which they were.

    A key's verdict is of the hour of its latest row: one that is looked at, and changed, opens its other hours, too.
    """
    job = replace(job, span=span_of(windows, slack_ms=job.slack_ms))
    prints = fingerprints(job, sums=compared.sums, buckets=compared.buckets, legs=legs_of(job.evidence))
    stale = list(windows) if job.full else to_judge(windows, store.windows, prints)
    closed, judged = set(windows).difference(stale), set(stale)
    for batch in batches(stale):
        with in_memory() as memory:
            chosen, legs, keys = _looked_at(job, batch, compared, memory)
            more = _reopened(job, legs, keys, batch, closed, store=store)
            if more:
                chosen, legs, keys = _looked_at(job, [*batch, *more], compared, memory)
            job.say(f"judging {len(batch) + len(more):,} of {len(windows):,} windows")
            _judge_batch(job, [*batch, *more], compared, prints, chosen, legs=legs, keys=keys, store=store)
        judged.update(more)
    return sorted(judged)


def compare(job: Job, kept: KeptDigests) -> Compared:
    """The cheap pass over all legs; files whose digests are kept are not read for it."""
    evidence = job.evidence
    legs = legs_of(evidence)
    by_id = evidence.groups or any(one.leg in {"actions", Leg.INBOX} for one in evidence.counts)
    known = kept.known(job.session, evidence.files)
    summed = clean_parts(_summed(job, known), covered=job.covered)
    if not by_id:
        clean = summed.localCheckpoint()
        return Compared(clean_parts=clean, sums=sums_of(clean), buckets=None, clean_buckets=None, known=known)
    tolerance = Tolerance(late_after_ms=int(job.settings.grace.late_after_seconds * 1000), slack_ms=job.slack_ms)
    clean, slotted = in_parallel(summed.localCheckpoint, buckets(legs, tolerance=tolerance).localCheckpoint)
    sums, agreed = in_parallel(
        lambda: sums_of(clean),
        clean_buckets(job.session, slotted, evidence.groups, late_ms=tolerance.late_after_ms).localCheckpoint,
    )
    return Compared(clean_parts=clean, sums=sums, buckets=slotted, clean_buckets=agreed, known=known)


def _summed(job: Job, known: Known) -> DataFrame:
    """Digests of all legs, kept or made now."""
    evidence = job.evidence
    rows, messages = evidence.loose or (evidence.rows, evidence.messages)
    found = [] if rows is None else [
        digest(rows.where(f"leg = '{leg}'"), leg) for leg in (Leg.BUSINESS, Leg.ARCHIVE, Leg.OUTBOX)
    ]  # fmt: skip
    found += [] if messages is None else [digest(messages, MESSAGES)]
    found += [digest(files.read(names), files.leg) for files, names in _not_known(evidence, known)]
    topics = sorted({one.topic for one in evidence.counts if one.topic} | set(job.covered))
    if known.sums is not None:
        found.append(known.sums.where(_touched(job.span)))
    return parts(job.session, found, topics=topics)


def _not_known(evidence: Evidence, known: Known) -> list[tuple[Files, list[str]]]:
    """Of each leg the files that have no digest of their own."""
    named = set(known.names.values())
    left = [(files, [name for name in files.names if name not in named]) for files in evidence.files]
    return [(files, names) for files, names in left if names]


def legs_of(evidence: Evidence) -> Legs:
    """The evidence's rows."""
    return Legs(rows=evidence.rows, messages=evidence.messages, actions=evidence.actions, inboxes=evidence.inboxes)


def _chosen(job: Job, batch: Sequence[int], compared: Compared, memory: Memory) -> Drilled | None:
    """The rows that must be looked at; None: all."""
    # Without an archive no key agrees.
    if job.full or all(one.leg != Leg.ARCHIVE for one in job.evidence.counts):
        return None
    found, messages = _unclean(job, compared, batch)
    near = _near(job, compared, batch)
    with _for(job, few=near is not None and messages <= NEAR_ROWS_MAX):
        whole = legs_of(job.evidence)
        return drilled(
            near or whole, whole, found, covered=job.covered,
            memory=memory if LEGS * found.parts.asked <= FEW_ROWS_MAX else None,
        )  # fmt: skip


def _for(job: Job, *, few: bool) -> AbstractContextManager[None]:
    """Spark set for few rows, or as it is."""
    return few_rows(job.session) if few else nullcontext()


def _near(job: Job, compared: Compared, batch: Sequence[int]) -> Legs | None:
    """All rows but those of files that are known to hold nothing of these windows; None: no file is."""
    evidence, hours = job.evidence, compared.known.hours
    whole = legs_of(evidence)
    if evidence.loose is None or compared.known.sums is None or compared.buckets is not None:
        return None
    asked = {NO_PERIOD, *batch}
    far = {name for name, some in hours.items() if asked.isdisjoint(some)}
    rows, messages = evidence.loose
    of_rows, of_messages = ([frame] if frame is not None else [] for frame in (rows, messages))
    for files in evidence.files:
        some = [name for name in files.names if name not in far]
        if some:
            (of_messages if files.leg == MESSAGES else of_rows).append(files.read(some).where(files.shown))
    return replace(
        whole,
        rows=reduce(union, of_rows) if of_rows else whole.rows.where("false"),
        messages=reduce(union, of_messages) if of_messages else whole.messages.where("false"),
    )


def _looked_at(
    job: Job, batch: Sequence[int], compared: Compared, memory: Memory
) -> tuple[Drilled | None, Legs, SpreadKeys | None]:
    """The rows that are looked at, here where they are few, and their keys that stand in several windows."""
    chosen = _chosen(job, batch, compared, memory)
    if chosen is None:
        return None, legs_of(job.evidence), None
    legs = in_one_place(memory, chosen.legs, job.session)
    return chosen, legs, spread_keys(legs, covered=job.covered)


def _reopened(
    job: Job, legs: Legs, keys: SpreadKeys | None, batch: Sequence[int], closed: set[int], *, store: WindowStore
) -> list[int]:
    """The closed windows that are to be judged with the batch."""
    if not closed:
        return []
    if keys is not None:
        return reopened(keys, batch, closed, store.windows)
    return sorted(closed.intersection(all_beside(legs, _within("window_ms", batch), covered=job.covered)))


def _judge_batch(
    job: Job, batch: Sequence[int], compared: Compared, prints: Mapping[int, str], chosen: Drilled | None, *,
    legs: Legs, keys: SpreadKeys | None, store: WindowStore,
) -> None:  # fmt: skip
    job.say("giving verdicts")
    looked = look(job, legs, batch)
    job.say("writing tables")
    _write(looked, batch, store=store)
    tallies = _tallies(job, batch, compared, looked, chosen)
    spread = keys or SpreadKeys()
    store.publish(
        {
            start: _window(tallies[start], prints.get(start, ""), job, start, keys=spread.within(start))
            for start in batch
        }
    )


def _unclean(job: Job, compared: Compared, batch: Sequence[int]) -> tuple[Unclean, int]:
    """What disagrees in the batch or may concern it, and how many messages the batch has.

    Of times outside of the span the broker's log is read alone: there no part could agree.
    """
    asked, windows = _within("window_ms", batch), set(batch)
    mine = [row for row in compared.sums if row["window_ms"] in windows]
    apart = [row for row in mine if not row["clean"]]
    messages = sum(row["n"] for row in mine)
    elsewhere = any(
        not row["clean"] and row["window_ms"] not in windows and _touches(row, job.span) for row in compared.sums
    )
    slots = None
    if compared.clean_buckets is not None:
        near = f"astray or {_within('first_window', batch)} or {_within('last_window', batch)}"
        slots = compared.clean_buckets.where(f"not clean and ({near})")
    parts = disagreeing(
        compared.clean_parts.where(f"not clean and {asked}"), count=sum(row["parts"] for row in apart),
        asked=sum(row["n"] for row in apart), messages=messages,
    )  # fmt: skip
    return Unclean(parts=parts, buckets=slots, elsewhere=elsewhere, span=job.span), messages


def _tallies(
    job: Job, batch: Sequence[int], compared: Compared, looked: Looked, chosen: Drilled | None
) -> dict[int, Tally]:
    """The numbers of each window. `chosen`: these rows were looked at, and the rest was settled in bulk."""
    tallies = {start: Tally() for start in batch}
    if chosen is not None:
        for bulk in (bulk_of(compared.sums), rest_of(chosen.rest), changes_of(chosen.changes)):
            tally_bulk(tallies, bulk, job.evidence.groups, job.settings.rules)
    tally_rows(tallies, looked.table)
    tally_business(tallies, looked.business)
    tally_examples(tallies, looked.table, looked.business)
    for start, count in looked.resolved.items():
        tallies[start].resolved = count
    return tallies


def _window(tally: Tally, fingerprint: str, job: Job, start: int, *, keys: dict[str, str]) -> Window:
    return Window(
        fingerprint=fingerprint,
        version=f"{fingerprint[:12] or 'empty'}-{job.now_ms}",
        judged_at_ms=job.now_ms,
        open=tally.open,
        result=tally.as_result(),
        late=job.late.get(start, []),
        keys=keys,
    )


def _write(looked: Looked, batch: Sequence[int], *, store: WindowStore) -> None:
    """Each window's tables in a folder of its own, in the staging area."""
    stage = store.staging()
    for name, frame in (("verdicts", looked.table), ("business_verdicts", looked.business)):
        store.checkpoint(f"write {name}")
        write_by_window(frame, name, batch, stage=stage)


def _touched(span: Span | None) -> str:
    """Whether a kept part's period touches the span."""
    if span is None:
        return "true"
    begins = f"period * {PERIOD_MS}L"
    return f"(period = {NO_PERIOD} or {begins} + {PERIOD_MS}L > {span.since_ms}L and {begins} < {span.until_ms}L)"


def _touches(row: Row, span: Span | None) -> bool:
    """Whether the hour of sums touches the span; what names no time may be of it."""
    if span is None or row["timeless"]:
        return True
    return bool(span.since_ms // HOUR_MS * HOUR_MS <= row["window_ms"] < span.until_ms)


def _within(column: str, windows: Sequence[int]) -> str:
    """Whether a time is the beginning of one of these windows; runs of windows are compared by their ends."""
    runs: list[list[int]] = []
    for start in windows:
        if runs and start == runs[-1][1] + HOUR_MS:
            runs[-1][1] = start
        else:
            runs.append([start, start])
    return f"({' or '.join(f'{column} between {low}L and {high}L' for low, high in runs)})"
