"""Hooks on Engines and dialects: track what happens to a transaction below its Session.

The server may roll it back; a statement may end it or roll back to a savepoint; its Connection may commit it.
session_hooks and consumers query this state and decide what follows.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar, assert_never
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import Dialect, ExceptionContext, ExecutionContext
from sqlalchemy.engine.base import RootTransaction, TwoPhaseTransaction
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import Pool, PoolProxiedConnection

from outbox.producer.transaction_continuity import UNSEEN, Continuity
from outbox.producer.transaction_effect import (
    ENDS,
    MAY_END,
    READS,
    WRITES,
    Effect,
    TransactionEffect,
    first_words,
    transaction_effect,
)
from outbox.producer.unit_of_work import UnitOfWork, next_moment
from outbox.store.database import is_autocommit
from outbox.store.databases.supported import database_of, known_database
from outbox_core.common.errors import ConfigurationError, NoTransaction, OutboxError, TransactionDoomed, UsageError

OutboxT = TypeVar("OutboxT")

_doomed: WeakKeyDictionary[RootTransaction, BaseException] = WeakKeyDictionary()
"""By transaction, why the server ended it. No value may refer to its key, which would then be kept for ever."""
_watched: WeakSet[Dialect] = WeakSet()
_listening = threading.Lock()
unheard: Final[dict[int, Callable[[Connection], None]]] = {}
"""By a Session that has published and used no connection yet, what lets it join a connection's transaction that it has
begun meanwhile without our having heard of it.
"""
_WRITES_ROWS: Final = re.compile(r"(?:INSERT|UPDATE|DELETE|REPLACE|WITH)\b", re.IGNORECASE)
_BEFORE_ALL: Final = -1
"""The start of a savepoint that is older than our tracking: before anything was published in the transaction."""


def listen_to_engines() -> None:
    """Track, on every Engine of this process, when the server rolls back a transaction.

    The business code may swallow the error. Every Engine is tracked, since a Session may bring one of its own.
    """
    with _listening:
        if not event.contains(Engine, "handle_error", _handle_error):
            event.listen(Engine, "handle_error", _handle_error)
            for name in ("checkin", "close", "close_detached"):
                event.listen(Pool, name, _checked_in)


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


class Participant(Generic[OutboxT]):
    """The part that one Session has in a driver's transaction: what it published there, by Outbox.

    Refers to no Session or Connection: the driver's transaction keeps it when these are gone, and must not keep them.
    """

    __slots__ = ("has_changes", "is_owner", "is_sealed", "units")

    def __init__(self, *, has_changes: Callable[[], bool], is_owner: bool = False) -> None:
        self.has_changes: Callable[[], bool] = has_changes
        """Whether the Session has changes to flush."""
        self.is_owner: bool = is_owner
        """Whether the Session alone may commit, as one that the outbox has opened."""
        self.is_sealed: bool = False
        """Whether the Session commits, and has written its messages, or has rolled back: it takes no more."""
        self.units: dict[OutboxT, UnitOfWork] = {}

    def refuse_commit(self, undone: Sequence[tuple[int, int]]) -> None:
        """Raise NoTransaction if this commit is not the Session's own, and either the Session owns the transaction or
        messages would be left behind. `undone`: the spans that were rolled back to savepoints.
        """
        if self.is_owner and not self.is_sealed:
            raise NoTransaction("the outbox began this transaction and commits it: leave the block or the function")
        if self.has_unwritten(undone):
            raise NoTransaction(
                "this commit would leave messages behind: they are written when the Session that they were published "
                "in commits (session.commit(), or leaving its block); if it ended without a commit, roll back"
            )

    def refuse_end(self, words: str, undone: Sequence[tuple[int, int]]) -> None:
        """Raise NoTransaction if the Session has messages in the transaction that a statement would end."""
        if self.has_unwritten(undone) or any(unit.written for unit in self.units.values()):
            raise unsent_error(words)

    def doubt(self, began: int) -> None:
        """Called at a rollback to a savepoint that began at this logical time."""
        if self.units and self.has_changes():
            for unit in self.units.values():
                unit.doubt(began)

    def has_unwritten(self, undone: Sequence[tuple[int, int]]) -> bool:
        """Returns whether a commit now would lose messages."""
        return any(unit.is_unwritten(undone) for unit in self.units.values())


@dataclass(slots=True, eq=False)
class DriverSavepoint:
    """A savepoint that was sent to the database. `began`: its logical time (see next_moment)."""

    name: str
    began: int
    is_undone: bool = False
    """Whether a rollback to it, or to one around it, was sent and has succeeded."""


@dataclass(frozen=True, slots=True)
class _HeldSend:
    """What is to be sent after a COMMIT: the logical times at which its first message was published, and written."""

    since: int
    written: int
    act: Callable[[], None]


class DriverTransaction:
    """The state of a driver connection's transaction, which may outlive the Sessions that use it.

    Not thread-safe: for the one thread or task that uses the connection.
    """

    __slots__ = (
        "_before_rollback", "_held", "_lost", "_participants", "_savepoints", "continuity", "driver_connection",
        "ended_by", "has_mark", "is_idle", "is_joined", "is_over", "is_undone", "swallowed", "undone", "writes",
    )  # fmt: skip

    def __init__(self, driver_connection: Any, dialect: Dialect) -> None:
        self.driver_connection: Any = driver_connection
        self.continuity: Continuity = Continuity(driver_connection, dialect)
        self.is_joined: bool = False
        """Whether a Session has taken part in it, which may have ended before."""
        self.has_mark: bool = False
        """Whether an inbox's mark is in it."""
        self._participants: list[Participant[Any]] = []
        self.writes: bool = False
        """Whether a statement in it wrote, judging by the first word of each statement."""
        self.ended_by: str | None = None
        """The first words of the statement that ended it; later statements belong to another transaction, or none."""
        self.is_idle: bool = False
        """Whether a statement ended it, and none has begun another."""
        self.is_over: bool = False
        """Whether it was committed or rolled back below SQLAlchemy's events of Sessions, or its connection was lost."""
        self.is_undone: bool = False
        """Whether it is over and was not committed."""
        self.swallowed: BaseException | None = None
        """The error with which the database rolled it back, if a statement has met one."""
        self.undone: list[tuple[int, int]] = []
        """The spans of logical time that were rolled back to savepoints (see next_moment)."""
        self._savepoints: list[DriverSavepoint] = []
        self._held: list[_HeldSend] = []
        self._lost: list[int] = []
        """When what was published whose rows alone were rolled back to a savepoint: the business's rows are older."""
        self._before_rollback = (self.undone, self._held, self._lost, self._savepoints, self._savepoints)

    def join(self, participant: Participant[Any]) -> None:
        """Register a Session's part, to be asked before the transaction ends. Idempotent."""
        self.is_joined = True
        self.check_status()
        if participant not in self._participants:
            self._participants.append(participant)

    def leave(self, participant: Participant[Any]) -> None:
        """Remove the part of a Session that has ended. If it has messages that nobody will write, it stays: a commit
        would leave them behind, until they are rolled back.
        """
        if not participant.has_unwritten(self.undone) and participant in self._participants:
            self._participants.remove(participant)

    def when_committed(self, act: Callable[[], None], *, since: int) -> None:
        """Call `act`, which must not raise nor refer to a Connection, after the COMMIT; not if the transaction, or its
        part since a savepoint, is rolled back. `since`: when the first of the messages that it sends was published.
        """
        self._held.append(_HeldSend(since, next_moment(), act))

    def refuse_commit(self) -> None:
        """Raise UsageError if a participant has not written its messages yet, or what it wrote is gone again."""
        for participant in self._participants:
            participant.refuse_commit(self.undone)
        if self._lost:
            raise NoTransaction(
                "this commit would leave messages behind: their Session has written them in a savepoint of its "
                "Connection that was rolled back, and had published them before it: roll back, and run it again"
            )

    def refuse_if_ended_unseen(self) -> None:
        """Called before a COMMIT: raise NoTransaction if there are messages or an inbox's mark in it, and what they
        were written with has ended before; TransactionDoomed if an error that was swallowed has rolled the mark back:
        what follows would commit without it. Raises the driver's error if the server does not say.
        """
        if self.has_mark and self.swallowed is not None:
            raise doomed_error(self.swallowed)
        if self.has_mark or self.has_messages:
            self.check_status()
            self.settle()
            self.refuse_if_ended()

    def refuse_if_ended(self) -> None:
        """Raise NoTransaction if something has ended it."""
        if self.ended_by is not None:
            raise NoTransaction(
                f"{self.ended_by} ended this transaction before: what it had done is committed or rolled back without "
                "its messages or its mark; commit and roll back by the Session, and run what commits or rolls back by "
                "itself, as a procedure may, in a transaction of its own"
            )

    @property
    def has_messages(self) -> bool:
        """Returns whether a Session has published in it, even if what it published was rolled back to a savepoint."""
        for participant in self._participants:  # any() of a generator takes twice the time, at each commit
            if participant.units:
                return True
        return bool(self._held or self._lost)

    def settle(self) -> None:
        """Ask the server whether what may have ended the transaction has. Raises the driver's error."""
        words = self.continuity.settle()
        if words is not None:
            self.end_unseen(words)

    def check_status(self) -> None:
        """Look whether the driver says that the transaction has ended. No I/O."""
        if self.continuity.check_status():
            self.end_unseen(self.continuity.doubted or UNSEEN)

    def end_unseen(self, words: str) -> None:
        """Called when the transaction is found to have ended: what follows is to be rolled back with the commit that is
        refused.
        """
        self.ended_by = self.ended_by or words
        self.is_idle = not self.continuity.begins_by_itself

    def committed(self) -> None:
        """Called after the COMMIT: run the registered functions."""
        held, self._held = self._held, []
        for send in held:
            send.act()

    def end(self, *, is_undone: bool) -> None:
        """Called when it is committed, or rolled back as a whole."""
        self.is_over, self.is_undone = True, is_undone
        for savepoint in self._savepoints:
            savepoint.is_undone = is_undone

    def end_by_statement(self, words: str, *, begins_another: bool) -> None:
        """Called before a statement that ends the transaction. Raises UsageError if the transaction contains messages,
        so that the statement is not run. No effect if nothing was done before. `begins_another`: whether what follows
        is in a transaction again.
        """
        for participant in self._participants:
            participant.refuse_end(words, self.undone)
        if self._held or self._lost:
            raise unsent_error(words)
        self.continuity.expect_end()
        if self.writes or self._savepoints:
            self.ended_by = words
        self.is_idle = not begins_another

    def begin_savepoint(self, name: str) -> None:
        """Called when a statement begins a savepoint."""
        self._savepoints.append(DriverSavepoint(name, next_moment()))

    def innermost_savepoint(self) -> DriverSavepoint:
        """Returns the newest open savepoint, where there is one: a nameless one if it is older than our tracking."""
        if not self._savepoints:
            self._savepoints.append(DriverSavepoint("", _BEFORE_ALL))
        newest = self._savepoints[-1]
        if newest.is_undone:
            # It was rolled back to, and is open still: what follows stands until that is done again. With the mark of
            # the first time its rows would be taken for rolled back, and their messages given up.
            newest = self._savepoints[-1] = DriverSavepoint(newest.name, newest.began)
        return newest

    def savepoint(self, name: str) -> DriverSavepoint:
        """Returns an open savepoint, or one that was rolled back to, by its name; of others we know no rollback."""
        index = self._index_of(name)
        return DriverSavepoint(name, _BEFORE_ALL) if index is None else self._savepoints[index]

    def roll_back_to_savepoint(self, name: str) -> None:
        """Called when a statement rolls back to a savepoint, which stays."""
        index = self._index_of(name)
        began = _BEFORE_ALL if index is None else self._savepoints[index].began
        kept, undone = self._savepoints[: 0 if index is None else index + 1], self._savepoints[index or 0 :]
        undone = [savepoint for savepoint in undone if not savepoint.is_undone]
        self._before_rollback = (self.undone, self._held, self._lost, self._savepoints, undone)
        for participant in self._participants:
            participant.doubt(began)
        for savepoint in undone:
            savepoint.is_undone = True
        self._savepoints = kept
        # A longer span replaces those inside it, which bounds the list by the number of consecutive savepoints.
        self.undone = [span for span in self.undone if span[0] < began] + [(began, next_moment())]
        self._lost = [since for since in self._lost if since < began]
        self._lost += [send.since for send in self._held if send.since < began < send.written]
        self._held = [send for send in self._held if send.written < began]

    def restore(self) -> None:
        """Called when the rollback to a savepoint failed: nothing was rolled back."""
        self.undone, self._held, self._lost, self._savepoints, undone = self._before_rollback
        for savepoint in undone:
            savepoint.is_undone = False

    def release_savepoint(self, name: str) -> None:
        """Called when a statement releases a savepoint, and those inside it."""
        index = self._index_of(name)
        if index is not None:
            del self._savepoints[index:]

    def _index_of(self, name: str) -> int | None:
        newest_first = range(len(self._savepoints) - 1, -1, -1)
        return next((index for index in newest_first if self._savepoints[index].name == name), None)


_transactions: Final[dict[int, DriverTransaction]] = {}
"""By the id() of the driver's connection, which the value keeps alive so that no other can have its id. From its first
use until the COMMIT or ROLLBACK, or until the pool takes the connection back. Not in the `info` of a connection, which
is the application's to clear; drivers' connections cannot have weak references (decision 113).
"""


def driver_transaction(connection: Connection) -> DriverTransaction:
    """Returns the state of this connection's current transaction, or of its next one."""
    driver_connection = connection.connection.dbapi_connection
    transaction = _transactions.get(id(driver_connection))
    if transaction is None:
        transaction = DriverTransaction(driver_connection, connection.dialect)
        if driver_connection is not None:  # else the pool has closed it: there is nothing to commit
            _transactions[id(driver_connection)] = transaction
    return transaction


def _end(driver_connection: object, *, is_undone: bool) -> None:
    """Forget the transaction of a driver's connection, and mark it for who has joined it."""
    transaction = _transactions.pop(id(driver_connection), None)
    if transaction is not None:
        transaction.end(is_undone=is_undone)


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
    transaction = None if connection.get_transaction() is None else _known(connection)
    if transaction is not None:
        _refuse_if_ended(connection, transaction)


def _refuse_if_ended(connection: Connection, transaction: DriverTransaction) -> None:
    _replace_if_switched(connection, transaction)
    transaction.refuse_if_ended()


def _replace_if_switched(connection: Connection, transaction: DriverTransaction) -> None:
    """Have the pool replace a connection that a procedure has switched to autocommit."""
    if transaction.ended_by is not None and is_autocommit(connection):
        _replace_later(connection)


def refuse_if_rolled_back(connection: Connection) -> None:
    """Raise TransactionDoomed if the server has ended this connection's transaction and the error was swallowed."""
    transaction = connection.get_transaction()
    cause = _doomed.get(transaction) if isinstance(transaction, RootTransaction) else None
    if cause is not None:
        raise doomed_error(cause)


def doomed_error(cause: BaseException) -> TransactionDoomed:
    """Returns the error of a transaction that the database rolled back with an error that was swallowed, its cause."""
    doomed = TransactionDoomed(
        "the database rolled this transaction back earlier and the error was swallowed "
        f"({str(cause).splitlines()[0]}); run the whole transaction again"
    )
    doomed.__cause__ = cause
    return doomed


def ending_statement(connection: Connection) -> str | None:
    """Returns the first words of the statement that has ended this connection's transaction, if one has."""
    transaction = None if connection.get_transaction() is None else _known(connection)
    return None if transaction is None else transaction.ended_by


def is_over(connection: Connection, begun: RootTransaction | None) -> bool:
    """Returns whether a transaction of this connection has ended: by its Session, its Connection or a statement, or
    may have, as the server does not say. Asks it where a procedure was called.
    """
    if begun is None or not begun.is_active:
        return True
    transaction = _known(connection)
    if transaction is None:
        return False
    try:
        transaction.check_status()
        transaction.settle()
    except connection.dialect.loaded_dbapi.Error:
        transaction.end_unseen(UNSEEN)
    _replace_if_switched(connection, transaction)
    return transaction.ended_by is not None


def keep_mark(connection: Connection) -> None:
    """Called when an inbox's mark is in this connection's transaction, before the handler's effect: track its end."""
    watch_dialect(connection.dialect)
    transaction = driver_transaction(connection)
    transaction.has_mark = True
    transaction.check_status()


def forget_mark(connection: Connection) -> None:
    """Called when an inbox's mark is found to be committed by a statement: what follows commits without it."""
    transaction = _known(connection)
    if transaction is not None:
        transaction.has_mark = False


def refuse_autocommit(connection: Connection, because: str) -> None:
    """Raise ConfigurationError if each statement of this connection commits by itself, NoTransaction if a statement of
    its transaction has switched it over. The pool replaces such a connection.
    """
    if not is_autocommit(connection):
        return
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        raise ConfigurationError(f"this connection is in AUTOCOMMIT, by its options: {because}; use another engine")
    _replace_later(connection)
    words = ending_statement(connection)
    if words is not None:
        raise NoTransaction(
            f"{words} has switched this connection to AUTOCOMMIT, and ended its transaction: {because}; leave the "
            "commit to the Session or the consumer. The pool replaces the connection"
        )
    raise ConfigurationError(
        f"this connection is in AUTOCOMMIT: {because}; if that is its engine's setting, use another engine. If not, "
        "something that ran on it before has switched it over (as SET autocommit = 1 does), and the pool replaces it"
    )


def undone_spans(connection: Connection) -> list[tuple[int, int]]:
    """Returns the spans of logical time that this connection's transaction has rolled back to savepoints."""
    transaction = _known(connection)
    return [] if transaction is None else transaction.undone


def _known(connection: Connection) -> DriverTransaction | None:
    if connection.invalidated or connection.closed:
        return None
    return _transactions.get(id(connection.connection.dbapi_connection))


def _execute(cursor: Any, statement: str, _parameters: object, context: ExecutionContext) -> None:
    """Called before each statement of a tracked dialect."""
    parsed = transaction_effect(statement, context.dialect)
    if parsed is READS:
        return
    connection = context.root_connection
    transaction = driver_transaction(connection)
    if unheard and not transaction.is_joined:
        # A list is made without a pass of the garbage collector, which may end a Session and so change what is read.
        for join_if_used in list(unheard.values()):
            join_if_used(connection)
    transaction.check_status()
    if transaction.continuity.doubted is not None:
        transaction.settle()
        if transaction.has_messages:
            _refuse_if_ended(connection, transaction)
    if parsed is WRITES:
        if transaction.is_idle:
            if not _WRITES_ROWS.match(first_words(statement)):
                return  # it stands at once, by itself
            database_of(context.dialect).begin_before_rows(connection, cursor)
            transaction.is_idle = False
        transaction.writes = True
        _check_status_behind(context, transaction)
    elif connection.in_transaction():  # else it is the BEGIN itself
        _follow(connection, transaction, parsed, statement, cursor)


def _check_status_behind(context: ExecutionContext, transaction: DriverTransaction) -> None:
    """Look at the driver's status right behind a Session's first write: what goes past SQLAlchemy may be the next, and
    what that ends must have been seen open. Refers to no context: its Connection would stay until it is collected.
    """
    if not (transaction.is_joined and transaction.continuity.has_seen_none):
        return
    context_ref, post_exec = weakref.ref(context), type(context).post_exec

    def check() -> None:
        executed = context_ref()
        if executed is not None:
            post_exec(executed)
        transaction.check_status()

    context.post_exec = check  # type: ignore[method-assign]


def _follow(
    connection: Connection, transaction: DriverTransaction, parsed: TransactionEffect, statement: str, cursor: Any
) -> None:
    """Called before a statement that does more to a transaction than to write in it."""
    if transaction.is_idle and parsed.effect is Effect.BEGINS_SAVEPOINT:
        # The savepoint would begin a transaction that its RELEASE commits (as SQLite's does).
        database_of(connection.dialect).begin_before_rows(connection, cursor)
        transaction.is_idle = False
    _note(transaction, parsed, statement)
    if parsed is ENDS and transaction.is_joined and first_words(statement).upper().startswith("SET "):
        # Autocommit: no other transaction begins, and whoever gets the connection next does not expect that.
        transaction.end_unseen(first_words(statement))
        _replace_later(connection)
    if parsed is MAY_END and _shall_doubt(connection, transaction):
        transaction.continuity.doubt(first_words(statement))


def _replace_later(connection: Connection) -> None:
    """Have the pool replace the driver's connection when it lends it again."""
    connection.connection.invalidate(soft=True)


def _shall_doubt(connection: Connection, transaction: DriverTransaction) -> bool:
    """Returns whether to ask what a procedure did: only where a Session or a mark is, and something can end. In two
    phases the servers refuse whatever would end it.
    """
    is_two_phase = isinstance(connection.get_transaction(), TwoPhaseTransaction)
    is_ours = transaction.is_joined or transaction.has_mark
    return is_ours and not is_two_phase and not is_autocommit(connection)


def _note(transaction: DriverTransaction, parsed: TransactionEffect, statement: str) -> None:
    match parsed.effect:
        case Effect.READS:
            return
        case Effect.WRITES | Effect.MAY_END:
            transaction.writes = True
        case Effect.ENDS:
            words = first_words(statement)
            begins_another = transaction.continuity.begins_by_itself or words.upper().startswith("BEGIN")
            transaction.end_by_statement(words, begins_another=begins_another)
        case Effect.BEGINS_SAVEPOINT:
            transaction.begin_savepoint(parsed.savepoint)
        case Effect.ROLLS_BACK_TO_SAVEPOINT:
            transaction.roll_back_to_savepoint(parsed.savepoint)
        case Effect.RELEASES_SAVEPOINT:
            transaction.release_savepoint(parsed.savepoint)
        case _:
            assert_never(parsed.effect)


def _execute_without_parameters(cursor: object, statement: str, context: ExecutionContext) -> None:
    _execute(cursor, statement, (), context)


def _wrap_commit(dialect: Dialect) -> None:
    commit, roll_back = dialect.do_commit, dialect.do_rollback

    def do_commit(dbapi_connection: PoolProxiedConnection) -> None:
        transaction = _transactions.get(id(dbapi_connection.dbapi_connection))
        if transaction is None:
            commit(dbapi_connection)
            return
        try:
            transaction.refuse_commit()
            transaction.refuse_if_ended_unseen()
            commit(dbapi_connection)
        except (UsageError, TransactionDoomed, dialect.loaded_dbapi.Error):
            # SQLAlchemy takes the transaction for ended now, and its pool hands the connection on as it is.
            with _invalidated_on_error(dialect, dbapi_connection):
                do_rollback(dbapi_connection)
            raise
        _end(dbapi_connection.dbapi_connection, is_undone=False)
        transaction.committed()

    def do_rollback(dbapi_connection: PoolProxiedConnection) -> None:
        _end(dbapi_connection.dbapi_connection, is_undone=True)
        roll_back(dbapi_connection)

    dialect.do_commit = do_commit  # type: ignore[method-assign]
    dialect.do_rollback = do_rollback  # type: ignore[method-assign]


def _wrap_two_phase_commit(dialect: Dialect) -> None:
    commit, roll_back = dialect.do_commit_twophase, dialect.do_rollback_twophase

    def do_commit_twophase(connection: Connection, xid: object, *prepared: bool, **named: Any) -> None:
        transaction = driver_transaction(connection)
        try:
            transaction.refuse_commit()
        except UsageError:
            with _invalidated_on_error(dialect, connection):
                do_rollback_twophase(connection, xid, *prepared, **named)
            raise
        commit(connection, xid, *prepared, **named)
        _end(transaction.driver_connection, is_undone=False)
        transaction.committed()

    def do_rollback_twophase(connection: Connection, xid: object, *prepared: bool, **named: Any) -> None:
        driver_connection = connection.connection.dbapi_connection
        _end(driver_connection, is_undone=True)
        try:
            roll_back(connection, xid, *prepared, **named)
        finally:
            _end(driver_connection, is_undone=True)  # its own statements, XA END and XA ROLLBACK, were noted as any are

    dialect.do_commit_twophase = do_commit_twophase  # type: ignore[method-assign]
    dialect.do_rollback_twophase = do_rollback_twophase  # type: ignore[method-assign]


@contextmanager
def _invalidated_on_error(dialect: Dialect, connection: Connection | PoolProxiedConnection) -> Iterator[None]:
    """Have the pool close a connection whose rollback fails inside the block; the caller raises why it rolls back."""
    try:
        yield
    except (dialect.loaded_dbapi.Error, DBAPIError) as error:
        connection.invalidate(error)


def _checked_in(driver_connection: object, _record: object = None) -> None:
    """The pool has a connection back, or closes it: whatever was open on it is nobody's any more."""
    _end(driver_connection, is_undone=True)


def _handle_error(context: ExceptionContext) -> None:
    error, connection = context.sqlalchemy_exception, context.connection
    if connection is None or not isinstance(error, DBAPIError):
        return
    if context.statement and not context.is_disconnect:
        _restore_savepoints(connection, context.statement)
    transaction = connection.get_transaction()
    if isinstance(transaction, RootTransaction) and (context.is_disconnect or _rolled_back(connection, error)):
        _doomed[transaction] = without_frames(error)
        driver_state = _known(connection)
        if driver_state is not None:
            driver_state.end_unseen("an error that was swallowed")
            driver_state.swallowed = driver_state.swallowed or _doomed[transaction]


def without_frames(error: BaseException) -> BaseException:
    """Returns a copy without a traceback: frames of the business refer to its objects and to the transaction."""
    match error:
        case DBAPIError():
            copied = copy(error)
            if error.orig is not None:  # not by copy(): the constructors of some drivers take other arguments
                copied.orig = type(error.orig).__new__(type(error.orig), *error.orig.args)
            return copied
        case OutboxError():
            return copy(error)
        case _:  # of a listener, or of the process: it may have any class
            return TransactionDoomed(
                f"this transaction failed earlier ({type(error).__name__}); run the whole transaction again"
            )


def _restore_savepoints(connection: Connection, statement: str) -> None:
    effect = transaction_effect(statement, connection.dialect).effect
    if effect is Effect.ROLLS_BACK_TO_SAVEPOINT and connection.dialect in _watched:
        driver_transaction(connection).restore()


def _rolled_back(connection: Connection, error: DBAPIError) -> bool:
    """Returns whether the database ended the whole transaction; of one that is not ours, no error is known to."""
    database = known_database(connection.dialect)
    return database is not None and database.has_rolled_back(error.orig, connection, partial(_shows_end, connection))


def _shows_end(connection: Connection) -> bool:
    transaction = _known(connection)
    return transaction is not None and transaction.continuity.check_status()
