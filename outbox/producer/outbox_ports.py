"""What the hooks of Sessions and transactional functions need of an Outbox."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.producer.unit_of_work import UnitOfWork


class CommitSink(Protocol):
    """Takes the messages of a transaction: written just before its commit, sent after it. Compared by identity."""

    def write(self, connection: Connection, unit: UnitOfWork) -> None:
        """Write a unit's rows, just before its commit. What is raised here makes the commit fail, and roll back."""

    def committed(self, unit: UnitOfWork) -> None:
        """Hand a committed unit to the sender. Never raises."""

    def shares_database(self, connection: Connection) -> bool:
        """Whether a transaction of this connection can hold the outbox's rows."""

    def is_own(self, connection: Connection) -> bool:
        """Whether this connection is one of the outbox's own engine."""

    def bind_arguments(self, session: Session) -> dict[str, Engine | Connection]:
        """Which of a session's databases the outbox is in."""


class SessionScope(Protocol):
    """The Sessions of transactional functions: the one that is running in this context, and fresh ones."""

    def current_session(self) -> Session | AsyncSession | None:
        """The session of the transactional function that is running in this context, while its transaction is open."""

    def as_current(self, session: Session | AsyncSession) -> AbstractContextManager[None]:
        """Make this the session that publish() and nested functions find."""

    def new_session(self) -> Session:
        """A fresh session of the business's factory."""

    def new_async_session(self) -> AsyncSession:
        """A fresh AsyncSession of the business's factory."""
