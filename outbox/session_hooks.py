"""Where SQLAlchemy's events drive units of work: the INSERT before the commit, the send after it. Not what is sent.

SQLAlchemy fires `before_commit` and `after_commit` for savepoints too, and `after_commit` also while an outer
transaction of the Session's own Connection is still open (sqlalchemy#4794, #6823); an exception out of `after_commit`
reaches the caller of a commit() that has succeeded. Each hook below says which of these it guards against.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.engine.base import RootTransaction
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, SessionTransaction

from messaging.errors import NoTransaction, TransactionDoomed
from outbox.database import DEADLOCK, LOCK_WAIT_TIMEOUT, error_code
from outbox.unit_of_work import TOO_LATE, UnitOfWork, next_moment

if TYPE_CHECKING:
    from outbox.box import Outbox

logger = logging.getLogger(__name__)

_INFO_KEY: Final = "outbox.units_of_work"
_SEALED_KEY: Final = "outbox.sealed"
_FLUSHES_MAX: Final = 100
_doomed: WeakKeyDictionary[RootTransaction, BaseException] = WeakKeyDictionary()
_savepoints: WeakKeyDictionary[Connection, _Savepoints] = WeakKeyDictionary()
_listening = threading.Lock()


def listen_to_sessions() -> None:
    """Listen to every Session of this process, once; a Session that publishes nothing pays one dictionary look-up."""
    with _listening:
        if not event.contains(Session, "before_commit", _before_commit):
            event.listen(Session, "before_commit", _before_commit)
            event.listen(Session, "after_commit", _after_commit)
            event.listen(Session, "after_rollback", _after_rollback)
            event.listen(Session, "after_soft_rollback", _after_soft_rollback)
            event.listen(Session, "after_transaction_end", _after_transaction_end)


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


def unit_of(session: Session, box: Outbox) -> UnitOfWork:
    """This Session's unit of work for this Outbox; made on first use, gone with the root transaction.

    Raises NoTransaction once the rows are written, or the transaction is rolled back: in an event of the commit's own,
    say, where a message would be neither sent nor refused.
    """
    if session.info.get(_SEALED_KEY):
        raise NoTransaction(TOO_LATE)
    units: dict[Outbox, UnitOfWork] = session.info.setdefault(_INFO_KEY, {})
    if box not in units:
        units[box] = UnitOfWork()
    return units[box]


def open_savepoints(session: Session) -> tuple[SessionTransaction, ...]:
    """The Session's open savepoints, outermost first; an empty tuple mostly, and at no cost."""
    innermost = session.get_nested_transaction()
    if innermost is None:
        return ()
    found: list[SessionTransaction] = []
    transaction: SessionTransaction | None = innermost
    while transaction is not None:
        if transaction.nested:
            found.append(transaction)
        transaction = transaction.parent
    return tuple(reversed(found))


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


def _before_commit(session: Session) -> None:
    if session.in_nested_transaction():  # a savepoint's release: nothing is committed yet
        return
    # Flush first: objects that publish in their flush events must be heard before the one INSERT, and may be the only
    # ones that publish at all.
    _flush_all(session)
    for box, unit in session.info.get(_INFO_KEY, {}).items():
        if unit.rows and not unit.written:
            connection = session.connection(bind_arguments=box.bind_arguments(session))
            unit.forget(_undone_spans(connection))
            if unit.rows:
                box.write(connection, unit)
    session.info[_SEALED_KEY] = True


def _flush_all(session: Session) -> None:
    """Flush until nothing is left to flush, as commit() is about to: a flush event may have added more."""
    for _ in range(_FLUSHES_MAX):
        if not (session.new or session.dirty or session.deleted):
            return
        session.flush()


def _after_commit(session: Session) -> None:
    units = session.info.get(_INFO_KEY)
    if not units or session.in_nested_transaction():
        return
    bind = session.get_bind() if session.bind is not None else None
    # A Session on somebody's open Connection has committed nothing yet: its rows are left to the compensator.
    still_open = isinstance(bind, Connection) and bind.in_transaction()
    for box, unit in session.info.pop(_INFO_KEY).items():
        if unit.written and not still_open:
            box.committed(unit)
        unit.closed = True


def _after_rollback(session: Session) -> None:
    """The root is rolled back but not over yet, as after a failed flush: what is published now would vanish with it."""
    if not session.in_nested_transaction():
        session.info[_SEALED_KEY] = True


def _after_soft_rollback(session: Session, previous: SessionTransaction) -> None:
    units = session.info.get(_INFO_KEY)
    if units and previous.nested:
        for unit in units.values():
            unit.savepoint_rolled_back(previous)


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    """Rolled back, or closed without a commit: nothing of it was ever published."""
    if transaction.parent is None:
        session.info.pop(_SEALED_KEY, None)
        for unit in session.info.pop(_INFO_KEY, {}).values():
            unit.closed = True


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


def _undone_spans(connection: Connection) -> list[tuple[int, int]]:
    return _savepoints_of(connection).undone if connection in _savepoints else []


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
    set so.
    """
    match error_code(error):
        case code if code == DEADLOCK:
            return True
        case code if code == LOCK_WAIT_TIMEOUT:
            return _rolls_back_on_timeout(connection)
        case _:
            return False


def _rolls_back_on_timeout(connection: Connection) -> bool:
    cursor: Any = connection.connection.cursor()
    try:
        cursor.execute("SELECT @@innodb_rollback_on_timeout")
        row = cursor.fetchone()
    finally:
        cursor.close()
    return bool(row and row[0])
