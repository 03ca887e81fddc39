"""Builds the SQL that reads each input: the same columns for all tables, names checked against the database.

An input's row is (input_kind, id, topic, message_key, consumer_group, body_sha256, deliver_at_ms, created_ms, at_ms,
attempts, note, due_unit_ms). `at_ms` is the sent, due or handled time, of a business row its created time as it stands
there; `note` the row's state, outcome, or its business rule's number; `due_unit_ms` the unit of its due time.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, assert_never

import msgspec

from outbox_core.common.errors import ConfigurationError, SchemaMissing
from outbox_core.common.table_namespace import FORMER_SCHEMA, SIGNS_OF_SCHEMA, left_in_former_schema
from spark_reconcile.core.plausible_times import EARLIEST_MS, LATEST_MS, or_null, outside
from spark_reconcile.core.settings import BusinessRule, Condition, InboxSource, KeyFormat, Operator, Settings
from spark_reconcile.core.time_buckets import DAY_MS, EVER_MS, Span
from spark_reconcile.sources.databases.source_database import DATE, INTEGERS
from spark_reconcile.sources.dbapi_reader import DatabaseAddress, DbApiReader, quoted

COLUMNS: Final = (
    "input_kind", "id", "topic", "message_key", "consumer_group", "body_sha256", "deliver_at_ms", "created_ms", "at_ms",
    "attempts", "note", "due_unit_ms",
)  # fmt: skip
NUMBERS: Final = frozenset({"deliver_at_ms", "created_ms", "at_ms", "attempts", "due_unit_ms"})
INPUT_SCHEMA: Final = ", ".join(f"{name} {'bigint' if name in NUMBERS else 'string'}" for name in COLUMNS)
_BYTES: Final = ("binary", "blob", "bytea")
_FLOATS: Final = ("float", "double", "real")
_UUID_PARTS: Final = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
_SPLIT: Final = re.compile(r"message_[0-9]{4}")
_NEEDED: Final[Mapping[str, frozenset[str]]] = {
    "message": frozenset({"id", "kind", "state", "due_at_us", "attempts", "topic", "message_key", "body_sha256",
                          "deliver_at_ms", "created_at_us"}),
    "archive": frozenset({"id", "kind", "topic", "message_key", "body_sha256", "deliver_at_ms", "created_at_us",
                          "sent_at_us", "attempts", "outcome"}),
    "inbox": frozenset({"consumer_group", "message_id", "topic", "handled_at_us"}),
}  # fmt: skip
ARCHIVE_COLUMNS: Final = _NEEDED["archive"]
"""The columns of the archive, in its table and in Parquet."""
CANCELS: Final = "(cancels)"
"""The topic of cancels: no message can have it. A cancel's `body_sha256` is that of the id that it cancels.

A cancel is a record of its own, in the hour of its own row: its message may be years older, and outside every time
range.
"""
UNKNOWN_KIND: Final = "(unknown kind)"
"""The topic of rows of a table that are neither messages nor cancels."""
WITHDRAWN: Final = "withdrawn"
"""The outcome of a scheduled message that a cancel took out of its table, and no broker has ever had."""
DISCARDED: Final = "discarded"
"""The outcome of a message or cancel that an operator discarded after it was parked."""
WITHDREW: Final = "withdrew"
"""The `note` of a cancel that did so; its outcome is that of a cancel that a broker took."""


class InputKind(StrEnum):
    """The tables that are read, in causal order from the end to the beginning."""

    INBOX = "inbox"
    OUTBOX = "outbox"
    ARCHIVE = "archive"
    BUSINESS = "business"


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """One SELECT: columns by name as SQL, constants, bound values in order, and a column for range partitions."""

    input_kind: InputKind
    table: str
    columns: dict[str, str]
    constants: dict[str, str]
    where: list[str] = []
    parameters: list[str | int | float | bool] = []
    range_by: str | None = None
    rows_about: int = 0
    is_by_day: bool = False
    """Whether the times of a business table are days."""


def archive_note() -> str:
    """Returns the note of an archive row, in SQL of databases and of Spark: its outcome, or WITHDREW.

    A withdrawal archives its cancel by one statement, with equal times; a cancel that was sent is archived after its
    commit and the broker's answer. So its row alone tells, whether its message's row is read or not.
    """
    withdrew = "kind = 'cancel' AND outcome = 'canceled' AND sent_at_us = created_at_us"
    return f"CASE WHEN {withdrew} THEN '{WITHDREW}' ELSE outcome END"


def inbox_statement(
    reader: DbApiReader, inbox: InboxSource, *, schema: str | None, span: Span | None = None
) -> Statement:
    """Reads the effects of one group, however late they are. Raises SchemaMissing if there is no inbox table."""
    table = _outbox_table(reader, "inbox", schema=schema)
    name = quoted(reader.address, "consumer_group")
    conditions: list[str] = [f"{name} = ?"]
    parameters: list[str | int | float | bool] = [inbox.group]
    if inbox.topics:
        conditions.append(f"{quoted(reader.address, 'topic')} IN ({', '.join('?' * len(inbox.topics))})")
        parameters += inbox.topics
    if span is not None:
        conditions.append("(handled_at_us < ? OR handled_at_us >= ?)")
        parameters += [EARLIEST_MS * 1000, span.since_ms * 1000]
    return Statement(
        input_kind=InputKind.INBOX,
        table=table,
        columns={
            "id": "message_id", "topic": "topic", "consumer_group": "consumer_group",
            "created_ms": _milli(reader.address, "handled_at_us"), "at_ms": _milli(reader.address, "handled_at_us"),
        },
        constants={},
        where=conditions,
        parameters=parameters,
        range_by="handled_at_us",
        rows_about=reader.rows_about(reader.address.outbox_table("inbox", schema=schema), schema=schema),
    )  # fmt: skip


def outbox_statements(
    reader: DbApiReader, *, schema: str | None, span: Span | None = None, latest_ms: int = LATEST_MS
) -> list[Statement]:
    """Reads the live message tables, then the archive: rows move from the first to the second.

    Unsent rows are read whatever their age: they are few, or they are findings.
    """
    names = message_tables(reader, schema=schema)
    live = [
        _message_statement(reader, InputKind.OUTBOX, name, at="due_at_us", note="state", schema=schema)
        for name in names
    ]
    note = archive_note()
    archive = _message_statement(reader, InputKind.ARCHIVE, "archive", at="sent_at_us", note=note, schema=schema)
    return [*live, archive if span is None else _within(archive, "created_at_us", span, latest_ms=latest_ms)]


def message_tables(reader: DbApiReader, *, schema: str | None) -> list[str]:
    """Returns the message tables of an outbox, split or not, by their names without the prefix of their place."""
    begin = reader.address.outbox_table("", schema=schema)
    names = [name.removeprefix(begin) for name in reader.tables(schema=schema) if name.startswith(begin)]
    return ["message", *(name for name in names if _SPLIT.fullmatch(name))]


def business_statement(
    reader: DbApiReader, rule: BusinessRule, rule_number: int, *, span: Span | None = None, latest_ms: int = LATEST_MS
) -> Statement:
    """Reads the rows of one rule; those later than `latest_ms` have no time. Raises ConfigurationError with the missing
    table or column.
    """
    address = reader.address
    schema, _, table = rule.table.rpartition(".")
    columns = reader.columns(table, schema=schema or None)
    if not columns:
        near = difflib.get_close_matches(table, reader.tables(schema=schema or None), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"rule {rule.name}: there is no table {rule.table} in {address}{hint}")
    of_where = [condition.column for condition in rule.where]
    for name in (rule.key_column, rule.time_column, *of_where, *rule.body.values()):
        _check_column(rule, name, columns)
    created_ms = _time(address, rule, rule.time_column, columns)
    # An impossible time gives no hour and no age: the row has no created time then, and `at_ms` is the original value.
    selected = {
        "message_key": key_text(address, rule, columns),
        "created_ms": or_null(created_ms, latest_ms=latest_ms),
        "at_ms": created_ms,
    }
    if is_date(columns[rule.time_column]):
        # The row was written at some time of that day: it is not older than the day's end.
        selected["at_ms"] = f"{created_ms} + {DAY_MS - 1}"
    if rule.deliver_at_column is not None:
        _check_column(rule, rule.deliver_at_column, columns)
        selected["deliver_at_ms"] = _time(address, rule, rule.deliver_at_column, columns)
        selected["due_unit_ms"] = _unit_ms(address, rule, rule.deliver_at_column, columns)
    parameters: list[str | int | float | bool] = []
    conditions = [_condition(address, condition, parameters) for condition in rule.where]
    whole = columns[rule.key_column].startswith(INTEGERS)
    if span is not None:
        is_sought = reader.leads_index(table, rule.time_column, schema=schema or None)
        _between(address, rule, columns, conditions, parameters, span=span, latest_ms=latest_ms, is_sought=is_sought)
    return Statement(
        input_kind=InputKind.BUSINESS,
        table=quoted(address, schema or None, table),
        columns=selected,
        constants={"topic": rule.topic, "note": str(rule_number)},
        where=conditions,
        parameters=parameters,
        range_by=quoted(address, rule.key_column) if whole else None,
        rows_about=reader.rows_about(table, schema=schema or None),
        is_by_day=is_date(columns[rule.time_column]),
    )


def _within(statement: Statement, column: str, span: Span, *, latest_ms: int) -> Statement:
    """The rows whose time, in microseconds, lies in the span, or cannot be true."""
    bounds = (span.since_ms, span.until_ms, EARLIEST_MS, latest_ms)
    return msgspec.structs.replace(
        statement,
        where=[*statement.where, f"(({column} >= ? AND {column} < ?) OR {outside(column)})"],
        parameters=[*statement.parameters, *(bound * 1000 for bound in bounds)],
    )


def _between(
    address: DatabaseAddress, rule: BusinessRule, columns: Mapping[str, str], conditions: list[str],
    parameters: list[str | int | float | bool], *, span: Span, latest_ms: int, is_sought: bool,
) -> None:  # fmt: skip
    """Conditions on the time column: the bare one where an index on it serves, if there is one (`is_sought`)."""
    column, kind = quoted(address, rule.time_column), columns[rule.time_column]
    times = (span.since_ms, span.until_ms, EARLIEST_MS, latest_ms)
    bounds: list[str | int] = [*times]
    nothing = f"{column} IS NULL"
    if kind.startswith(INTEGERS):
        bounds = [bound * 1000 if rule.time_unit == "us" else bound for bound in times]
        if rule.time_unit == "s":
            bounds = [span.since_ms // 1000, -(-span.until_ms // 1000), EARLIEST_MS // 1000, latest_ms // 1000]
    else:
        compared = address.backend.time_bounds(column, kind, times, latest_ms=latest_ms, is_sought=is_sought)
        column, nothing, bounds = compared.column, compared.nothing, [*compared.bounds]
    # A row without a time, or with one that cannot be true, is of no hour, and still asks for its message.
    conditions.append(f"(({column} >= ? AND {column} < ?) OR {nothing} OR {outside(column)})")
    parameters += bounds


def is_date(kind: str) -> bool:
    """Whether a column of this type has days, and no time of the day."""
    return kind == DATE


def narrowed(statement: Statement, *, ids: Sequence[str], keys: Sequence[str]) -> Statement | None:
    """Restricts a statement to these messages and keys; None if it would select nothing."""
    name_values = {
        InputKind.INBOX: [("id", ids)],
        InputKind.OUTBOX: [("id", ids), ("message_key", keys)],
        InputKind.ARCHIVE: [("id", ids), ("message_key", keys)],
        InputKind.BUSINESS: [("message_key", keys)],
    }[statement.input_kind]
    column_values = [(statement.columns[name], values) for name, values in name_values if values]
    if not column_values:
        return None
    either = " OR ".join(f"{column} IN ({', '.join('?' * len(values))})" for column, values in column_values)
    return msgspec.structs.replace(
        statement,
        where=[*statement.where, f"({either})"],
        parameters=[*statement.parameters, *(value for _, values in column_values for value in values)],
    )


def schema_of(settings: Settings, inbox: InboxSource, address: DatabaseAddress) -> str | None:
    """The schema of a group's inbox."""
    return address.schema_of(inbox.schema or settings.schema)


def _message_statement(
    reader: DbApiReader, input_kind: InputKind, name: str, *, at: str, note: str, schema: str | None
) -> Statement:
    address = reader.address
    return Statement(
        input_kind=input_kind,
        table=_outbox_table(
            reader, name, schema=schema, like="archive" if input_kind is InputKind.ARCHIVE else "message"
        ),
        columns={
            "id": "id",
            "topic": f"CASE kind WHEN 'publish' THEN topic WHEN 'cancel' THEN '{CANCELS}' ELSE '{UNKNOWN_KIND}' END",
            "message_key": "message_key", "body_sha256": "body_sha256",
            "deliver_at_ms": "deliver_at_ms", "created_ms": _milli(address, "created_at_us"),
            "at_ms": _milli(address, at),
            "attempts": "attempts", "note": note,
        },
        constants={},
        # A kind of newer code is read, too: the run ends on it, rather than miss a message.
        where=["kind IS NOT NULL"],
        range_by="sent_at_us" if input_kind is InputKind.ARCHIVE else None,
        rows_about=reader.rows_about(address.outbox_table(name, schema=schema), schema=schema),
    )  # fmt: skip


def _is_left_beside(reader: DbApiReader, schema: str | None) -> bool:
    """Whether the tables may be in the schema that once was the default, as outbox.store.table_placement has it."""
    is_default = not reader.address.backend.is_file and schema == reader.address.database != FORMER_SCHEMA
    return is_default and set(reader.tables(schema=FORMER_SCHEMA)) >= SIGNS_OF_SCHEMA


def _outbox_table(reader: DbApiReader, name: str, *, schema: str | None, like: str | None = None) -> str:
    """The quoted name of one of the outbox's tables. Raises SchemaMissing where it or a column of it is not there."""
    address = reader.address
    table = address.outbox_table(name, schema=schema)
    needed = _NEEDED[like or name]
    missing = needed - set(reader.columns(table, schema=schema))
    if missing:
        if len(missing) == len(needed) and _is_left_beside(reader, schema):
            raise left_in_former_schema(schema)
        missing_part = f"column {min(missing)} of" if len(missing) < len(needed) else "table"
        raise SchemaMissing(
            f"there is no {missing_part} {schema + '.' if schema else ''}{table} in {address}; "
            "run: outbox db upgrade --url URL" + (f" --schema {schema}" if schema else "")
        )
    return quoted(address, schema, table)


def _check_column(rule: BusinessRule, name: str, columns: Mapping[str, str]) -> None:
    if name in columns:
        return
    near = difflib.get_close_matches(name, columns, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(columns)}"
    raise ConfigurationError(f"rule {rule.name}: table {rule.table} has no column {name}; {hint}")


def _condition(address: DatabaseAddress, condition: Condition, parameters: list[str | int | float | bool]) -> str:
    column = quoted(address, condition.column)
    parameters.extend(condition.values)
    match condition.operator:
        case Operator.IS_NULL | Operator.IS_NOT_NULL:
            return f"{column} {condition.operator.upper()}"
        case Operator.IN:
            return f"{column} IN ({', '.join('?' * len(condition.values))})"
        case _:
            return f"{column} {condition.operator} ?"


def _time(address: DatabaseAddress, rule: BusinessRule, name: str, columns: Mapping[str, str]) -> str:
    """A column of times as milliseconds since the epoch, in SQL. Raises ConfigurationError for other types."""
    column, kind = quoted(address, name), columns[name]
    if kind.startswith(INTEGERS):
        return _bounded(address, name, rule.time_unit)
    time_ms = address.backend.time_ms(column, kind)
    if time_ms is not None:
        return time_ms
    raise ConfigurationError(
        f"rule {rule.name}: column {name} is of type {kind}; times are integers since the epoch or datetimes"
    )


def _bounded(address: DatabaseAddress, name: str, unit: str) -> str:
    """A column of integers as milliseconds, in SQL; beyond EVER_MS, which no time is, EVER_MS.

    One row with the largest number that its column can hold would be too large for a product, a sum or Spark's bigint,
    and would end every run.
    """
    column = quoted(address, name)
    milli = {"s": f"{column} * 1000", "ms": column, "us": _milli(address, name)}[unit]
    most = EVER_MS // 1000 if unit == "s" else EVER_MS * (1000 if unit == "us" else 1)
    bounded = f"CASE WHEN {column} > {most} THEN {EVER_MS} WHEN {column} < -{most} THEN -{EVER_MS} ELSE {milli} END"
    return address.backend.whole_number(bounded)


def _unit_ms(address: DatabaseAddress, rule: BusinessRule, name: str, columns: Mapping[str, str]) -> str:
    """The unit in which a column of times is written, in milliseconds and at least one, in SQL.

    What is written is rounded: by the code that writes it, up or down, or by the database.
    """
    column, kind = quoted(address, name), columns[name]
    if kind.startswith(INTEGERS):
        return "1000" if rule.time_unit == "s" else "1"
    return address.backend.time_unit_ms(column, kind)


def _milli(address: DatabaseAddress, name: str) -> str:
    """Microseconds as milliseconds, rounded down, in SQL."""
    return address.backend.milli(quoted(address, name))


def key_text(address: DatabaseAddress, rule: BusinessRule, columns: Mapping[str, str]) -> str:
    """A rule's key column as the text of the message's key, in SQL. Raises ConfigurationError for a type whose text is
    not the one that the business publishes.
    """
    column, kind = quoted(address, rule.key_column), columns[rule.key_column]
    text = address.backend.text(column)
    is_bytes = any(name in kind for name in _BYTES)
    if any(name in kind for name in _FLOATS):
        raise ConfigurationError(
            f"rule {rule.name}: key column {rule.key_column} of {rule.table} is of type {kind}, whose text depends on "
            "who writes it; name a column of whole numbers or of text"
        )
    match rule.key_format:
        case None if is_bytes:
            raise ConfigurationError(
                f"rule {rule.name}: key column {rule.key_column} of {rule.table} is of type {kind}, and a key is text: "
                f"say with key_format ({' or '.join(KeyFormat)}) how the business writes it in the message's key"
            )
        case None:
            return address.backend.key_text(column, kind)
        case KeyFormat.HEX:
            return f"LOWER({address.backend.hex_digits(column)})" if is_bytes else f"LOWER({text})"
        case KeyFormat.UUID:
            digits = f"LOWER({address.backend.hex_digits(column)})" if is_bytes else f"LOWER(REPLACE({text}, '-', ''))"
            parts = [f"SUBSTR({digits}, {begin}, {length})" for begin, length in _UUID_PARTS]
            return address.backend.joined(parts, by="-")
        case _:
            assert_never(rule.key_format)
