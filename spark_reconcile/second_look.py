"""A difference is a suspect until a second look confirms it: the suspects' records are read again, and judged again.

In the same order as the first time: inboxes, broker, outbox, business. Of the broker's logs only what was appended
since: what they held before cannot change. Times are still compared with the moment of the first look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from spark_reconcile.cancels import answers, are_answered
from spark_reconcile.in_memory import FewRows, as_spark, beside, few, grouped, to_spark
from spark_reconcile.planning import Plan, Read
from spark_reconcile.reading import Evidence, LegCount, read_log, sql_frame, united
from spark_reconcile.settings import Settings
from spark_reconcile.sources.frames import ACTION_SCHEMA, MESSAGE_SCHEMA
from spark_reconcile.sources.naming import each_of, named_each, single
from spark_reconcile.sources.segments import begins_whole, grown, survey
from spark_reconcile.sources.statements import LEG_SCHEMA, Leg, narrowed
from spark_reconcile.verdict import FINDING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SUSPECTS_MAX: Final = 100_000
"""Up to so many ids, and so many keys, are looked at again; above, the sources disagree as a whole."""
APPENDED_ROWS_MAX: Final = 100_000
"""Up to so many rows that came since the first look, or that a table has of suspects, are brought to few; more are
asked where they are.
"""
SUSPECTS_A_LOOK: Final = 5_000
"""So many ids, and so many keys, are asked for at once."""
KEY_SCHEMA: Final = "topic string, message_key string"

Key = tuple[str, str]
"""A topic and a business key."""


class _TooManyRows(Exception):
    """A table has more rows of the suspects than are brought to few."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """Messages by id, and business keys with their topics, that a first look found something about."""

    ids: Sequence[str]
    keys: Sequence[Key]


def suspects_of(table: DataFrame, business: DataFrame) -> list[Suspects] | None:
    """Of the first look's verdicts, those that would be findings; and all messages under the keys of those.

    In parts that can be looked at one by one, as a key is in one part with all its messages; None: there are too many.
    """
    found = table.where(FINDING).select("message_id").distinct()
    keyed = table.where("message_key is not null")
    # A delivery's verdict names no key; its message does, and without its business rows it would look like a phantom.
    of_messages = keyed.join(found.hint("broadcast"), "message_id", "left_semi").select("topic", "message_key")
    of_business = business.where(f"{FINDING} and message_key is not null").select("topic", "message_key")
    keys = of_messages.unionByName(of_business).distinct().limit(SUSPECTS_MAX + 1).localCheckpoint()
    under_keys = keyed.join(keys.hint("broadcast"), ["topic", "message_key"], "left_semi")
    placed = under_keys.select("message_id", "topic", "message_key").unionByName(
        found.selectExpr("message_id", "cast(null as string) as topic", "cast(null as string) as message_key")
    )
    # A message has one key, its verdict's; without one it is a suspect by itself.
    ids = grouped(placed, "message_id", topic="min(topic)", key="min(message_key)").limit(SUSPECTS_MAX + 1)
    under: dict[Key | None, list[str]] = {(row["topic"], row["message_key"]): [] for row in keys.collect()}
    for row in ids.collect():
        key = None if row["key"] is None else (row["topic"], row["key"])
        under.setdefault(key, []).append(row["message_id"])
    return parted(under)


def parted(under: Mapping[Key | None, Sequence[str]]) -> list[Suspects] | None:
    """Keys with the ids under them, and ids that are under none, in parts; None: there are too many.

    A key with more messages than one look takes is left out.
    """
    if max(sum(map(len, under.values())), len(under.keys() - {None})) > SUSPECTS_MAX:
        return None
    loose: list[tuple[Sequence[Key], Sequence[str]]] = [((), [one]) for one in sorted(under.get(None, ()))]
    keyed = [((key,), sorted(under[key])) for key in sorted(one for one in under if one is not None)]
    parts: list[tuple[list[Key], list[str]]] = []
    for keys, ids in (*keyed, *loose):
        if len(ids) > SUSPECTS_A_LOOK:
            continue
        if not parts or max(len(parts[-1][0]) + len(keys), len(parts[-1][1]) + len(ids)) > SUSPECTS_A_LOOK:
            parts.append(([], []))
        parts[-1][0].extend(keys)
        parts[-1][1].extend(ids)
    return [Suspects(ids=ids, keys=keys) for keys, ids in parts]


def ids_frame(engine: SparkSession, ids: Iterable[str], *, name: str = "id") -> DataFrame:
    """Messages by id, where `engine` has its rows, in a column of this name."""
    return engine.createDataFrame([(one,) for one in ids], f"{name} string")


def keys_frame(engine: SparkSession, keys: Iterable[Key]) -> DataFrame:
    """Keys with their topics, where `engine` has its rows."""
    return engine.createDataFrame(list(keys), KEY_SCHEMA)


def look_again(session: SparkSession, settings: Settings, plan: Plan, first: Evidence, suspects: Suspects) -> Evidence:
    """The suspects' evidence as it stands now. Raises NotComparable where a log is damaged by now.

    A message that one source has under these keys another may have under others: all that is said of it is read. It
    stands where the first look's rows do, unless tables hold too many rows under one of the keys to bring them there.
    """
    try:
        return _again(session, settings, plan, first, suspects)
    except _TooManyRows:
        return _again(session, settings, plan, _lifted(session, first), suspects)


def _again(session: SparkSession, settings: Settings, plan: Plan, first: Evidence, suspects: Suspects) -> Evidence:
    inboxes = _tables(session, plan.inboxes, suspects, like=first.rows)
    appended, known = _appended(session, settings, first), first
    if appended.rows > APPENDED_ROWS_MAX:
        known = _lifted(session, first)
    messages, actions = _logs(known, appended)
    engine = messages.sparkSession
    ids, keys = ids_frame(engine, suspects.ids), keys_frame(engine, suspects.keys)
    stored = messages.where("damage is null")
    under = stored.join(keys, ["topic", "message_key"], "left_semi").select("id")
    named = _union(ids, under).distinct().localCheckpoint()
    more = [row["id"] for row in named.join(ids, "id", "left_anti").limit(SUSPECTS_A_LOOK).collect()]
    tables = _tables(session, plan.rest, replace(suspects, ids=[*suspects.ids, *more]), like=messages)
    rows = united(engine, tables)
    if settings.archives:
        archived = known.rows.where(f"leg = '{Leg.ARCHIVE}'")
        asked = _union(named, archived.join(keys, ["topic", "message_key"], "left_semi").select("id"))
        rows = _union(rows, archived.join(asked, "id", "left_semi").select(*rows.columns))
    named = _union(named, rows.where("id is not null").select("id")).distinct().localCheckpoint()
    if are_answered(first.counts):
        actions = _union(actions, answers(rows, messages=stored, actions=actions))
    messages = stored.join(named, "id", "left_semi").select(*first.messages.columns).localCheckpoint()
    actions = actions.join(named, "id", "left_semi").select(*first.actions.columns).localCheckpoint()
    return replace(
        first,
        inboxes=united(first.rows.sparkSession, inboxes),
        messages=beside(first.rows, messages),
        actions=beside(first.rows, actions),
        rows=beside(first.rows, rows),
        tables=(*inboxes, *tables),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Appended:
    """What was appended to the logs since the first look; None: nothing. `is_whole`: both begin at their beginnings."""

    messages: DataFrame | None
    actions: DataFrame | None
    rows: int
    is_whole: bool


def _appended(session: SparkSession, settings: Settings, first: Evidence) -> _Appended:
    """Actions are surveyed first."""
    counts: list[LegCount] = []
    now = {log: survey(settings.broker_data, log) for log in ("actions", "messages")}
    more = {log: grown(first.surveyed[log], now[log]) if log in first.surveyed else [] for log in now}
    found = {log: read_log(session, log, some, counts).frame for log, some in more.items() if some}
    return _Appended(
        messages=found.get("messages"), actions=found.get("actions"), rows=sum(one.rows for one in counts),
        is_whole=all(map(begins_whole, now.values())),
    )  # fmt: skip


def _lifted(session: SparkSession, first: Evidence) -> Evidence:
    """The rows of the first look where Spark has them."""
    return replace(
        first,
        rows=to_spark(session, first.rows, LEG_SCHEMA),
        messages=to_spark(session, first.messages, MESSAGE_SCHEMA),
        actions=to_spark(session, first.actions, ACTION_SCHEMA),
    )


def _logs(first: Evidence, appended: _Appended) -> tuple[DataFrame, DataFrame]:
    """What the first look had of messages and of actions, and what was appended since."""
    messages, actions = first.messages, first.actions
    if appended.messages is not None:
        messages = _union(messages, beside(messages, appended.messages))
    if appended.actions is not None:
        single_ones = beside(actions, single(appended.actions))
        named = named_each(beside(actions, each_of(appended.actions)), messages, is_whole=appended.is_whole)
        actions = _union(actions, _union(single_ones, named))
    return messages, actions


def _tables(
    session: SparkSession, reads: Sequence[Read], suspects: Suspects, *, like: DataFrame
) -> list[DataFrame]:  # fmt: skip
    """Read now, and kept where `like` is: what is asked twice of a table must not answer twice.

    Raises _TooManyRows where that is this process, and a read has more than it takes.
    """
    here, frames = few(like), []
    for one in reads:
        statements = [
            asked
            for statement in one.statements
            if (asked := narrowed(statement, ids=suspects.ids, keys=[key for _, key in suspects.keys])) is not None
        ]
        if statements:
            frame = sql_frame(session, Read(one.url, tuple(statements), snapshot=True))
            frames.append(_kept(frame) if here is None else _fetched(here, frame))
    return frames


def _fetched(here: FewRows, frame: DataFrame) -> DataFrame:
    found = frame.limit(APPENDED_ROWS_MAX + 1).toArrow()
    if found.num_rows > APPENDED_ROWS_MAX:
        raise _TooManyRows
    return as_spark(here.sparkSession.of_arrow(found))


def _kept(frame: DataFrame) -> DataFrame:
    """Read, and kept by Spark."""
    kept = frame.persist()
    kept.count()
    return kept


def _union(one: DataFrame, other: DataFrame) -> DataFrame:
    return one.unionByName(other)
