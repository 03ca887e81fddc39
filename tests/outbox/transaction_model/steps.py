"""What a program of the model consists of: steps as plain data, which a generator makes and an interpreter performs.

A step whose session, connection or block is not there does nothing, so that a program stays one without any of its
steps: that is what makes shrinking simple. Every error of a step is swallowed, as careless applications do it, but in a
body that says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum

CURRENT = "current"
"""The slot of the session or Connection of the innermost transactional function or block of the outbox."""


class Bind(StrEnum):
    """What a Session is made on."""

    ENGINE = "engine"
    FIRST_CONNECTION = "c0"
    SECOND_CONNECTION = "c1"
    CLASSES_ON_FIRST_CONNECTION = "classes on c0"


class Factory(StrEnum):
    """How a Session is made."""

    PLAIN = "Session"
    MAKER = "sessionmaker"
    SCOPED = "scoped_session"


class Opening(StrEnum):
    """How a Connection's transaction begins."""

    ROOT = "begin"
    NESTED = "begin_nested"
    TWO_PHASE = "begin_twophase"


class Ending(StrEnum):
    """How a block, a transaction or a savepoint ends."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    CLOSE = "close"
    LEAVE = "leave the block"
    FAIL = "fail in the block"


class RowWay(StrEnum):
    """How a business row is written."""

    ADD = "add"
    FLUSH = "add, flush"
    EXECUTE = "session.execute"
    CONNECTION = "connection.execute"
    DRIVER = "exec_driver_sql"


class Topic(StrEnum):
    """The kind of topic that a message goes to."""

    PLAIN = "plain"
    ORDERED = "ordered"
    DELAYED = "delayed"


class Order(StrEnum):
    """What comes first, the row or its message."""

    ROW_FIRST = "row, message"
    MESSAGE_FIRST = "message, row"


class Way(StrEnum):
    """How a statement is run."""

    SESSION = "session.execute"
    CONNECTION = "connection.execute"
    DRIVER = "exec_driver_sql"
    CURSOR = "a cursor of the driver"


class Statement(StrEnum):
    """The statements that a program may run by itself."""

    SAVEPOINT = "SAVEPOINT here"
    ROLLBACK_TO = "ROLLBACK TO SAVEPOINT here"
    RELEASE = "RELEASE SAVEPOINT here"
    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    BEGIN = "BEGIN"
    DDL = "CREATE TABLE IF NOT EXISTS made (id INTEGER)"
    TEMPORARY = "CREATE TEMPORARY TABLE IF NOT EXISTS passing (id INTEGER)"
    AUTOCOMMIT = "SET autocommit = 1"
    CALL_NOTHING = "CALL does_nothing()"
    CALL_COMMIT = "CALL commits()"
    CALL_ROLLBACK = "CALL rolls_back()"
    CALL_HANDLER = "CALL rolls_back_on_error()"


class Below(StrEnum):
    """What is done below a Session, on its Connection."""

    COMMIT = "connection.commit"
    ROLLBACK = "connection.rollback"
    ROOT_COMMIT = "get_transaction.commit"
    ROOT_ROLLBACK = "get_transaction.rollback"
    ROOT_CLOSE = "get_transaction.close"
    NESTED_COMMIT = "get_nested_transaction.commit"
    NESTED_ROLLBACK = "get_nested_transaction.rollback"
    CLOSE = "connection.close"
    INVALIDATE = "connection.invalidate"
    AUTOCOMMIT = "isolation_level AUTOCOMMIT"


class Info(StrEnum):
    """What an application does to a dictionary that SQLAlchemy gives it."""

    CLEAR_SESSION = "session.info.clear"
    REPLACE_SESSION = "session.info = {}"
    CLEAR_CONNECTION = "connection.info.clear"


class Moment(StrEnum):
    """The events of a Session that a program may listen to."""

    AFTER_BEGIN = "after_begin"
    BEFORE_FLUSH = "before_flush"
    BEFORE_COMMIT = "before_commit"
    AFTER_COMMIT = "after_commit"
    AFTER_ROLLBACK = "after_rollback"
    AFTER_SOFT_ROLLBACK = "after_soft_rollback"
    AFTER_TRANSACTION_END = "after_transaction_end"


class Reaction(StrEnum):
    """What a listener does."""

    RAISE_ONCE = "raise once"
    CLEAR_INFO = "clear info"


class Propagation(StrEnum):
    """How a transactional function treats an open transaction."""

    REQUIRED = "required"
    REQUIRES_NEW = "requires_new"
    NESTED = "nested"


class Finish(StrEnum):
    """What a program does with the sessions and connections that it still has at its end."""

    CLOSE = "close"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class OpenConnection:
    """`engine.connect()`."""

    slot: str


@dataclass(frozen=True, slots=True)
class BeginConnection:
    """Begin a transaction or savepoint of a Connection."""

    slot: str
    opening: Opening


@dataclass(frozen=True, slots=True)
class EndConnection:
    """End the innermost transaction or savepoint that the program began on a Connection."""

    slot: str
    ending: Ending


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """`connection.close()`."""

    slot: str


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Make a Session; the one of this slot is dropped."""

    slot: str
    bind: Bind
    factory: Factory = Factory.PLAIN
    join_mode: str = "conditional_savepoint"
    two_phase: bool = False


@dataclass(frozen=True, slots=True)
class Begin:
    """`session.begin()`, whose transaction is kept; `is_block`: by `with`."""

    slot: str
    is_block: bool = True


@dataclass(frozen=True, slots=True)
class BeginNested:
    """`session.begin_nested()`, whose savepoint is kept; `is_block`: by `with`."""

    slot: str
    is_block: bool = True


@dataclass(frozen=True, slots=True)
class End:
    """End the innermost block that the program keeps of a Session."""

    slot: str
    ending: Ending


@dataclass(frozen=True, slots=True)
class Commit:
    """`session.commit()` or, of a Connection, `connection.commit()`."""

    slot: str


@dataclass(frozen=True, slots=True)
class Rollback:
    """`session.rollback()` or, of a Connection, `connection.rollback()`."""

    slot: str


@dataclass(frozen=True, slots=True)
class EndRoot:
    """`session.get_transaction()`, ended by hand."""

    slot: str
    ending: Ending


@dataclass(frozen=True, slots=True)
class Prepare:
    """`session.prepare()`."""

    slot: str


@dataclass(frozen=True, slots=True)
class Close:
    """`session.close()`; of a scoped one `remove()`."""

    slot: str


@dataclass(frozen=True, slots=True)
class Invalidate:
    """`session.invalidate()`."""

    slot: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a Session or Connection without closing it."""

    slot: str


@dataclass(frozen=True, slots=True)
class Pay:
    """A row and its message: one cannot stand without the other."""

    slot: str
    number: int
    way: RowWay = RowWay.FLUSH
    topic: Topic = Topic.PLAIN
    order: Order = Order.ROW_FIRST
    box: int = 0


@dataclass(frozen=True, slots=True)
class WriteRow:
    """A row without a message."""

    slot: str
    number: int
    way: RowWay = RowWay.FLUSH


@dataclass(frozen=True, slots=True)
class Publish:
    """A message without a row; `copies` are published under ids of their own."""

    slot: str
    number: int
    topic: Topic = Topic.PLAIN
    box: int = 0
    copies: int = 1


@dataclass(frozen=True, slots=True)
class PublishAgain:
    """A second message under the id of an earlier one: the commit must fail, if that one is not sent yet."""

    slot: str
    number: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel an earlier message."""

    slot: str
    number: int


@dataclass(frozen=True, slots=True)
class Read:
    """A SELECT."""

    slot: str


@dataclass(frozen=True, slots=True)
class FailFlush:
    """A flush that fails, of a row that is there already."""

    slot: str


@dataclass(frozen=True, slots=True)
class Execute:
    """Run a statement."""

    slot: str
    statement: Statement
    way: Way


@dataclass(frozen=True, slots=True)
class DoBelow:
    """Do something to a Session's Connection."""

    slot: str
    what: Below


@dataclass(frozen=True, slots=True)
class EmptyInfo:
    """Empty a dictionary that SQLAlchemy gives to applications."""

    slot: str
    what: Info


@dataclass(frozen=True, slots=True)
class Listen:
    """Listen to an event of a Session."""

    slot: str
    moment: Moment
    reaction: Reaction


@dataclass(frozen=True, slots=True)
class Kill:
    """The server ends a Session's connection."""

    slot: str


@dataclass(frozen=True, slots=True)
class LoseAnswer:
    """The next COMMIT on a Session's connection is done, but its answer is lost."""

    slot: str


@dataclass(frozen=True, slots=True)
class WaitForLock:
    """A statement waits for a stranger's lock until its time is up (SQLite: at once)."""

    slot: str


@dataclass(frozen=True, slots=True)
class HoldLock:
    """A stranger takes what a message's INSERT needs; on SQLite the write lock."""

    number: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """The stranger rolls back."""


@dataclass(frozen=True, slots=True)
class Collect:
    """Look for garbage."""


@dataclass(frozen=True, slots=True)
class Stranger:
    """A transaction of somebody else on a connection of the same pool."""

    number: int


@dataclass(frozen=True, slots=True)
class Transactional:
    """Call a transactional function; its session is CURRENT in the body."""

    propagation: Propagation
    body: tuple[Step, ...]
    box: int = 0
    swallows: bool = True
    fails: bool = False


@dataclass(frozen=True, slots=True)
class BoxBegin:
    """`with box.begin()`; its Connection is CURRENT in the body."""

    body: tuple[Step, ...]
    box: int = 0
    swallows: bool = True
    fails: bool = False


@dataclass(frozen=True, slots=True)
class InThread:
    """Run steps in another thread, and wait for it."""

    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A task is cancelled where it waits for the database for the nth time in these steps."""

    body: tuple[Step, ...]
    waits: int


WithBody = Transactional | BoxBegin | InThread | Cancelled

Step = (
    OpenConnection | BeginConnection | EndConnection | CloseConnection | OpenSession | Begin | BeginNested | End
    | Commit | Rollback | EndRoot | Prepare | Close | Invalidate | Drop | Pay | WriteRow | Publish | PublishAgain
    | Cancel | Read | FailFlush | Execute | DoBelow | EmptyInfo | Listen | Kill | LoseAnswer | WaitForLock | HoldLock
    | LetGo | Collect | Stranger | WithBody
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Program:
    """A program, and the pool that it runs on. The seed tells where it came from; steps may have been left out."""

    seed: int
    pool_size: int
    steps: tuple[Step, ...]
    finish: Finish = Finish.CLOSE

    def lines(self) -> Iterator[str]:
        """The program in a form to read, a step a line."""
        yield f"pool of {self.pool_size}; at the end: {self.finish}"
        yield from _lines(self.steps, indent="  ")


def walk(steps: tuple[Step, ...]) -> Iterator[Step]:
    """All steps, those of bodies behind the step that they are of."""
    for step in steps:
        yield step
        if isinstance(step, WithBody):
            yield from walk(step.body)


def _lines(steps: tuple[Step, ...], *, indent: str) -> Iterator[str]:
    for step in steps:
        shown = [
            f"{field.name}={getattr(step, field.name)}" for field in fields(step) if field.name not in {"slot", "body"}
        ]
        slot = getattr(step, "slot", "")
        yield f"{indent}{slot}{'.' if slot else ''}{type(step).__name__}({', '.join(shown)})"
        if isinstance(step, WithBody):
            yield from _lines(step.body, indent=indent + "    ")
