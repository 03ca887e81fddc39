"""Where SQLAlchemy's events drive units of work: the INSERT before the commit, the send after it. Not what is sent.

SQLAlchemy fires `before_commit` and `after_commit` for savepoints too, and `after_commit` also while an outer
transaction of the Session's own Connection is still open (sqlalchemy#4794, #6823); an exception out of `after_commit`
reaches the caller of a commit() that has succeeded. Each hook below says which of these it guards against.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

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
from outbox.store.database import WRITE_LOCK_FIRST
from outbox.store.row import OutboxRow
from outbox_core.common.errors import ConfigurationError, NoTransaction

if TYPE_CHECKING:
    from outbox.producer.outbox_ports import CommitSink

_UNITS_KEY: Final = "outbox.units_of_work"
"""Where Session.info has its units of work, by Outbox."""
_SEALED_KEY: Final = "outbox.sealed"
_JOINED_KEY: Final = "outbox.joined"
_OWNED_KEY: Final = "outbox.owned"
_OPTIONS_KEY: Final = "outbox.execution_options"
"""Where Session.info has the options that the Session had before write_first()."""
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


def unit_of(session: Session, box: CommitSink) -> UnitOfWork:
    """This Session's unit of work for this Outbox; made on first use, gone with the root transaction.

    Raises NoTransaction once the rows are written, or the transaction is rolled back: in an event of the commit's own,
    say, where a message would be neither sent nor refused.
    """
    if session.info.get(_SEALED_KEY):
        raise NoTransaction(TOO_LATE)
    _refuse_if_over(session)
    units: dict[CommitSink, UnitOfWork] = session.info.setdefault(_UNITS_KEY, {})
    if box not in units:
        units[box] = UnitOfWork()
    return units[box]


def own(session: Session) -> None:
    """Note that this Session begins and ends its transactions itself: nobody commits them by its Connection."""
    session.info[_OWNED_KEY] = True


def write_first(session: Session) -> None:
    """Have this Session's transaction take SQLite's write lock first, if it has asked the database for nothing yet."""
    if session.info.get(_JOINED_KEY) or _OPTIONS_KEY in session.info or WRITE_LOCK_FIRST in session.execution_options:
        return
    if any(isinstance(bind, Connection) for bind in (session.bind, *session.binds.values())):
        return  # its options would stay on somebody's Connection
    session.info[_OPTIONS_KEY] = session.execution_options
    session.execution_options = session.execution_options.union({WRITE_LOCK_FIRST: True})


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


def _refuse_if_over(session: Session) -> None:
    """Raise NoTransaction where the Session's transaction was ended below it, by its Connection."""
    joined: Sequence[_Joined] = session.info.get(_JOINED_KEY, ())
    for one in joined:
        if one.root is not None and not one.root.is_active:
            raise NoTransaction(
                "this transaction was committed or rolled back by its Connection, which the Session does not know: "
                "end it by the Session or its block"
            )


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Joined:
    """A Connection that a Session has begun to work on; the driver's transaction asks it before it ends."""

    session: Session
    connection: Connection
    root: RootTransaction | None
    transaction: DriverTransaction

    def refuse_commit(self) -> None:
        """Raise NoTransaction where this commit is not the Session's own, and is no business of others or would leave
        messages behind.
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
        """Raise NoTransaction where the Session has published."""
        if self._has_messages(written=True):
            raise unsent_error(words)

    def _has_messages(self, *, written: bool) -> bool:
        units: dict[CommitSink, UnitOfWork] = self.session.info.get(_UNITS_KEY, {})
        undone = self.transaction.undone
        return any(unit.is_unwritten(undone) or (written and unit.written) for unit in units.values())


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


def _connection_for(session: Session, box: CommitSink) -> Connection:
    """The connection that the business wrote on: a Session may be bound to several, and may route to others.

    Raises ConfigurationError where it wrote on several: each is a transaction of its own, and may fail by itself
    (unless they are committed in two phases).
    """
    joined: list[_Joined] = session.info.get(_JOINED_KEY, [])
    if not joined:
        return session.connection(bind_arguments=_message_bind(session, box))
    sharing = [one for one in joined if box.shares_database(one.connection)]
    writing = [one for one in joined if one.transaction.writes]
    if not session.twophase:
        _refuse_several(writing, sharing)
    # A follower behind the leader's address is the same database by its URL, but not the transaction that is written.
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


def _refuse_several(writing: Sequence[_Joined], sharing: Sequence[_Joined]) -> None:
    """Raise ConfigurationError where not all that the Session wrote is in one transaction on the outbox's server."""
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


def _message_bind(session: Session, box: CommitSink) -> dict[str, Engine | Connection]:
    """Where a Session that has no connection yet gets the outbox's: the open Connection that classes are bound to, or
    the outbox's own engine where it has no bind of its own.

    Raises ConfigurationError where classes are bound to several such Connections.
    """
    bound = {id(one): one for one in session.binds.values() if isinstance(one, Connection) and box.shares_database(one)}
    if len(bound) > 1:
        raise ConfigurationError(
            f"this session is bound to {len(bound)} Connections to the outbox's server, and a message can be in one"
        )
    return {"bind": next(iter(bound.values()))} if bound else box.bind_arguments(session)


def _shown(joined: Sequence[_Joined]) -> str:
    urls = [one.connection.engine.url.set(query={}) for one in joined]
    return ", ".join(url.render_as_string(hide_password=True) for url in urls)


def _after_begin(session: Session, _transaction: SessionTransaction, connection: Connection) -> None:
    """Remember the connections of this root transaction, each once."""
    watch_dialect(connection.dialect)
    joined: list[_Joined] = session.info.setdefault(_JOINED_KEY, [])
    if not any(one.connection is connection for one in joined):
        one = _Joined(session, connection, connection.get_transaction(), driver_transaction(connection))
        joined.append(one)
        one.transaction.join(one)


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
    for box, unit in session.info.pop(_UNITS_KEY).items():
        for hearer in tuple(_hearers):
            hearer(unit.written_rows)
        if unit.written:
            _send_when_committed(session, box, unit)
        unit.closed = True


def _send_when_committed(session: Session, box: CommitSink, unit: UnitOfWork) -> None:
    """Now, or with the COMMIT of the Connection whose transaction the Session has joined: nothing is committed yet."""
    act = partial(box.committed, unit)
    if unit.transaction is None or not unit.transaction.is_active:
        act()
        return
    joined: list[_Joined] = session.info.get(_JOINED_KEY, [])
    for one in joined:
        if one.root is unit.transaction:
            one.transaction.when_committed(act)


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
        if _OPTIONS_KEY in session.info:
            session.execution_options = session.info.pop(_OPTIONS_KEY)
        for joined in session.info.pop(_JOINED_KEY, ()):
            joined.transaction.leave(joined)
        for unit in session.info.pop(_UNITS_KEY, {}).values():
            unit.closed = True
