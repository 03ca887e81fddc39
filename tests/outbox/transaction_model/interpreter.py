"""Performs a program's steps: with messages, or as plain SQLAlchemy with a witness row in the place of each message.

The plain run follows the other one's trace. What the outbox refused there is not done here: a statement, a publish and
a COMMIT that left its transaction open are passed over, and a COMMIT that ended it is a rollback. All else happens by
itself, so both must end with the same rows, and the witnesses are the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, Protocol, assert_never

from sqlalchemy import Connection, Engine, event, insert, select, text, update
from sqlalchemy.engine.base import RootTransaction
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, SessionTransaction, scoped_session, sessionmaker
from sqlalchemy.util import await_only, greenlet_spawn

from outbox import Outbox, OutboxError
from outbox.store.databases.database_port import WRITE_LOCK_FIRST
from tests.outbox.transaction_model.business import PAYMENTS, STANDING_ROW, WITNESSES, Payment, Witness
from tests.outbox.transaction_model.steps import (
    CURRENT,
    Begin,
    BeginConnection,
    BeginNested,
    Below,
    Bind,
    BoxBegin,
    Cancel,
    Cancelled,
    Close,
    CloseConnection,
    Collect,
    Commit,
    DoBelow,
    Drop,
    EmptyInfo,
    End,
    EndConnection,
    Ending,
    EndRoot,
    Execute,
    Factory,
    FailFlush,
    Finish,
    HoldLock,
    Info,
    InThread,
    Invalidate,
    Kill,
    LetGo,
    Listen,
    LoseAnswer,
    OpenConnection,
    Opening,
    OpenSession,
    Order,
    Pay,
    Prepare,
    Program,
    Propagation,
    Publish,
    PublishAgain,
    Reaction,
    Read,
    Rollback,
    RowWay,
    Statement,
    Step,
    Stranger,
    Topic,
    Transactional,
    WaitForLock,
    Way,
    WriteRow,
    walk,
)

Path = tuple[int | str, ...]
NUMBERS_MAX = 1_000
"""A program's rows are numbered below this."""
LAST_STRANGERS = 900
"""The numbers of the strangers that look at each connection of the pool at the end."""
DELAY = timedelta(hours=1)
_LOCK_CODES = frozenset({1205, 1213, 1020, 3572})


class Declined(Exception):
    """The business says no."""


class ListenerFailed(Exception):
    """A listener of the application raises."""


class Failure(StrEnum):
    """What kind of error a step raised."""

    REFUSED = "refused"
    """By the outbox, or by one of its statements."""
    LOCKED = "locked"
    LOST = "lost"
    """The connection."""
    NO_CONNECTION = "no connection"
    CANCELLED = "cancelled"
    OTHER = "other"


ONE_SIDED = frozenset({Failure.LOCKED, Failure.NO_CONNECTION, Failure.CANCELLED, Failure.LOST})

_SAVEPOINT_GONE = ("(1305, 'SAVEPOINT", "no such savepoint")
"""By which a database says that a savepoint, and mostly its transaction, has ended."""
_BLOCK_LEFT_OPEN = "Can't operate on closed transaction inside context manager"
"""By which SQLAlchemy refuses statements on a Connection, and not its COMMIT: the outbox needs one before it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended. `alive`: whether one that failed has ended no transaction."""

    failure: Failure | None = None
    error: str = ""
    alive: bool = False
    after_refusal: bool = False

    @property
    def says_savepoint_is_gone(self) -> bool:
        """Whether its error says that a savepoint is not there."""
        return any(words in self.error for words in _SAVEPOINT_GONE)


@dataclass(slots=True)
class Trace:
    """What a run did, by the places of its steps."""

    outcomes: dict[Path, Outcome] = field(default_factory=dict)
    rows: dict[int, str] = field(default_factory=dict)
    """The numbers of rows that were written without an error, and the slots that wrote them."""
    lazy: set[int] = field(default_factory=set)
    """Those that a later flush writes."""
    unflushed: set[int] = field(default_factory=set)
    """Numbers of witnesses that a later flush writes, in the plain run."""
    messages: dict[int, list[str]] = field(default_factory=dict)
    """The ids of the messages that were published without an error, by number."""
    publishers: dict[int, str] = field(default_factory=dict)
    opened: set[Path] = field(default_factory=set)
    """The steps that began a block."""
    pairs: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    """Numbers of witnesses that waited for a flush, in a Session on a Connection whose savepoints it does not know, or
    in a savepoint of its own that its Connection may roll back.
    """
    silent: set[int] = field(default_factory=set)
    """Torn numbers before a commit that went well, of which no error has told."""
    uncertain: set[int] = field(default_factory=set)
    """Numbers of which the plain run cannot say what became of them."""
    torn: set[int] = field(default_factory=set)
    """Numbers whose rows may have been committed out of sight, before their messages were written: the program must
    have been told so.
    """
    checked_out: int = 0

    def failed(self, path: Path) -> bool:
        """Whether a step raised."""
        outcome = self.outcomes.get(path)
        return outcome is not None and outcome.failure is not None


class Faults(Protocol):
    """What a run does to its database from outside."""

    def kill(self, connection: Connection) -> None:
        """End a connection at the server."""

    def lose_answer(self, connection: Connection) -> None:
        """Let the next COMMIT be done, and its answer be lost."""

    def hold_row(self) -> bool:
        """Have a stranger lock the standing row; returns whether it did."""

    def hold_message(self, message_id: str) -> None:
        """Have a stranger lock the place of a message."""

    def let_go(self) -> None:
        """Have the stranger roll back."""


@dataclass(slots=True, kw_only=True)
class Side:
    """A database to run programs on, and the boxes to publish with; without one it is the plain side."""

    engine: Engine
    async_engine: AsyncEngine | None
    faults: Faults
    boxes: tuple[Outbox, ...] = ()


class CancelAt:
    """Awaits something, and cancels it where it waits for the nth time."""

    def __init__(self, awaited: Awaitable[Any], waits: int) -> None:
        self._awaited = awaited
        self._waits = waits

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._awaited.__await__()
        waited = 0
        try:
            future = next(inner)
            while True:
                waited += 1
                if waited == self._waits:
                    if asyncio.isfuture(future):
                        future.cancel()
                    future = inner.throw(asyncio.CancelledError())
                    continue
                try:
                    sent = yield future
                except BaseException as error:
                    future = inner.throw(error)
                else:
                    future = inner.send(sent)
        except StopIteration as ended:
            return ended.value


@dataclass(slots=True)
class _Place:
    """A session or Connection of the program, and the blocks that it keeps of it, innermost last."""

    handle: Any
    blocks: list[Any] = field(default_factory=list)
    slot: str = ""
    connection_slot: str | None = None
    owner: Session | None = None
    """The Session of a Connection that a block of the outbox has opened."""
    context: tuple[int, int] = (0, 0)
    """The box and the thread of a body: a function of another box, or in another thread, does not join it."""
    diverged: bool = False
    """In the plain run: a lock, or a full pool, was met by one of the runs alone."""
    has_waiting_witness: bool = False
    """In the plain run: a witness waits for a flush, which may fail, where a message waits for the commit."""
    refused: bool = False
    """In the plain run: the outbox has refused something in the other one."""

    @property
    def is_connection(self) -> bool:
        return isinstance(self.handle, Connection | AsyncConnection)

    @property
    def session(self) -> Session:
        """The plain Session."""
        handle = self.handle() if isinstance(self.handle, scoped_session) else self.handle
        return handle.sync_session if isinstance(handle, AsyncSession) else handle

    @property
    def plain_connection(self) -> Connection:
        """The plain Connection of a place that is one."""
        return self.handle.sync_connection if isinstance(self.handle, AsyncConnection) else self.handle


class Run:
    """One run of a program on one side. Not for a second one."""

    def __init__(self, side: Side, program: Program, *, serial: int, followed: Trace | None = None) -> None:
        """`followed` is the trace of the run with messages, for the plain run that comes after it."""
        self.trace = Trace()
        self._side = side
        self._program = program
        self._serial = serial
        self._followed = followed
        self._places: dict[str, _Place] = {}
        self._current: list[_Place] = []
        self._roots: weakref.WeakKeyDictionary[Session, weakref.ref[RootTransaction]] = weakref.WeakKeyDictionary()
        self._is_async = side.async_engine is not None
        self._told = False
        self._was_cancelled = False
        self._was_refused = False
        self._was_lost_alone = False
        self._ended: set[str] = set()
        """Slots where a statement has ended SQLite's transaction: what comes then commits by itself."""
        self._was_switched = False
        """Whether a connection was switched to autocommit, which the pool may lend to anyone."""
        self._past_torn: set[int] = set()
        """Torn numbers whose transaction has ended."""

    def run(self) -> Trace:
        """Perform all steps, let go of everything, and look at each connection of the pool."""
        gc.disable()
        gc.freeze()  # what it collects is its own: to look at a whole process takes longer than the program
        try:
            self._body(self._program.steps, (), swallows=True)
            self._side.faults.let_go()
            self._finish()
            gc.collect()
            self.trace.checked_out = self._side.engine.pool.checkedout()  # type: ignore[attr-defined]
            self._last_strangers()
        finally:
            gc.enable()
        return self.trace

    # -- what becomes of a step --------------------------------------------------------------------------------------

    def _body(self, steps: tuple[Step, ...], path: Path, *, swallows: bool) -> None:
        for index, step in enumerate(steps):
            here = (*path, index)
            self._perform(step, here)
            leading = self.trace if self._followed is None else self._followed
            outcome = leading.outcomes.get(here)
            if outcome is None or outcome.failure is None:
                continue
            if outcome.failure is Failure.CANCELLED and self._followed is None and not isinstance(step, Cancelled):
                raise asyncio.CancelledError
            if not swallows:
                raise Declined

    def _perform(self, step: Step, path: Path) -> None:
        if self._followed is not None:
            seen = self._followed.outcomes.get(path)
            if seen is None or self._passes_over(step, seen):
                return
        if isinstance(step, Begin | BeginNested | BeginConnection):
            self.trace.opened.add(path)
        place = self._place(getattr(step, "slot", ""))
        root = self._root(place)
        self._attempt(path, lambda: self._do(step, path), slot=getattr(step, "slot", None), step=step)
        self._note_end(step, place, root, failed=self.trace.failed(path))

    def _passes_over(self, step: Step, seen: Outcome) -> bool:
        """Whether the plain run must not do what the outbox refused; does what stands for it."""
        place = self._place(getattr(step, "slot", ""))
        if seen.failure is Failure.CANCELLED and not isinstance(step, Cancelled | Transactional | BoxBegin):
            self._diverge(place)
            self._was_cancelled = True
            if isinstance(step, Stranger):
                self.trace.uncertain.add(step.number)  # its commit may have been done
            return True
        if seen.failure is None:
            return False
        self._note_doubtful_row(step, seen)
        if isinstance(step, OpenConnection):
            return True  # there was none in the pool: who used it there could not
        if seen.failure is Failure.REFUSED:
            self._note_refused(place)
        elif seen.failure is Failure.LOST or place is None or not place.diverged:
            return False
        match step:
            case Transactional() | BoxBegin() | InThread() | Cancelled():
                return False
            case Close() | Drop() | Rollback() | Pay() | CloseConnection():
                return False
            case _:
                self._attempt(("instead",), lambda: self._do_instead(step, seen), slot=None)
                return True

    def _note_doubtful_row(self, step: Step, seen: Outcome) -> None:
        """Note a row of which nothing is known, since the step that was to write it failed in the other run."""
        if isinstance(step, Stranger) and seen.failure in ONE_SIDED:
            # What goes on there alone has the connection or the lock; SQLite's is taken before the first row.
            locks_first = seen.failure is Failure.LOCKED and self._side.engine.dialect.name == "sqlite"
            differs = self._was_cancelled or self._was_refused or self._was_lost_alone
            if differs or locks_first or any(place.diverged for place in self._places.values()):
                self.trace.uncertain.add(step.number)
        if isinstance(step, WriteRow):
            self.trace.uncertain.add(step.number)  # an object whose flush failed may still wait for one

    def _do_instead(self, step: Step, seen: Outcome) -> None:
        """Do what stands for a COMMIT that was refused."""
        place = self._place(getattr(step, "slot", ""))
        if place is None:
            return
        match step:
            case End(ending=ending) | EndConnection(ending=ending) if place.blocks:
                block = place.blocks.pop()
                if block is None:
                    return
                if ending is Ending.LEAVE:
                    self._leave(block, Declined())
                elif not seen.alive:
                    self._wait(block.rollback())
            case Commit() if not seen.alive:
                self._wait(place.handle.rollback())
            case EndRoot() if not seen.alive:
                place.session.rollback()
            case DoBelow() if not seen.alive:
                self._below(place).rollback()
            case _ if not seen.alive and not place.is_connection:
                place.session.rollback()  # a flush that is refused rolls its session back
            case _:
                pass

    def _attempt(self, path: Path, act: Callable[[], None], *, slot: str | None, step: Step | None = None) -> Outcome:
        place = None if slot is None else self._place(slot)
        root = self._root(place)
        before = self._state(place, root)
        try:
            act()
            outcome = Outcome()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            outcome = Outcome(
                _failure(error), _shown(error), alive=_ended_nothing(before, self._state(place, root)),
                after_refusal=self._is_aftermath(place, path),
            )  # fmt: skip
        self.trace.outcomes[path] = outcome
        if outcome.failure is not None and place is not None and self._opened_there(path):
            place.blocks.append(None)
        self._note_divergence(path, outcome, place)
        if isinstance(step, Stranger) and outcome.failure is not None and self._followed is not None:
            self.trace.uncertain.add(step.number)  # what plain SQLAlchemy cannot do, it need not do with messages
        if outcome.failure is Failure.REFUSED or outcome.says_savepoint_is_gone:
            self._told = True
        return outcome

    def _note_end(self, step: Step, place: _Place | None, root: RootTransaction | None, *, failed: bool) -> None:
        """A commit that goes well says that all is well in its transaction, unless the program was told otherwise
        before; a rollback, the release of a savepoint, and the end of a block that is not there say nothing. `root`:
        the transaction that was open before the step.
        """
        is_commit = isinstance(step, Commit | Transactional | BoxBegin) or (
            isinstance(step, End | EndConnection | EndRoot) and step.ending in {Ending.COMMIT, Ending.LEAVE}
        )
        if isinstance(step, Transactional | BoxBegin):
            slots = {CURRENT}
        elif place is not None and root is not None and not root.is_active:
            slots = {family.slot for family in self._family(place)}
        else:
            return
        ended = {
            number
            for number in self.trace.torn - self._past_torn
            if {self.trace.rows.get(number), self.trace.publishers.get(number)} & slots
        }
        self._past_torn |= ended
        if is_commit and not failed and not self._told:
            self.trace.silent |= ended

    def _is_aftermath(self, place: _Place | None, path: Path) -> bool:
        """Whether something was refused before, in this place or this body, or is no measure any more."""
        if place is not None:
            return place.refused or place.diverged or place.has_waiting_witness
        followed = {} if self._followed is None else self._followed.outcomes
        return any(
            inside[: len(path)] == path and outcome.failure in {Failure.REFUSED, Failure.CANCELLED}
            for inside, outcome in followed.items()
        )

    def _opened_there(self, path: Path) -> bool:
        """Whether the other run has a block of this step, which failed here."""
        followed = self._followed
        return followed is not None and path in followed.opened and not followed.failed(path)

    def _note_refused(self, place: _Place | None) -> None:
        """What the outbox has refused once fails on in other words: the session's, and those of its Connection."""
        self._was_refused = True
        for family in self._family(place):
            family.refused = True
        if place is not None and place.has_waiting_witness and place.connection_slot is not None:
            self._diverge(place)  # this Session has not used the Connection, which the other run rolled back

    def _family(self, place: _Place | None) -> list[_Place]:
        """The places that share a Connection with this one."""
        if place is None:
            return []
        if place.slot == CURRENT:
            return list(self._current)
        slots = {place.slot, place.connection_slot or place.slot}
        return [place, *(other for other in self._places.values() if {other.slot, other.connection_slot} & slots)]

    def _note_divergence(self, path: Path, outcome: Outcome, place: _Place | None) -> None:
        """Where only one run met a lock, a full pool, or what follows from a refusal, the plain run is no measure of
        that slot any more.
        """
        seen = None if self._followed is None else self._followed.outcomes.get(path)
        if seen is not None and (seen.says_savepoint_is_gone or outcome.says_savepoint_is_gone):
            self._diverge(place)  # at which statement a database says it depends on those that are sent
        is_refused = place is not None and place.refused
        both_failed = seen is not None and seen.failure is not None and outcome.failure is not None
        if both_failed and seen.failure is not outcome.failure and {seen.failure, outcome.failure} & ONE_SIDED:
            self._diverge(place)
        if seen is not None and outcome.failure is None and seen.error.startswith(ListenerFailed.__name__):
            self._diverge(place)  # a listener of the rollback raised, and hides that the outbox has refused the commit
        if both_failed and (outcome.failure is Failure.LOCKED or seen.error != outcome.error):
            self._diverge_by_flush(place)
        if seen is None or (
            (seen.failure is None) == (outcome.failure is None) and not (is_refused and seen.error != outcome.error)
        ):
            return
        is_aftermath = any(family.has_waiting_witness or family.refused for family in self._family(place))
        if is_aftermath or {seen.failure, outcome.failure} & ONE_SIDED:
            self._diverge(place)

    def _diverge_by_flush(self, place: _Place | None) -> None:
        """A witness's flush that fails rolls its session back; the other run has none to do."""
        if place is not None and place.has_waiting_witness:
            self._diverge(place)

    def _diverge(self, place: _Place | None) -> None:
        followed = self._followed
        if followed is None:
            return
        slots = {one.slot for one in self._places.values()} | {CURRENT}
        if place is not None:
            slots = {place.slot}
            for family in self._family(place):
                family.diverged = True
                slots |= {family.slot}
        for numbers in (followed.rows, followed.publishers, self.trace.rows):
            self.trace.uncertain |= {number for number, slot in numbers.items() if slot in slots}

    def _root(self, place: _Place | None) -> RootTransaction | None:
        if place is None:
            return None
        if place.is_connection:
            found = place.plain_connection.get_transaction()
            return found if isinstance(found, RootTransaction) else None
        known = self._roots.get(place.session)
        return None if known is None else known()

    def _state(self, place: _Place | None, root: RootTransaction | None) -> tuple[bool, bool]:
        """Whether the Connection's transaction is open, and the Session's."""
        in_session = place is not None and not place.is_connection and place.session.in_transaction()
        return root is not None and root.is_active, in_session

    # -- steps -------------------------------------------------------------------------------------------------------

    def _do(self, step: Step, path: Path) -> None:
        match step:
            case OpenConnection() | BeginConnection() | EndConnection() | CloseConnection():
                self._do_connection(step)
            case OpenSession():
                self._open_session(step)
            case Transactional() | BoxBegin() | InThread() | Cancelled():
                self._do_body(step, path)
            case Collect():
                gc.collect()
            case Stranger(number=number):
                self._stranger(number)
            case HoldLock(number=number):
                self._side.faults.hold_message(self._message_id(number))
            case LetGo():
                self._side.faults.let_go()
            case Drop(slot=slot):
                self._places.pop(slot, None)
            case _:
                place = self._place(step.slot)
                if place is not None:
                    self._do_in_place(step, place, path)

    def _do_connection(self, step: OpenConnection | BeginConnection | EndConnection | CloseConnection) -> None:
        if isinstance(step, OpenConnection):
            if step.slot not in self._places:
                self._places[step.slot] = _Place(self._connect(), slot=step.slot)
            return
        place = self._places.get(step.slot)
        if place is None:
            return
        match step:
            case BeginConnection(opening=opening):
                begun = {
                    Opening.ROOT: place.handle.begin,
                    Opening.NESTED: place.handle.begin_nested,
                    Opening.TWO_PHASE: place.plain_connection.begin_twophase,
                }[opening]()
                place.blocks.append(self._begun(begun, is_block=False))
            case EndConnection(ending=ending):
                if place.blocks:
                    self._end(place.blocks.pop(), ending)
            case CloseConnection():
                del self._places[step.slot]
                self._wait(place.handle.close())
            case _:
                assert_never(step)

    def _open_session(self, step: OpenSession) -> None:
        connection = None
        if step.bind is not Bind.ENGINE:
            slot = "c1" if step.bind is Bind.SECOND_CONNECTION else "c0"
            held = self._places.get(slot)
            if held is None:
                return
            connection = held.handle
        bind = connection if connection is not None else self._bind
        options: dict[str, Any] = {"bind": bind}
        if step.bind is Bind.CLASSES_ON_FIRST_CONNECTION:
            options = {"binds": {Payment: connection, Witness: connection}}
        options |= {"twophase": step.two_phase, "join_transaction_mode": step.join_mode}
        place = _Place(
            self._made(step.factory, options), slot=step.slot,
            connection_slot=None if connection is None else step.bind.value[-2:],
        )  # fmt: skip
        self._places[step.slot] = place
        self._watch(place.session)

    def _made(self, factory: Factory, options: dict[str, Any]) -> Any:
        if self._is_async:
            made = async_sessionmaker(**options) if factory is Factory.MAKER else AsyncSession
            return made() if factory is Factory.MAKER else AsyncSession(**options)
        match factory:
            case Factory.PLAIN:
                return Session(**options)
            case Factory.MAKER:
                return sessionmaker(**options)()
            case Factory.SCOPED:
                return scoped_session(sessionmaker(**options), scopefunc=lambda: 0)
            case _:
                assert_never(factory)

    def _watch(self, session: Session) -> None:
        roots = self._roots

        def note(begun: Session, _transaction: object, connection: Connection) -> None:
            root = connection.get_transaction()
            if isinstance(root, RootTransaction):
                roots[begun] = weakref.ref(root)

        def forget(ended: Session, transaction: SessionTransaction) -> None:
            if transaction.parent is None:
                roots.pop(ended, None)

        event.listen(session, "after_begin", note)
        event.listen(session, "after_transaction_end", forget)

    def _do_in_place(self, step: Step, place: _Place, path: Path) -> None:  # noqa: C901
        match step:
            case Pay():
                self._pay(step, path)
            case WriteRow(number=number, way=way):
                self._write_row(place, number, way)
            case Publish():
                self._publish(step, place)
            case PublishAgain(number=number):
                self._publish_again(place, number)
            case Cancel(number=number):
                self._cancel(place, number)
            case Read():
                self._execute(place, select(Payment.id).limit(1), Way.SESSION)
            case Execute(statement=statement, way=way):
                if statement is Statement.CALL_COMMIT or way is Way.CURSOR:
                    self.trace.torn |= set(self.trace.rows) | set(self.trace.messages)
                self._execute(place, text(statement), way)
                self._was_switched |= statement is Statement.AUTOCOMMIT
                is_sqlite = self._side.engine.dialect.name == "sqlite"
                if is_sqlite and statement in {Statement.COMMIT, Statement.ROLLBACK}:
                    self._ended |= {place.slot, place.connection_slot or place.slot}
            case FailFlush():
                self._fail_flush(place)
            case WaitForLock():
                self._wait_for_lock(place)
            case Kill():
                self._side.faults.kill(self._below(place))
            case LoseAnswer():
                self._side.faults.lose_answer(self._below(place))
            case _:
                self._do_in_transaction(step, place)

    def _do_in_transaction(self, step: Step, place: _Place) -> None:  # noqa: C901
        match step:
            case Begin(is_block=is_block):
                if not place.is_connection:
                    place.blocks.append(self._begun(place.handle.begin(), is_block))
            case BeginNested(is_block=is_block):
                place.blocks.append(self._begun(place.handle.begin_nested(), is_block))
            case End(ending=ending):
                if place.blocks:
                    self._end(place.blocks.pop(), ending)
                    if ending is Ending.CLOSE:
                        self._forget_waiting(place)
            case Commit():
                self._wait(place.handle.commit())
            case Rollback():
                self._note_early_use(place)
                self._wait(place.handle.rollback())
            case EndRoot(ending=ending):
                self._note_early_use(place)
                self._end_root(place, ending)
            case Prepare():
                if not place.is_connection:
                    place.session.prepare()
            case Close():
                self._close(place)
            case Invalidate():
                self._wait(place.handle.invalidate())
            case DoBelow(what=what):
                self._do_below(place, what)
            case EmptyInfo(what=what):
                self._empty_info(place, what)
            case Listen():
                self._listen(step, place)
            case _:
                raise AssertionError(step)

    def _note_early_use(self, place: _Place) -> None:
        """A witness that was flushed has used the Connection whose transaction ends with this; a message has not."""
        if place.has_waiting_witness and place.connection_slot is not None:
            self._diverge(place)

    def _pay(self, step: Pay, path: Path) -> None:
        row = WriteRow(step.slot, step.number, step.way)
        message = Publish(step.slot, step.number, step.topic, step.box)
        both: tuple[Step, Step] = (row, message) if step.order is Order.ROW_FIRST else (message, row)
        for index, part in enumerate(both):
            self._perform(part, (*path, index))
            leading = self.trace if self._followed is None else self._followed
            if leading.failed((*path, index)):
                if self._followed is None and self.trace.outcomes[*path, index].failure is Failure.CANCELLED:
                    raise asyncio.CancelledError
                return
        self.trace.pairs.add(step.number)
        self._write_waiting(step)

    def _write_waiting(self, step: Pay) -> None:
        """Write a witness that went before its row, if that alone is written by it."""
        place = self._place(step.slot)
        if self._followed is None or place is None or place.is_connection or self.trace.lazy:
            return
        if step.order is Order.MESSAGE_FIRST and step.way is not RowWay.ADD:
            place.session.flush()
            self.trace.waiting.discard(step.number)
            self.trace.unflushed.discard(step.number)

    def _write_row(self, place: _Place, number: int, way: RowWay) -> None:
        values = {"id": self._row_id(number), "note": "paid"}
        if place.is_connection or way in {RowWay.CONNECTION, RowWay.DRIVER}:
            connection = self._below(place)
            if way is RowWay.DRIVER:
                connection.exec_driver_sql(f"INSERT INTO payment (id, note) VALUES ({values['id']}, 'paid')")
            else:
                connection.execute(insert(PAYMENTS), values)
        elif way is RowWay.EXECUTE:
            self._wait(place.handle.execute(insert(PAYMENTS), values))
        else:
            place.session.add(Payment(**values))
            if way is RowWay.ADD:
                self.trace.lazy.add(number)
            else:
                self._wait(place.handle.flush())
        self.trace.rows[number] = place.slot

    def _publish(self, step: Publish, place: _Place) -> None:
        number = step.number
        if self._was_switched or self._ended & {place.slot, place.connection_slot}:
            self.trace.torn.add(number)
        if self._followed is not None:
            try:
                self._write_witness(place, number)
            except Exception as error:  # publish() asks the database for nothing, so it may go well where this cannot
                self.trace.uncertain.add(number)
                self._was_lost_alone |= _failure(error) is Failure.LOST
            return
        box = self._side.boxes[step.box % len(self._side.boxes)]
        for copy in range(step.copies):
            message_id = self._message_id(number) + (f"-{copy}" if copy else "")
            key = f"k{number % 2}" if step.topic is Topic.ORDERED else None
            delay = DELAY if step.topic is Topic.DELAYED else None
            box.publish(
                f"{step.topic}.{step.box}", {"n": number}, key=key, delay=delay, message_id=message_id,
                session=self._given(place, step.box),
            )  # fmt: skip
            self.trace.messages.setdefault(number, []).append(message_id)
            self.trace.publishers[number] = place.slot

    def _write_witness(self, place: _Place, number: int) -> None:
        values = {"id": self._row_id(number)}
        root = self._root(place)
        if not place.is_connection and (root is None or not root.is_active):
            place.has_waiting_witness = True
            place.session.add(Witness(**values))  # publish() begins nothing at the database, and this neither
            self.trace.unflushed.add(number)
            if place.connection_slot is not None or place.session.in_nested_transaction():
                self.trace.waiting.add(number)
        else:  # not by the Session, which would flush
            self._below(place).execute(insert(WITNESSES), values)

    def _given(self, place: _Place, box: int) -> Any:
        """What publish() is given: nothing in a function of the box itself, in whose thread it finds its session."""
        in_function = self._current and place is self._current[-1] and not place.is_connection
        return None if in_function and place.context == (box, threading.get_ident()) else place.handle

    def _publish_again(self, place: _Place, number: int) -> None:
        self.trace.uncertain.add(number)
        if self._followed is None:
            message_id = self._message_id(number)
            self._side.boxes[0].publish("plain.0", {"n": number}, message_id=message_id, session=self._given(place, 0))
            if message_id not in self.trace.messages.setdefault(number, []):
                self.trace.messages[number].append(message_id)

    def _cancel(self, place: _Place, number: int) -> None:
        self.trace.uncertain.add(number)
        if self._followed is None:
            self._side.boxes[0].cancel(self._message_id(number), session=self._given(place, 0))

    def _fail_flush(self, place: _Place) -> None:
        if place.is_connection:
            self._below(place).execute(insert(PAYMENTS), {"id": STANDING_ROW, "note": "again"})
        else:
            place.session.add(Payment(id=STANDING_ROW, note="again"))
            self._wait(place.handle.flush())

    def _wait_for_lock(self, place: _Place) -> None:
        if self._side.faults.hold_row():
            try:
                self._execute(place, update(Payment).where(Payment.id == STANDING_ROW).values(note="mine"), Way.SESSION)
            finally:
                self._side.faults.let_go()

    def _execute(self, place: _Place, statement: Any, way: Way) -> None:
        if way is Way.SESSION and not place.is_connection:
            self._wait(place.handle.execute(statement))
            return
        connection = self._below(place)
        if way is Way.CURSOR:
            cursor = connection.connection.cursor()
            try:
                cursor.execute(str(statement))
            finally:
                cursor.close()
        elif way is Way.DRIVER:
            connection.exec_driver_sql(str(statement.compile(connection)))
        else:
            connection.execute(statement)

    def _end(self, block: Any, ending: Ending) -> None:
        if block is None:
            return
        match ending:
            case Ending.COMMIT:
                self._wait(block.commit())
            case Ending.ROLLBACK:
                self._wait(block.rollback())
            case Ending.CLOSE:
                self._wait(getattr(block, "sync_transaction", block).close())
            case Ending.LEAVE:
                self._leave(block, None)
            case Ending.FAIL:
                self._leave(block, Declined())
            case _:
                assert_never(ending)

    def _end_root(self, place: _Place, ending: Ending) -> None:
        root = place.plain_connection.get_transaction() if place.is_connection else place.session.get_transaction()
        if root is None:
            return
        match ending:
            case Ending.COMMIT | Ending.LEAVE:
                root.commit()
            case Ending.ROLLBACK | Ending.FAIL:
                root.rollback()
            case Ending.CLOSE:
                root.close()
                self._forget_waiting(place)
            case _:
                assert_never(ending)

    def _forget_waiting(self, place: _Place) -> None:
        """What waits for a flush outlives its transaction, as a message does not."""
        if not place.is_connection:
            for waiting in [one for one in place.session.new if isinstance(one, Witness)]:
                place.session.expunge(waiting)

    def _close(self, place: _Place) -> None:
        place.blocks.clear()
        if isinstance(place.handle, scoped_session):
            place.handle.remove()
        else:
            self._wait(place.handle.close())

    def _do_below(self, place: _Place, what: Below) -> None:
        connection = self._below(place)
        root, nested = connection.get_transaction(), connection.get_nested_transaction()
        acts: dict[Below, Callable[[], object]] = {
            Below.COMMIT: connection.commit,
            Below.ROLLBACK: connection.rollback,
            Below.ROOT_COMMIT: _nothing if root is None else root.commit,
            Below.ROOT_ROLLBACK: _nothing if root is None else root.rollback,
            Below.ROOT_CLOSE: _nothing if root is None else root.close,
            Below.NESTED_COMMIT: _nothing if nested is None else nested.commit,
            Below.NESTED_ROLLBACK: _nothing if nested is None else nested.rollback,
            Below.CLOSE: connection.close,
            Below.INVALIDATE: connection.invalidate,
            Below.AUTOCOMMIT: lambda: connection.execution_options(isolation_level="AUTOCOMMIT"),
        }
        acts[what]()

    def _empty_info(self, place: _Place, what: Info) -> None:
        if what is Info.CLEAR_CONNECTION:
            self._below(place).info.clear()
        elif not place.is_connection:
            if what is Info.CLEAR_SESSION:
                place.session.info.clear()
            else:
                place.session.info = {}  # type: ignore[misc]

    def _listen(self, step: Listen, place: _Place) -> None:
        if place.is_connection:
            return
        left = [True]

        def react(session: Session, *_: object) -> None:
            if step.reaction is Reaction.CLEAR_INFO:
                session.info.clear()
            elif left:
                left.clear()
                raise ListenerFailed

        event.listen(place.session, step.moment, react)

    def _stranger(self, number: int) -> None:
        with self._side.engine.begin() as connection:
            connection.execute(insert(PAYMENTS), {"id": self._row_id(number), "note": "stranger"})
        self.trace.rows[number] = "stranger"

    # -- bodies ------------------------------------------------------------------------------------------------------

    def _do_body(self, step: Transactional | BoxBegin | InThread | Cancelled, path: Path) -> None:
        match step:
            case Transactional():
                self._call(step, path)
            case BoxBegin():
                if not self._is_async:
                    self._box_begin(step, path)
            case InThread(body=body):
                self._in_thread(body, path)
            case Cancelled(body=body, waits=waits):
                if not self._is_async or self._followed is not None:
                    self._note_cancelled(body, path)
                    self._body(body, path, swallows=True)
                else:
                    await_only(CancelAt(greenlet_spawn(self._cancelled, body, path), waits))
            case _:
                assert_never(step)

    def _note_cancelled(self, body: tuple[Step, ...], path: Path) -> None:
        """What a task does that is cancelled may be done, or not: a connection is lost with the wait that it is in."""
        followed = {} if self._followed is None or not self._is_async else self._followed.outcomes
        if any(inside[: len(path)] == path and outcome.failure is not None for inside, outcome in followed.items()):
            self.trace.uncertain |= {step.number for step in walk(body) if hasattr(step, "number")}

    def _cancelled(self, body: tuple[Step, ...], path: Path) -> None:
        self._body(body, path, swallows=True)

    def _in_body(self, step: Transactional | BoxBegin, path: Path, handle: Any, owner: Session | None = None) -> None:
        place = _Place(handle, slot=CURRENT, owner=owner, context=(step.box, threading.get_ident()))
        if not place.is_connection:
            self._watch(place.session)
        self._current.append(place)
        try:
            self._body(step.body, path, swallows=step.swallows)
        finally:
            self._current.pop()
        seen = None if self._followed is None else self._followed.outcomes.get(path)
        if step.fails or (seen is not None and self._is_declined(seen)):
            raise Declined

    def _is_declined(self, seen: Outcome) -> bool:
        """Whether the outbox has refused the end of a body in the other run, in its words or in those of SQLAlchemy."""
        if seen.failure is None:
            return False
        return seen.failure is Failure.REFUSED or self._was_refused or _BLOCK_LEFT_OPEN in seen.error

    def _call(self, step: Transactional, path: Path) -> None:
        if self._followed is not None:
            with self._plain_transaction(step) as session:
                self._in_body(step, path, session)
            return
        box = self._side.boxes[step.box % len(self._side.boxes)]
        if self._is_async:

            async def called(session: AsyncSession) -> None:
                await greenlet_spawn(self._in_body, step, path, session)

            await_only(box.transactional(propagation=step.propagation)(called)())
        else:
            box.transactional(propagation=step.propagation)(lambda session: self._in_body(step, path, session))()

    @contextlib.contextmanager
    def _plain_transaction(self, step: Transactional) -> Iterator[Any]:
        """What a transactional function does, by SQLAlchemy alone."""
        context = (step.box, threading.get_ident())
        current = next((place for place in reversed(self._current) if place.context == context), None)
        joined = None
        if current is not None and (current.owner or current.session).in_transaction():
            joined = current.owner or current.handle
        if joined is not None and step.propagation is Propagation.REQUIRED:
            yield joined
        elif joined is not None and step.propagation is Propagation.NESTED:
            with self._block(joined.begin_nested()):
                yield joined
        else:
            session = AsyncSession(self._writing_bind) if self._is_async else Session(self._writing_bind)
            with self._block(session), self._block(session.begin()):
                yield session

    @contextlib.contextmanager
    def _block(self, block: Any) -> Iterator[None]:
        self._enter(block)
        try:
            yield
        except BaseException as error:
            self._leave(block, error)
            raise
        else:
            self._leave(block, None)

    def _box_begin(self, step: BoxBegin, path: Path) -> None:
        if self._followed is None:
            with self._side.boxes[step.box % len(self._side.boxes)].begin() as connection:
                self._in_body(step, path, connection)
        else:
            with Session(self._writing_bind) as session, session.begin():
                self._in_body(step, path, session.connection(), session)

    def _in_thread(self, body: tuple[Step, ...], path: Path) -> None:
        if self._is_async:
            self._body(body, path, swallows=True)
            return
        thread = threading.Thread(target=lambda: self._body(body, path, swallows=True), name="business")
        thread.start()
        thread.join()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Let go of everything, as a request does at its end."""
        if self._program.finish is Finish.CLOSE or self._is_async:
            for slot, place in sorted(self._places.items(), reverse=True):  # sessions before their connections
                self._attempt(("end", slot), lambda place=place: self._close(place), slot=slot)
        self._places.clear()

    def _last_strangers(self) -> None:
        with contextlib.ExitStack() as held:
            connections: list[Connection] = []

            def connect_all() -> None:
                for _ in range(self._program.pool_size):
                    connections.append(self._side.engine.connect())
                    held.callback(connections[-1].close)

            self._attempt(("strangers",), connect_all, slot=None)
            followed = self._followed
            if followed is not None and followed.failed(("strangers",)):  # what is checked out is judged by itself
                self.trace.uncertain |= {LAST_STRANGERS + index for index in range(self._program.pool_size)}
            for index, connection in enumerate(connections):
                number = LAST_STRANGERS + index

                def pay(connection: Connection = connection, number: int = number) -> None:
                    connection.execute(insert(PAYMENTS), {"id": self._row_id(number), "note": "stranger"})
                    connection.commit()
                    self.trace.rows[number] = "stranger"

                met = None if self._followed is None else self._followed.outcomes.get(("stranger", index))
                if self._was_refused and met is not None and met.failure is Failure.LOST:
                    self.trace.uncertain.add(number)  # a refused commit sends nothing, so does not meet what was killed
                self._attempt(("stranger", index), pay, slot=None)

    # -- both colours ------------------------------------------------------------------------------------------------

    @property
    def _bind(self) -> Any:
        return self._side.async_engine or self._side.engine

    @property
    def _writing_bind(self) -> Any:
        """For what the outbox opens itself: it takes SQLite's write lock first."""
        return self._bind.execution_options(**{WRITE_LOCK_FIRST: True})

    def _wait(self, done: Any) -> Any:
        """The result of a call, which an async one has to be waited for."""
        return await_only(done) if self._is_async and hasattr(done, "__await__") else done

    def _connect(self) -> Any:
        if self._side.async_engine is None:
            return self._side.engine.connect()
        return await_only(self._side.async_engine.connect().start())

    def _enter(self, block: Any) -> Any:
        return await_only(block.__aenter__()) if hasattr(block, "__aenter__") else block.__enter__()

    def _begun(self, block: Any, is_block: bool) -> Any:
        if is_block:
            return self._enter(block)
        return await_only(block.start()) if hasattr(block, "start") else block

    def _leave(self, block: Any, error: BaseException | None) -> None:
        arguments = (None, None, None) if error is None else (type(error), error, None)
        if hasattr(block, "__aexit__"):
            await_only(block.__aexit__(*arguments))
        else:
            block.__exit__(*arguments)

    # -- names and places --------------------------------------------------------------------------------------------

    def _place(self, slot: str) -> _Place | None:
        if slot == CURRENT:
            return self._current[-1] if self._current else None
        return self._places.get(slot)

    def _below(self, place: _Place) -> Connection:
        if place.is_connection:
            return place.plain_connection
        return place.session.connection(bind_arguments={"mapper": Payment})

    def _row_id(self, number: int) -> int:
        return self._serial * NUMBERS_MAX + number

    def _message_id(self, number: int) -> str:
        return f"{self._serial}-{number}"


def _ended_nothing(before: tuple[bool, bool], after: tuple[bool, bool]) -> bool:
    """Whether what was open before is open still."""
    return all(is_open or not was_open for was_open, is_open in zip(before, after, strict=True))


def _nothing() -> None:
    """There is no such transaction."""


def _failure(error: BaseException) -> Failure:
    if isinstance(error, OutboxError):
        return Failure.REFUSED
    if isinstance(error, asyncio.CancelledError):
        return Failure.CANCELLED
    if isinstance(error, PoolTimeoutError):
        return Failure.NO_CONNECTION
    if not isinstance(error, DBAPIError):
        return Failure.OTHER
    if "outbox" in (error.statement or ""):
        return Failure.REFUSED
    if error.connection_invalidated:
        return Failure.LOST
    code = error.orig.args[0] if error.orig is not None and error.orig.args else None
    return Failure.LOCKED if code in _LOCK_CODES or "database is locked" in str(error.orig) else Failure.OTHER


def _shown(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
