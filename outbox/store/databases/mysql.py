"""What MySQL and MariaDB do differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, cast

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Delete,
    FromClause,
    Insert,
    Select,
    Table,
    func,
    insert,
    literal_column,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeEngine

from outbox.store.databases.port import Database, Write
from outbox.store.databases.sql_text import name_in_sql, text_of

_UTF8: Final = {"charset": "utf8mb4", "collation": "utf8mb4_bin"}


class MySql(Database):
    """MySQL and MariaDB: one protocol, one storage engine."""

    names = frozenset({"mysql", "mariadb"})
    paramstyle: Literal["format"] = "format"
    tables_a_statement_max = 2_048
    reads_snapshots = True

    # -- types -------------------------------------------------------------------------------------------------------

    table_options: Mapping[str, Any] = {
        f"{name}_{option}": value
        for name in ("mysql", "mariadb")
        for option, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
    }

    def ascii_type(self, length: int) -> TypeEngine[Any]:
        return mysql.VARCHAR(length, charset="ascii", collation="ascii_bin")

    def unicode_type(self, length: int) -> TypeEngine[Any]:
        return mysql.VARCHAR(length, **_UTF8)

    def long_text_type(self) -> TypeEngine[Any]:
        return mysql.MEDIUMTEXT(**_UTF8)

    def body_type(self) -> TypeEngine[Any]:
        return mysql.LONGBLOB()

    # -- expressions -------------------------------------------------------------------------------------------------

    def now_us(self) -> ColumnElement[int]:
        # Unlike NOW() and UNIX_TIMESTAMP(NOW(6)), independent of the session's time zone and of daylight saving.
        return literal_column("TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))", BigInteger())

    def least(self, first: Any, second: Any) -> ColumnElement[Any]:
        return func.least(first, second)

    def greatest(self, first: Any, second: Any) -> ColumnElement[Any]:
        return func.greatest(first, second)

    # -- statements --------------------------------------------------------------------------------------------------

    def by_primary_key(self, statement: Write, dialect: Dialect) -> Write:
        # Without the hint they read the whole table if the keys are a large part of it (MariaDB also for a list of one
        # pair), and a DELETE then waits for rows that other transactions have not committed yet, and two settlements
        # can deadlock.
        hinted = statement.with_hint("FORCE INDEX (PRIMARY)", dialect_name=dialect.name)
        if isinstance(hinted, Delete):
            # A hint is allowed only in the multi-table form: DELETE table FROM table FORCE INDEX ...
            table = cast("Table", hinted.table)
            return hinted.prefix_with(text_of(name_in_sql(dialect, table.schema, table.name)))
        return hinted

    def along_index(self, statement: Select[Any], table: FromClause, index: str, dialect: Dialect) -> Select[Any]:
        return statement.with_hint(table, f"FORCE INDEX ({index})", dialect.name)

    def insert_missing(self, table: Table) -> Insert:
        return insert(table).prefix_with("IGNORE")

    def insert_or_advance(
        self, table: Table, values: Mapping[str, Any], *, key: str, advanced: str, by: ColumnElement[Any]
    ) -> Insert:
        statement = mysql.insert(table).values(values)
        column = table.c[advanced]
        return statement.on_duplicate_key_update({advanced: func.greatest(column + by, statement.inserted[advanced])})

    def union_part(self, statement: Select[Any], name: str) -> Any:
        return statement.self_group()  # a sub-query of FROM would be materialized

    # -- the INSERT of messages --------------------------------------------------------------------------------------

    # Hexadecimal digits. Drivers differ in how they escape bytes: asyncmy writes backslashes, which have no effect
    # under NO_BACKSLASH_ESCAPES, so that a quote in a key would be SQL.

    def sent_text(self, text: str) -> str:
        return text.encode().hex()

    def stored_text(self, parameter: ColumnElement[Any]) -> ColumnElement[Any]:
        return func.convert(_unhex(parameter).op("USING")(literal_column("utf8mb4")))

    def sent_body(self, body: bytes) -> bytes | str:
        return body.hex()

    def stored_body(self, parameter: ColumnElement[Any]) -> ColumnElement[Any]:
        # An empty body's digits are NULL under EMPTY_STRING_IS_NULL (MariaDB).
        return func.coalesce(_unhex(parameter), literal_column("x''"))


def _unhex(digits: ColumnElement[Any]) -> ColumnElement[Any]:
    # UNHEX reads bytes: under a collation_connection of utf16 or utf32 each digit has a zero before it: all are NULL.
    return func.unhex(func.convert(digits.op("USING")(literal_column("ascii"))))
