"""How SQLite is read."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, unquote

from outbox_core.common.table_namespace import SQLITE_NAMESPACE, TableNamespace
from spark_reconcile.core.time_buckets import DAY_MS
from spark_reconcile.sources.databases.source_database import (
    CONNECT_SECONDS,
    TIMES,
    Address,
    Query,
    SourceDatabase,
    TimeBounds,
)

_NOT_UTF_8: Final = re.compile(r"Could not decode to UTF-8 column '(.*?)' with text", re.DOTALL)
"""What follows is the value."""


class SqliteSource(SourceDatabase):
    """SQLite: a file, whose texts may be of any type and are compared byte by byte."""

    # -- connections -------------------------------------------------------------------------------------------------

    schemes: frozenset[str] = frozenset({"sqlite"})
    is_file: bool = True
    quote: str = '"'
    driver_error: type[Exception] = sqlite3.Error

    def address(self, url: SplitResult) -> Address | None:
        return Address(database=unquote(url.path.removeprefix("/"))) if url.path.strip("/") else None

    def shown(self, address: Address) -> str:
        return address.database

    def tables_at(self, schema: str | None, *, current: str) -> TableNamespace:
        return SQLITE_NAMESPACE

    def open(self, address: Address, *, writes: bool = False) -> Any:
        uri = f"{Path(address.database).resolve().as_uri()}?mode={'rw' if writes else 'ro'}"
        return sqlite3.connect(uri, uri=True, timeout=CONNECT_SECONDS, isolation_level=None)

    def begin_snapshot(self, cursor: Any) -> None:
        cursor.execute("BEGIN")
        cursor.execute("SELECT count(*) FROM sqlite_master").fetchone()  # the first read takes the snapshot

    def begin_write(self, cursor: Any) -> None:
        cursor.execute("BEGIN IMMEDIATE")

    def for_driver(self, statement: str) -> str:
        return statement

    # -- errors ------------------------------------------------------------------------------------------------------

    def is_table_missing(self, error: Exception) -> bool:
        return str(error).startswith(("no such table", "no such column"))

    def is_access_denied(self, error: Exception) -> bool:
        return False

    def undecodable_column(self, error: Exception) -> str | None:
        matched = _NOT_UTF_8.match(str(error))
        return None if matched is None else matched[1]

    def is_unsupported(self, error: Exception) -> bool:
        return False

    def is_not_granted(self, error: Exception) -> bool:
        return False

    # -- what a server says of itself --------------------------------------------------------------------------------

    version_query: None = None
    read_only_query: None = None
    identity_query: None = None

    def replica_statements(self, version: str) -> Sequence[str]:
        return ()

    # -- the catalog -------------------------------------------------------------------------------------------------

    def columns_query(self, table: str, schema: str | None) -> Query:
        return Query("SELECT name, type FROM pragma_table_info(?)", (table,))

    def tables_query(self, schema: str | None) -> Query:
        return Query("SELECT name FROM sqlite_master WHERE type = 'table'")

    def leading_index_query(self, table: str, column: str, schema: str | None) -> None:
        return None  # times are computed with, which no index serves

    def collation_query(self, table: str, column: str, schema: str | None) -> None:
        return None

    def row_count_query(self, table: str, schema: str | None, *, quoted_table: str) -> Query:
        return Query(f"SELECT count(*) FROM {quoted_table}")  # noqa: S608 - a checked name

    # -- expressions -------------------------------------------------------------------------------------------------

    now_us: str = "(CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER) * 1000)"
    from_nothing: str = ""

    def milli(self, column: str) -> str:
        return f"{column} / 1000"

    def whole_number(self, expression: str) -> str:
        return f"CAST({expression} AS INTEGER)"

    def text(self, column: str) -> str:
        return f"CAST({column} AS TEXT)"

    def key_text(self, column: str, kind: str) -> str:
        return self.text(column)

    def hex_digits(self, column: str) -> str:
        return f"HEX({column})"

    def joined(self, parts: Sequence[str], *, by: str) -> str:
        return f" || '{by}' || ".join(parts)

    def collated(self, expression: str, *, charset: str, collation: str) -> str:
        return expression

    def time_ms(self, column: str, kind: str) -> str | None:
        if not kind.startswith((*TIMES, "text")):
            return None
        # SQLite counts 31 February on into March: no such day is no time.
        day = f"substr({column}, 1, 10)"
        return (
            f"CASE WHEN typeof({column}) != 'text' OR date(julianday({day})) = {day} "
            f"THEN CAST(ROUND((julianday({column}) - 2440587.5) * 86400000.0) AS INTEGER) END"
        )

    def time_unit_ms(self, column: str, kind: str) -> str:
        day, fraction = len("2026-11-01"), f"instr({column}, '.') > 0"
        return f"CASE WHEN length({column}) <= {day} THEN {DAY_MS} WHEN {fraction} THEN 1 ELSE 1000 END"

    def time_bounds(
        self, column: str, kind: str, bounds_ms: Sequence[int], *, latest_ms: int, is_sought: bool
    ) -> TimeBounds:
        computed = f"({self.time_ms(column, kind)})"  # its texts are computed with
        return TimeBounds(computed, f"{computed} IS NULL", bounds_ms)
