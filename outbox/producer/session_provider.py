"""SessionProvider: makes the Sessions of an Outbox's transactional functions, and finds the Session of a publish()."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox.producer import session_hooks
from outbox.store.databases.supported import database_of
from outbox_core.common.errors import ConfigurationError, NoTransaction

AnySession = Session | AsyncSession | scoped_session[Any] | async_scoped_session[Any] | Connection
SessionFactory = Callable[[], Session] | Callable[[], AsyncSession]


class SessionProvider:
    """Makes Sessions with the application's factory, and tracks the current one of each context. Safe in any thread
    and task.
    """

    def __init__(self, engine: Engine, *, async_engine: AsyncEngine | None, factory: SessionFactory | None) -> None:
        self._engine = engine
        self._factory = factory or _default_factory(engine, async_engine)
        self._current: ContextVar[Session | AsyncSession | None] = ContextVar("outbox_current_session", default=None)
        self._sessions_by_connection: WeakKeyDictionary[Connection, Session] = WeakKeyDictionary()

    def new_session(self) -> Session:
        """Returns a new Session of the application's factory."""
        session = self._factory()
        if isinstance(session, AsyncSession):
            raise ConfigurationError("this Outbox is on an async engine: decorate `async def` functions")
        return self._owned(session)

    def new_async_session(self) -> AsyncSession:
        """Returns a new AsyncSession of the application's factory."""
        session = self._factory()
        if not isinstance(session, AsyncSession):
            raise ConfigurationError("an `async def` function needs an Outbox on an async engine (create_async_engine)")
        self._owned(session.sync_session)
        return session

    def current_session(self) -> Session | AsyncSession | None:
        """Returns the session of this context's running transactional function, while its transaction is open."""
        session = self._current.get()
        # A task or generator may have inherited the context of a function that has returned since.
        return session if session is not None and session.in_transaction() else None

    @contextmanager
    def as_current(self, session: Session | AsyncSession) -> Iterator[None]:
        """Make this the session that publish() and nested functions find."""
        token = self._current.set(session)
        try:
            yield
        finally:
            # A framework may resume a generator in another context than it began in: the variable of that one cannot
            # be reset here. The transaction may have committed, so this must not raise.
            with suppress(ValueError):
                self._current.reset(token)

    @contextmanager
    def connection(self, bind: dict[str, Engine | Connection]) -> Iterator[Connection]:
        """Returns a plain Connection in a transaction of a new Session; publish() accepts it for that Session inside
        the block. `bind`: the arguments by which the Session finds the outbox's database.
        """
        with self.new_session() as session, self.as_current(session), session.begin():
            connection = session.connection(bind_arguments=bind if session.bind is None else {})
            self._sessions_by_connection[connection] = session
            try:
                yield connection
            finally:
                self._sessions_by_connection.pop(connection, None)

    def publishing_session(self, passed_session: AnySession | None) -> Session:
        """Returns the Session whose transaction a message belongs to: the given one, or the current one of the context.

        Raises NoTransaction if there is none, or if its transaction is not open; a given Session with autobegin
        begins one.
        """
        session = self._session_of(self._current.get() if passed_session is None else passed_session)
        if passed_session is not None and session is not None and session.autobegin and not session.in_transaction():
            session.begin()
        if session is None or not session.in_transaction():
            raise NoTransaction(
                "publish and cancel belong to a transaction: call them in a function decorated with "
                "@box.transactional or inside `with box.begin():`, or pass session= with an open transaction "
                "(with session.begin(): ...)"
            )
        self._write_first(session)
        return session

    def _session_of(self, passed_session: AnySession | None) -> Session | None:
        session: Session | None
        match passed_session:
            case None:
                session = None
            case AsyncSession():
                session = passed_session.sync_session
            case async_scoped_session():
                session = passed_session().sync_session
            case scoped_session():
                session = passed_session()
            case Connection():
                session = self._sessions_by_connection.get(passed_session)
                if session is None:
                    raise NoTransaction(
                        "this Connection is not the outbox's: open it with `with box.begin() as connection`"
                    )
            case Session():
                session = passed_session
            case _:
                raise NoTransaction(f"session must be a SQLAlchemy session, not {type(passed_session).__name__}")
        return session

    def _owned(self, session: Session) -> Session:
        session_hooks.own(session)
        self._write_first(session)
        return session

    def _write_first(self, session: Session) -> None:
        if database_of(self._engine.dialect).locks_when_begun:
            session_hooks.write_first(session)


def _default_factory(engine: Engine, async_engine: AsyncEngine | None) -> SessionFactory:
    return sessionmaker(engine) if async_engine is None else async_sessionmaker(async_engine)
