"""What happens to a transaction below its Session, as Engine and dialect tell it. Not what follows from it.

The server ends it by itself, or a savepoint of the Connection's own is rolled back: session_hooks and the consumer ask.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import Dialect, ExceptionContext
from sqlalchemy.engine.base import RootTransaction
from sqlalchemy.exc import DBAPIError

from messaging.errors import TransactionDoomed
from outbox.database import DEADLOCK, LOCK_WAIT_TIMEOUT, RECORD_CHANGED, error_code
from outbox.unit_of_work import next_moment

_ENDS_TRANSACTION: Final = frozenset(
    {
        DEADLOCK,
        RECORD_CHANGED,
        1206,  # the lock table is full
        1053,  # the server is shutting down
        1153,  # larger than max_allowed_packet: the server hangs up
        3169,  # the session was killed
    }
)
_doomed: WeakKeyDictionary[RootTransaction, BaseException] = WeakKeyDictionary()
_savepoints: WeakKeyDictionary[Connection, _Savepoints] = WeakKeyDictionary()
_watched: WeakSet[Dialect] = WeakSet()
_listening = threading.Lock()
_BEFORE_ALL: Final = -1
"""When a savepoint began that is older than our watch: before anything that was published in it."""


def listen_to_engines() -> None:
    """Notice, on every Engine of this process, what happens to a transaction below its Session.

    Namely that the server rolls it back by itself, whatever the business code does with the error. On every Engine,
    since a Session may bring one of its own.
    """
    with _listening:
        if not event.contains(Engine, "handle_error", _handle_error):
            event.listen(Engine, "handle_error", _handle_error)


def watch_savepoints(dialect: Dialect) -> None:
    """Notice the savepoints of every Connection that speaks by this dialect object, from now on.

    Its methods are wrapped, since SQLAlchemy's savepoint events would make every statement of every Engine in the
    process run through the event machinery (`Engine._has_events`): 7.5 us each, measured with SQLAlchemy 2.0.
    """
    if dialect in _watched:
        return
    with _listening:
        if dialect not in _watched:
            _wrap_savepoints(dialect)
            _watched.add(dialect)


def _wrap_savepoints(dialect: Dialect) -> None:
    begin, roll_back, release = dialect.do_savepoint, dialect.do_rollback_to_savepoint, dialect.do_release_savepoint

    def do_savepoint(connection: Connection, name: str) -> None:
        _began(connection, name)
        begin(connection, name)

    def do_rollback_to_savepoint(connection: Connection, name: str) -> None:
        _rolled_back_to(connection, name)
        roll_back(connection, name)

    def do_release_savepoint(connection: Connection, name: str) -> None:
        _released(connection, name)
        release(connection, name)

    dialect.do_savepoint = do_savepoint  # type: ignore[method-assign]
    dialect.do_rollback_to_savepoint = do_rollback_to_savepoint  # type: ignore[method-assign]
    dialect.do_release_savepoint = do_release_savepoint  # type: ignore[method-assign]


def refuse_if_doomed(connection: Connection) -> None:
    """Raise TransactionDoomed where the server has ended this connection's transaction and somebody swallowed
    the error.
    """
    transaction = connection.get_transaction()
    cause = _doomed.get(transaction) if isinstance(transaction, RootTransaction) else None
    if cause is not None:
        raise TransactionDoomed(
            "the database rolled this transaction back earlier and the error was swallowed "
            f"({str(cause).splitlines()[0]}); run the whole transaction again"
        ) from cause


def undone_spans(connection: Connection) -> list[tuple[int, int]]:
    """The spans of moments that this connection's transaction has rolled back to savepoints."""
    return _savepoints_of(connection).undone if connection in _savepoints else []


class _Savepoints:
    """The savepoints of one Connection's transaction: when the open ones began, and which spans were rolled back."""

    __slots__ = ("began", "transaction", "undone")

    def __init__(self) -> None:
        self.transaction: weakref.ref[RootTransaction] | None = None
        self.began: dict[str, int] = {}
        self.undone: list[tuple[int, int]] = []


def _savepoints_of(connection: Connection) -> _Savepoints:
    """Those of the transaction that is open now; what an earlier one on this Connection left is forgotten."""
    found = _savepoints.setdefault(connection, _Savepoints())
    transaction = connection.get_transaction()
    known = found.transaction() if found.transaction is not None else None
    if isinstance(transaction, RootTransaction) and known is not transaction:
        found.transaction, found.began, found.undone = weakref.ref(transaction), {}, []
    return found


def _began(connection: Connection, name: str) -> None:
    _savepoints_of(connection).began[name] = next_moment()


def _rolled_back_to(connection: Connection, name: str) -> None:
    found = _savepoints_of(connection)
    began = found.began.pop(name, _BEFORE_ALL)
    # A longer span swallows those inside it, so the list does not outgrow the savepoints that lie side by side.
    found.undone = [span for span in found.undone if span[0] < began] + [(began, next_moment())]


def _released(connection: Connection, name: str) -> None:
    _savepoints_of(connection).began.pop(name, None)


def _handle_error(context: ExceptionContext) -> None:
    error, connection = context.sqlalchemy_exception, context.connection
    if connection is None or not isinstance(error, DBAPIError):
        return
    transaction = connection.get_transaction()
    if isinstance(transaction, RootTransaction) and (context.is_disconnect or _rolled_back(connection, error)):
        _doomed[transaction] = error


def _rolled_back(connection: Connection, error: DBAPIError) -> bool:
    """Whether the server ended the whole transaction: a deadlock's victim always, a lock wait only where it is
    set so. What ends a statement alone (a killed query, NOWAIT, a duplicate) leaves the transaction as it was.
    """
    match error_code(error):
        case code if code in _ENDS_TRANSACTION:
            return True
        case code if code == LOCK_WAIT_TIMEOUT:
            return _rolls_back_on_timeout(connection)
        case _:
            return False


def _rolls_back_on_timeout(connection: Connection) -> bool:
    """As the server is set; where it cannot be asked, the connection is lost and the transaction with it."""
    cursor: Any = connection.connection.cursor()
    try:
        cursor.execute("SELECT @@innodb_rollback_on_timeout")
        row = cursor.fetchone()
    except connection.dialect.loaded_dbapi.Error:
        return True
    finally:
        cursor.close()
    return bool(row and row[0])
