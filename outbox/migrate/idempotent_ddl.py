"""Idempotent steps of revisions: each checks first whether it is done already. Each revision defines its own tables.

MySQL commits each DDL statement by itself. An upgrade that was interrupted must be able to run again, and MySQL has no
IF NOT EXISTS for columns and indexes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

from outbox.store.databases.sql_text import name_in_sql, text_of


def create_table(name: str, *columns: sa.Column[Any], schema: str | None, **options: Any) -> None:
    """Create a table unless it exists."""
    if not _inspector().has_table(name, schema=schema):
        op.create_table(name, *columns, schema=schema, **options)


def create_index(name: str, table: str, columns: Sequence[str], *, schema: str | None) -> None:
    """Create an index unless it exists."""
    if name not in {index["name"] for index in _inspector().get_indexes(table, schema=schema)}:
        op.create_index(name, table, columns, schema=schema)


def add_column(table: str, column: sa.Column[Any], *, schema: str | None) -> None:
    """Add a column unless it exists."""
    if column.name not in _columns(table, schema=schema):
        op.add_column(table, column, schema=schema)


def replace_primary_key(table: str, columns: Sequence[str], *, schema: str | None) -> None:
    """Replace a table's primary key by one of existing columns, unless it has that one already.

    MySQL and MariaDB rebuild the table online; SQLite, which cannot change a key, copies it.
    """
    inspector = _inspector()
    if inspector.get_pk_constraint(table, schema=schema)["constrained_columns"] == list(columns):
        return
    if op.get_bind().dialect.name == "sqlite":
        _copy_with_primary_key(table, columns)
        return
    dialect = op.get_bind().dialect
    name, key = name_in_sql(dialect, schema, table), ", ".join(name_in_sql(dialect, column) for column in columns)
    op.execute(text_of(f"ALTER TABLE {name} DROP PRIMARY KEY, ADD PRIMARY KEY ({key}), ALGORITHM=INPLACE, LOCK=NONE"))


def _copy_with_primary_key(table: str, columns: Sequence[str]) -> None:
    """Replaces a table on SQLite by a copy with another primary key and the same indexes.

    Copying, dropping and renaming are in one transaction, which the caller may have opened.
    """
    inspector, copy = _inspector(), f"{table}_copy"
    indexes = inspector.get_indexes(table)
    copied_columns = [
        sa.Column(column["name"], column["type"], nullable=column["nullable"], primary_key=column["name"] in columns)
        for column in sorted(inspector.get_columns(table), key=lambda column: _position_in_key(column["name"], columns))
    ]
    names = [column.name for column in copied_columns]
    drop_table(copy, schema=None)  # left by an interrupted upgrade
    copied_table = op.create_table(copy, *copied_columns)
    op.execute(copied_table.insert().from_select(names, sa.select(*map(sa.column, names)).select_from(sa.table(table))))
    op.drop_table(table)
    op.rename_table(copy, table)
    for index in indexes:
        op.create_index(index["name"], table, [str(name) for name in index["column_names"]])


def _position_in_key(name: str, columns: Sequence[str]) -> int:
    return columns.index(name) if name in columns else len(columns)


def drop_table(name: str, *, schema: str | None) -> None:
    """Drop a table if it exists."""
    if _inspector().has_table(name, schema=schema):
        op.drop_table(name, schema=schema)


def drop_column(table: str, name: str, *, schema: str | None) -> None:
    """Drop a column if it and its table exist."""
    if _inspector().has_table(table, schema=schema) and name in _columns(table, schema=schema):
        op.drop_column(table, name, schema=schema)


def _columns(table: str, *, schema: str | None) -> set[str]:
    return {column["name"] for column in _inspector().get_columns(table, schema=schema)}


def _inspector() -> sa.Inspector:
    """Returns a new inspector each time, since inspectors cache what they have read."""
    return sa.inspect(op.get_bind())
