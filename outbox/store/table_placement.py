"""Selects the message table of a row: the only one, or one of up to 1,024 by the CRC32 of the key. Pure; no SQL."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.engine import Dialect

from outbox.store.schema import TABLES_MAX, plain_message_table_name, schema_for, split_message_table_name
from outbox_core.common.errors import ConfigurationError


@dataclass(frozen=True, slots=True, order=True)
class MessageTable:
    """A message table: its schema (None on SQLite) and its name."""

    schema: str | None
    name: str


class Placement:
    """Maps rows to tables. All rows of one key are in one table, so that their order can be kept."""

    def __init__(self, *, schemas: Sequence[str | None], tables: int = 1) -> None:
        """`tables` is the number over all schemas, each of which gets an equal range of consecutive numbers.

        Raises ConfigurationError if the tables cannot be distributed evenly.
        """
        if not schemas or len(set(schemas)) != len(schemas):
            raise ConfigurationError("schemas must be named once each, at least one")
        if not 1 <= tables <= TABLES_MAX or tables % len(schemas):
            raise ConfigurationError(
                f"tables must be 1 to {TABLES_MAX} and a multiple of the number of schemas ({len(schemas)}), "
                f"not {tables}"
            )
        if tables > 1 and None in schemas:
            raise ConfigurationError("SQLite has one message table: leave `tables` at 1")
        self.tables: list[MessageTable] = _tables(schemas, tables)

    def place(self, key: str) -> MessageTable:
        """Returns the table for a message key (for a message without one: its id)."""
        if len(self.tables) == 1:
            return self.tables[0]
        return self.tables[zlib.crc32(key.encode()) % len(self.tables)]

    def names_in(self, schema: str | None) -> list[str]:
        """Returns the names of the message tables in one schema."""
        return [table.name for table in self.tables if table.schema == schema]


def placement_for(dialect: Dialect, schema: str | Sequence[str] | None, tables: int) -> Placement:
    """Returns the placement for schemas (one, several, or None for the default) and a number of tables."""
    names = [schema] if schema is None or isinstance(schema, str) else schema
    return Placement(schemas=[schema_for(dialect, name) for name in names], tables=tables)


def _tables(schemas: Sequence[str | None], tables: int) -> list[MessageTable]:
    if tables == 1:
        return [MessageTable(schemas[0], plain_message_table_name(schemas[0]))]
    each = tables // len(schemas)
    return [MessageTable(schemas[number // each], split_message_table_name(number)) for number in range(tables)]
