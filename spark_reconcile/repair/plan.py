"""Plans repairs of confirmed lost and unsent messages: one line each, with its precondition. Changes nothing.

Unsent: the row is made due now. Lost between the outbox and the broker: the row is inserted again, from the archive row
and the business row, if the body built from it has exactly the archived hash. A cancel that the broker lost: likewise,
while its message is not due. All others are listed, with the reason why they cannot be repaired.
The compensator sends what is repaired: it has the lease, the breaker, the rate and the order, and broker and inbox know
a repeat by its id. A repair that published to the broker itself would have none of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from heapq import nsmallest
from pathlib import Path
from typing import Any, Final

import msgspec

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.core.settings import BusinessRule, OutboxSource, Settings
from spark_reconcile.core.time_buckets import HOUR_MS
from spark_reconcile.results.window_store import WindowStore
from spark_reconcile.sources.dbapi_reader import DatabaseAddress, DbApiReader, quoted, reading
from spark_reconcile.sources.sql_statements import DISCARDED, WITHDRAWN, key_text, message_tables

IDS_A_STATEMENT: Final = 500
UNSENT_RULE: Final = "not_sent"
LOST_RULE: Final = "not_in_broker"
CANCEL_RULE: Final = "cancel_not_noted"
_ARCHIVED: Final = ("id", "topic", "message_key", "body_sha256", "deliver_at_ms", "created_at_us", "sent_at_us")
_STANDING: Final = ("id", "kind", "topic", "state", "due_at_us", "deliver_at_ms")
_UNSENT: Final = "committed and not sent"
_TIMED: Final = "it is scheduled, and its table holds it until it is due"
_NO_HEADERS: Final = "accepted by the broker, and not in its log; headers are not archived: it gets content-type alone"
_ORDERED: Final = "its key is ordered, and the archive keeps no place in that order: publish it from its row"
_UNPUBLISHED: Final = "it was never published, so nothing says what its message held: publish it from the row"
_NO_BODY: Final = "the archive keeps no bodies, and no rule of this topic says how one is made (body = {...})"
_FORGOTTEN: Final = "the broker took it, and has no note of it; its message is not due yet"
_UNNAMED: Final = "the broker's log does not tell which message it cancels: cancel that again by its id"
_DUE: Final = "its message was due, so no cancel can hold it back any more: undo by hand what it did"
_encode_json = msgspec.json.Encoder().encode
BATCH_ROWS: Final = 10_000
_COLUMNS: Final = ("message_id", "topic", "message_key", "rule")
_OF_MESSAGES: Final = [("rule", "in", [UNSENT_RULE, LOST_RULE, CANCEL_RULE]), ("scope", "=", "message")]
_OF_ROWS: Final = [("rule", "in", ["no_message", "too_few_messages"])]


def hour_folders(output: Path, *, since_ms: int, until_ms: int) -> list[Path]:
    """Returns the folders of the windows that overlap [since, until); a full run has one folder of its own."""
    store = WindowStore(output)
    return [
        store.folder(start)
        for start in sorted(store.windows)
        if start + HOUR_MS > since_ms and start < until_ms
    ]  # fmt: skip


def confirmed_suspects(folders: Sequence[Path]) -> list[Suspect]:
    """Returns messages that are lost or unsent, confirmed by the recheck, from the tables in these folders."""
    suspects = []
    for table in _tables(folders, "verdicts"):
        rows = _each_row(table, _COLUMNS, [*_OF_MESSAGES, ("confirmed", "=", True)])
        suspects += [
            Suspect(message_id=row["message_id"], topic=row["topic"], key=row["message_key"], rule=row["rule"])
            for row in sorted(rows, key=lambda row: str(row["message_id"]))
        ]
    return suspects


def unconfirmed_count(folders: Sequence[Path]) -> int:
    """Counts lost or unsent messages that were too many for a recheck."""
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    unconfirmed = pq.filters_to_expression([*_OF_MESSAGES, ("confirmed", "=", False)])
    tables = _tables(folders, "verdicts")
    return sum(ds.dataset(table, format="parquet").count_rows(filter=unconfirmed) for table in tables)


def unpublished_rows(folders: Sequence[Path], *, rows_max: int) -> list[Suspect]:
    """Returns at most `rows_max` business rows without their message, one a key, in order of time."""
    suspects: list[Suspect] = []
    for table in _tables(folders, "business_verdicts"):
        rows = _each_row(table, ("topic", "message_key", "rule", "at_ms"), _OF_ROWS)
        # There may be millions, where a source is missing: only those that are returned are kept.
        earliest = nsmallest(rows_max - len(suspects), rows, key=lambda row: (row["at_ms"], str(row["message_key"])))
        suspects += [
            Suspect(message_id="", topic=row["topic"], key=row["message_key"], rule=row["rule"]) for row in earliest
        ]
        if len(suspects) >= rows_max:
            break
    return suspects


def _tables(folders: Sequence[Path], name: str) -> list[Path]:
    """Returns the existing tables: an hour without rows classified one by one has none."""
    return [folder / name for folder in folders if (folder / name).exists()]


def _each_row(table: Path, columns: Sequence[str], filters: list[tuple[str, str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table, never all of them in memory."""
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    rows = ds.dataset(table, format="parquet")
    matching = pq.filters_to_expression(filters)
    for batch in rows.to_batches(columns=list(columns), filter=matching, batch_size=BATCH_ROWS):
        yield from batch.to_pylist()


MessageName = tuple[str, str]
"""A topic and an id: one id on two topics is two messages."""


class RepairAction(StrEnum):
    """How a message is repaired."""

    MAKE_DUE = "make due"
    WRITE_AGAIN = "write again"
    # Safe to repeat: a broker that remembers the cancel answers `canceled` again, one that delivered it `too_late`.
    CANCEL_AGAIN = "cancel again"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A confirmed finding that may be repaired."""

    message_id: str
    topic: str
    key: str | None
    rule: str

    @property
    def name(self) -> MessageName:
        """The message, or the cancel."""
        return self.topic, self.message_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The planned repair of one message: action, table and reason. `row`: the row to insert again."""

    message_id: str
    topic: str
    action: RepairAction
    reason: str
    outbox: OutboxSource | None = None
    table: str = ""
    key: str | None = None
    row: dict[str, Any] | None = None

    @property
    def name(self) -> MessageName:
        """The message, or the cancel."""
        return self.topic, self.message_id

    @property
    def repair_id(self) -> str:
        """An id derived from the repair: equal repairs have equal ids."""
        location = "" if self.outbox is None else f"{DatabaseAddress.of(self.outbox.url)} {self.outbox.schema}"
        subject = self.message_id or f"{self.topic} {self.key}"
        return hashlib.sha256(f"{self.action} {subject} {location} {self.table}".encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Returns the repair for JSON, without body and password."""
        values = {name: value for name, value in asdict(self).items() if name not in {"outbox", "row"}}
        location = None if self.outbox is None else str(DatabaseAddress.of(self.outbox.url))
        return {"repair_id": self.repair_id, **values, "place": location}


def plan_repairs(settings: Settings, suspects: Sequence[Suspect], *, repairs_max: int) -> list[Repair]:
    """Plan by the current state of each message. Raises ConfigurationError if there are more than `repairs_max`."""
    if len(suspects) > repairs_max:
        raise ConfigurationError(
            f"{len(suspects):,} messages would be repaired, more than {repairs_max:,}: nothing is done. "
            "Where so many are missing a source is; if it is none, say --repairs-max"
        )
    repairs = {suspect.name: _unfound(suspect) for suspect in suspects}
    for outbox in settings.all_outboxes:
        address = DatabaseAddress.of(outbox.url)
        with reading(address) as reader:
            for chunk in _chunks(
                [suspect for suspect in suspects if repairs[suspect.name].action is RepairAction.NOTHING]
            ):
                for repair in _in_outbox(reader, outbox, settings, chunk):
                    repairs[repair.name] = repair
    return [repairs[suspect.name] for suspect in suspects]


def name_unpublished(rows: Sequence[Suspect]) -> list[Repair]:
    """Returns business rows without a message as repairs without an action."""
    return [
        Repair(message_id="", topic=row.topic, key=row.key, action=RepairAction.NOTHING, reason=_UNPUBLISHED)
        for row in rows
    ]


def _in_outbox(
    reader: DbApiReader, outbox: OutboxSource, settings: Settings, suspects: Sequence[Suspect]
) -> Iterator[Repair]:
    schema = reader.address.schema_of(outbox.schema)
    waiting: set[MessageName] = set()
    for plain_name in message_tables(reader, schema=schema):
        name = reader.address.outbox_table(plain_name, schema=schema)
        table = quoted(reader.address, schema, name)
        for suspect, reason in _standing(reader, table, suspects):
            waiting.add(suspect.name)
            yield Repair(
                message_id=suspect.message_id, topic=suspect.topic, outbox=outbox, table=name, reason=reason or _UNSENT,
                action=RepairAction.NOTHING if reason else RepairAction.MAKE_DUE,
            )  # fmt: skip
    archive = quoted(reader.address, schema, reader.address.outbox_table("archive", schema=schema))
    gone = [suspect for suspect in suspects if suspect.name not in waiting]
    yield from _cancel_again(
        reader, outbox, archive, {suspect.message_id: suspect for suspect in gone if suspect.rule == CANCEL_RULE}
    )
    lost = {suspect.name: suspect for suspect in gone if suspect.rule == LOST_RULE}
    rows = [row for row in _archived(reader, archive, {id_ for _, id_ in lost}) if (row["topic"], row["id"]) in lost]
    ordered = _ordered(reader, schema, [_order_key(row) for row in rows])
    for row in rows:
        repair = _write_again(settings, outbox, reader.address, lost[row["topic"], row["id"]], row)
        is_late = repair.action is RepairAction.WRITE_AGAIN and _order_key(row) in ordered
        yield replace(repair, action=RepairAction.NOTHING, reason=_ORDERED, row=None) if is_late else repair


def _standing(reader: DbApiReader, table: str, suspects: Sequence[Suspect]) -> Iterator[tuple[Suspect, str]]:
    """Yields the suspects that have a row in a message table, and why it is left as it is; empty if it is made due.

    A cancel's row is of no topic.
    """
    by_id: dict[str, list[Suspect]] = {}
    for suspect in suspects:
        by_id.setdefault(suspect.message_id, []).append(suspect)
    now_ms = reader.now_ms()
    for message_id, kind, topic, state, due_us, deliver_at_ms in _rows(reader, table, _STANDING, by_id):
        reason = "" if state == "pending" else f"its row is {state}: decide about it by hand"
        # Sent now, it would be the broker's, and no cancel could take it out of its table any more.
        if not reason and deliver_at_ms is not None and due_us == deliver_at_ms * 1000 and deliver_at_ms > now_ms:
            reason = _TIMED
        yield from ((suspect, reason) for suspect in by_id[message_id] if kind == "cancel" or suspect.topic == topic)


def _archived(reader: DbApiReader, archive: str, ids: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the archive rows of these messages or cancels, the newest last, without those of messages that were
    withdrawn or discarded: no broker has taken these.
    """
    archive_rows = _rows(reader, archive, (*_ARCHIVED, "outcome"), ids)
    taken = [values for *values, outcome in archive_rows if outcome not in {WITHDRAWN, DISCARDED}]
    rows = [dict(zip(_ARCHIVED, values, strict=True)) for values in taken]
    return sorted(rows, key=lambda row: int(row["sent_at_us"]))


def _cancel_again(
    reader: DbApiReader, outbox: OutboxSource, archive: str, cancels: dict[str, Suspect]
) -> Iterator[Repair]:
    """Plan to insert archived cancels again, with the canceled ids if the broker's log has them."""
    if not cancels:
        return
    now_ms, table = reader.now_ms(), reader.address.outbox_table("message", schema=outbox.schema)
    due = dict(
        _rows(reader, archive, ("id", "deliver_at_ms"), {cancel.key for cancel in cancels.values() if cancel.key})
    )
    for row in _archived(reader, archive, cancels):
        message = cancels[row["id"]].key or ""
        repair = Repair(
            message_id=row["id"], topic=cancels[row["id"]].topic, key=message or None, outbox=outbox,
            action=RepairAction.NOTHING, reason=_UNNAMED,
        )  # fmt: skip
        if hashlib.sha256(message.encode()).hexdigest() != row["body_sha256"]:
            yield repair
        elif (due.get(message) or now_ms + 1) <= now_ms:
            yield replace(repair, reason=_DUE)
        else:
            row["body"] = message.encode()
            yield replace(repair, action=RepairAction.CANCEL_AGAIN, reason=_FORGOTTEN, table=table, row=row)


def _ordered(reader: DbApiReader, schema: str | None, keys: Sequence[str]) -> set[str]:
    """Returns the keys that are ordered in the outbox."""
    name = reader.address.outbox_table("order_head", schema=schema)
    if not keys or name not in reader.tables(schema=schema):
        return set()
    table, marks = quoted(reader.address, schema, name), ", ".join("?" * len(keys))
    sql = f"SELECT order_key FROM {table} WHERE order_key IN ({marks})"  # noqa: S608 - checked names
    return {str(key) for (key,) in reader.rows(sql, keys)}


def _order_key(row: dict[str, Any]) -> str:
    """Returns the name of a topic's key in the outbox's order tables."""
    return hashlib.sha256(f"{row['topic']}\0{row['message_key']}".encode()).hexdigest()[:32]


def _write_again(
    settings: Settings, outbox: OutboxSource, address: DatabaseAddress, lost: Suspect, row: dict[str, Any]
) -> Repair:
    """Plan to insert the archive row with the body built from its business row, if the hashes are equal."""
    nothing = Repair(
        message_id=lost.message_id, topic=lost.topic, outbox=outbox, action=RepairAction.NOTHING, reason=_NO_BODY
    )
    rules = [rule for rule in settings.rules if rule.topic == lost.topic and rule.body]
    if not rules:
        return nothing
    for rule in rules:
        for body in _bodies(settings, rule, str(row["message_key"])):
            if hashlib.sha256(body).hexdigest() == row["body_sha256"]:
                return replace(
                    nothing, action=RepairAction.WRITE_AGAIN, reason=_NO_HEADERS,
                    table=address.outbox_table("message", schema=outbox.schema), row={**row, "body": body},
                )  # fmt: skip
    return replace(nothing, reason="the body made of its business row has another hash than the message had")


def _bodies(settings: Settings, rule: BusinessRule, key: str) -> Iterator[bytes]:
    """Builds bodies from the rule's rows with this key."""
    for url in settings.urls_of(rule):
        address = DatabaseAddress.of(url)
        schema, _, table = rule.table.rpartition(".")
        columns = ", ".join(quoted(address, column) for column in rule.body.values())
        with reading(address) as reader:
            key_column = quoted(address, rule.key_column)
            if rule.key_format is not None:
                key_column = key_text(address, rule, reader.columns(table, schema=schema or None))
            # quoted() checks the names; the key is a bound parameter.
            sql = f"SELECT {columns} FROM {quoted(address, schema or None, table)} WHERE {key_column} = ?"  # noqa: S608
            for values in reader.rows(sql, (key,)):
                yield _encode_json(dict(zip(rule.body, values, strict=True)))


def _unfound(suspect: Suspect) -> Repair:
    return Repair(
        message_id=suspect.message_id, topic=suspect.topic, action=RepairAction.NOTHING,
        reason="neither an outbox nor an archive here has it any more",
    )  # fmt: skip


def _rows(reader: DbApiReader, table: str, columns: Sequence[str], ids: Iterable[str]) -> list[tuple[Any, ...]]:
    id_list = list(ids)
    if not id_list:
        return []
    marks = ", ".join("?" * len(id_list))
    return reader.rows(f"SELECT {', '.join(columns)} FROM {table} WHERE id IN ({marks})", id_list)  # noqa: S608 - checked


def _chunks(suspects: Sequence[Suspect]) -> Iterator[Sequence[Suspect]]:
    for start in range(0, len(suspects), IDS_A_STATEMENT):
        yield suspects[start : start + IDS_A_STATEMENT]
