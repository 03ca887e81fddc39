"""A difference is a suspect until a second look confirms it: the suspects' records are read again, and judged again.

In the same order as the first time: inboxes, broker, outbox, business. Of the broker's logs only what was appended
since: what they held before cannot change. Times are still compared with the moment of the first look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from spark_reconcile.core.counts import LegCount
from spark_reconcile.core.dataframes import listed, union
from spark_reconcile.core.settings import Settings
from spark_reconcile.evidence.cancel_answers import answers, are_answered
from spark_reconcile.load.evidence import Evidence, read_log, sql_frame, united
from spark_reconcile.load.source_check import Read, SourcePlan
from spark_reconcile.sources.action_runs import named_runs, single
from spark_reconcile.sources.log_segments import begins_whole, grown, survey
from spark_reconcile.sources.sql_statements import Leg, narrowed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SUSPECTS_MAX: Final = 100_000
"""Up to so many ids, and so many keys, are looked at again; above, the sources disagree as a whole."""
SUSPECTS_A_LOOK: Final = 5_000
"""So many ids, and so many keys, are asked for at once."""

Key = tuple[str, str]
"""A topic and a business key."""
MessageName = tuple[str, str]
"""A topic and an id."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """Messages by topic and id, and business keys with their topics, that a first look found something about."""

    messages: Sequence[MessageName]
    keys: Sequence[Key]

    @property
    def ids(self) -> list[str]:
        """The ids of the messages, each once."""
        return list(dict.fromkeys(id_ for _, id_ in self.messages))


def parted(under: Mapping[Key | None, Sequence[MessageName]]) -> list[Suspects] | None:
    """Keys with the messages under them, and messages that are under none, in parts; None: there are too many.

    A key with more messages than one look takes is left out.
    """
    if max(sum(map(len, under.values())), len(under.keys() - {None})) > SUSPECTS_MAX:
        return None
    loose: list[tuple[Sequence[Key], Sequence[MessageName]]] = [((), [one]) for one in sorted(under.get(None, ()))]
    keyed = [((key,), sorted(under[key])) for key in sorted(one for one in under if one is not None)]
    parts: list[tuple[list[Key], list[MessageName]]] = []
    for keys, messages in (*keyed, *loose):
        if len(messages) > SUSPECTS_A_LOOK:
            continue
        if not parts or max(len(parts[-1][0]) + len(keys), len(parts[-1][1]) + len(messages)) > SUSPECTS_A_LOOK:
            parts.append(([], []))
        parts[-1][0].extend(keys)
        parts[-1][1].extend(messages)
    return [Suspects(messages=messages, keys=keys) for keys, messages in parts]


def ids_frame(session: SparkSession, ids: Iterable[str]) -> DataFrame:
    """Ids of messages, in the column `id`."""
    return listed(session, [(id_,) for id_ in ids], "id string").hint("broadcast")


def messages_frame(session: SparkSession, messages: Sequence[MessageName]) -> DataFrame:
    """Messages by name, in the columns `topic` and `id`."""
    return listed(session, messages, "topic string, id string").hint("broadcast")


def keys_frame(session: SparkSession, keys: Iterable[Key]) -> DataFrame:
    """Keys with their topics, in the columns `topic` and `message_key`."""
    return listed(session, list(keys), "topic string, message_key string").hint("broadcast")


def look_again(
    session: SparkSession, settings: Settings, plan: SourcePlan, first: Evidence, suspects: Suspects
) -> Evidence:
    """The suspects' evidence as it stands now. Raises NotComparable where a log is damaged by now.

    A message that one source has under these keys another may have under others: all that is said of it is read.
    """
    inboxes = _tables(session, plan.inboxes, ids=suspects.ids, keys=suspects.keys)
    messages, actions = _logs(session, settings, first)
    ids, keys = ids_frame(session, suspects.ids), keys_frame(session, suspects.keys)
    stored = messages.where("damage is null")
    under = stored.join(keys, ["topic", "message_key"], "left_semi").select("id")
    named = union(ids, under).distinct().localCheckpoint()
    more = [row["id"] for row in named.join(ids, "id", "left_anti").limit(SUSPECTS_A_LOOK).collect()]
    tables = _tables(session, plan.rest, ids=[*suspects.ids, *more], keys=suspects.keys)
    rows = united(session, tables)
    if settings.archives:
        archived = first.rows.where(f"leg = '{Leg.ARCHIVE}'")
        asked = union(named, archived.join(keys, ["topic", "message_key"], "left_semi").select("id"))
        # The tables gave theirs anew: what is left, each row as often as it was there, stands in files.
        in_files = archived.join(asked, "id", "left_semi").select(*rows.columns).exceptAll(rows)
        rows = union(rows, in_files)
    named = union(named, rows.where("id is not null").select("id")).distinct().localCheckpoint()
    if are_answered(first.counts):
        actions = union(actions, answers(rows, messages=stored, actions=actions))
    messages = stored.join(named, "id", "left_semi").select(*first.messages.columns).localCheckpoint()
    actions = actions.join(named, "id", "left_semi").select(*first.actions.columns).localCheckpoint()
    return replace(
        first,
        inboxes=united(session, inboxes),
        messages=messages,
        actions=actions,
        rows=rows,
        tables=(*inboxes, *tables),
    )


def _logs(session: SparkSession, settings: Settings, first: Evidence) -> tuple[DataFrame, DataFrame]:
    """What the first look had of messages and of actions, and what was appended since; actions are surveyed first."""
    counts: list[LegCount] = []
    now = {log: survey(settings.broker_data, log) for log in ("actions", "messages")}
    more = {log: grown(first.surveyed[log], now[log]) if log in first.surveyed else [] for log in now}
    appended = {log: read_log(session, log, some, counts).frame for log, some in more.items() if some}
    messages, actions = first.messages, first.actions
    if "messages" in appended:
        messages = union(messages, appended["messages"])
    if "actions" in appended:
        runs = appended["actions"]
        named = named_runs(runs, messages, is_whole=all(map(begins_whole, now.values())))
        actions = union(actions, single(runs), named)
    return messages, actions


def _tables(
    session: SparkSession, reads: Sequence[Read], *, ids: Sequence[str], keys: Sequence[Key]
) -> list[DataFrame]:
    """Read now, and kept by Spark: what is asked twice of a table must not answer twice."""
    frames = []
    for one in reads:
        statements = [
            asked
            for statement in one.statements
            if (asked := narrowed(statement, ids=ids, keys=[key for _, key in keys])) is not None
        ]
        if statements:
            kept = sql_frame(session, Read(one.url, tuple(statements), snapshot=True)).persist()
            kept.count()
            frames.append(kept)
    return frames
