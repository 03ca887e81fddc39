"""CommitHandler: writes an Outbox's rows just before a transaction's commit, and sends them after it."""

from __future__ import annotations

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from outbox.producer.sender import Sender
from outbox.producer.unit_of_work import UnitOfWork
from outbox.producer.unit_writer import UnitWriter
from outbox.store.schema import RowState
from outbox.telemetry import Telemetry


class CommitHandler:
    """What the hooks of Sessions know of one Outbox. Thread-safe; compared by identity."""

    def __init__(self, *, engine: Engine, writer: UnitWriter, sender: Sender, telemetry: Telemetry) -> None:
        self._engine = engine
        self._writer = writer
        self._sender = sender
        self._telemetry = telemetry

    @property
    def schema_name(self) -> str:
        """Returns the name of the place of the outbox's tables: outboxes are written in its order."""
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
