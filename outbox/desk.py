"""What an operator may do with rows of the message table: list, retry, park, discard. It opens and commits nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, delete, null, select, update
from sqlalchemy.engine import Dialect

from outbox.database import now_us
from outbox.schema import RowState, outbox_tables, schema_for

PARKED_BY_HAND = "parked by an operator"


class MessageDesk:
    """The operator's statements. A row that somebody is just sending is left alone: their settlement decides."""

    def __init__(self, *, dialect: Dialect, schema: str | None = None) -> None:
        self._message = outbox_tables(schema_for(dialect, schema)).message
        self._now_us = now_us(dialect)
        nobodys = self._message.c.token.is_(None) | (self._message.c.due_at_us <= self._now_us)
        self._free = (self._message.c.state == RowState.PENDING) & nobodys

    def list(self, connection: Connection, *, state: RowState | None, limit: int) -> list[dict[str, Any]]:
        """Rows without bodies and headers, the longest due first."""
        message = self._message
        statement = (
            select(
                message.c.id, message.c.kind, message.c.topic, message.c.message_key.label("key"), message.c.state,
                message.c.attempts, message.c.created_at_us, message.c.deliver_at_ms, message.c.last_error,
                (message.c.due_at_us - self._now_us).label("due_in_us"),
            )
            .where(message.c.state.in_([state] if state else list(RowState)))
            .order_by(message.c.state, message.c.due_at_us, message.c.id)
            .limit(limit)
        )  # fmt: skip
        return [dict(row) for row in connection.execute(statement).mappings()]

    def retry(self, connection: Connection, ids: Sequence[str]) -> int:
        """Make rows due now, parked ones too; returns how many."""
        message = self._message
        statement = (
            update(message)
            .where(message.c.id.in_(sorted(ids)), self._free | (message.c.state == RowState.PARKED))
            .values(state=RowState.PENDING, token=null(), due_at_us=self._now_us)
        )
        return connection.execute(statement).rowcount

    def park(self, connection: Connection, ids: Sequence[str]) -> int:
        """Set pending rows aside; returns how many."""
        message = self._message
        statement = (
            update(message)
            .where(message.c.id.in_(sorted(ids)), self._free)
            .values(state=RowState.PARKED, token=null(), last_error=PARKED_BY_HAND)
        )
        return connection.execute(statement).rowcount

    def discard(self, connection: Connection, ids: Sequence[str]) -> int:
        """Delete parked rows; returns how many. Nothing that might still be sent is deleted."""
        message = self._message
        statement = delete(message).where(message.c.id.in_(sorted(ids)), message.c.state == RowState.PARKED)
        return connection.execute(statement).rowcount
