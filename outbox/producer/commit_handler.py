"""CommitHandler: what happens to an Outbox's rows at a transaction's commit: written just before it, sent after it.

UnitWriter, below, writes a transaction's messages to their tables; it begins and commits nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from operator import itemgetter
from typing import Final

import msgspec
from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox.producer.engine_hooks import refuse_autocommit, without_frames
from outbox.producer.sender import Sender
from outbox.producer.unit_of_work import UnitOfWork
from outbox.store.database import is_duplicate, is_mendable, is_schema_missing, translate
from outbox.store.database_identity import DatabaseIdentity, StrangerCheck
from outbox.store.databases.supported import database_of
from outbox.store.message_table import MessageStore
from outbox.store.row import OutboxRow
from outbox.store.schema import RowKind, RowState
from outbox.store.server_limits import ServerLimits
from outbox.store.table_placement import MessageTable, Placement, connect_once, is_left_beside, tables_missing
from outbox.store.withdrawals import Withdrawals
from outbox.telemetry import Telemetry
from outbox_core.common.errors import ConfigurationError, DuplicateMessageId
from outbox_core.messages.message import CancelStatus
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


class CommitHandler:
    """What the hooks of Sessions know of one Outbox. Thread-safe; compared by identity."""

    def __init__(self, *, engine: Engine, writer: UnitWriter, sender: Sender, telemetry: Telemetry) -> None:
        self._engine = engine
        self._writer = writer
        self._sender = sender
        self._telemetry = telemetry

    @property
    def schema_name(self) -> str:
        """Returns the name of the namespace of the outbox's tables: outboxes are written in its order."""
        return self._writer.schema_name

    def write(self, connection: Connection, unit: UnitOfWork) -> None:
        """Write a unit's rows, just before its commit. An error makes the commit fail and roll back."""
        state = RowState.PENDING if self._sender.may_send else RowState.HELD
        self._writer.write(connection, unit, token=self._sender.token, state=state)

    def committed(self, unit: UnitOfWork) -> None:
        """Pass a committed unit to the sender. Never raises: the commit has succeeded, whether or not the send does."""
        self._telemetry.committed(unit.written_rows)
        self._sender.offer(unit.written_rows, written_at_ms=unit.written_at_ms)

    def shares_database(self, connection: Connection) -> bool:
        """Returns whether a transaction of this connection can contain the outbox's rows."""
        return self._writer.shares_database(connection)

    def is_own(self, connection: Connection) -> bool:
        """Returns whether this connection belongs to the outbox's own engine, with whatever options."""
        return connection.engine.pool is self._engine.pool

    def connect(self, session: Session) -> Connection:
        """Returns a connection of the session to the outbox's database, by the session's own routing if that leads
        there; write() refuses one that leads elsewhere. A Session that routes what it only reads to a follower has no
        statement that would lead to the primary.
        """
        if session.bind is not None:
            routed = session.connection()
            if not self._writer.is_follower(routed):
                return routed
        return session.connection(bind_arguments={"bind": self._engine})


# -- writing -----------------------------------------------------------------------------------------------------------

_IDS_SHOWN_MAX: Final = 3


class UnitWriter:
    """Writes to one database. An error makes the business transaction's commit fail and roll back. Thread-safe."""

    def __init__(
        self,
        *,
        engine: Engine,
        store: MessageStore,
        lease_ms: int,
        placement: Placement | None = None,
        keep_archive: bool = True,
    ) -> None:
        """`engine` is the application's. Rows belong to the sender's token until `lease_ms` after they were written.
        `placement`: of the rows' tables; by default all are in the store's.
        """
        self._placement = placement
        self._keep_archive = keep_archive
        self._engine = engine
        self._store = store
        self._lease_us = lease_ms * 1000
        self._identity = DatabaseIdentity(engine, schema=store.schema)
        schemas = (store.schema,) if placement is None else placement.schemas
        self._strangers = StrangerCheck(engine.dialect, schemas)
        self._bounds = ServerLimits(engine)

    @property
    def schema_name(self) -> str:
        """Returns the schema that the user named first, or an empty name for the business's own database."""
        return self._store.schema or ""

    def refuse_early(self, row: OutboxRow) -> None:
        """Raise InvalidMessage for a row that exceeds the server's limits, as far as these are known. No I/O."""
        self._bounds.refuse_early(row)

    def shares_database(self, connection: Connection) -> bool:
        """Returns whether a transaction of this connection can contain the outbox's rows."""
        return self._identity.is_of(connection) and not self._identity.is_follower(connection)

    def is_follower(self, connection: Connection) -> bool:
        """Returns whether this connection only reads a copy of the outbox's database."""
        return self._identity.is_follower(connection)

    def write(
        self, connection: Connection, unit: UnitOfWork, *, token: str, state: RowState = RowState.PENDING
    ) -> None:
        """Write a unit's rows on the connection whose transaction is about to commit. An error dooms it: a part of the
        rows may be in the tables.
        """
        connect_once(self._engine)  # the transaction may be another engine's
        self._refuse_foreign(connection)
        unit.start_lease()
        try:
            self._write(connection, unit, token=token, state=state)
        except BaseException as error:
            unit.failed = without_frames(error)
            raise

    def _write(self, connection: Connection, unit: UnitOfWork, *, token: str, state: RowState) -> None:
        try:
            to_insert = self._placed(unit.rows)
            packet_bytes = self._bounds.check(connection, to_insert, table=self._store.table)
            withdrawals = [row for row in to_insert if row.is_timed and row.kind is RowKind.CANCEL]
            if withdrawals:
                to_insert = [row for row in to_insert if row not in withdrawals]
            rows = self._dated(connection, to_insert)
            written = self._insert(connection, rows, token=token, packet_bytes=packet_bytes, state=state)
            # After the INSERT: a cancel must find a message of its own transaction.
            withdrawn = [row for row in withdrawals if self._withdraw(connection, row)]
            # Behind the first INSERT: before it, its SELECT would take a snapshot in which other commits are missing.
            self._strangers.run(connection)
        except DBAPIError as error:
            error.hide_parameters = True  # the caller may log it, and they are bodies
            if is_duplicate(error):
                raise DuplicateMessageId(_duplicate_id(unit.rows)) from error
            if is_schema_missing(error) and is_left_beside(connection, self._store.schema):
                raise tables_missing(connection, self._store.schema) from error
            if is_mendable(error):
                raise translate(error, self._engine.url) from error
            raise
        unit.mark_written(written, withdrawals=withdrawn)

    @cached_property
    def _withdrawals(self) -> Withdrawals:
        """Made at the first use: it knows each of up to a thousand tables."""
        tables = (self._store.table,) if self._placement is None else self._placement.tables
        return Withdrawals(
            store=self._store, dialect=self._engine.dialect, tables=tables, keep_archive=self._keep_archive
        )

    def _placed(self, rows: Sequence[OutboxRow]) -> Sequence[OutboxRow]:
        """Returns the rows with the tables that their numbers mean on this database."""
        if self._placement is None or not self._placement.is_split:
            return rows
        tables = self._placement.tables
        return [msgspec.structs.replace(row, table=tables[row.table_number]) for row in rows]

    def _withdraw(self, connection: Connection, cancel: OutboxRow) -> bool:
        """Withdraw a scheduled message from the table that holds it; returns whether it is canceled. Errors make the
        commit fail.
        """
        status = self._withdrawals.withdraw(connection, cancel)
        if status is not CancelStatus.CANCELED:
            logger.warning("cancel_without_effect", extra={"message_id": cancel.cancels, "status": str(status)})
        return status is CancelStatus.CANCELED

    def _dated(self, connection: Connection, rows: Sequence[OutboxRow]) -> Sequence[OutboxRow]:
        """Returns the rows, with the due times of delays by the database's clock, so that table and sender agree."""
        if all(row.delay_ms is None for row in rows):
            return rows
        now_ms = -(-int(connection.scalar(select(database_of(connection.dialect).now_us())) or 0) // 1000)
        return [
            row if row.delay_ms is None else msgspec.structs.replace(row, deliver_at_ms=max(0, now_ms + row.delay_ms))
            for row in rows
        ]

    def _insert(
        self,
        connection: Connection,
        rows: Sequence[OutboxRow],
        *,
        token: str,
        packet_bytes: int | None,
        state: RowState,
    ) -> Sequence[OutboxRow]:
        """Insert the rows of each table, in the tables' order, so that transactions with the same ordered keys lock
        them in the same order.
        """
        by_table: dict[MessageTable, list[OutboxRow]] = {}
        for row in rows:
            by_table.setdefault(row.table or self._store.table, []).append(row)
        written: list[OutboxRow] = []
        for table, table_rows in sorted(by_table.items(), key=itemgetter(0)) if len(by_table) > 1 else by_table.items():
            written += self._store.at(table).insert(
                connection, table_rows, token=token, lease_us=self._lease_us, packet_bytes=packet_bytes, state=state
            )
        return written

    def _refuse_foreign(self, connection: Connection) -> None:
        if not self._identity.is_of(connection):
            raise ConfigurationError(
                "this session is on another database than the outbox: business tables and message table must share "
                "one server, or no transaction can hold both"
            )
        refuse_autocommit(connection, "there is no transaction to publish in")


def _duplicate_id(rows: Sequence[OutboxRow]) -> str:
    """Returns what is wrong: the database says only that an id would be in the table twice."""
    counts = Counter(row.id for row in rows)
    repeated = [row_id for row_id, count in counts.items() if count > 1]
    if repeated:
        return f"message id {repeated[0]} is published twice in this transaction; give each message an id of its own"
    if len(counts) == 1:
        return f"message id {rows[0].id} was published before, and that message is not sent yet"
    shown = ", ".join(list(counts)[:_IDS_SHOWN_MAX]) + (", ..." if len(counts) > _IDS_SHOWN_MAX else "")
    return f"one of {len(counts):,} message ids was published before, and that message is not sent yet ({shown})"
