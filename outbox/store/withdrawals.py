"""Withdrawals: cancels scheduled messages that message tables hold, in the business transaction. Commits nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, Table, delete, insert, literal, select
from sqlalchemy.engine import Dialect

from outbox.store.databases.supported import database_of
from outbox.store.message_table import ARCHIVED_COLUMNS, MessageStore
from outbox.store.row import OutboxRow
from outbox.store.schema import PARKED_BY_HAND, RowState, message_table
from outbox.store.table_placement import MessageTable
from outbox_core.messages.message import CancelStatus

WITHDRAWN: Final = "withdrawn"
"""What the archive says of a scheduled message that was canceled while its table held it."""


class Withdrawals:
    """Withdraws from any of a set of message tables, since a cancel does not say a key. Stateless, so thread-safe."""

    def __init__(
        self, *, store: MessageStore, dialect: Dialect, tables: Sequence[MessageTable], keep_archive: bool
    ) -> None:
        """`store`: of any message table of the namespace, whose archive records what was withdrawn."""
        self._tables = [message_table(table.schema, table.name) for table in tables]
        self._archive = store.tables.archive
        self._keep_archive = keep_archive
        self._database = database_of(dialect)
        self._now_us = self._database.now_us()

    def withdraw(self, connection: Connection, cancel: OutboxRow) -> CancelStatus:
        """Delete a scheduled message that no broker can have, and archive it and the cancel with its result. The cancel
        is sent as soon as it is created: by these equal times, reconciliation knows that no broker was asked.

        `too_late`: it is being sent, or was, or may have been: a send of it failed; or an operator discarded it.
        `unknown`: it is in no table and no archive.
        """
        status = self._withdraw_from_any(connection, cancel.cancels) or self._of_archive(connection, cancel.cancels)
        if status is CancelStatus.UNKNOWN and self._database.reads_snapshots:
            status = self._withdraw_from_any(connection, cancel.cancels, by_locking=True) or status
        if self._keep_archive:
            connection.execute(
                insert(self._archive).values(
                    id=cancel.id, kind=cancel.kind.value, topic=cancel.topic, body_sha256=cancel.body_sha256,
                    created_at_us=self._now_us, attempts=1, sent_at_us=self._now_us, outcome=status,
                )
            )  # fmt: skip
        return status

    def _withdraw_from_any(
        self, connection: Connection, message_id: str, *, by_locking: bool = False
    ) -> CancelStatus | None:
        """Returns None if it is in none of the tables. `by_locking`: look by locking statements alone.

        A transaction at REPEATABLE READ does not see what was committed since its first read, for instance the row that
        it read `FOR UPDATE` to know what to cancel. A locking statement sees it, but locks the gap if it finds nothing,
        in which producers insert: so it comes last, and the transaction ends right after it.
        """
        statuses = (self._withdraw_from(connection, table, message_id, by_locking=by_locking) for table in self._tables)
        return next((status for status in statuses if status is not None), None)

    def _withdraw_from(
        self, connection: Connection, message: Table, message_id: str, *, by_locking: bool
    ) -> CancelStatus | None:
        """Returns None if it is not in this table. A row that is there is locked by its primary key until the
        transaction ends.
        """
        scheduled = (message.c.id == message_id) & message.c.deliver_at_ms.is_not(None) & message.c.order_key.is_(None)
        if not by_locking and connection.scalar(select(message.c.id).where(scheduled).limit(1)) is None:
            return None
        columns = (message.c.state, message.c.token, message.c.attempts, message.c.last_error)
        locked = connection.execute(select(*columns).where(scheduled).limit(1).with_for_update()).one_or_none()
        if locked is None and by_locking:
            return None
        if locked is None or _may_have_been_sent(locked):
            return CancelStatus.TOO_LATE
        if self._keep_archive:
            copied = [message.c[name] for name in ARCHIVED_COLUMNS]
            source = select(*copied, self._now_us, literal(WITHDRAWN)).where(scheduled)
            names = [*ARCHIVED_COLUMNS, "sent_at_us", "outcome"]
            connection.execute(insert(self._archive).from_select(names, source))
        withdrawal = delete(message).where(message.c.id == message_id)
        connection.execute(self._database.by_primary_key(withdrawal, connection.dialect))
        return CancelStatus.CANCELED

    def _of_archive(self, connection: Connection, message_id: str) -> CancelStatus:
        archive = self._archive
        # The newest row: a message that was withdrawn may have been published again under its id, and sent.
        newest = select(archive.c.outcome).where(archive.c.id == message_id).order_by(archive.c.sent_at_us.desc())
        outcome = connection.scalar(newest.limit(1))
        if outcome is None:
            return CancelStatus.UNKNOWN
        return CancelStatus.CANCELED if outcome == WITHDRAWN else CancelStatus.TOO_LATE


def _may_have_been_sent(row: Any) -> bool:
    """Whether a broker may have a row's message: after a claim, unless it was refused for good. An outage leaves an
    error and no attempt, a process that was killed a token or, once an operator has retried the row, an attempt. An
    operator who parks a row keeps these, but for the token.
    """
    error: str | None = row.last_error
    if row.state == RowState.PARKED and error is not None and error.startswith(PARKED_BY_HAND):
        return row.attempts > 0 or error != PARKED_BY_HAND
    was_tried = row.token is not None or row.attempts > 0 or error is not None
    return row.state != RowState.PARKED and was_tried
