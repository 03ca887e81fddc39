"""Where SQLAlchemy's events drive units of work: the INSERT before the commit, the send after it. Not what is sent.

SQLAlchemy fires `before_commit` and `after_commit` for savepoints too, and `after_commit` also while an outer
transaction of the Session's own Connection is still open (sqlalchemy#4794, #6823); an exception out of `after_commit`
reaches the caller of a commit() that has succeeded. Each hook below says which of these it guards against.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

from messaging.errors import ConfigurationError, NoTransaction
from outbox.engine_hooks import undone_spans, watch_savepoints
from outbox.row import OutboxRow
from outbox.unit_of_work import TOO_LATE, UnitOfWork

if TYPE_CHECKING:
    from outbox.box import Outbox

_UNITS_KEY: Final = "outbox.units_of_work"
"""Where Session.info has its units of work, by Outbox."""
_SEALED_KEY: Final = "outbox.sealed"
_CONNECTIONS_KEY: Final = "outbox.connections"
_FLUSHES_MAX: Final = 100
_listening = threading.Lock()
_hearers: Final[list[Callable[[Sequence[OutboxRow]], None]]] = []


def listen_to_sessions() -> None:
    """Listen to every Session of this process, once; a Session that publishes nothing pays one dictionary look-up."""
    with _listening:
        if not event.contains(Session, "before_commit", _before_commit):
            event.listen(Session, "after_begin", _after_begin)
            event.listen(Session, "before_commit", _before_commit)
            # First of all: a listener of the application's that raises would keep those after it from being called.
            event.listen(Session, "after_commit", _after_commit, insert=True)
            event.listen(Session, "after_rollback", _after_rollback)
            event.listen(Session, "after_soft_rollback", _after_soft_rollback)
            event.listen(Session, "after_transaction_end", _after_transaction_end)


@contextmanager
def hearing(hearer: Callable[[Sequence[OutboxRow]], None]) -> Iterator[None]:
    """Tell the hearer, until the block ends, what each commit wrote, before the sender has it; it must not raise.

    Also of a Session that has joined a transaction which somebody else will end.
    """
    _hearers.append(hearer)
    try:
        yield
    finally:
        _hearers.remove(hearer)


def unit_of(session: Session, box: Outbox) -> UnitOfWork:
    """This Session's unit of work for this Outbox; made on first use, gone with the root transaction.

    Raises NoTransaction once the rows are written, or the transaction is rolled back: in an event of the commit's own,
    say, where a message would be neither sent nor refused.
    """
    if session.info.get(_SEALED_KEY):
        raise NoTransaction(TOO_LATE)
    units: dict[Outbox, UnitOfWork] = session.info.setdefault(_UNITS_KEY, {})
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


def _before_commit(session: Session) -> None:
    if session.in_nested_transaction():  # a savepoint's release: nothing is committed yet
        return
    # Flush first: objects that publish in their flush events must be heard before the one INSERT, and may be the only
    # ones that publish at all.
    _flush_all(session)
    for box, unit in session.info.get(_UNITS_KEY, {}).items():
        if unit.rows and not unit.written:
            connection = _connection_for(session, box)
            unit.forget(undone_spans(connection))
            if unit.rows:
                box.write(connection, unit)
    session.info[_SEALED_KEY] = True


def _connection_for(session: Session, box: Outbox) -> Connection:
    """The connection that the business writes on: a Session whose classes are bound to an engine of their own may hold
    one to the outbox's database already, and a second one would be a second transaction.

    Raises ConfigurationError where there are several such transactions and none is on the outbox's own engine.
    """
    opened: list[Connection] = session.info.get(_CONNECTIONS_KEY, []) if session.bind is None else []
    sharing = [connection for connection in opened if box.shares_database(connection)]
    # A follower behind the leader's address is the same database by its URL, but not the transaction that is written.
    own = [connection for connection in sharing if connection.engine.pool is box.engine.pool]
    if own or len(sharing) == 1:
        return (own or sharing)[0]
    if sharing:
        raise ConfigurationError(
            f"this session has {len(sharing)} transactions open on the outbox's server, and a message can be in one: "
            "make the Outbox with the engine that the business writes with"
        )
    return session.connection(bind_arguments=box.bind_arguments(session))


def _after_begin(session: Session, _transaction: SessionTransaction, connection: Connection) -> None:
    """Remember the connections of this root transaction, each once."""
    watch_savepoints(connection.dialect)
    found: list[Connection] = session.info.setdefault(_CONNECTIONS_KEY, [])
    if not any(one is connection for one in found):
        found.append(connection)


def _flush_all(session: Session) -> None:
    """Flush until nothing is left to flush, as commit() is about to: a flush event may have added more."""
    for _ in range(_FLUSHES_MAX):
        if not (session.new or session.dirty or session.deleted):
            return
        session.flush()


def _after_commit(session: Session) -> None:
    units = session.info.get(_UNITS_KEY)
    if not units or session.in_nested_transaction():
        return
    bind = session.get_bind() if session.bind is not None else None
    # A Session on somebody's open Connection has committed nothing yet: its rows are left to the compensator.
    still_open = isinstance(bind, Connection) and bind.in_transaction()
    for box, unit in session.info.pop(_UNITS_KEY).items():
        for hearer in tuple(_hearers):
            hearer(unit.written_rows)
        if unit.written and not still_open:
            box.committed(unit)
        unit.closed = True


def _after_rollback(session: Session) -> None:
    """The root is rolled back but not over yet, as after a failed flush: what is published now would vanish with it."""
    if not session.in_nested_transaction():
        session.info[_SEALED_KEY] = True


def _after_soft_rollback(session: Session, previous: SessionTransaction) -> None:
    units = session.info.get(_UNITS_KEY)
    if units and previous.nested:
        for unit in units.values():
            unit.savepoint_rolled_back(previous)


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    """Rolled back, or closed without a commit: nothing of it was ever published."""
    if transaction.parent is None:
        session.info.pop(_SEALED_KEY, None)
        session.info.pop(_CONNECTIONS_KEY, None)
        for unit in session.info.pop(_UNITS_KEY, {}).values():
            unit.closed = True
