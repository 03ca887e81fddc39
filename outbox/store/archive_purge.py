"""The archive's retention: deletes old rows in small batches by primary key. MessageStore writes the archive."""

from __future__ import annotations

from functools import cached_property

from sqlalchemy import Connection, Table, and_, delete, or_, select
from sqlalchemy.engine import Dialect

from outbox.store.databases.supported import database_of
from outbox.store.schema import outbox_tables
from outbox.store.table_placement import table_namespace


class ArchiveStore:
    """The archive's SQL. It opens no connection and commits nothing."""

    def __init__(self, *, dialect: Dialect, schema: str | None = None) -> None:
        self._schema = schema
        self._dialect = dialect
        self._database = database_of(dialect)
        self._now_us = self._database.now_us()

    @cached_property
    def _archive(self) -> Table:
        return outbox_tables(table_namespace(self._dialect, self._schema)).archive

    def purge(self, connection: Connection, *, older_than_us: int, limit: int) -> int:
        """Delete at most `limit` rows that were sent more than `older_than_us` ago; returns how many.

        It reads first, then deletes by primary key: a range DELETE would lock gaps that the relay's INSERT needs.
        """
        archive = self._archive
        key = (archive.c.sent_at_us, archive.c.id)
        select_old = select(*key).where(archive.c.sent_at_us < self._now_us - older_than_us).order_by(*key).limit(limit)
        keys = [tuple(row) for row in connection.execute(select_old)]
        if not keys:
            return 0
        pairs = [and_(archive.c.sent_at_us == sent_at_us, archive.c.id == row_id) for sent_at_us, row_id in keys]
        return connection.execute(
            self._database.by_primary_key(delete(archive).where(or_(*pairs)), self._dialect)
        ).rowcount
