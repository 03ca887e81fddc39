"""A fingerprint for each window, which changes with its records, the settings, or the version of the code.

For records with a creation time, it is based on the digests of parts. A late acknowledgement has only the id: it
changes the hour of the time in the id, and also the next hour if that is near. Records whose ids carry no time, or one
far from their row's, are assigned to windows one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import TYPE_CHECKING, Final

import msgspec

from spark_reconcile.compare.id_digests import CANCELED, Inputs, sums, windows_of_slot
from spark_reconcile.core.dataframes import grouped, union
from spark_reconcile.core.settings import CompletenessBound, Settings
from spark_reconcile.core.time_buckets import NO_SLOT, slot, window_of_message
from spark_reconcile.load.source_reader import Evidence
from spark_reconcile.recheck.run_context import RunContext

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

CODE_VERSION: Final = 17
"""Incremented when verdicts change: every window is then evaluated again."""
_NO_WINDOW: Final = -1


def fingerprints(job: RunContext, *, sums: Sequence[Row], buckets: DataFrame | None, inputs: Inputs) -> dict[int, str]:
    """Returns the fingerprint of each window that has records. `sums`: of parts, the result of sums_of()."""
    numbers_by_window = _of_parts(sums)
    for window_ms, numbers in () if buckets is None else _sums(_of_buckets(buckets)).items():
        _add(numbers_by_window, window_ms, numbers)
    if buckets is not None and any(loose for *_, loose in numbers_by_window.values()):
        for window_ms, more in _sums(_of_loose_ids(inputs, buckets, slack_ms=job.slack_ms)).items():
            numbers_by_window[window_ms] = (*numbers_by_window.get(window_ms, ()), *more)
    numbers_by_window.pop(_NO_WINDOW, None)
    chosen = _of_settings(job.settings, job.evidence)
    return {
        window_ms: hashlib.sha256(f"{chosen} {' '.join(map(str, numbers))}".encode()).hexdigest()
        for window_ms, numbers in numbers_by_window.items()
    }


def _sums(rows: DataFrame) -> dict[int, tuple[int, ...]]:
    """Returns by window: the number of rows, sums of their hashes, and the number of loose ids."""
    summed = grouped(rows, "window_ms", n="count(*)", **sums("h", "low", "high"), loose="sum(loose)")
    return {row["window_ms"]: (row["n"], row["low"], row["high"], row["loose"]) for row in summed.collect()}


def _of_buckets(buckets: DataFrame) -> DataFrame:
    first, last = windows_of_slot()
    near = f"if({first} = {last}, array({first}), array({first}, {last}))"
    return buckets.selectExpr(
        f"explode(if(slot = '{NO_SLOT}', array({_NO_WINDOW}L), {near})) as window_ms",
        "xxhash64(input_kind, topic, consumer_group, slot, n, id_low, id_high, odd, first_ms, last_ms) as h",
        f"if({_LOOSE}, 1L, 0L) as loose",
    )


def _of_parts(sums: Sequence[Row]) -> dict[int, tuple[int, ...]]:
    """Returns the same for parts, whose records have a creation time."""
    numbers_by_window: dict[int, tuple[int, ...]] = {}
    for row in sums:
        _add(numbers_by_window, row["window_ms"], (row["digests"], row["digest_low"], row["digest_high"], 0))
    return numbers_by_window


def _add(numbers_by_window: dict[int, tuple[int, ...]], window_ms: int, numbers: tuple[int, ...]) -> None:
    before = numbers_by_window.get(window_ms)
    numbers_by_window[window_ms] = tuple(map(add, before, numbers)) if before else numbers


_LOOSE: Final = f"slot = '{NO_SLOT}' or astray > 0"
"""Buckets of loose ids: they carry no time, or one that is far from their row's."""


def _of_loose_ids(inputs: Inputs, buckets: DataFrame, *, slack_ms: int) -> DataFrame:
    """Returns every record of a loose id, in the window of its message."""
    from pyspark.sql.functions import broadcast

    slots = buckets.where(_LOOSE).select("slot").distinct()
    canceled = f"kind in {CANCELED}"
    records = union(
        _records(inputs.rows.where("id is not null"), made="created_ms"),
        _records(inputs.messages, made="created_ms", stored="stored_ms"),
        _records(
            inputs.actions.where("id is not null"), canceled=f"if({canceled}, at_ms, null)",
            at=f"if({canceled}, null, at_ms)",
        ),
        _records(inputs.inboxes, at="at_ms"),
    )  # fmt: skip
    loose = records.join(broadcast(slots), "slot", "left_semi")
    made = "coalesce(min(made) over (partition by id), 0L)"
    time = (
        "coalesce(min(canceled) over (partition by id), min(stored) over (partition by id), "
        "max(at) over (partition by id, topic, consumer_group), 0L)"
    )
    timed = loose.selectExpr("slot", "h", f"{made} as made", f"{time} as time")
    window = window_of_message("made", otherwise="time", slack_ms=slack_ms)
    return timed.selectExpr(f"{window} as window_ms", "h", "0L as loose")


def _records(
    frame: DataFrame, *, made: str = "null", canceled: str = "null", stored: str = "null", at: str = "null"
) -> DataFrame:
    times = {"made": made, "canceled": canceled, "stored": stored, "at": at}
    group = "consumer_group" if "consumer_group" in frame.columns else "cast(null as string) as consumer_group"
    return frame.selectExpr(
        "id", "topic", group, f"{slot()} as slot", f"xxhash64({', '.join(frame.columns)}) as h",
        *(f"cast({value} as bigint) as {name}" for name, value in times.items()),
    )  # fmt: skip


def _of_settings(settings: Settings, evidence: Evidence) -> str:
    # Completeness times always change: verdicts pending because of them keep a window open, so it is evaluated again.
    rules, inboxes = (
        [replace(source, until=CompletenessBound()) for source in some] for some in (settings.rules, settings.inboxes)
    )
    compared_settings = [
        rules, inboxes, settings.grace, settings.complete_since_ms, settings.archive_days,
        settings.inbox_days,
    ]  # fmt: skip
    groups = [
        (facts.topic, facts.consumer_group, facts.floor, facts.seeks, facts.deleted, facts.paused, facts.filtered)
        for facts in evidence.groups
    ]
    return hashlib.sha256(msgspec.json.encode([CODE_VERSION, compared_settings, groups])).hexdigest()[:16]
