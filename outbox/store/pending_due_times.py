"""PendingDueTimes: reads when pending rows of a message table are due, for a timing store. Locks nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select
from sqlalchemy.engine import Dialect

from outbox.store.bounded_counts import count_rows
from outbox.store.databases.supported import database_of
from outbox.store.schema import RowState, along_due_index, message_table
from outbox.store.table_placement import MessageTable


@dataclass(frozen=True, slots=True, order=True)
class DuePosition:
    """A place in the order of due times and ids: where a page ends, and the next one begins."""

    due_at_us: int = 0
    id: str = ""


class PendingDueTimes:
    """The reads of one message table. Stateless, so thread-safe."""

    def __init__(self, *, dialect: Dialect, table: MessageTable) -> None:
        self._dialect = dialect
        self._table = table
        self._message = message_table(table.schema, table.name)
        self._now_us = database_of(dialect).now_us()

    def due_in_us(self, connection: Connection, ids: Sequence[str]) -> dict[str, int]:
        """Returns in how long those of these rows that are pending are due; negative: for how long they have been."""
        message = self._message
        is_pending = message.c.id.in_(sorted(ids)) & (message.c.state == RowState.PENDING)
        return {
            row.id: int(row.due_in_us)
            for row in connection.execute(
                select(message.c.id, (message.c.due_at_us - self._now_us).label("due_in_us")).where(is_pending)
            )
        }

    def count(self, connection: Connection, *, rows_max: int) -> int | None:
        """Returns how many rows are pending; None: more than `rows_max`. Scans that part of the index."""
        message = self._message
        counted = count_rows(message, message.c.state == RowState.PENDING, rows_max=rows_max + 1)
        rows = int(connection.execute(select(counted)).scalar_one())
        return rows if rows <= rows_max else None

    def page(self, connection: Connection, *, after: DuePosition, limit: int) -> list[DuePosition]:
        """Returns pending rows behind a position, in order. A page of the index, whatever is before it."""
        message = self._message
        is_behind = (message.c.due_at_us > after.due_at_us) | (message.c.id > after.id)
        statement = (
            select(message.c.due_at_us, message.c.id)
            .where(message.c.state == RowState.PENDING, message.c.due_at_us >= after.due_at_us, is_behind)
            .order_by(message.c.state, message.c.due_at_us, message.c.id)
            .limit(limit)
        )
        hinted = along_due_index(statement, message, table=self._table.name, dialect=self._dialect)
        return [DuePosition(row.due_at_us, row.id) for row in connection.execute(hinted)]
