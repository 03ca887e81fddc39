"""Reconciliation by the hour: evaluates the windows that are new, changed or open.

First, digests (counts and sums of hashes) are compared by parts of the keys and slots of the ids; only mismatches are
classified row by row; their findings are rechecked. Results are published window by window: a killed run is simply
started again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from spark_reconcile.classify.window_placement import among_windows
from spark_reconcile.compare.drill_down import Mismatches, drilled, windows_beside
from spark_reconcile.compare.file_digest_cache import CachedDigests, FileDigestCache
from spark_reconcile.compare.id_digests import Legs, Tolerance, buckets, clean_buckets
from spark_reconcile.compare.key_digests import MESSAGES, clean_parts, digest, parts, sums_of
from spark_reconcile.core.dataframes import union
from spark_reconcile.core.parallel_jobs import in_parallel
from spark_reconcile.core.time_buckets import HOUR_MS, NO_PERIOD, PERIOD_MS
from spark_reconcile.core.time_range import Span
from spark_reconcile.load.evidence import Evidence
from spark_reconcile.recheck.run_context import RunContext
from spark_reconcile.results.verdict_tables import write_by_window
from spark_reconcile.results.window_selection import batches, span_of, to_judge
from spark_reconcile.results.window_store import Window, WindowStore
from spark_reconcile.results.window_totals import (
    Tally,
    bulk_of,
    changes_of,
    tally_bulk,
    tally_verdicts,
)
from spark_reconcile.runs.window_classification import WindowVerdicts, window_verdicts
from spark_reconcile.runs.window_fingerprints import fingerprints
from spark_reconcile.sources.parquet_file_identity import Files
from spark_reconcile.sources.sql_statements import Leg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

FEW_ROWS_MAX: Final = 100_000
"""Up to so many selected rows are classified with the Spark settings for few rows."""
NEAR_ROWS_MAX: Final = 500_000
"""Up to so many messages of the selected files are drilled down with the Spark settings for few rows."""
KEPT_SHARE_MAX: Final = 0.1
"""Rows of mismatching parts are cached up to this share of a batch's messages; above, they are scanned again."""


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


def judge_windows(
    job: RunContext, windows: Sequence[int], compared: DigestComparison, *, store: WindowStore
) -> list[int]:
    """Evaluate those of the windows that need it, and publish their results; returns these windows.

    A key's verdict belongs to the hour of its latest row: if a key is classified, its other hours are evaluated, too.
    """
    job = replace(job, span=span_of(windows, slack_ms=job.slack_ms))
    prints = fingerprints(job, sums=compared.sums, buckets=compared.buckets, legs=legs_of(job.evidence))
    stale = list(windows) if job.full else to_judge(windows, store.windows, prints)
    closed, judged = set(windows).difference(stale), set(stale)
    for some in batches(stale, size=job.settings.limits.windows_a_batch):
        chosen = _chosen(job, some, compared)
        with _configured(job, few=chosen.few):
            more = _reopened(job, chosen.legs, some, closed)
        batch = [*some, *more]
        if more:
            chosen = _chosen(job, batch, compared)
        job.say(f"judging {len(batch):,} of {len(windows):,} windows")
        with _configured(job, few=chosen.few):
            _judge_batch(job, batch, compared, prints, chosen, store=store)
        judged.update(batch)
    return sorted(judged)


def compare(job: RunContext, kept: FileDigestCache) -> DigestComparison:
    """Compute and compare the digests of all legs; files with cached digests are not read."""
    evidence = job.evidence
    legs = legs_of(evidence)
    by_id = evidence.groups or any(one.leg in {"actions", Leg.INBOX} for one in evidence.counts)
    known = kept.known(job.session, evidence.files)
    summed = clean_parts(_summed(job, known), covered=job.covered)
    if not by_id:
        clean = summed.localCheckpoint()
        return DigestComparison(clean_parts=clean, sums=sums_of(clean), buckets=None, clean_buckets=None, known=known)
    tolerance = Tolerance(late_after_ms=int(job.settings.grace.late_after_seconds * 1000), slack_ms=job.slack_ms)
    clean, slotted = in_parallel(summed.localCheckpoint, buckets(legs, tolerance=tolerance).localCheckpoint)
    sums, agreed = in_parallel(
        lambda: sums_of(clean),
        clean_buckets(job.session, slotted, evidence.groups, late_ms=tolerance.late_after_ms).localCheckpoint,
    )
    return DigestComparison(clean_parts=clean, sums=sums, buckets=slotted, clean_buckets=agreed, known=known)


def _summed(job: RunContext, known: CachedDigests) -> DataFrame:
    """Returns the digests of all legs, cached or computed now."""
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


def _not_known(evidence: Evidence, known: CachedDigests) -> list[tuple[Files, list[str]]]:
    """Returns, for each leg, the files without a cached digest."""
    named = set(known.names.values())
    left = [(files, [name for name in files.names if name not in named]) for files in evidence.files]
    return [(files, names) for files, names in left if names]


def legs_of(evidence: Evidence) -> Legs:
    """Returns the evidence's rows."""
    return Legs(rows=evidence.rows, messages=evidence.messages, actions=evidence.actions, inboxes=evidence.inboxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The rows to classify. `changes`: as in SelectedRows; None: every row is classified. `few`: with the Spark
    settings for few rows.
    """

    legs: Legs
    changes: DataFrame | None
    few: bool


def _chosen(job: RunContext, batch: Sequence[int], compared: DigestComparison) -> _Chosen:
    """Selects the rows of the batch to classify."""
    whole = legs_of(job.evidence)
    # Without an archive no key matches.
    if job.full or all(one.leg != Leg.ARCHIVE for one in job.evidence.counts):
        return _Chosen(legs=whole, changes=None, few=False)
    windows = _drilled_windows(job, compared, batch)
    found, messages = _unclean(job, compared, batch, windows)
    near = _near(job, compared, windows)
    with _configured(job, few=near is not None and messages <= NEAR_ROWS_MAX):
        has_unsent = any(one.leg == Leg.OUTBOX and one.rows for one in job.evidence.counts)
        rows = drilled(
            near or whole, whole, found, covered=job.covered, has_unsent=has_unsent, is_few=job.evidence.is_few
        )
    return _Chosen(legs=rows.legs, changes=rows.changes, few=job.evidence.is_few or _are_few(rows.legs))


def _are_few(legs: Legs) -> bool:
    """Whether at most FEW_ROWS_MAX rows were selected."""
    frames = (legs.rows, legs.messages, legs.actions, legs.inboxes)
    rows: list[int] = in_parallel(*(frame.count for frame in frames))
    return sum(rows) <= FEW_ROWS_MAX


def _configured(job: RunContext, *, few: bool) -> AbstractContextManager[None]:
    return job.few_rows() if few else nullcontext()


def _near(job: RunContext, compared: DigestComparison, windows: Collection[int]) -> Legs | None:
    """Returns all rows without files known to have none of these windows; None: there are no such files."""
    evidence, hours = job.evidence, compared.known.hours
    whole = legs_of(evidence)
    if evidence.loose is None or compared.known.sums is None or compared.buckets is not None:
        return None
    asked = {NO_PERIOD, *windows}
    far = {name for name, some in hours.items() if asked.isdisjoint(some)}
    rows, messages = evidence.loose
    of_rows, of_messages = ([frame] if frame is not None else [] for frame in (rows, messages))
    for files in evidence.files:
        some = [name for name in files.names if name not in far]
        if some:
            (of_messages if files.leg == MESSAGES else of_rows).append(files.read(some).where(files.shown))
    return replace(
        whole,
        rows=union(*of_rows) if of_rows else whole.rows.where("false"),
        messages=union(*of_messages) if of_messages else whole.messages.where("false"),
    )


def _reopened(job: RunContext, legs: Legs, batch: Sequence[int], closed: set[int]) -> list[int]:
    """Returns the closed windows that have rows with a key of the batch: they are evaluated with it."""
    if not closed:
        return []
    return sorted(closed & windows_beside(legs, among_windows("window_ms", batch), covered=job.covered))


def _judge_batch(
    job: RunContext, batch: Sequence[int], compared: DigestComparison, prints: Mapping[int, str], chosen: _Chosen, *,
    store: WindowStore,
) -> None:  # fmt: skip
    job.say(f"giving verdicts in {len(batch):,} windows")
    found = window_verdicts(job, chosen.legs, batch)
    job.say("writing the tables of verdicts")
    _write(found, batch, store=store)
    tallies = _tallies(job, batch, compared, found, chosen.changes)
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


def _drilled_windows(job: RunContext, compared: DigestComparison, batch: Sequence[int]) -> set[int]:
    """Returns the windows of the batch, and those of the time range in which parts mismatch: a verdict of the batch may
    be on a key whose row in another hour disagrees. Outside of the time range only the broker's log is read: no part
    could match there.
    """
    apart = {row["window_ms"] for row in compared.sums if not row["clean"] and _touches(row, job.span)}
    return apart.union(batch)


def _tallies(
    job: RunContext, batch: Sequence[int], compared: DigestComparison, found: WindowVerdicts, changes: DataFrame | None
) -> dict[int, Tally]:
    """Returns the numbers of each window. `changes`: corrections of what was settled in bulk; None: nothing was."""
    tallies = {start: Tally() for start in batch}
    if changes is not None:
        for bulk in (bulk_of(compared.sums), changes_of(changes)):
            tally_bulk(tallies, bulk, job.evidence.groups, job.settings.rules)
    tally_verdicts(tallies, found.table, found.business)
    for start, count in found.cleared.items():
        tallies[start].resolved = count
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


def _write(found: WindowVerdicts, batch: Sequence[int], *, store: WindowStore) -> None:
    """Write each window's tables to a folder of its own, in the staging folder."""
    stage = store.staging()
    for name, frame in (("verdicts", found.table), ("business_verdicts", found.business)):
        store.checkpoint(f"write {name}")
        write_by_window(frame, name, batch, stage=stage)


def _touched(span: Span | None) -> str:
    """SQL condition: the period of a cached part overlaps the time range."""
    if span is None:
        return "true"
    begins = f"period * {PERIOD_MS}L"
    return f"(period = {NO_PERIOD} or {begins} + {PERIOD_MS}L > {span.since_ms}L and {begins} < {span.until_ms}L)"


def _touches(row: Row, span: Span | None) -> bool:
    """Whether the hour of sums overlaps the time range; sums of rows without a time may."""
    if span is None or row["timeless"]:
        return True
    return bool(span.since_ms // HOUR_MS * HOUR_MS <= row["window_ms"] < span.until_ms)
