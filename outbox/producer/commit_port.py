"""CommitPort: the port through which the hooks of Sessions use an Outbox."""

from __future__ import annotations

from typing import Protocol

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from outbox.producer.unit_of_work import UnitOfWork


class CommitPort(Protocol):
    """Writes a transaction's messages just before its commit, and sends them after it. Compared by identity."""

    @property
    def place(self) -> str:
        """Returns the name of the place of the outbox's tables: outboxes are written in its order."""

    def write(self, connection: Connection, unit: UnitOfWork) -> None:
        """Write a unit's rows, just before its commit. An error makes the commit fail and roll back."""

    def committed(self, unit: UnitOfWork) -> None:
        """Pass a committed unit to the sender. Never raises."""

    def shares_database(self, connection: Connection) -> bool:
        """Returns whether a transaction of this connection can contain the outbox's rows."""

    def is_own(self, connection: Connection) -> bool:
        """Returns whether this connection belongs to the outbox's own engine."""

    def connect(self, session: Session) -> Connection:
        """Returns a connection of a session that has none to the outbox's database. One that leads elsewhere is refused
        by write().
        """
