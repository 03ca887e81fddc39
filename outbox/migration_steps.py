"""Steps of revisions that ask first whether they are done already. Not the tables themselves: each revision spells out
its own.

MySQL commits each DDL statement by itself. An upgrade that was cut in the middle must be able to run again, and MySQL
has no IF NOT EXISTS for columns and indexes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op


def create_table(name: str, *columns: sa.Column[Any], schema: str | None, **options: Any) -> None:
    """Make a table, unless it is there."""
    if not _inspector().has_table(name, schema=schema):
        op.create_table(name, *columns, schema=schema, **options)


def create_index(name: str, table: str, columns: Sequence[str], *, schema: str | None) -> None:
    """Make an index, unless it is there."""
    if name not in {index["name"] for index in _inspector().get_indexes(table, schema=schema)}:
        op.create_index(name, table, columns, schema=schema)


def add_column(table: str, column: sa.Column[Any], *, schema: str | None) -> None:
    """Add a column, unless it is there."""
    if column.name not in _columns(table, schema=schema):
        op.add_column(table, column, schema=schema)


def drop_table(name: str, *, schema: str | None) -> None:
    """Drop a table, unless it is gone."""
    if _inspector().has_table(name, schema=schema):
        op.drop_table(name, schema=schema)


def drop_column(table: str, name: str, *, schema: str | None) -> None:
    """Drop a column, unless it or its table is gone."""
    if _inspector().has_table(table, schema=schema) and name in _columns(table, schema=schema):
        op.drop_column(table, name, schema=schema)


def _columns(table: str, *, schema: str | None) -> set[str]:
    return {column["name"] for column in _inspector().get_columns(table, schema=schema)}


def _inspector() -> sa.Inspector:
    """A new one each time: it remembers what it has seen."""
    return sa.inspect(op.get_bind())
