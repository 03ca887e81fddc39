"""Operators' statements on one message table: list, show, retry, park, discard. Opens and commits nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, assert_never

from sqlalchemy import ColumnElement, Connection, delete, func, null, select, update
from sqlalchemy.engine import Dialect

from outbox.store.databases.database_port import Write
from outbox.store.databases.supported import database_of
from outbox.store.order_table import OrderStore
from outbox.store.schema import RowState, message_table, plain_message_table_name
from outbox.store.table_placement import table_namespace

PARKED_BY_HAND: Final = "parked by an operator"


class AdminAction(StrEnum):
    """A change to rows."""

    RETRY = "retry"
    PARK = "park"
    DISCARD = "discard"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSelection:
    """Conditions that select rows; None matches any."""

    state: RowState | None = None
    topic: str | None = None
    key: str | None = None
    older_than_us: int | None = None


class MessageAdmin:
    """The operators' statements. They skip rows whose lease has not ended: the lease's owner settles those."""

    def __init__(self, *, dialect: Dialect, schema: str | None = None, table: str | None = None) -> None:
        """`dialect`: of an engine that has connected. `table`: one of the namespace's message tables; by default the
        one that is not split.
        """
        namespace = table_namespace(dialect, schema)
        self.table: str = table or plain_message_table_name(namespace)
        self._message = message_table(namespace.schema, self.table)
        self._dialect = dialect
        self._order = OrderStore(dialect=dialect, schema=schema)
        self._database = database_of(dialect)
        self._now_us = self._database.now_us()
        nobodys = self._message.c.token.is_(None) | (self._message.c.due_at_us <= self._now_us)
        self._free = (self._message.c.state == RowState.PENDING) & nobodys
        self._parked = self._message.c.state.in_([RowState.PARKED, RowState.HELD])

    # -- reading -----------------------------------------------------------------------------------------------------

    def rows(self, connection: Connection, selection: MessageSelection, *, limit: int) -> list[dict[str, Any]]:
        """Returns rows without bodies and headers, the longest due first."""
        message = self._message
        statement = (
            select(*self._plain_columns())
            .where(*self._conditions(selection))
            .order_by(message.c.state, message.c.due_at_us, message.c.id)
            .limit(limit)
        )
        return [dict(row) for row in connection.execute(statement).mappings()]

    def show(self, connection: Connection, message_id: str, *, body_bytes_max: int) -> dict[str, Any] | None:
        """Returns a complete row, with at most `body_bytes_max` of its body; None if it is not in this table."""
        message = self._message
        statement = select(
            *self._plain_columns(),
            message.c.headers,
            message.c.body_sha256,
            message.c.order_key,
            message.c.order_seq,
            func.length(message.c.body).label("body_bytes"),
            func.substr(message.c.body, 1, body_bytes_max).label(message.c.body.name),
        ).where(message.c.id == message_id)
        row = connection.execute(statement).mappings().one_or_none()
        return None if row is None else {**row, "body": bytes(row["body"] or b"")}

    def ids(self, connection: Connection, selection: MessageSelection, *, action: AdminAction, limit: int) -> list[str]:
        """Returns ids of the selected rows to which the action can be applied now, the longest due first."""
        message = self._message
        statement = (
            select(message.c.id)
            .where(*self._conditions(selection), self._allowed(action))
            .order_by(message.c.state, message.c.due_at_us, message.c.id)
            .limit(limit)
        )
        return list(connection.scalars(statement))

    def among(self, connection: Connection, ids: Sequence[str], *, action: AdminAction | None = None) -> list[str]:
        """Returns the ids that are rows of this table; with an action, of rows to which it can be applied now."""
        message = self._message
        allowed = () if action is None else (self._allowed(action),)
        return list(connection.scalars(select(message.c.id).where(message.c.id.in_(sorted(ids)), *allowed)))

    # -- changing ----------------------------------------------------------------------------------------------------

    def change(self, connection: Connection, action: AdminAction, ids: Sequence[str]) -> int:
        """Apply an action to rows by id; returns how many rows were changed."""
        match action:
            case AdminAction.RETRY:
                return self.retry(connection, ids)
            case AdminAction.PARK:
                return self.park(connection, ids)
            case AdminAction.DISCARD:
                return self.discard(connection, ids)
            case _:
                assert_never(action)

    def retry(self, connection: Connection, ids: Sequence[str]) -> int:
        """Make rows due now, also parked ones; returns how many."""
        message = self._message
        statement = (
            update(message)
            .where(message.c.id.in_(sorted(ids)), self._allowed(AdminAction.RETRY))
            .values(state=RowState.PENDING, token=null(), due_at_us=self._now_us)
        )
        return self._write(connection, statement)

    def park(self, connection: Connection, ids: Sequence[str]) -> int:
        """Park pending rows; returns how many."""
        message = self._message
        statement = (
            update(message)
            .where(message.c.id.in_(sorted(ids)), self._allowed(AdminAction.PARK))
            .values(state=RowState.PARKED, token=null(), last_error=PARKED_BY_HAND)
        )
        return self._write(connection, statement)

    def discard(self, connection: Connection, ids: Sequence[str]) -> int:
        """Delete parked rows; returns how many. Rows that may still be sent are not deleted.

        Younger messages of an ordered key need not wait for them any more.
        """
        message = self._message
        has_id = message.c.id.in_(sorted(ids))
        numbers = select(message.c.id, message.c.order_key, message.c.order_seq).where(
            has_id, self._parked, message.c.order_key.is_not(None)
        )
        ordered = connection.execute(numbers).all()
        deleted = self._write(connection, delete(message).where(has_id, self._allowed(AdminAction.DISCARD)))
        if ordered:
            kept_ids = set(self.among(connection, [row.id for row in ordered]))
            forgotten = [(row.order_key, row.order_seq) for row in ordered if row.id not in kept_ids]
            self._order.forget(connection, forgotten)
        return deleted

    def _write(self, connection: Connection, statement: Write) -> int:
        return connection.execute(self._database.by_primary_key(statement, self._dialect)).rowcount

    def _allowed(self, action: AdminAction) -> ColumnElement[bool]:
        match action:
            case AdminAction.RETRY:
                return self._free | self._parked
            case AdminAction.PARK:
                return self._free
            case AdminAction.DISCARD:
                return self._parked
            case _:
                assert_never(action)

    def _conditions(self, selection: MessageSelection) -> list[ColumnElement[bool]]:
        message = self._message
        # Without a selected state both are named, so that the index on state and due time also gives the order.
        conditions: list[ColumnElement[bool]] = [
            message.c.state.in_([selection.state] if selection.state else list(RowState)),
        ]
        if selection.topic is not None:
            conditions.append(message.c.topic == selection.topic)
        if selection.key is not None:
            conditions.append(message.c.message_key == selection.key)
        if selection.older_than_us is not None:
            conditions.append(message.c.created_at_us <= self._now_us - selection.older_than_us)
        return conditions

    def _plain_columns(self) -> list[ColumnElement[Any]]:
        message = self._message
        in_hand = (message.c.state == RowState.PENDING) & message.c.token.is_not(None)
        return [
            message.c.id, message.c.kind, message.c.topic, message.c.message_key.label("key"), message.c.state,
            message.c.attempts, message.c.created_at_us, message.c.deliver_at_ms, message.c.last_error,
            (message.c.due_at_us - self._now_us).label("due_in_us"),
            (in_hand & (message.c.due_at_us > self._now_us)).label("in_hand"),
        ]  # fmt: skip
