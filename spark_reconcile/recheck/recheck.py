"""The recheck: reads suspects once more after a pause, and classifies them again: they may have been in transit.

The verdicts of the recheck replace the first ones. Callers decide which rows are classified and counted. Module
suspect_rereading reads the suspects' records again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from spark_reconcile.classify.classification import ClassifiedEvidence
from spark_reconcile.classify.window_placement import WindowPlacement
from spark_reconcile.core.dataframes import ComputedRows, computed, gathered, grouped, in_parallel, union
from spark_reconcile.core.settings import RunLimits
from spark_reconcile.load.source_reader import Evidence
from spark_reconcile.recheck.run_context import RunContext
from spark_reconcile.recheck.suspect_rereading import (
    Key,
    MessageName,
    Suspects,
    ids_frame,
    keys_frame,
    messages_frame,
    parted,
)
from spark_reconcile.rules.verdict_rule import FINDING
from spark_reconcile.sources.sql_statements import InputKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_UNDER_KEY: Final = ["topic", "message_key"]
_MESSAGE: Final = ["topic", "id"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecheckResult:
    """Verdicts with the column `confirmed`: whether the recheck resulted in a finding, too; and the number of suspects
    that it cleared, by window.
    """

    classified: ClassifiedEvidence
    cleared: Mapping[int, int]


def recheck(
    job: RunContext, evidence: Evidence, first: ClassifiedEvidence, placement: WindowPlacement
) -> RecheckResult:
    """Returns the verdicts after a recheck of the findings in `first`; too many suspects are not rechecked.

    The frames of `first` must stay cached as long as the result is used.
    """
    findings = _found(first, is_few=evidence.is_few)
    suspects = _suspects(first, findings, job.settings.limits, is_few=evidence.is_few)
    if suspects is None:
        job.say("too many suspects to look at each of them again: none is confirmed")
    if not suspects:
        return RecheckResult(
            classified=first.map(lambda frame: frame.selectExpr("*", "false as confirmed")), cleared={}
        )
    job.pause(job.settings.grace.confirm_after_seconds)
    near = _near(job, evidence, suspects)
    suspect_count = sum(len(part.messages) + len(part.keys) for part in suspects)
    parts = []
    with job.few_rows():
        for part_number, part in enumerate(suspects, start=1):
            job.say(f"looking again at {suspect_count:,} suspects, part {part_number} of {len(suspects)}")
            parts.append(_part(job, near, part, placement))
        messages = union(*(part.messages for part in parts)).distinct()
        keys = union(*(part.keys for part in parts))
        before, after = _by_window(
            [
                findings.messages.frame.join(messages, _MESSAGE, "left_semi"),
                findings.keys.frame.join(keys, _UNDER_KEY, "left_semi"),
            ],
            [frame.where(FINDING) for part in parts for frame in part.classified.frames],
        )
    cleared = {start: count - after.get(start, 0) for start, count in before.items() if count > after.get(start, 0)}
    return RecheckResult(classified=_replaced(first, parts, messages=messages, keys=keys), cleared=cleared)


@dataclass(frozen=True, slots=True)
class _Findings:
    """Findings: messages, a row for each of their verdicts, and business keys; each with its window."""

    messages: ComputedRows
    keys: ComputedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The new verdicts of suspects, and the messages (topic, id) and keys that they concern."""

    classified: ClassifiedEvidence
    messages: DataFrame
    keys: DataFrame


def _found(first: ClassifiedEvidence, *, is_few: bool) -> _Findings:
    """Computes the findings: later plans on these few rows do not include the plan of all evidence."""
    frames = (first.messages, first.deliveries)
    messages = union(*(frame.where(FINDING).select(*_MESSAGE, "window_ms") for frame in frames))
    keys = first.business.where(f"{FINDING} and message_key is not null").select(*_UNDER_KEY, "window_ms")
    return _Findings(*in_parallel(*(partial(computed, frame, is_few=is_few) for frame in (messages, keys))))


def _suspects(
    first: ClassifiedEvidence, findings: _Findings, limits: RunLimits, *, is_few: bool
) -> list[Suspects] | None:
    """Returns messages and keys with findings, and all messages with these keys, in parts; None: too many."""
    from pyspark.sql.functions import broadcast

    most = limits.suspects_max
    messages = computed(findings.messages.frame.select(*_MESSAGE).distinct().limit(most + 1), is_few=is_few)
    names = messages.rows()
    if not names and findings.keys.is_empty():
        return []
    if len(names) > most:
        return None
    keyed = first.messages.where("message_key != ''").select(*_MESSAGE, "message_key")
    # A delivery's verdict has no key; its message has one, and would look like a phantom without its business rows.
    of_messages = keyed.join(broadcast(messages.frame), _MESSAGE, "left_semi").select(*_UNDER_KEY)
    suspect_keys = union(of_messages, findings.keys.frame.select(*_UNDER_KEY)).distinct().limit(most + 1)
    keys = computed(suspect_keys, is_few=is_few)
    under = keyed.join(broadcast(keys.frame), _UNDER_KEY, "left_semi").limit(most + 1).collect()
    by_key: dict[Key | None, list[MessageName]] = {(topic, key): [] for topic, key in keys.rows()}
    for row in under:
        by_key[row["topic"], row["message_key"]].append((row["topic"], row["id"]))
    by_key[None] = sorted(set(names).difference((row["topic"], row["id"]) for row in under))
    return parted(by_key, limits)


def _near(job: RunContext, evidence: Evidence, suspects: Sequence[Suspects]) -> Evidence:
    """Returns the evidence, reduced to the suspects' records of logs and archives: these are searched once, not for
    each part. Tables are not in it, since the recheck reads them again.
    """
    from pyspark.sql.functions import broadcast

    ids = ids_frame(job.session, dict.fromkeys(message_id for part in suspects for message_id in part.ids))
    keys = keys_frame(job.session, dict.fromkeys(key for part in suspects for key in part.keys))
    archived = evidence.rows.where(f"input_kind = '{InputKind.ARCHIVE}'")
    suspect_count = sum(len(part.messages) + len(part.keys) for part in suspects)
    few = partial(gathered, rows=suspect_count, rows_max=job.settings.limits.one_partition_rows_max)
    rows, messages = (
        few(frame)
        for frame in in_parallel(*(_named(frame, ids, keys).localCheckpoint for frame in (archived, evidence.messages)))
    )
    named = union(ids, union(rows.select("id"), messages.select("id"))).distinct()
    actions = evidence.actions.join(broadcast(named), "id", "left_semi").select(*evidence.actions.columns)
    return replace(evidence, rows=rows, messages=messages, actions=few(actions.localCheckpoint()), tables=())


def _named(frame: DataFrame, ids: DataFrame, keys: DataFrame) -> DataFrame:
    """Returns the rows of an input with these ids or these keys."""
    marked = frame.join(ids.selectExpr("id", "true as of_id"), "id", "left").join(
        keys.selectExpr("*", "true as of_key"), _UNDER_KEY, "left"
    )
    return marked.where("of_id or of_key").select(*frame.columns)


def _part(job: RunContext, near: Evidence, suspects: Suspects, placement: WindowPlacement) -> _Part:
    evidence = job.again(job.session, job.settings, job.plan, near, suspects)
    again = job.classify(evidence, placement)
    keys = keys_frame(job.session, suspects.keys)
    # Messages stored meanwhile with these keys, too; for other keys, not all records were read.
    under = again.messages.where("broker > 0").join(keys, _UNDER_KEY, "left_semi").select(*_MESSAGE)
    looked_at = under.unionByName(messages_frame(job.session, suspects.messages)).distinct().localCheckpoint()
    messages, deliveries, business = in_parallel(
        *(
            frame.selectExpr("*", f"({FINDING}) as confirmed").localCheckpoint
            for frame in (
                again.messages.join(looked_at, _MESSAGE, "left_semi"),
                again.deliveries.join(looked_at, _MESSAGE, "left_semi"),
                again.business.join(keys, _UNDER_KEY, "left_semi"),
            )
        )
    )
    again.release()
    evidence.release()
    return _Part(
        classified=ClassifiedEvidence(messages=messages, deliveries=deliveries, business=business),
        messages=looked_at,
        keys=keys,
    )


def _replaced(
    first: ClassifiedEvidence, parts: Sequence[_Part], *, messages: DataFrame, keys: DataFrame
) -> ClassifiedEvidence:
    """Returns the first verdicts, with those of suspects replaced by the verdicts of the parts."""
    from pyspark.sql.functions import broadcast

    def whole(before: DataFrame, on: list[str], gone: DataFrame, after: Sequence[DataFrame]) -> DataFrame:
        untouched = before.join(broadcast(gone), on, "left_anti").selectExpr("*", "false as confirmed")
        return union(untouched, *after)

    return ClassifiedEvidence(
        messages=whole(first.messages, _MESSAGE, messages, [part.classified.messages for part in parts]),
        deliveries=whole(first.deliveries, _MESSAGE, messages, [part.classified.deliveries for part in parts]),
        business=whole(first.business, _UNDER_KEY, keys, [part.classified.business for part in parts]),
    )


def _by_window(*readings: Sequence[DataFrame]) -> list[dict[int, int]]:
    """Returns, for each reading, the number of its rows in each window; by one job."""
    placed = [
        frame.selectExpr(f"{index} as reading", "window_ms")
        for index, frames in enumerate(readings)
        for frame in frames
    ]
    counts: list[dict[int, int]] = [{} for _ in readings]
    for row in grouped(union(*placed), "reading", "window_ms", n="count(*)").collect():
        counts[row["reading"]][row["window_ms"]] = row["n"]
    return counts
