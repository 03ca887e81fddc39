"""Operators' access to all message tables of one schema: list, show, select rows, and change them in batches.

Opens its own short transactions; the statements are those of message_admin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection, Engine, select
from sqlalchemy.engine import URL

from outbox.admin.message_admin import AdminAction, MessageAdmin, MessageSelection
from outbox.store.database import background_engine, database_errors, open_engine
from outbox.store.database_identity import refuse_stranger
from outbox.store.schema import message_table_names, outbox_tables
from outbox.store.table_placement import table_namespace, tables_missing

BATCH_ROWS: Final = 200
"""Rows changed in one transaction: few, so that senders do not wait long for their locks."""


class SchemaAdmin:
    """The message tables of one schema."""

    def __init__(self, engine: Engine, *, schema: str | None = None) -> None:
        """`engine` comes from outbox.store.database.background_engine. Raises SchemaMissing if there is no table,
        and ConfigurationError if the schema is another service's.
        """
        self._engine = engine
        with self._reading() as connection:
            self._namespace = table_namespace(engine.dialect, schema)
            names = message_table_names(connection, self._namespace)
            if not names:
                raise tables_missing(connection, schema)
            refuse_stranger(connection, engine.dialect, schema)
        self._admins = {name: MessageAdmin(dialect=engine.dialect, schema=schema, table=name) for name in names}

    def rows(self, selection: MessageSelection, *, limit: int) -> list[dict[str, Any]]:
        """Returns rows of all tables, without bodies and headers, the longest due of each state first."""
        rows: list[dict[str, Any]] = []
        with self._reading() as connection:
            for name, admin in self._admins.items():
                rows += ({**row, "table": name} for row in admin.rows(connection, selection, limit=limit))
        return sorted(rows, key=lambda row: (row["state"], row["due_in_us"], row["id"]))[:limit]

    def show(self, message_id: str, *, body_bytes_max: int) -> dict[str, Any] | None:
        """Returns the complete row of a message; None if no table has it."""
        with self._reading() as connection:
            for name, admin in self._admins.items():
                row = admin.show(connection, message_id, body_bytes_max=body_bytes_max)
                if row is not None:
                    return {**row, "table": name}
        return None

    def sent(self, message_id: str) -> list[dict[str, Any]]:
        """Returns the archive's rows of a message: when it was sent, and the broker's result."""
        archive = outbox_tables(self._namespace).archive
        statement = select(archive).where(archive.c.id == message_id).order_by(archive.c.sent_at_us)
        with self._reading() as connection:
            return [dict(row) for row in connection.execute(statement).mappings()]

    def find(self, selection: MessageSelection, *, action: AdminAction, rows_max: int) -> dict[str, list[str]]:
        """Returns, by table, ids of at most `rows_max` selected rows to which the action can be applied."""
        ids_by_table: dict[str, list[str]] = {}
        rows_left = rows_max
        with self._reading() as connection:
            for name, admin in self._admins.items():
                if rows_left <= 0:
                    break
                ids_by_table[name] = admin.ids(connection, selection, action=action, limit=rows_left)
                rows_left -= len(ids_by_table[name])
        return ids_by_table

    def locate(self, ids: Sequence[str]) -> dict[str, list[str]]:
        """Returns these ids by table; unknown ones are left out."""
        ids_by_table: dict[str, list[str]] = {}
        ids_left = set(ids)
        with self._reading() as connection:
            for name, admin in self._admins.items():
                if not ids_left:
                    break
                for batch in _batches(sorted(ids_left)):
                    ids_by_table.setdefault(name, []).extend(admin.among(connection, batch))
                ids_left -= set(ids_by_table[name])
        return ids_by_table

    def count_allowed(self, action: AdminAction, ids_by_table: Mapping[str, Sequence[str]]) -> int:
        """Returns to how many of these rows, by table, the action can be applied now."""
        with self._reading() as connection:
            return sum(
                len(self._admins[name].among(connection, batch, action=action))
                for name, ids in ids_by_table.items()
                for batch in _batches(ids)
            )

    def change(
        self, action: AdminAction, ids_by_table: Mapping[str, Sequence[str]], *, after_batch: Callable[[int], None]
    ) -> Iterator[int]:
        """Apply the action by primary key, in a short transaction for each batch; yields how many rows each changed.

        `after_batch` is called with the number of rows of each batch. An iteration can be stopped between two batches.
        """
        for name, ids in ids_by_table.items():
            for batch in _batches(ids):
                with database_errors(self._engine.url), self._engine.begin() as connection:
                    changed = self._admins[name].change(connection, action, batch)
                after_batch(len(batch))
                yield changed

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with database_errors(self._engine.url), self._engine.connect() as connection:
            yield connection


@contextmanager
def open_schema_admin(url: URL, *, schema: str | None) -> Iterator[SchemaAdmin]:
    """Yields access to the schema at a URL. Raises SchemaMissing, DatabaseUnavailable or ConfigurationError."""
    engine = open_engine(url)
    background = background_engine(engine)
    try:
        yield SchemaAdmin(background, schema=schema)
    finally:
        background.dispose()
        engine.dispose()


def _batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), BATCH_ROWS):
        yield ids[start : start + BATCH_ROWS]
