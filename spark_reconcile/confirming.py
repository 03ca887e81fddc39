"""The second look of a whole run: what would be a finding is read again, judged again, and put in its first place.

Runs by the hour look at the rows of a batch, in looking; what both look at again, and how, is second_look's. Nothing is
counted or written here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Final

from spark_reconcile import second_look
from spark_reconcile.bringing import brought
from spark_reconcile.digests import union
from spark_reconcile.in_memory import Memory, in_memory, to_spark
from spark_reconcile.judging import Judged, bounds_of, judge
from spark_reconcile.looking import Job, after_a_while, part_by_part
from spark_reconcile.second_look import KEY_SCHEMA, Suspects, ids_frame, keys_frame
from spark_reconcile.session import few_rows
from spark_reconcile.sources.statements import Leg
from spark_reconcile.verdict import FINDING, Severity

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_UNDER_KEY: Final = ["topic", "message_key"]


def confirmed(job: Job, first: Judged) -> tuple[Judged, int]:
    """The verdicts after a second look, with the column `confirmed`; and how many suspects it cleared.

    What the first look found, and its evidence, must be kept as long as these are used.
    """
    found = _found(first)
    suspects = after_a_while(job, _suspects(first, found))
    if not suspects:
        return _each(first, lambda frame: frame.selectExpr("*", "false as confirmed")), 0
    near = _near(job, suspects)
    with in_memory() as memory, few_rows(job.session):
        near = _here(near, memory)
        looks = [_part(near, part, like=first) for part in part_by_part(job, suspects)]
        parts, ids, keys = zip(*looks, strict=True)
        looked_at = _Found(reduce(union, ids).distinct(), reduce(union, keys))
        resolved = _count_of(found, looked_at) - sum(map(_findings, parts))
    return _second(first, parts, looked_at), resolved


@dataclass(frozen=True, slots=True)
class _Found:
    """What is a finding, or was looked at again: messages, an `id` for each of their verdicts, and business keys."""

    ids: DataFrame
    keys: DataFrame


def _found(first: Judged) -> _Found:
    """Kept apart: whoever goes on from these few rows carries no plan of all evidence along."""
    ids = reduce(union, (frame.where(FINDING).select("id") for frame in (first.messages, first.deliveries)))
    keys = first.business.where(f"{FINDING} and message_key is not null").select(*_UNDER_KEY)
    return _Found(ids.localCheckpoint(), keys.localCheckpoint())


def _suspects(first: Judged, found: _Found) -> list[Suspects] | None:
    """As second_look has it, of the few rows that it asks for."""
    from pyspark.sql.functions import broadcast

    ids = found.ids.distinct().withColumnRenamed("id", "message_id").localCheckpoint()
    count = ids.count()
    if not count and found.keys.isEmpty():
        return []
    if count > second_look.SUSPECTS_MAX:
        return None
    keyed = first.messages.where("message_key != ''").selectExpr("id as message_id", *_UNDER_KEY)
    keys = union(keyed.join(broadcast(ids), "message_id", "left_semi").select(*_UNDER_KEY), found.keys).distinct()
    keys = keys.limit(second_look.SUSPECTS_MAX + 1).localCheckpoint()
    under = keyed.join(broadcast(keys), _UNDER_KEY, "left_semi").select("message_id", *_UNDER_KEY).localCheckpoint()
    nothing = [f"cast(null as string) as {name}" for name in _UNDER_KEY]
    finding = f"'{Severity.FINDING}' as severity"
    with few_rows(first.messages.sparkSession):
        table = union(under.selectExpr("*", "'' as severity"), ids.selectExpr("message_id", *nothing, finding))
        return second_look.suspects_of(table, found.keys.selectExpr("*", finding))


def _near(job: Job, suspects: Sequence[Suspects]) -> Job:
    """The job with that of the logs and the archives that is asked for: they are searched once, not part by part."""
    from pyspark.sql.functions import broadcast

    evidence = job.evidence
    ids = broadcast(ids_frame(job.session, (one for part in suspects for one in part.ids)).distinct())
    keys = broadcast(keys_frame(job.session, (key for part in suspects for key in part.keys)).distinct())
    rows, messages = (_of(frame, ids, keys) for frame in (_archived(evidence.rows), evidence.messages))
    rows, messages = rows.localCheckpoint(), messages.localCheckpoint()
    named = union(ids, union(rows.select("id"), messages.select("id"))).distinct()
    actions = evidence.actions.join(broadcast(named), "id", "left_semi").select(*evidence.actions.columns)
    return replace(
        job, evidence=replace(evidence, rows=rows, messages=messages, actions=actions.localCheckpoint(), tables=())
    )


def _here(job: Job, memory: Memory) -> Job:
    """The job with these rows in this process, where they are few; inboxes are asked anew."""
    evidence = job.evidence
    found = brought(memory, (evidence.rows, evidence.messages, evidence.actions))
    if found is None:
        return job
    rows, messages, actions = found
    return replace(job, evidence=replace(evidence, rows=rows, messages=messages, actions=actions))


def _of(frame: DataFrame, ids: DataFrame, keys: DataFrame) -> DataFrame:
    """Of a leg what is of these messages, or under these keys."""
    marked = frame.join(ids.selectExpr("id", "true as of_id"), "id", "left").join(
        keys.selectExpr("*", "true as of_key"), _UNDER_KEY, "left"
    )
    return marked.where("of_id or of_key").select(*frame.columns)


def _archived(rows: DataFrame) -> DataFrame:
    """Of tables the second look asks again; of files it does not."""
    return rows.where(f"leg = '{Leg.ARCHIVE}'")


def _part(job: Job, suspects: Suspects, *, like: Judged) -> tuple[Judged, DataFrame, DataFrame]:
    """These suspects as they are by now, shaped like the first look, and the ids and keys that this speaks for."""
    evidence = job.again(job.session, job.settings, job.plan, job.evidence, suspects)
    again = judge(evidence, bounds_of(job.settings.grace, evidence, now_ms=job.now_ms))
    engine = evidence.rows.sparkSession
    keys = keys_frame(engine, suspects.keys)
    # What was stored meanwhile under these keys, too; of what stands under another's the rest was not read.
    under = again.messages.where("broker > 0").join(keys, _UNDER_KEY, "left_semi").select("id")
    ids = under.unionByName(ids_frame(engine, suspects.ids)).distinct().localCheckpoint()
    of_part = Judged(
        messages=_as(like.messages, again.messages.join(ids, "id", "left_semi"), job),
        deliveries=_as(like.deliveries, again.deliveries.join(ids, "id", "left_semi"), job),
        business=_as(like.business, again.business.join(keys, _UNDER_KEY, "left_semi"), job),
    )
    again.release()
    evidence.release()
    return of_part, to_spark(job.session, ids, "id string"), to_spark(job.session, keys, KEY_SCHEMA)


def _as(like: DataFrame, frame: DataFrame, job: Job) -> DataFrame:
    """Verdicts with `confirmed`, kept by Spark."""
    schema = ", ".join(f"{name} {kind}" for name, kind in like.dtypes)
    return to_spark(job.session, frame, schema).selectExpr("*", f"({FINDING}) as confirmed").localCheckpoint()


def _second(first: Judged, parts: Sequence[Judged], looked_at: _Found) -> Judged:
    """The first look's verdicts with those of the second in place of the suspects'."""
    from pyspark.sql.functions import broadcast

    ids, keys = broadcast(looked_at.ids), broadcast(looked_at.keys)

    def whole(before: DataFrame, on: list[str], gone: DataFrame, after: Sequence[DataFrame]) -> DataFrame:
        rest = before.join(gone, on, "left_anti").selectExpr("*", "false as confirmed")
        return reduce(union, after, rest)

    return Judged(
        messages=whole(first.messages, ["id"], ids, [part.messages for part in parts]),
        deliveries=whole(first.deliveries, ["id"], ids, [part.deliveries for part in parts]),
        business=whole(first.business, _UNDER_KEY, keys, [part.business for part in parts]),
    )


def _each(judged: Judged, change: Callable[[DataFrame], DataFrame]) -> Judged:
    return Judged(
        messages=change(judged.messages), deliveries=change(judged.deliveries), business=change(judged.business)
    )


def _count_of(found: _Found, looked_at: _Found) -> int:
    """How many of these findings were looked at again."""
    return (
        found.ids.join(looked_at.ids, "id", "left_semi").count()
        + found.keys.join(looked_at.keys, _UNDER_KEY, "left_semi").count()
    )


def _findings(judged: Judged) -> int:
    frames = (judged.messages, judged.deliveries, judged.business)
    return reduce(union, (frame.where(FINDING).select("rule") for frame in frames)).count()
