"""Which SQL reads which leg: one shape of row for all tables, names checked against the database. Runs no leg.

A leg's row is (leg, id, topic, message_key, consumer_group, body_sha256, deliver_at_ms, created_ms, at_ms, attempts,
note). `at_ms` is the sent, due or handled time; `note` the row's state, outcome, or its business rule's number.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from messaging.errors import ConfigurationError, SchemaMissing
from spark_reconcile.settings import BusinessRule, Condition, InboxSource, Operator, Settings
from spark_reconcile.sources.database import Backend, Place, Reader, quoted

COLUMNS: Final = (
    "leg", "id", "topic", "message_key", "consumer_group", "body_sha256", "deliver_at_ms", "created_ms", "at_ms",
    "attempts", "note",
)  # fmt: skip
NUMBERS: Final = frozenset({"deliver_at_ms", "created_ms", "at_ms", "attempts"})
LEG_SCHEMA: Final = ", ".join(f"{name} {'bigint' if name in NUMBERS else 'string'}" for name in COLUMNS)
_INTEGERS: Final = ("int", "bigint", "mediumint", "smallint", "tinyint", "integer")
_TIMES: Final = ("datetime", "timestamp", "date")
_NEEDED: Final[Mapping[str, frozenset[str]]] = {
    "message": frozenset({"id", "kind", "state", "due_at_us", "attempts", "topic", "message_key", "body_sha256",
                          "deliver_at_ms", "created_at_us"}),
    "archive": frozenset({"id", "kind", "topic", "message_key", "body_sha256", "deliver_at_ms", "created_at_us",
                          "sent_at_us", "attempts", "outcome"}),
    "inbox": frozenset({"consumer_group", "message_id", "topic", "handled_at_us"}),
}  # fmt: skip


class Leg(StrEnum):
    """The tables that are read, in causal order from the end to the beginning."""

    INBOX = "inbox"
    OUTBOX = "outbox"
    ARCHIVE = "archive"
    BUSINESS = "business"


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """One SELECT: columns by name as SQL, constants beside them, bound values in order, and a column to part it by."""

    leg: Leg
    table: str
    columns: dict[str, str]
    constants: dict[str, str]
    where: list[str] = []
    parameters: list[str | int | float | bool] = []
    range_by: str | None = None
    rows_about: int = 0


def inbox_statement(reader: Reader, inbox: InboxSource, *, schema: str | None) -> Statement:
    """The effects of one group. Raises SchemaMissing where there is no inbox table."""
    table = _outbox_table(reader, "inbox", schema=schema)
    name = quoted(reader.place, "consumer_group")
    where, parameters = [f"{name} = ?"], [inbox.group]
    if inbox.topics:
        where.append(f"{quoted(reader.place, 'topic')} IN ({', '.join('?' * len(inbox.topics))})")
        parameters += inbox.topics
    return Statement(
        leg=Leg.INBOX,
        table=table,
        columns={
            "id": "message_id", "topic": "topic", "consumer_group": "consumer_group",
            "created_ms": _milli(reader.place, "handled_at_us"), "at_ms": _milli(reader.place, "handled_at_us"),
        },
        constants={},
        where=where,
        parameters=[*parameters],
        range_by="handled_at_us",
        rows_about=reader.rows_about(reader.place.outbox_table("inbox"), schema=schema),
    )  # fmt: skip


def outbox_statements(reader: Reader, *, schema: str | None) -> list[Statement]:
    """The live message table, then the archive: a row moves from the first to the second."""
    return [
        _message_statement(reader, Leg.OUTBOX, "message", at="due_at_us", note="state", schema=schema),
        _message_statement(reader, Leg.ARCHIVE, "archive", at="sent_at_us", note="outcome", schema=schema),
    ]


def business_statement(reader: Reader, rule: BusinessRule, number: int) -> Statement:
    """The rows that one rule asks about. Raises ConfigurationError naming the table or column that is not there."""
    place = reader.place
    schema, _, table = rule.table.rpartition(".")
    columns = reader.columns(table, schema=schema or None)
    if not columns:
        raise ConfigurationError(f"rule {rule.name}: there is no table {rule.table} in {place}")
    for name in (rule.key_column, rule.time_column, *(one.column for one in rule.where)):
        _check_column(rule, name, columns)
    created_ms = _time(place, rule, rule.time_column, columns)
    selected = {"message_key": _text(place, rule.key_column), "created_ms": created_ms, "at_ms": created_ms}
    if rule.deliver_at_column is not None:
        _check_column(rule, rule.deliver_at_column, columns)
        selected["deliver_at_ms"] = _time(place, rule, rule.deliver_at_column, columns)
    parameters: list[str | int | float | bool] = []
    where = [_condition(place, one, parameters) for one in rule.where]
    whole = columns[rule.key_column].startswith(_INTEGERS)
    return Statement(
        leg=Leg.BUSINESS,
        table=quoted(place, schema or None, table),
        columns=selected,
        constants={"topic": rule.topic, "note": str(number)},
        where=where,
        parameters=parameters,
        range_by=quoted(place, rule.key_column) if whole else None,
        rows_about=reader.rows_about(table, schema=schema or None),
    )


def schema_of(settings: Settings, inbox: InboxSource, place: Place) -> str | None:
    """The schema of a group's inbox."""
    return place.schema_of(inbox.schema or settings.schema)


def _message_statement(reader: Reader, leg: Leg, name: str, *, at: str, note: str, schema: str | None) -> Statement:
    place = reader.place
    return Statement(
        leg=leg,
        table=_outbox_table(reader, name, schema=schema),
        columns={
            "id": "id", "topic": "topic", "message_key": "message_key", "body_sha256": "body_sha256",
            "deliver_at_ms": "deliver_at_ms", "created_ms": _milli(place, "created_at_us"), "at_ms": _milli(place, at),
            "attempts": "attempts", "note": note,
        },
        constants={},
        where=["kind = ?"],
        parameters=["publish"],
        range_by="sent_at_us" if leg is Leg.ARCHIVE else None,
        rows_about=reader.rows_about(place.outbox_table(name), schema=schema),
    )  # fmt: skip


def _outbox_table(reader: Reader, name: str, *, schema: str | None) -> str:
    """The quoted name of one of the outbox's tables. Raises SchemaMissing where it or a column of it is not there."""
    place = reader.place
    table = place.outbox_table(name)
    missing = _NEEDED[name] - set(reader.columns(table, schema=schema))
    if missing:
        what = f"column {min(missing)} of" if len(missing) < len(_NEEDED[name]) else "table"
        raise SchemaMissing(
            f"there is no {what} {schema + '.' if schema else ''}{table} in {place}; run: outbox db upgrade --url URL"
            + (f" --schema {schema}" if schema else "")
        )
    return quoted(place, schema, table)


def _check_column(rule: BusinessRule, name: str, columns: Mapping[str, str]) -> None:
    if name in columns:
        return
    near = difflib.get_close_matches(name, columns, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(columns)}"
    raise ConfigurationError(f"rule {rule.name}: table {rule.table} has no column {name}; {hint}")


def _condition(place: Place, one: Condition, parameters: list[str | int | float | bool]) -> str:
    column = quoted(place, one.column)
    parameters.extend(one.values)
    match one.operator:
        case Operator.IS_NULL | Operator.IS_NOT_NULL:
            return f"{column} {one.operator.upper()}"
        case Operator.IN:
            return f"{column} IN ({', '.join('?' * len(one.values))})"
        case _:
            return f"{column} {one.operator} ?"


def _time(place: Place, rule: BusinessRule, name: str, columns: Mapping[str, str]) -> str:
    """A column of times as milliseconds since the epoch, in SQL. Raises ConfigurationError for other types."""
    column, kind = quoted(place, name), columns[name]
    if kind.startswith(_INTEGERS):
        if rule.time_unit == "s":
            return f"{column} * 1000"
        return column if rule.time_unit == "ms" else _milli(place, name)
    if place.backend is Backend.SQLITE and kind.startswith((*_TIMES, "text")):
        return f"CAST(ROUND((julianday({column}) - 2440587.5) * 86400000.0) AS INTEGER)"
    if kind.startswith(_TIMES):
        return f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {column}) DIV 1000"
    raise ConfigurationError(
        f"rule {rule.name}: column {name} is of type {kind}; times are integers since the epoch or datetimes"
    )


def _milli(place: Place, name: str) -> str:
    """Microseconds as milliseconds, rounded down, in SQL."""
    return f"{quoted(place, name)} {'/' if place.backend is Backend.SQLITE else 'DIV'} 1000"


def _text(place: Place, name: str) -> str:
    """A column as text, in SQL."""
    return f"CAST({quoted(place, name)} AS {'TEXT' if place.backend is Backend.SQLITE else 'CHAR'})"
