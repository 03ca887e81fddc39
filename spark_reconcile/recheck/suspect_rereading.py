"""Reads the records of suspects again: a mismatch is a suspect until the recheck confirms it.

The order is that of the first read: inboxes, broker, outbox, business. Of the broker's logs only appended records are
read: earlier ones cannot change. Times are still compared with the time of the first evaluation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from spark_reconcile.core.dataframes import ComputedRows, among, computed, gathered, listed, union
from spark_reconcile.core.plausible_times import InputCount
from spark_reconcile.core.settings import RunLimits, Settings
from spark_reconcile.evidence.message_evidence import answers, are_answered
from spark_reconcile.load.delay_records import read_delay
from spark_reconcile.load.ledger_exports import refresh_broker_export
from spark_reconcile.load.read_plan import Read, SourcePlan
from spark_reconcile.load.source_reader import Evidence, effects_of, has_places, read_log, sql_frame, united
from spark_reconcile.sources.broker_logs import begins_whole, grown, named_runs, single, survey
from spark_reconcile.sources.messages_aside import PLACED_KINDS
from spark_reconcile.sources.sql_statements import InputKind, narrowed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


Key = tuple[str, str]
"""A topic and a business key."""
MessageName = tuple[str, str]
"""A topic and an id."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """Messages by topic and id, and business keys with their topics, for which the first evaluation has findings."""

    messages: Sequence[MessageName]
    keys: Sequence[Key]

    @property
    def ids(self) -> list[str]:
        """The distinct ids of the messages."""
        return list(dict.fromkeys(id_ for _, id_ in self.messages))


def parted(under: Mapping[Key | None, Sequence[MessageName]], limits: RunLimits) -> list[Suspects] | None:
    """Splits keys with their messages, and messages without a key, into parts; None: there are too many.

    A key with more messages than a part may have is left out.
    """
    if max(sum(map(len, under.values())), len(under.keys() - {None})) > limits.suspects_max:
        return None
    loose: list[tuple[Sequence[Key], Sequence[MessageName]]] = [((), [name]) for name in sorted(under.get(None, ()))]
    keyed = [((key,), sorted(under[key])) for key in sorted(key for key in under if key is not None)]
    parts: list[tuple[list[Key], list[MessageName]]] = []
    for keys, messages in (*keyed, *loose):
        if len(messages) > limits.suspects_a_part:
            continue
        if not parts or max(len(parts[-1][0]) + len(keys), len(parts[-1][1]) + len(messages)) > limits.suspects_a_part:
            parts.append(([], []))
        parts[-1][0].extend(keys)
        parts[-1][1].extend(messages)
    return [Suspects(messages=messages, keys=keys) for keys, messages in parts]


def ids_frame(session: SparkSession, ids: Iterable[str]) -> DataFrame:
    """Returns ids of messages, in the column `id`."""
    return listed(session, [(id_,) for id_ in ids], "id string").hint("broadcast")


def messages_frame(session: SparkSession, messages: Sequence[MessageName]) -> DataFrame:
    """Returns messages, in the columns `topic` and `id`."""
    return listed(session, messages, "topic string, id string").hint("broadcast")


def keys_frame(session: SparkSession, keys: Iterable[Key]) -> DataFrame:
    """Returns keys with their topics, in the columns `topic` and `message_key`."""
    return listed(session, list(keys), "topic string, message_key string").hint("broadcast")


def reread_suspects(
    session: SparkSession, settings: Settings, plan: SourcePlan, first: Evidence, suspects: Suspects
) -> Evidence:
    """Read the suspects' current evidence. Raises NotComparable if a log is damaged now.

    Another source may have a message of these keys under other keys: all records of such messages are read.
    """
    handled_ids = [*suspects.ids, *_edited_ids(session, first, suspects)]
    inboxes = _tables(session, plan.inboxes, ids=handled_ids, keys=suspects.keys)
    messages, actions = _logs(session, settings, first)
    ids, keys = ids_frame(session, suspects.ids), keys_frame(session, suspects.keys)
    stored = messages.where("damage is null")
    under = stored.join(keys, ["topic", "message_key"], "left_semi").select("id")
    suspect_ids = computed(union(ids, under).distinct(), is_few=first.is_few)
    more = _others(suspect_ids, ids, suspects.ids, rows_max=settings.limits.suspects_a_part)
    tables = _tables(session, plan.rest, ids=[*suspects.ids, *more], keys=suspects.keys)
    suspect_count = len(suspects.messages) + len(suspects.keys) + len(more)
    few = partial(gathered, rows=suspect_count, rows_max=settings.limits.one_partition_rows_max)
    rows = few(united(session, tables))
    if settings.archives:
        archived = first.rows.where(f"input_kind = '{InputKind.ARCHIVE}'")
        archived_ids = union(suspect_ids.frame, archived.join(keys, ["topic", "message_key"], "left_semi").select("id"))
        # The tables were read again: the remaining rows (a multiset difference) are those in files.
        in_files = archived.join(archived_ids, "id", "left_semi").select(*rows.columns).exceptAll(rows)
        rows = few(union(rows, in_files))
    named = union(suspect_ids.frame, rows.where("id is not null").select("id")).distinct().localCheckpoint()
    if are_answered(first.counts):
        actions = union(actions, answers(rows, messages=stored, actions=actions))
    messages = stored.join(named, "id", "left_semi").select(*first.messages.columns).localCheckpoint()
    actions = actions.join(named, "id", "left_semi").select(*first.actions.columns).localCheckpoint()
    return replace(
        first,
        inboxes=few(effects_of(united(session, inboxes), actions, first.counts)),
        messages=few(messages),
        actions=few(actions),
        rows=rows,
        tables=(*inboxes, *tables),
        is_few=suspect_count <= settings.limits.one_partition_rows_max,
    )


def _edited_ids(session: SparkSession, first: Evidence, suspects: Suspects) -> list[str]:
    """Returns the ids under which the suspects were edited: an inbox has their effects under these."""
    if not has_places(first.counts):
        return []
    edits = first.actions.where(f"{among('kind', PLACED_KINDS)} and reason is not null").join(
        ids_frame(session, suspects.ids), "id", "left_semi"
    )
    return [row["reason"] for row in edits.select("reason").distinct().collect()]


def _others(suspect_ids: ComputedRows, ids: DataFrame, known_ids: Collection[str], *, rows_max: int) -> list[str]:
    """Returns up to `rows_max` of the ids that are not among the known ones, of which `ids` is the frame."""
    if suspect_ids.table is None:
        return [row["id"] for row in suspect_ids.frame.join(ids, "id", "left_anti").limit(rows_max).collect()]
    return sorted({id_ for (id_,) in suspect_ids.rows()}.difference(known_ids))[:rows_max]


def _logs(session: SparkSession, settings: Settings, first: Evidence) -> tuple[DataFrame, DataFrame]:
    """Returns the messages and actions of the first read, and those appended since; actions are surveyed first."""
    counts: list[InputCount] = []
    messages, actions = first.messages, first.actions
    if settings.delay is not None:
        delayed = read_delay(session, settings, settings.delay)
        messages, actions = union(messages, delayed.messages), union(actions, delayed.actions)
    refresh_broker_export(settings)
    now = {log: survey(settings.broker_data, log) for log in ("actions", "messages")}
    more = {
        log: grown(first.surveyed[log], now[log], end_offset=first.ends[log].offset if log in first.ends else None)
        for log in now
        if log in first.surveyed
    }
    appended = {log: read_log(session, log, some, counts).frame for log, some in more.items() if some}
    if "messages" in appended:
        messages = union(messages, appended["messages"])
    if "actions" in appended:
        runs = appended["actions"]
        named = named_runs(runs, messages, is_whole=all(map(begins_whole, now.values())), asides=first.asides)
        actions = union(actions, single(runs), named)
    return messages, actions


def _tables(
    session: SparkSession, reads: Sequence[Read], *, ids: Sequence[str], keys: Sequence[Key]
) -> list[DataFrame]:
    """Read the tables now, and cache the rows: a second query of a table could return other rows."""
    frames = []
    for read in reads:
        statements = [
            narrowed_statement
            for statement in read.statements
            if (narrowed_statement := narrowed(statement, ids=ids, keys=[key for _, key in keys])) is not None
        ]
        if statements:
            kept = sql_frame(session, Read(read.url, tuple(statements), snapshot=True)).persist()
            kept.count()
            frames.append(kept)
    return frames
