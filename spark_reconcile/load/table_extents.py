"""Extents of archives and inboxes as a whole, whatever a run reads: the times of their first and last rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spark_reconcile.rules.plausible_times import EARLIEST_MS, LATEST_MS
from spark_reconcile.sources.dbapi_reader import DbApiReader, Place
from spark_reconcile.sources.sql_statements import Leg, Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class TableExtent:
    """The archive of one outbox, or the inbox of one group in one table; times in milliseconds, None if it is empty.
    Rows whose time cannot be true are its ends only where it has no others.

    `name` identifies the table among all databases, without user or password; `what`: the group, "" for an archive.
    """

    name: str
    leg: Leg
    what: str
    first_ms: int | None
    last_ms: int | None

    @property
    def is_empty(self) -> bool:
        """Whether it has no row."""
        return self.first_ms is None


def extent_of(reader: DbApiReader, statement: Statement, *, what: str, schema: str | None) -> TableExtent:
    """Query the extent for a statement, without its time range: two look-ups in an index, no scan."""
    first, last = (_end_ms(reader, statement, order) for order in ("ASC", "DESC"))
    name = f"{' '.join(filter(None, (statement.leg, what)))} in {_place(reader.place, schema)}"
    return TableExtent(name=name, leg=statement.leg, what=what, first_ms=first, last_ms=last)


def _end_ms(reader: DbApiReader, statement: Statement, order: str) -> int | None:
    # The kind or the group; the other conditions are topics and the time range.
    condition, time = statement.where[0], statement.range_by
    given = statement.parameters[: condition.count("?")]
    for true, bounds in ((f" AND {time} >= ? AND {time} <= ?", [EARLIEST_MS * 1000, LATEST_MS * 1000]), ("", [])):
        sql = f"SELECT {time} FROM {statement.table} WHERE {condition}{true} ORDER BY {time} {order} LIMIT 1"  # noqa: S608 - checked
        if rows := reader.rows(sql, [*given, *bounds]):
            return int(rows[0][0]) // 1000
    return None


def _place(place: Place, schema: str | None) -> str:
    if place.backend.is_file:
        return str(Path(place.database).resolve())
    return f"{place}, schema {schema}" if schema else str(place)
