"""Hooks on Engines and dialects: track what happens to a transaction below its Session.

The server may roll it back; a statement may end it or roll back to a savepoint; its Connection may commit it.
session_hooks and consumers query this state and decide what follows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Any, Final, Protocol, assert_never
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import Dialect, ExceptionContext, ExecutionContext
from sqlalchemy.engine.base import RootTransaction
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import PoolProxiedConnection

from outbox.producer.statement_effect import READS, WRITES, Effect, StatementEffect, first_words, statement_effect
from outbox.producer.unit_of_work import next_moment
from outbox.store.database import DEADLOCK, LOCK_WAIT_TIMEOUT, MYSQL_DIALECTS, RECORD_CHANGED, error_code
from outbox_core.common.errors import NoTransaction, TransactionDoomed

_ENDS_TRANSACTION: Final = frozenset(
    {
        DEADLOCK,
        RECORD_CHANGED,
        1206,  # the lock table is full
        1053,  # the server is shutting down
        1153,  # larger than max_allowed_packet: the server closes the connection
        3169,  # the session was killed
    }
)
_doomed: WeakKeyDictionary[RootTransaction, DBAPIError] = WeakKeyDictionary()
"""By transaction, why the server ended it. No value may refer to its key, which would then be kept for ever."""
_watched: WeakSet[Dialect] = WeakSet()
_listening = threading.Lock()
_BEFORE_ALL: Final = -1
"""The start of a savepoint that is older than our tracking: before anything was published in the transaction."""
_TRANSACTION_KEY: Final = "outbox.driver_transaction"
"""The key of the DriverTransaction in a driver connection's info, from its first use until COMMIT or ROLLBACK."""


def listen_to_engines() -> None:
    """Track, on every Engine of this process, when the server rolls back a transaction.

    The business code may swallow the error. Every Engine is tracked, since a Session may bring one of its own.
    """
    with _listening:
        if not event.contains(Engine, "handle_error", _handle_error):
            event.listen(Engine, "handle_error", _handle_error)


def watch_dialect(dialect: Dialect) -> None:
    """Track, on every Connection that uses this dialect object, what statements do to its transaction, and when it is
    committed or rolled back.

    The dialect's own `do_execute` event costs a statement half a microsecond. SQLAlchemy's events of Connections are
    not used: they would make every statement of the Engine run through the event machinery (`Engine._has_events`),
    7.5 us each, and its `commit` event comes before the COMMIT, so the methods that commit and roll back are wrapped.
    """
    if dialect in _watched:
        return
    with _listening:
        if dialect not in _watched:
            event.listen(dialect, "do_execute", _execute)
            event.listen(dialect, "do_executemany", _execute)  # a flush of several objects of one class
            event.listen(dialect, "do_execute_no_params", _execute_without_parameters)
            _wrap_commit(dialect)
            _wrap_two_phase_commit(dialect)
            _watched.add(dialect)


class Participant(Protocol):
    """A publisher in a transaction that is to be committed through it, as a Session is."""

    def refuse_commit(self) -> None:
        """Called before a COMMIT: raise UsageError if messages would not be written by then."""

    def refuse_end(self, words: str) -> None:
        """Called before a statement that ends the transaction: raise UsageError if it contains messages."""


class DriverTransaction:
    """The state of a driver connection's transaction, which may outlive the Sessions that use it.

    Not thread-safe: for the one thread or task that uses the connection.
    """

    __slots__ = ("_held", "_participants", "_savepoints", "_undo", "ended_by", "undone", "writes")

    def __init__(self) -> None:
        self._participants: WeakSet[Participant] = WeakSet()
        self.writes: bool = False
        """Whether a statement in it wrote, judging by the first word of each statement."""
        self.ended_by: str | None = None
        """The first words of the statement that ended it; later statements belong to another transaction."""
        self.undone: list[tuple[int, int]] = []
        """The spans of logical time that were rolled back to savepoints (see next_moment)."""
        self._savepoints: list[tuple[str, int]] = []
        self._held: list[tuple[int, Callable[[], None]]] = []
        self._undo = (self.undone, self._held, self._savepoints)

    def join(self, participant: Participant) -> None:
        """Register a participant to be asked before the transaction ends. Keeps a weak reference: a Session that is
        garbage-collected returns its connection.
        """
        self._participants.add(participant)

    def leave(self, participant: Participant) -> None:
        """Remove a participant."""
        self._participants.discard(participant)

    def when_committed(self, act: Callable[[], None]) -> None:
        """Call `act`, which must not raise, after the COMMIT; not if the transaction, or its part since a savepoint,
        is rolled back.
        """
        self._held.append((next_moment(), act))

    def refuse_commit(self) -> None:
        """Raise UsageError if a participant has not written its messages yet."""
        for participant in list(self._participants):
            participant.refuse_commit()

    def committed(self) -> None:
        """Called after the COMMIT: run the registered functions."""
        for _, act in self._held:
            act()

    def end_by_statement(self, words: str) -> None:
        """Called before a statement that ends the transaction. Raises UsageError if the transaction contains messages,
        so that the statement is not run. No effect if nothing was written before.
        """
        for participant in list(self._participants):
            participant.refuse_end(words)
        if self._held:
            raise unsent_error(words)
        if self.writes:
            self.ended_by = words

    def begin_savepoint(self, name: str) -> None:
        """Called when a statement begins a savepoint."""
        self._savepoints.append((name, next_moment()))

    def roll_back_to_savepoint(self, name: str) -> None:
        """Called when a statement rolls back to a savepoint, which stays."""
        self._undo = (self.undone, self._held, self._savepoints)
        place = self._place(name)
        began = _BEFORE_ALL if place is None else self._savepoints[place][1]
        self._savepoints = [] if place is None else self._savepoints[: place + 1]
        # A longer span replaces those inside it, which bounds the list by the number of consecutive savepoints.
        self.undone = [span for span in self.undone if span[0] < began] + [(began, next_moment())]
        self._held = [held for held in self._held if held[0] < began]

    def restore(self) -> None:
        """Called when the rollback to a savepoint failed: nothing was rolled back."""
        self.undone, self._held, self._savepoints = self._undo

    def release_savepoint(self, name: str) -> None:
        """Called when a statement releases a savepoint, and those inside it."""
        place = self._place(name)
        if place is not None:
            del self._savepoints[place:]

    def _place(self, name: str) -> int | None:
        places = range(len(self._savepoints) - 1, -1, -1)
        return next((place for place in places if self._savepoints[place][0] == name), None)


def driver_transaction(connection: Connection) -> DriverTransaction:
    """Returns the state of this connection's current transaction, or of its next one."""
    return _transaction_in(connection.info)


def unsent_error(words: str) -> NoTransaction:
    """Returns the error of a statement that would end a transaction with messages in it."""
    return NoTransaction(
        f"{words} would end this transaction, but not its messages with it: commit and roll back by the Session "
        "(session.commit(), session.rollback()) or its block, and run what commits implicitly in a transaction of its "
        "own"
    )


def refuse_if_doomed(connection: Connection) -> None:
    """Raise TransactionDoomed if the server has ended this connection's transaction and the error was swallowed,
    NoTransaction if a statement has ended it.
    """
    refuse_if_rolled_back(connection)
    words = ending_statement(connection)
    if words is not None:
        raise NoTransaction(
            f"{words} ended this transaction before: what it had done is committed or rolled back without its "
            "messages; commit and roll back by the Session, and run what commits implicitly in a transaction of its own"
        )


def refuse_if_rolled_back(connection: Connection) -> None:
    """Raise TransactionDoomed if the server has ended this connection's transaction and the error was swallowed."""
    transaction = connection.get_transaction()
    cause = _doomed.get(transaction) if isinstance(transaction, RootTransaction) else None
    if cause is not None:
        raise TransactionDoomed(
            "the database rolled this transaction back earlier and the error was swallowed "
            f"({str(cause).splitlines()[0]}); run the whole transaction again"
        ) from cause


def ending_statement(connection: Connection) -> str | None:
    """Returns the first words of the statement that has ended this connection's transaction, if one has."""
    known = None if connection.get_transaction() is None else _known(connection)
    return None if known is None else known.ended_by


def is_over(connection: Connection, begun: RootTransaction | None) -> bool:
    """Returns whether a transaction of this connection has ended: by its Session, its Connection or a statement."""
    return begun is None or not begun.is_active or ending_statement(connection) is not None


def undone_spans(connection: Connection) -> list[tuple[int, int]]:
    """Returns the spans of logical time that this connection's transaction has rolled back to savepoints."""
    known = _known(connection)
    return [] if known is None else known.undone


def _known(connection: Connection) -> DriverTransaction | None:
    return None if connection.invalidated else connection.info.get(_TRANSACTION_KEY)


def _transaction_in(info: dict[Any, Any]) -> DriverTransaction:
    known: DriverTransaction | None = info.get(_TRANSACTION_KEY)
    if known is None:
        known = info[_TRANSACTION_KEY] = DriverTransaction()
    return known


def _execute(_cursor: object, statement: str, _parameters: object, context: ExecutionContext) -> None:
    """Called before each statement of a tracked dialect."""
    found = statement_effect(statement, mysql=context.dialect.name in MYSQL_DIALECTS)
    if found is READS:
        return
    transaction = driver_transaction(context.root_connection)
    if found is WRITES:
        transaction.writes = True
    elif context.root_connection.in_transaction():  # else it is the BEGIN itself
        _note(transaction, found, statement)


def _note(transaction: DriverTransaction, found: StatementEffect, statement: str) -> None:
    match found.effect:
        case Effect.READS | Effect.WRITES:
            return
        case Effect.ENDS:
            transaction.end_by_statement(first_words(statement))
        case Effect.BEGINS_SAVEPOINT:
            transaction.begin_savepoint(found.savepoint)
        case Effect.ROLLS_BACK_TO_SAVEPOINT:
            transaction.roll_back_to_savepoint(found.savepoint)
        case Effect.RELEASES_SAVEPOINT:
            transaction.release_savepoint(found.savepoint)
        case _:
            assert_never(found.effect)


def _execute_without_parameters(cursor: object, statement: str, context: ExecutionContext) -> None:
    _execute(cursor, statement, (), context)


def _wrap_commit(dialect: Dialect) -> None:
    commit, roll_back = dialect.do_commit, dialect.do_rollback

    def do_commit(dbapi_connection: PoolProxiedConnection) -> None:
        known: DriverTransaction | None = dbapi_connection.info.get(_TRANSACTION_KEY)
        if known is None:
            commit(dbapi_connection)
            return
        known.refuse_commit()
        commit(dbapi_connection)
        dbapi_connection.info.pop(_TRANSACTION_KEY, None)
        known.committed()

    def do_rollback(dbapi_connection: PoolProxiedConnection) -> None:
        with suppress(NotImplementedError):  # an engine's very first connection, while the dialect inspects it
            dbapi_connection.info.pop(_TRANSACTION_KEY, None)
        roll_back(dbapi_connection)

    dialect.do_commit = do_commit  # type: ignore[method-assign]
    dialect.do_rollback = do_rollback  # type: ignore[method-assign]


def _wrap_two_phase_commit(dialect: Dialect) -> None:
    commit, roll_back = dialect.do_commit_twophase, dialect.do_rollback_twophase

    def do_commit_twophase(connection: Connection, *given: Any, **named: Any) -> None:
        known = driver_transaction(connection)
        known.refuse_commit()
        commit(connection, *given, **named)
        connection.info.pop(_TRANSACTION_KEY, None)
        known.committed()

    def do_rollback_twophase(connection: Connection, *given: Any, **named: Any) -> None:
        connection.info.pop(_TRANSACTION_KEY, None)
        roll_back(connection, *given, **named)

    dialect.do_commit_twophase = do_commit_twophase  # type: ignore[method-assign]
    dialect.do_rollback_twophase = do_rollback_twophase  # type: ignore[method-assign]


def _handle_error(context: ExceptionContext) -> None:
    error, connection = context.sqlalchemy_exception, context.connection
    if connection is None or not isinstance(error, DBAPIError):
        return
    if context.statement and not context.is_disconnect:
        _restore_savepoints(connection, context.statement)
    transaction = connection.get_transaction()
    if isinstance(transaction, RootTransaction) and (context.is_disconnect or _rolled_back(connection, error)):
        _doomed[transaction] = _without_frames(error)


def _without_frames(error: DBAPIError) -> DBAPIError:
    """Returns a copy without a traceback: frames of the business refer to its objects and to the transaction."""
    copied = copy(error)
    copied.orig = Exception(*getattr(error.orig, "args", ()))
    return copied


def _restore_savepoints(connection: Connection, statement: str) -> None:
    effect = statement_effect(statement, mysql=connection.dialect.name in MYSQL_DIALECTS).effect
    if effect is Effect.ROLLS_BACK_TO_SAVEPOINT and connection.dialect in _watched:
        driver_transaction(connection).restore()


def _rolled_back(connection: Connection, error: DBAPIError) -> bool:
    """Returns whether the server ended the whole transaction: always for a deadlock's victim; for a lock wait only if
    it is so configured. Errors of a single statement (a killed query, NOWAIT, a duplicate) leave the transaction open.
    """
    match error_code(error):
        case code if code in _ENDS_TRANSACTION:
            return True
        case code if code == LOCK_WAIT_TIMEOUT:
            return _rolls_back_on_timeout(connection)
        case _:
            return False


def _rolls_back_on_timeout(connection: Connection) -> bool:
    """Reads the server's setting; if that fails, the connection is lost and the transaction with it."""
    cursor: Any = connection.connection.cursor()
    try:
        cursor.execute("SELECT @@innodb_rollback_on_timeout")
        row = cursor.fetchone()
    except connection.dialect.loaded_dbapi.Error:
        return True
    finally:
        cursor.close()
    return bool(row and row[0])
