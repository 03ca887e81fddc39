"""What happens to a transaction below its Session, by SQLAlchemy's engine events. Not what follows from it.

The server ends it by itself, or a savepoint of the Connection's own is rolled back: session_hooks and the consumer ask.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext
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
_listening = threading.Lock()


def listen_to_engines() -> None:
    """Notice, on every Engine of this process, what happens to a transaction below its Session.

    Namely that the server rolls it back by itself, whatever the business code does with the error, and that a
    savepoint of the Connection's own is rolled back. On every Engine, since a Session may bring one of its own.
    """
    with _listening:
        if not event.contains(Engine, "handle_error", _handle_error):
            event.listen(Engine, "handle_error", _handle_error)
            event.listen(Engine, "savepoint", _savepoint)
            event.listen(Engine, "rollback_savepoint", _rollback_savepoint)
            event.listen(Engine, "release_savepoint", _release_savepoint)


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

    __slots__ = ("began", "count", "transaction", "undone")

    def __init__(self) -> None:
        self.count = 0
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


def _savepoint(connection: Connection, _name: None) -> None:
    found = _savepoints_of(connection)
    found.count += 1
    # The event comes before the savepoint has its name: SQLAlchemy numbers them from 1 on each Connection.
    found.began[f"sa_savepoint_{found.count}"] = next_moment()


def _rollback_savepoint(connection: Connection, name: str, _context: None) -> None:
    found = _savepoints_of(connection)
    began = _take(found, name)
    if began is not None:
        # A longer span swallows those inside it, so the list does not outgrow the savepoints that lie side by side.
        found.undone = [span for span in found.undone if span[0] < began] + [(began, next_moment())]


def _release_savepoint(connection: Connection, name: str, _context: None) -> None:
    _take(_savepoints_of(connection), name)


def _take(found: _Savepoints, name: str) -> int | None:
    """When the savepoint began; the innermost one is meant where the Connection had some before we listened."""
    if name not in found.began and found.began:
        name = next(reversed(found.began))
    return found.began.pop(name, None)


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
