"""PendingRowReader: reads the pending rows of one schema's message tables, with which a timing store is compared."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Engine

from outbox.store.database import database_errors
from outbox.store.database_identity import StrangerCheck
from outbox.store.pending_due_times import DuePosition, PendingDueTimes
from outbox.store.schema import message_table_names
from outbox.store.table_placement import MessageTable, table_namespace, tables_missing
from outbox_core.common.table_namespace import TableNamespace


class PendingRowReader:
    """The message tables of one schema. Thread-safe. All methods raise DatabaseUnavailable and SchemaMissing."""

    def __init__(self, name: str, *, schema: str | None, reads: Engine) -> None:
        """`name`: of the source, for logs. `schema`: as the user names it. `reads`: by autocommit_engine."""
        self.name = name
        self._schema = schema
        self._reads = reads
        self._strangers = StrangerCheck(reads.dialect, [schema])

    @property
    def namespace(self) -> TableNamespace:
        """Where the tables are; the engine has connected."""
        return table_namespace(self._reads.dialect, self._schema)

    def tables(self) -> Sequence[str]:
        """The names of the message tables, at least one."""
        with database_errors(self._reads.url), self._reads.connect() as connection:
            names = message_table_names(connection, self.namespace)
            if not names:
                raise tables_missing(connection, self._schema)
            self._strangers.run(connection)
        return names

    def count(self, *, rows_max: int) -> int | None:
        """How many rows of all tables are pending; None: more than `rows_max`."""
        rows = 0
        for table in self.tables():
            with database_errors(self._reads.url), self._reads.connect() as connection:
                table_rows = self._rows(table).count(connection, rows_max=rows_max - rows)
            if table_rows is None:
                return None
            rows += table_rows
        return rows

    def pending_page(self, table: str, *, after: DuePosition, limit: int) -> list[DuePosition]:
        """Pending rows of a table behind a position, the first due first."""
        with database_errors(self._reads.url), self._reads.connect() as connection:
            return self._rows(table).page(connection, after=after, limit=limit)

    def pending(self, table: str, ids: Sequence[str]) -> set[str]:
        """Those of these rows of a table that are pending."""
        with database_errors(self._reads.url), self._reads.connect() as connection:
            return set(self._rows(table).due_in_us(connection, ids))

    def _rows(self, table: str) -> PendingDueTimes:
        return PendingDueTimes(dialect=self._reads.dialect, table=MessageTable(self.namespace.schema, table))
