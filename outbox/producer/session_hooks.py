"""Hooks on SQLAlchemy's Sessions: they drive the units of work, the INSERT before a commit and the send after it.

SQLAlchemy fires `before_commit` and `after_commit` for savepoints too, and `after_commit` also while an outer
transaction of the Session's own Connection is still open (sqlalchemy#4794, #6823); an exception out of `after_commit`
reaches the caller of a commit() that has succeeded. Each hook below names the case that it guards against.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.base import RootTransaction
from sqlalchemy.orm import Session, SessionTransaction

from outbox.producer.engine_hooks import (
    DriverTransaction,
    driver_transaction,
    undone_spans,
    unsent_error,
    watch_dialect,
)
from outbox.producer.unit_of_work import TOO_LATE, UnitOfWork
from outbox.store.database import take_write_lock
from outbox.store.row import OutboxRow
from outbox_core.common.errors import ConfigurationError, NoTransaction

if TYPE_CHECKING:
    from outbox.producer.commit_port import CommitPort

_UNITS_KEY: Final = "outbox.units_of_work"
"""The key in Session.info of its units of work, by Outbox."""
_SEALED_KEY: Final = "outbox.sealed"
_UNDONE_KEY: Final = "outbox.undone_savepoint"
"""The key of the savepoint that is rolled back but not closed yet."""
_JOINED_KEY: Final = "outbox.joined"
_OWNED_KEY: Final = "outbox.owned"
_WRITE_FIRST_KEY: Final = "outbox.write_first"
_FLUSHES_MAX: Final = 100
_listening = threading.Lock()
_commit_observers: Final[list[Callable[[Sequence[OutboxRow]], None]]] = []


def listen_to_sessions() -> None:
    """Listen to every Session of this process, once; a Session that publishes nothing pays one dictionary look-up."""
    with _listening:
        if not event.contains(Session, "before_commit", _before_commit):
            event.listen(Session, "after_begin", _after_begin)
            event.listen(Session, "before_commit", _before_commit)
            # Inserted first: an application's listener that raises would prevent the call of later ones.
            event.listen(Session, "after_commit", _after_commit, insert=True)
            event.listen(Session, "after_rollback", _after_rollback)
            event.listen(Session, "after_transaction_end", _after_transaction_end)


@contextmanager
def observed_commits(observer: Callable[[Sequence[OutboxRow]], None]) -> Iterator[None]:
    """Call `observer` inside the block with the rows of each commit, before the sender gets them; it must not raise.

    It is also called for a Session that has joined an outer transaction, which is not committed yet.
    """
    _commit_observers.append(observer)
    try:
        yield
    finally:
        _commit_observers.remove(observer)


def unit_of(session: Session, box: CommitPort) -> UnitOfWork:
    """Returns this Session's unit of work for this Outbox; created on first use, removed with the root transaction.

    Raises NoTransaction once the rows are written or the transaction or savepoint is rolled back, for instance in an
    event of the commit itself: a message would neither be sent nor rejected there.
    """
    if session.info.get(_SEALED_KEY):
        raise NoTransaction(TOO_LATE)
    undone = session.info.get(_UNDONE_KEY)
    if undone is not None and undone is session.get_nested_transaction():
        raise NoTransaction("this savepoint is rolled back, as after a failed flush: end its block before you publish")
    _refuse_if_over(session)
    units: dict[CommitPort, UnitOfWork] = session.info.setdefault(_UNITS_KEY, {})
    if box not in units:
        units[box] = UnitOfWork()
    return units[box]


def own(session: Session) -> None:
    """Record that this Session owns its transactions: its Connection must not commit them."""
    session.info[_OWNED_KEY] = True


def write_first(session: Session) -> None:
    """Make this Session's transaction acquire SQLite's write lock when it begins, if it has used no connection yet."""
    if session.info.get(_JOINED_KEY):
        return
    if any(isinstance(bind, Connection) for bind in (session.bind, *_binds(session))):
        return  # its transaction is somebody else's, and may have begun
    session.info[_WRITE_FIRST_KEY] = True


def open_savepoints(session: Session) -> tuple[SessionTransaction, ...]:
    """Returns the Session's open savepoints, outermost first; mostly an empty tuple, without a cost."""
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


def _refuse_if_over(session: Session) -> None:
    """Raise NoTransaction if the Session's transaction was ended below it, by its Connection."""
    joined: Sequence[_JoinedConnection] = session.info.get(_JOINED_KEY, ())
    for one in joined:
        if one.root is not None and not one.root.is_active:
            raise NoTransaction(
                "this transaction was committed or rolled back by its Connection, which the Session does not know: "
                "end it by the Session or its block"
            )


@dataclass(slots=True, eq=False, weakref_slot=True)
class _JoinedConnection:
    """A Connection that a Session uses, as a participant of the driver's transaction."""

    session: Session
    connection: Connection
    root: RootTransaction | None
    transaction: DriverTransaction

    def refuse_commit(self) -> None:
        """Raise NoTransaction if this commit is not the Session's own, and either the Session owns the transaction or
        messages are not written yet.
        """
        info = self.session.info
        if info.get(_OWNED_KEY) and not info.get(_SEALED_KEY):
            raise NoTransaction("the outbox began this transaction and commits it: leave the block or the function")
        if self._has_messages(written=False):
            raise NoTransaction(
                "this commit would leave messages behind: they are written when the Session commits "
                "(session.commit(), or leaving its block)"
            )

    def refuse_end(self, words: str) -> None:
        """Raise NoTransaction if the Session has published."""
        if self._has_messages(written=True):
            raise unsent_error(words)

    def _has_messages(self, *, written: bool) -> bool:
        units: dict[CommitPort, UnitOfWork] = self.session.info.get(_UNITS_KEY, {})
        undone = self.transaction.undone
        return any(unit.is_unwritten(undone) or (written and unit.written) for unit in units.values())


def _before_commit(session: Session) -> None:
    if session.in_nested_transaction() and not _root_commits(session):
        return  # a savepoint's release: nothing is committed yet
    # Flush first: objects may publish in their flush events, which must precede the INSERT, and may be the only
    # publishers.
    _flush_all(session)
    for box, unit in session.info.get(_UNITS_KEY, {}).items():
        if unit.rows and not unit.written:
            _refuse_if_over(session)
            connection = _connection_for(session, box)
            unit.forget(undone_spans(connection))
            if unit.rows:
                box.write(connection, unit)
    session.info[_SEALED_KEY] = True


def _root_commits(session: Session) -> bool:
    """Returns whether the root is being committed, with savepoints that are still open: it releases them, and has no
    other event before its COMMIT. Only a private attribute of SQLAlchemy tells it from the release of a savepoint.
    """
    root = session.get_transaction()
    return root is not None and vars(root).get("_current_fn") is not None


def _connection_for(session: Session, box: CommitPort) -> Connection:
    """Returns the connection that the business wrote on: a Session may be bound to several, and may route to others.

    Raises ConfigurationError if it wrote on several: each has its own transaction, and may fail alone (unless they are
    committed in two phases).
    """
    joined: list[_JoinedConnection] = session.info.get(_JOINED_KEY, [])
    if not joined:
        return session.connection(bind_arguments=_message_bind(session, box))
    sharing = [one for one in joined if box.shares_database(one.connection)]
    writing = [one for one in joined if one.transaction.writes]
    if not session.twophase:
        _refuse_several(writing, sharing)
    # A replica behind the primary's address is the same database by its URL, but has not the transaction that wrote.
    own = [one for one in sharing if box.is_own(one.connection)]
    for chosen in ([one for one in writing if one in sharing], own, sharing):
        if len(chosen) == 1:
            return chosen[0].connection
    if sharing:
        raise ConfigurationError(
            f"this session has {len(sharing)} transactions open on the outbox's server, and a message can be in one: "
            "make the Outbox with the engine that the business writes with"
        )
    return session.connection(bind_arguments=_message_bind(session, box))


def _refuse_several(writing: Sequence[_JoinedConnection], sharing: Sequence[_JoinedConnection]) -> None:
    """Raise ConfigurationError unless all writes of the Session are in one transaction on the outbox's server."""
    if any(one not in sharing for one in writing):
        raise ConfigurationError(
            f"this session has written to another database than the outbox's ({_shown(writing)}): business tables and "
            "message table must share one server, or no transaction can hold both"
        )
    if len(writing) > 1:
        raise ConfigurationError(
            f"this session has written in {len(writing)} transactions ({_shown(writing)}), and a message can be in one "
            "of them: write all that belongs together with one engine"
        )


def _message_bind(session: Session, box: CommitPort) -> dict[str, Engine | Connection]:
    """Returns the bind by which a Session without a connection gets one to the outbox's database: the open Connection
    that classes are bound to, or the outbox's own engine if the Session has no bind.

    Raises ConfigurationError if classes are bound to several such Connections.
    """
    bound = {id(one): one for one in _binds(session) if isinstance(one, Connection) and box.shares_database(one)}
    if len(bound) > 1:
        raise ConfigurationError(
            f"this session is bound to {len(bound)} Connections to the outbox's server, and a message can be in one"
        )
    return {"bind": next(iter(bound.values()))} if bound else box.bind_arguments(session)


def _binds(session: Session) -> Collection[Engine | Connection]:
    """Returns the binds of this Session's classes and tables; SQLAlchemy 2.0 has it in a private attribute."""
    binds: Mapping[Any, Engine | Connection] = vars(session).get("binds") or vars(session).get("_Session__binds", {})
    return binds.values()


def _shown(joined: Sequence[_JoinedConnection]) -> str:
    urls = [one.connection.engine.url.set(query={}) for one in joined]
    return ", ".join(url.render_as_string(hide_password=True) for url in urls)


def _after_begin(session: Session, _transaction: SessionTransaction, connection: Connection) -> None:
    """Record the connections of this root transaction, each once."""
    watch_dialect(connection.dialect)
    joined: list[_JoinedConnection] = session.info.setdefault(_JOINED_KEY, [])
    if not any(one.connection is connection for one in joined):
        if _WRITE_FIRST_KEY in session.info:
            take_write_lock(connection)
        one = _JoinedConnection(session, connection, connection.get_transaction(), driver_transaction(connection))
        joined.append(one)
        one.transaction.join(one)


def _flush_all(session: Session) -> None:
    """Flush until nothing is left, as commit() does: a flush event may add more."""
    for _ in range(_FLUSHES_MAX):
        if not (session.new or session.dirty or session.deleted):
            return
        session.flush()


def _after_commit(session: Session) -> None:
    units = session.info.get(_UNITS_KEY)
    if not units or session.in_nested_transaction():
        return
    for box, unit in session.info.pop(_UNITS_KEY).items():
        for observer in tuple(_commit_observers):
            observer((*unit.written_rows, *unit.withdrawals))
        if unit.written:
            _send_when_committed(session, box, unit)
        unit.closed = True


def _send_when_committed(session: Session, box: CommitPort, unit: UnitOfWork) -> None:
    """Send now; if the Session has joined a Connection's transaction, which is still open, send after its COMMIT."""
    act = partial(box.committed, unit)
    if unit.transaction is None or not unit.transaction.is_active:
        act()
        return
    joined: list[_JoinedConnection] = session.info.get(_JOINED_KEY, [])
    for one in joined:
        if one.root is unit.transaction:
            one.transaction.when_committed(act)


def _after_rollback(session: Session) -> None:
    """The root or a savepoint is rolled back but not closed yet: messages published in it now would be lost.

    For a savepoint that a failed flush has rolled back, SQLAlchemy has no other event: `after_soft_rollback` names the
    flush's own transaction, and the end of the block then only closes the savepoint.
    """
    savepoint = session.get_nested_transaction()
    if savepoint is None:
        session.info[_SEALED_KEY] = True
        return
    session.info[_UNDONE_KEY] = savepoint
    for unit in session.info.get(_UNITS_KEY, {}).values():
        unit.savepoint_rolled_back(savepoint)


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    """Rolled back, or closed without a commit: discard its messages."""
    if session.info.get(_UNDONE_KEY) is transaction:
        del session.info[_UNDONE_KEY]
    if transaction.parent is None:
        session.info.pop(_SEALED_KEY, None)
        session.info.pop(_WRITE_FIRST_KEY, None)
        for joined in session.info.pop(_JOINED_KEY, ()):
            joined.transaction.leave(joined)
        for unit in session.info.pop(_UNITS_KEY, {}).values():
            unit.closed = True
