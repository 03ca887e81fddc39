"""Hooks on SQLAlchemy's Sessions: they drive the units of work, the INSERT before a commit and the send after it.

SQLAlchemy fires `before_commit` and `after_commit` for savepoints too, and `after_commit` also while an outer
transaction of the Session's own Connection is still open (sqlalchemy#4794, #6823); an exception out of `after_commit`
reaches the caller of a commit() that has succeeded. Each hook below names the case that it guards against.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.base import NestedTransaction
from sqlalchemy.orm import Session, SessionTransaction

from outbox.producer.engine_hooks import (
    DriverSavepoint,
    DriverTransaction,
    Participant,
    driver_transaction,
    refuse_if_doomed,
    refuse_if_rolled_back,
    undone_spans,
    unheard,
    watch_dialect,
    without_frames,
)
from outbox.producer.unit_of_work import TOO_LATE, Savepoint, UnitOfWork
from outbox.store.databases.supported import known_database
from outbox.store.row import OutboxRow
from outbox_core.common.errors import ConfigurationError, NoTransaction

if TYPE_CHECKING:
    from outbox.producer.commit_handler import CommitHandler

_FLUSHES_MAX: Final = 100
_name_of: Final = attrgetter("_savepoint")
"""The name of a savepoint of SQLAlchemy's, which has it in a private attribute alone."""
_listening = threading.Lock()
_commit_observers: Final[list[Callable[[Sequence[OutboxRow]], None]]] = []


def listen_to_sessions() -> None:
    """Listen to every Session of this process, once; a Session that publishes nothing pays one dictionary look-up."""
    with _listening:
        if not event.contains(Session, "before_commit", _before_commit):
            # Inserted first: an application's listener that raises would prevent the call of later ones.
            event.listen(Session, "after_begin", _after_begin, insert=True)
            event.listen(Session, "before_flush", _before_flush)
            event.listen(Session, "before_commit", _before_commit)
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


@dataclass(slots=True, eq=False)
class _JoinedConnection:
    """A Connection that a Session uses, and the driver's transaction that it has joined by it."""

    connection_ref: weakref.ref[Connection]
    transaction: DriverTransaction
    is_used: bool
    """Whether the Session has sent something by it, or is only bound to it."""

    @property
    def connection(self) -> Connection | None:
        """Returns None once it is garbage."""
        return self.connection_ref()


@dataclass(slots=True, eq=False)
class _Scope:
    """What can be rolled back at once: a Session's root transaction, or one of its savepoints.

    A savepoint of a Session is sent to a database only when its first statement is, so it may be none or several there.
    """

    transaction_ref: weakref.ref[SessionTransaction]
    marks: list[DriverSavepoint | DriverTransaction] = field(default_factory=list)
    """What the databases know of it."""
    is_undone: bool = False
    """Whether the Session has rolled it back; its block has not ended yet."""
    is_released: bool = False


@dataclass(slots=True, eq=False)
class _SessionState:
    """What we know of one Session and its transaction. Refers to neither, nor to its Connections: they could never be
    collected. The application cannot reach it, as it could `Session.info`.
    """

    has_changes: Callable[[], bool]
    """Whether the Session has changes to flush."""
    is_owner: bool = False
    writes_first: bool = False
    """Whether its transaction acquires SQLite's write lock when it begins."""
    joined: list[_JoinedConnection] = field(default_factory=list)
    scopes: list[_Scope] = field(default_factory=list)
    participant: Participant[CommitHandler] = field(init=False)
    gone_savepoint: bool = False
    """Whether a savepoint ended otherwise than the Session believes: its rows stand, or went, without its messages."""

    def __post_init__(self) -> None:
        self.participant = Participant(has_changes=self.has_changes, is_owner=self.is_owner)

    def joined_by(self, connection: Connection) -> _JoinedConnection | None:
        """Returns how this Connection is joined, if it is."""
        return next((joined for joined in self.joined if joined.connection is connection), None)

    def begin_anew(self) -> None:
        """The transaction has ended: forget it."""
        self.writes_first = self.gone_savepoint = False
        self.joined, self.scopes = [], []
        self.participant = Participant(has_changes=self.has_changes, is_owner=self.is_owner)

    def scope(self, transaction: SessionTransaction) -> _Scope:
        """Returns the scope of this transaction or savepoint."""
        for scope in reversed(self.scopes):
            if scope.transaction_ref() is transaction:
                return scope
        scope = _Scope(weakref.ref(transaction))
        self.scopes.append(scope)
        return scope


# Not in Session.info, which is the application's to clear: its messages would be lost, and its rows committed.
_states: Final[weakref.WeakKeyDictionary[Session, _SessionState]] = weakref.WeakKeyDictionary()


def _state_of(session: Session) -> _SessionState:
    state = _states.get(session)
    if state is None:
        state = _states[session] = _SessionState(partial(_has_changes, weakref.ref(session)))
    return state


def _has_changes(session_ref: weakref.ref[Session]) -> bool:
    session = session_ref()
    return session is not None and bool(session.new or session.dirty or session.deleted)


def unit_of(session: Session, box: CommitHandler) -> UnitOfWork:
    """Returns this Session's unit of work for this Outbox; created on first use, removed with the root transaction.

    Raises NoTransaction once the rows are written or the transaction or savepoint is rolled back, for instance in an
    event of the commit itself: a message would neither be sent nor rejected there.
    """
    state = _state_of(session)
    if state.participant.is_sealed:
        raise NoTransaction(TOO_LATE)
    savepoint = session.get_nested_transaction()
    if savepoint is not None and state.scope(savepoint).is_undone:
        raise NoTransaction("this savepoint is rolled back, as after a failed flush: end its block before you publish")
    _join_all(session, state)
    _join_given_connections(session, state, box)
    _refuse_if_over(state)
    if not state.joined:
        _expect_connection(session)
    units = state.participant.units
    if box not in units:
        units[box] = UnitOfWork()
    return units[box]


def own(session: Session) -> None:
    """Record that this Session owns its transactions: its Connection must not commit them."""
    state = _state_of(session)
    state.is_owner = state.participant.is_owner = True


def write_first(session: Session) -> None:
    """Make this Session's transaction acquire SQLite's write lock when it begins, if it has used no connection yet."""
    state = _state_of(session)
    if state.joined:
        return
    if any(isinstance(bind, Connection) for bind in (session.bind, *_binds(session))):
        return  # its transaction is somebody else's, and may have begun
    state.writes_first = True


def open_savepoints(session: Session) -> tuple[Savepoint, ...]:
    """Returns the Session's open savepoints, outermost first; mostly an empty tuple, without a cost."""
    transaction: SessionTransaction | None = session.get_nested_transaction()
    if transaction is None:
        return ()
    state = _state_of(session)
    savepoints: list[Savepoint] = []
    while transaction is not None:
        if transaction.nested:
            savepoints.append(state.scope(transaction))
        transaction = transaction.parent
    return tuple(reversed(savepoints))


def _refuse_if_over(state: _SessionState) -> None:
    """Raise an error if the Session's transaction was ended below it: by its Connection, or by the server; or one of
    its savepoints was rolled back below it, so that what follows is not in the savepoint that the Session will end.
    """
    for joined in state.joined:
        connection = joined.connection
        joined.transaction.check_status()
        if connection is None or joined.transaction.is_over or not connection.in_transaction():
            if connection is not None:
                refuse_if_rolled_back(connection)
            raise NoTransaction(
                "this transaction was committed or rolled back by its Connection, which the Session does not know: "
                "end it by the Session or its block"
            )
    for scope in state.scopes:  # last: of a connection that was lost the error above says that a retry can help
        if not scope.is_undone and any(mark.is_undone for mark in scope.marks):
            raise NoTransaction(
                "this transaction, or a savepoint of it, was rolled back by its Connection, which the Session does not "
                "know: roll back by the Session or its block, and run it again"
            )


def _refuse_if_doomed(state: _SessionState, box: CommitHandler) -> None:
    """Raise an error if nothing of the Session's transaction may commit, whether or not it has a message left."""
    _refuse_if_over(state)
    for joined in state.joined:
        connection = joined.connection
        if connection is not None and box.shares_database(connection):
            refuse_if_doomed(connection)
    if state.gone_savepoint:
        raise NoTransaction(
            "a savepoint of this session was ended below it (by its Connection, or by a statement that commits), and "
            "its rows may stand although the session has given up its messages: roll back, and run it again"
        )
    for unit in state.participant.units.values():
        if unit.failed is not None:
            raise without_frames(unit.failed)  # a copy each time: what is raised gets frames


def _before_flush(session: Session, _context: object, _instances: object) -> None:
    """A flush behind a transaction that ended below its Session writes into another one, or commits by itself: a
    commit by the Connection would then take the rows along, and not the messages that were published with them.
    """
    state = _states.get(session)
    if state is not None:
        for box in state.participant.units:
            _refuse_if_doomed(state, box)


def _before_commit(session: Session) -> None:
    if session.in_nested_transaction() and not _root_commits(session):
        return  # a savepoint's release: nothing is committed yet
    # Flush first: objects may publish in their flush events, which must precede the INSERT, and may be the only
    # publishers.
    _flush_all(session)
    state = _state_of(session)
    _join_all(session, state)
    # In one order, whichever published first: two transactions that publish under ordered keys of the same outboxes
    # would lock these in opposite orders else, and one of them would be the victim of a deadlock.
    for box, unit in sorted(state.participant.units.items(), key=lambda published: published[0].schema_name):
        _refuse_if_doomed(state, box)
        if unit.rows and not unit.written:
            connection = _connection_for(session, state, box)
            spans = undone_spans(connection)
            if unit.is_doubtful(spans):
                raise NoTransaction(
                    "a savepoint was rolled back below this session, which had published in it and had changes to "
                    "flush: these stand now, and their messages may be gone: roll back, and run it again; flush before "
                    "a savepoint is rolled back below the session"
                )
            unit.forget(spans)
            if unit.rows:
                box.write(connection, unit)
                unit.transaction = driver_transaction(connection)
    state.participant.is_sealed = True


def _root_commits(session: Session) -> bool:
    """Returns whether the root is being committed, with savepoints that are still open: it releases them, and has no
    other event before its COMMIT. Only a private attribute of SQLAlchemy tells it from the release of a savepoint.
    """
    root = session.get_transaction()
    return root is not None and vars(root).get("_current_fn") is not None


def _connection_for(session: Session, state: _SessionState, box: CommitHandler) -> Connection:
    """Returns the connection that the business wrote on: a Session may be bound to several, and may route to others.

    Raises ConfigurationError if it wrote on several: each has its own transaction, and may fail alone (unless they are
    committed in two phases).
    """
    used = [
        (connection, joined.transaction)
        for joined in state.joined
        if joined.is_used and (connection := joined.connection) is not None
    ]
    if not used:
        return _connect(session, box)
    sharing = [connection for connection, _ in used if box.shares_database(connection)]
    writing = [connection for connection, transaction in used if transaction.writes]
    if not session.twophase:
        _refuse_several(writing, sharing)
    # A replica behind the primary's address is the same database by its URL, but has not the transaction that wrote.
    own_connections = [connection for connection in sharing if box.is_own(connection)]
    for candidates in ([connection for connection in writing if connection in sharing], own_connections, sharing):
        if len(candidates) == 1:
            return candidates[0]
    if sharing:
        raise ConfigurationError(
            f"this session has {len(sharing)} transactions open on the outbox's server, and a message can be in one: "
            "make the Outbox with the engine that the business writes with"
        )
    return _connect(session, box)


def _refuse_several(writing: Sequence[Connection], sharing: Sequence[Connection]) -> None:
    """Raise ConfigurationError unless all writes of the Session are in one transaction on the outbox's server."""
    if any(connection not in sharing for connection in writing):
        raise ConfigurationError(
            f"this session has written to another database than the outbox's ({_shown(writing)}): business tables and "
            "message table must share one server, or no transaction can hold both"
        )
    if len(writing) > 1:
        raise ConfigurationError(
            f"this session has written in {len(writing)} transactions ({_shown(writing)}), and a message can be in one "
            "of them: write all that belongs together with one engine"
        )


def _connect(session: Session, box: CommitHandler) -> Connection:
    """Returns a connection to the outbox's database for a Session that has none: the open Connection that classes are
    bound to, or what the outbox finds.

    Raises ConfigurationError if classes are bound to several such Connections.
    """
    bound = {id(bind): bind for bind in _binds(session) if isinstance(bind, Connection) and box.shares_database(bind)}
    if len(bound) > 1:
        raise ConfigurationError(
            f"this session is bound to {len(bound)} Connections to the outbox's server, and a message can be in one"
        )
    return session.connection(bind_arguments={"bind": next(iter(bound.values()))}) if bound else box.connect(session)


def _binds(session: Session) -> Collection[Engine | Connection]:
    """Returns the binds of this Session's classes and tables; SQLAlchemy 2.0 has it in a private attribute."""
    binds: Mapping[Any, Engine | Connection] = vars(session).get("binds") or vars(session).get("_Session__binds", {})
    return binds.values()


def _shown(connections: Sequence[Connection]) -> str:
    urls = [connection.engine.url.set(query={}) for connection in connections]
    return ", ".join(url.render_as_string(hide_password=True) for url in urls)


def _after_begin(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    """Record each connection of this transaction or savepoint, before anything can fail: this event comes once."""
    watch_dialect(connection.dialect)
    unheard.pop(id(session), None)
    state = _state_of(session)
    try:
        if state.writes_first and state.joined_by(connection) is None:
            database = known_database(connection.dialect)
            if database is not None:
                database.take_write_lock(connection)
    finally:
        # Behind the write lock, whose own ROLLBACK would be refused in a transaction that has messages.
        if not connection.invalidated:
            _join(state, connection, is_used=True)
            _mark(state.scope(transaction), connection)


def _join(state: _SessionState, connection: Connection, *, is_used: bool) -> None:
    """Take part in the driver's transaction of this connection. Idempotent."""
    joined = state.joined_by(connection)
    if joined is None:
        watch_dialect(connection.dialect)
        transaction = driver_transaction(connection)
        transaction.join(state.participant)
        state.joined.append(_JoinedConnection(weakref.ref(connection), transaction, is_used))
    elif is_used:
        joined.is_used = True


def _expect_connection(session: Session) -> None:
    """Have this Session, which has published and used no connection, join the first that it writes by, also if an
    application's listener of after_begin is called before ours and raises: its Connection may commit.
    """
    key = id(session)
    if key in unheard:
        return
    session_ref = weakref.ref(session, lambda _: unheard.pop(key, None))

    def join_if_used(connection: Connection) -> None:
        expecting = session_ref()
        root = None if expecting is None else expecting.get_transaction()
        if expecting is not None and root is not None and connection in (vars(root)["_connections"] or ()):
            unheard.pop(key, None)
            _join(_state_of(expecting), connection, is_used=True)

    unheard[key] = join_if_used


def _mark(scope: _Scope, connection: Connection) -> None:
    """Record what the connection's database knows of a scope: its savepoint, or the whole transaction."""
    transaction = driver_transaction(connection)
    scope.marks.append(transaction.innermost_savepoint() if connection.in_nested_transaction() else transaction)


def _ending_scope(state: _SessionState, transaction: SessionTransaction) -> _Scope:
    """Returns the scope of a transaction or savepoint that ends, with the savepoints of which we have not heard, as a
    listener that was called before ours has raised: without a mark its rows would be taken for rolled back.
    """
    scope = state.scope(transaction)
    connections = vars(transaction)["_connections"]  # see _join_all
    if len(connections) != 2 * len(scope.marks):
        for connection, begun, *_ in connections.values():
            if isinstance(begun, NestedTransaction) and not (connection.invalidated or connection.closed):
                savepoint = driver_transaction(connection).savepoint(_name_of(begun))
                if savepoint not in scope.marks:
                    scope.marks.append(savepoint)
    return scope


def _join_all(session: Session, state: _SessionState) -> None:
    """Join what the Session uses without our having heard of it: a listener that was called before ours has raised.

    SQLAlchemy 2.0 has the connections of a transaction in a private attribute alone.
    """
    root = session.get_transaction()
    connections = {} if root is None else vars(root)["_connections"]  # each twice: by itself and by its engine
    if len(connections) == 2 * sum(joined.is_used for joined in state.joined):
        return
    for connection, *_ in connections.values():
        if not connection.invalidated:
            _join(state, connection, is_used=True)


def _join_given_connections(session: Session, state: _SessionState, box: CommitHandler) -> None:
    """Join the open transactions of Connections to the outbox's database that this Session is bound to and has not used
    yet: their owner may commit first.
    """
    for bind in (session.bind, *_binds(session)):
        if not isinstance(bind, Connection) or bind.invalidated or not bind.in_transaction():
            continue
        if box.shares_database(bind):
            _join(state, bind, is_used=False)


def _flush_all(session: Session) -> None:
    """Flush until nothing is left, as commit() does: a flush event may add more."""
    for _ in range(_FLUSHES_MAX):
        if not (session.new or session.dirty or session.deleted):
            return
        session.flush()


def _after_commit(session: Session) -> None:
    state = _states.get(session)
    if state is None:
        return
    savepoint = session.get_nested_transaction()
    if savepoint is not None:
        state.scope(savepoint).is_released = True
        return
    units, state.participant.units = state.participant.units, {}
    for box, unit in units.items():
        for observer in tuple(_commit_observers):
            observer((*unit.written_rows, *unit.withdrawals))
        if unit.written:
            _send_when_committed(box, unit)
        unit.closed = True


def _send_when_committed(box: CommitHandler, unit: UnitOfWork) -> None:
    """Send now; if the Session has joined a Connection's transaction, which is still open, send after its COMMIT."""
    transaction, act = unit.transaction, partial(box.committed, unit)
    if transaction is None or transaction.is_over:
        act()
    else:
        transaction.when_committed(act, since=unit.since)


def _after_rollback(session: Session) -> None:
    """The root or a savepoint is rolled back but not closed yet: messages published in it now would be lost.

    For a savepoint that a failed flush has rolled back, SQLAlchemy has no other event: `after_soft_rollback` names the
    flush's own transaction, and the end of the block then only closes the savepoint.
    """
    state = _state_of(session)
    savepoint = session.get_nested_transaction()
    if savepoint is not None:
        _give_up(state, _ending_scope(state, savepoint))
        return
    state.participant.is_sealed = True
    root = session.get_transaction()
    if root is not None and all(mark.is_undone for mark in _ending_scope(state, root).marks):
        _discard_all(state)


def _give_up(state: _SessionState, savepoint: _Scope) -> None:
    """Discard what was published in a savepoint, if its rows went as well: by a rollback that was sent, for each
    database that knows of it. Otherwise they may stand, and the transaction must not commit.
    """
    savepoint.is_undone = True
    if all(mark.is_undone for mark in savepoint.marks):
        for unit in state.participant.units.values():
            unit.savepoint_rolled_back(savepoint)
    else:
        state.gone_savepoint = True


def _discard_all(state: _SessionState) -> None:
    for unit in state.participant.units.values():
        unit.discard()


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    """Rolled back, or closed without a commit: discard its messages, if its rows went as well."""
    state = _states.get(session)
    if state is None or not (transaction.nested or transaction.parent is None):
        return
    scope = _ending_scope(state, transaction)
    state.scopes.remove(scope)
    if transaction.nested:
        if not (scope.is_released or scope.is_undone):
            _give_up(state, scope)
    else:
        # Without marks the Session has sent nothing: then rows that its message is about may be its Connection's own.
        is_separate = bool(scope.marks) or session.join_transaction_mode == "create_savepoint"
        if is_separate and all(mark.is_undone for mark in scope.marks):
            _discard_all(state)
        for joined in state.joined:
            joined.transaction.leave(state.participant)
        for unit in state.participant.units.values():
            unit.closed = True
        unheard.pop(id(session), None)
        state.begin_anew()
