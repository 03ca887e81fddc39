"""Idempotent steps of revisions: each checks first whether it is done already. Each revision defines its own tables.

MySQL commits each DDL statement by itself. An upgrade that was interrupted must be able to run again, and MySQL has no
IF NOT EXISTS for columns and indexes. Without a connection, for `outbox db upgrade --sql`, nothing is there yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op


def create_table(name: str, *columns: sa.Column[Any], schema: str | None, **options: Any) -> None:
    """Create a table unless it exists."""
    if is_offline() or not _inspector().has_table(name, schema=schema):
        op.create_table(name, *columns, schema=schema, **options)


def create_index(name: str, table: str, columns: Sequence[str], *, schema: str | None) -> None:
    """Create an index unless it exists."""
    if is_offline() or name not in {index["name"] for index in _inspector().get_indexes(table, schema=schema)}:
        op.create_index(name, table, columns, schema=schema)


def add_column(table: str, column: sa.Column[Any], *, schema: str | None) -> None:
    """Add a column unless it exists."""
    if is_offline() or column.name not in {
        present["name"] for present in _inspector().get_columns(table, schema=schema)
    }:
        op.add_column(table, column, schema=schema)


def drop_table(name: str, *, schema: str | None) -> None:
    """Drop a table if it exists."""
    if is_offline() or _inspector().has_table(name, schema=schema):
        op.drop_table(name, schema=schema)


def is_offline() -> bool:
    """Returns whether the statements are printed, and not run."""
    return op.get_context().as_sql


def _inspector() -> sa.Inspector:
    """Returns a new inspector each time, since inspectors cache what they have read."""
    return sa.inspect(op.get_bind())
