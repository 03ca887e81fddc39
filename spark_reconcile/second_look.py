"""A difference is a suspect until a second look confirms it: the suspects' records are read again, and judged again.

In the same order as the first time: inboxes, broker, outbox, business. Of the broker's logs only what was appended
since: what they held before cannot change. Times are still compared with the moment of the first look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Final

from spark_reconcile.cancels import answers, are_answered
from spark_reconcile.planning import Plan, Read
from spark_reconcile.reading import Evidence, LegCount, read_log, sql_frame, united
from spark_reconcile.settings import Settings
from spark_reconcile.sources.naming import named_runs, single
from spark_reconcile.sources.segments import begins_whole, grown, survey
from spark_reconcile.sources.statements import Leg, narrowed
from spark_reconcile.verdict import Severity

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SUSPECTS_MAX: Final = 5_000
"""Up to so many ids, and so many keys, are looked at again; above, the sources disagree as a whole."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """Messages by id, and business keys with their topics, that a first look found something about."""

    ids: Sequence[str]
    keys: Sequence[tuple[str, str]]

    @property
    def too_many(self) -> bool:
        """Whether they are not looked at again one by one."""
        return max(len(self.ids), len(self.keys)) > SUSPECTS_MAX


def suspects_of(table: DataFrame, business: DataFrame) -> Suspects:
    """Of the first look's verdicts, those that would be findings; and all messages under the keys of those."""
    from pyspark.sql.functions import broadcast

    finding = f"severity = '{Severity.FINDING}'"
    found = table.where(finding).select("message_id").distinct()
    keyed = table.where("message_key is not null")
    # A delivery's verdict names no key; its message does, and without its business rows it would look like a phantom.
    of_messages = keyed.join(broadcast(found), "message_id", "left_semi").select("topic", "message_key")
    of_business = business.where(f"{finding} and message_key is not null").select("topic", "message_key")
    keys = of_messages.unionByName(of_business).distinct().limit(SUSPECTS_MAX + 1).localCheckpoint()
    under_keys = keyed.join(broadcast(keys), ["topic", "message_key"], "left_semi").select("message_id")
    ids = found.unionByName(under_keys).distinct().limit(SUSPECTS_MAX + 1)
    return Suspects(
        ids=sorted(row["message_id"] for row in ids.collect()),
        keys=sorted((row["topic"], row["message_key"]) for row in keys.collect()),
    )


def look_again(session: SparkSession, settings: Settings, plan: Plan, first: Evidence, suspects: Suspects) -> Evidence:
    """The suspects' evidence as it stands now. Raises NotComparable where a log is damaged by now."""
    counts: list[LegCount] = []
    ids = session.createDataFrame([(one,) for one in suspects.ids], "id string")
    keys = session.createDataFrame(list(suspects.keys), "topic string, message_key string")
    inboxes = _tables(session, plan.inboxes, suspects)
    logs: dict[str, DataFrame] = {}
    now = {log: survey(settings.broker_data, log) for log in ("actions", "messages")}
    for log, before in (("messages", first.messages), ("actions", first.actions)):
        known = first.surveyed.get(log)
        appended = [] if known is None else grown(known, now[log])
        parts = [before]
        if appended:
            found = read_log(session, log, appended, counts).frame
            if log == "actions":
                named = named_runs(found, logs["messages"], is_whole=all(map(begins_whole, now.values())))
                found = _union(single(found), named)
            parts.append(found)
        logs[log] = reduce(_union, parts)
    messages = logs["messages"].where("damage is null")
    under_keys = messages.where("message_key is not null").join(keys, ["topic", "message_key"], "left_semi")
    named = _union(ids, under_keys.select("id")).distinct().localCheckpoint()
    archives = first.rows.where(f"leg = '{Leg.ARCHIVE}'").join(ids, "id", "left_semi") if settings.archives else None
    tables = _tables(session, plan.rest, suspects)
    rows = united(session, tables)
    if archives is not None:
        rows = _union(rows, archives.select(*rows.columns))
    if are_answered(first.counts):
        logs["actions"] = _union(logs["actions"], answers(rows, messages=messages, actions=logs["actions"]))
    return replace(
        first,
        inboxes=united(session, inboxes),
        messages=messages.join(named, "id", "left_semi").select(*first.messages.columns).localCheckpoint(),
        actions=logs["actions"].join(named, "id", "left_semi").select(*first.actions.columns).localCheckpoint(),
        rows=rows,
        tables=(*inboxes, *tables),
    )


def _tables(session: SparkSession, reads: Sequence[Read], suspects: Suspects) -> list[DataFrame]:
    """Read now, and kept: what is asked twice of a table must not answer twice."""
    frames = []
    for one in reads:
        statements = [
            asked
            for statement in one.statements
            if (asked := narrowed(statement, ids=suspects.ids, keys=[key for _, key in suspects.keys])) is not None
        ]
        if statements:
            frame = sql_frame(session, Read(one.url, tuple(statements), snapshot=True)).persist()
            frame.count()
            frames.append(frame)
    return frames


def _union(one: DataFrame, other: DataFrame) -> DataFrame:
    return one.unionByName(other)
