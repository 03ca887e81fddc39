"""Makes random programs from seeds. What applications rarely do together is common here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

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
    Moment,
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
)

STEPS_MIN, STEPS_MAX = 4, 14
BODY_STEPS_MAX = 4
DEPTH_MAX = 2
COPIES_MANY = 120
"""More messages than go in one INSERT."""
JOIN_MODES = ("conditional_savepoint", "rollback_only", "create_savepoint", "control_fully")
SESSIONS = ("s0", "s1", "s2")
CONNECTIONS = ("c0", "c1")
_ENDS_BY_COMMIT = (Ending.COMMIT, Ending.LEAVE)
_ENDING = frozenset({Statement.COMMIT, Statement.ROLLBACK, Statement.DDL})
_SERVER_ONLY = frozenset(
    {
        Statement.AUTOCOMMIT,
        Statement.CALL_NOTHING,
        Statement.CALL_COMMIT,
        Statement.CALL_ROLLBACK,
        Statement.CALL_HANDLER,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The kind of database that programs are for."""

    has_server: bool
    is_async: bool
    waits_are_short: bool = True
    """Whether a lock wait can be over at once."""


@dataclass(slots=True)
class _State:
    """What a program has open, as far as its steps did what they say."""

    sessions: dict[str, Bind] = field(default_factory=dict)
    connections: set[str] = field(default_factory=set)
    blocks: dict[str, int] = field(default_factory=dict)
    numbers: int = 0
    in_body: list[type] = field(default_factory=list)


def generate(seed: int, kind: Kind) -> Program:
    """Returns the program of a seed."""
    return _Generator(Random(seed), kind).program(seed)


class _Generator:
    """Makes one program."""

    def __init__(self, random: Random, kind: Kind) -> None:
        self._random = random
        self._kind = kind
        self._state = _State()

    def program(self, seed: int) -> Program:
        """The program."""
        pool_size = self._random.choice((1, 2, 2, 3))
        steps: list[Step] = []
        for _ in range(self._random.randint(STEPS_MIN, STEPS_MAX)):
            steps += self._next()
        if self._random.random() < 0.7:
            steps += self._end_all()
        return Program(
            seed=seed, pool_size=pool_size, steps=tuple(steps), finish=self._random.choice((Finish.CLOSE, Finish.DROP))
        )

    def _next(self) -> Sequence[Step]:
        """Some next steps, mostly one."""
        if not self._state.sessions and not self._state.in_body:
            return self._open()
        weighted: list[tuple[float, Callable[[], Sequence[Step]]]] = [
            (6, self._pay),
            (1.5, self._write),
            (3, self._end),
            (2.5, self._commit),
            (1.5, self._block),
            (1.2, self._open),
            (1.2, self._execute),
            (1.6, self._below),
            (0.5, self._empty_info),
            (0.5, self._listen),
            (0.5, self._fail),
            (0.9, self._let_go_of_something),
            (0.8, self._stranger),
            (0.7, self._call),
            (0.5, self._around),
            (0.5, self._trouble),
            (0.4, self._again),
        ]
        weights = [weight for weight, _ in weighted]
        (chosen,) = self._random.choices([make for _, make in weighted], weights)
        return chosen()

    # -- sessions and connections ------------------------------------------------------------------------------------

    def _open(self) -> Sequence[Step]:
        slot = self._random.choice(SESSIONS)
        bind = self._random.choices(tuple(Bind), (6, 4, 1, 1))[0]
        steps: list[Step] = []
        if bind is not Bind.ENGINE:
            connection = "c1" if bind is Bind.SECOND_CONNECTION else "c0"
            if connection not in self._state.connections:
                self._state.connections.add(connection)
                self._state.blocks[connection] = 0
                steps.append(OpenConnection(connection))
                if self._random.random() < 0.75:
                    steps.append(self._begin_connection(connection))
        factory = self._random.choices(tuple(Factory), (5, 2, 1))[0]
        two_phase = self._kind.has_server and self._random.random() < 0.08
        mode = self._random.choices(JOIN_MODES, (3, 2, 2, 1))[0] if bind is not Bind.ENGINE else JOIN_MODES[0]
        self._state.sessions[slot] = bind
        self._state.blocks[slot] = 0
        steps.append(OpenSession(slot, bind, factory, mode, two_phase))
        if self._random.random() < 0.3:
            self._state.blocks[slot] += 1
            steps.append(Begin(slot, self._is_block()))
        return steps

    def _begin_connection(self, slot: str) -> Step:
        weights = (5, 2, 0.7 if self._kind.has_server and not self._kind.is_async else 0)
        opening = self._random.choices(tuple(Opening), weights)[0]
        self._state.blocks[slot] += 1
        return BeginConnection(slot, opening)

    def _slot(self) -> str:
        if self._state.in_body and self._random.random() < 0.8:
            return CURRENT
        return self._random.choice(sorted(self._state.sessions) or [CURRENT])

    def _pay(self) -> Sequence[Step]:
        return [self._payment(self._slot())]

    def _payment(self, slot: str) -> Step:
        topic = self._random.choices(tuple(Topic), (6, 2, 1))[0]
        order = self._random.choices(tuple(Order), (3, 1))[0]
        way = self._random.choices(tuple(RowWay), (2, 4, 3, 1, 1))[0]
        return Pay(slot, self._number(), way, topic, order, self._box())

    def _write(self) -> Sequence[Step]:
        slot = self._slot()
        match self._random.randrange(5):
            case 0:
                return [Read(slot)]
            case 1 | 2:
                return [WriteRow(slot, self._number(), self._random.choice(tuple(RowWay)))]
            case _:
                copies = COPIES_MANY if self._random.random() < 0.05 else 1
                return [Publish(slot, self._number(), self._random.choice(tuple(Topic)), self._box(), copies)]

    def _end(self) -> Sequence[Step]:
        """End a block that is open, or else the transaction."""
        open_blocks = [slot for slot, depth in self._state.blocks.items() if depth > 0]
        if not open_blocks:
            return self._commit()
        slot = self._random.choice(sorted(open_blocks))
        self._state.blocks[slot] -= 1
        ending = self._random.choices(tuple(Ending), (4, 2, 1, 4, 2))[0]
        return [EndConnection(slot, ending) if slot in CONNECTIONS else End(slot, ending)]

    def _commit(self) -> Sequence[Step]:
        slot = self._slot()
        match self._random.randrange(10):
            case 0 | 1:
                step: Step = Rollback(slot)
            case 2:
                step = EndRoot(slot, self._random.choice((Ending.COMMIT, Ending.ROLLBACK, Ending.CLOSE)))
            case 3 if self._kind.has_server:
                step = Prepare(slot)
            case 4 if self._state.connections:
                step = Commit(self._random.choice(sorted(self._state.connections)))
            case _:
                step = Commit(slot)
        depth = self._state.blocks.get(slot, 0)
        if depth and self._random.random() < 0.7:
            self._state.blocks[slot] = 0
            return [*(End(slot, Ending.LEAVE) for _ in range(depth)), step]
        if self._random.random() < 0.12:
            return [step, Commit(slot)]
        return [step]

    def _end_all(self) -> Sequence[Step]:
        """What a careful application does in the end: leave the blocks, commit the rest."""
        leaves = [
            EndConnection(slot, Ending.LEAVE) if slot in CONNECTIONS else End(slot, Ending.LEAVE)
            for slot, depth in sorted(self._state.blocks.items(), reverse=True)
            for _ in range(depth)
        ]
        slots = [*sorted(self._state.sessions), *sorted(self._state.connections)]
        return [*leaves, *(Commit(slot) for slot in slots)]

    def _block(self) -> Sequence[Step]:
        if self._state.connections and self._random.random() < 0.25:
            return [self._begin_connection(self._random.choice(sorted(self._state.connections)))]
        slot = self._slot()
        if slot != CURRENT:
            self._state.blocks[slot] += 1
            if self._random.random() < 0.2:
                return [Begin(slot, self._is_block())]
        elif not self._random.randrange(2):
            return [BeginNested(slot), self._payment(slot), End(slot, self._random.choice(tuple(Ending)))]
        return [BeginNested(slot, self._is_block())]

    # -- what goes past the session ----------------------------------------------------------------------------------

    def _execute(self) -> Sequence[Step]:
        slot = self._slot()
        weights = [0 if one in _SERVER_ONLY and not self._kind.has_server else 1 for one in Statement]
        statement = self._random.choices(tuple(Statement), weights)[0]
        # Of a driver's own cursor nothing is seen but that the transaction has ended.
        cursor = 1 if statement in _ENDING else 0
        way = self._random.choices(tuple(Way), (4, 2, 2, cursor))[0]
        steps: list[Step] = [Execute(slot, statement, way)]
        if statement is Statement.SAVEPOINT and self._random.random() < 0.8:
            end = self._random.choice((Statement.ROLLBACK_TO, Statement.ROLLBACK_TO, Statement.RELEASE))
            steps += [self._payment(slot), Execute(slot, end, way)]
        if self._random.random() < 0.3:
            steps += [self._payment(slot)]
        return steps

    def _below(self) -> Sequence[Step]:
        slot = self._slot()
        weights = (5, 2, 2, 1, 1, 2, 1, 1, 0.5, 0.7)
        steps: list[Step] = [DoBelow(slot, self._random.choices(tuple(Below), weights)[0])]
        match self._random.randrange(4):
            case 0 if slot != CURRENT:
                steps.append(Close(slot))
            case 1:
                steps.append(Commit(slot))
            case _:
                pass
        return steps

    def _empty_info(self) -> Sequence[Step]:
        return [EmptyInfo(self._slot(), self._random.choice(tuple(Info)))]

    def _listen(self) -> Sequence[Step]:
        return [
            Listen(
                self._slot(),
                self._random.choice(tuple(Moment)),
                self._random.choices(tuple(Reaction), (2, 3))[0],
            )
        ]

    def _fail(self) -> Sequence[Step]:
        slot = self._slot()
        return [FailFlush(slot)] if self._random.random() < 0.7 else [BeginNested(slot), FailFlush(slot), *self._end()]

    def _let_go_of_something(self) -> Sequence[Step]:
        slot = self._random.choice(sorted({*self._state.sessions, *self._state.connections}) or [CURRENT])
        if slot == CURRENT:
            return [Collect()]
        is_connection = slot in CONNECTIONS
        self._state.sessions.pop(slot, None)
        self._state.connections.discard(slot)
        self._state.blocks.pop(slot, None)
        match self._random.randrange(4):
            case 0 if not self._kind.is_async:
                return [Drop(slot), Collect()]
            case 1 if not self._kind.is_async:
                return [Drop(slot)]
            case 2 if not is_connection:
                return [Invalidate(slot)]
            case _:
                return [CloseConnection(slot) if is_connection else Close(slot)]

    def _stranger(self) -> Sequence[Step]:
        return [Stranger(self._number())]

    def _again(self) -> Sequence[Step]:
        if not self._state.numbers:
            return [Collect()]
        number = self._random.randrange(self._state.numbers)
        slot = self._slot()
        return [PublishAgain(slot, number) if self._random.random() < 0.6 else Cancel(slot, number)]

    def _trouble(self) -> Sequence[Step]:
        slot = self._slot()
        match self._random.randrange(4):
            case 0 if self._kind.has_server:
                return [Kill(slot)]
            case 1:
                return [LoseAnswer(slot), Commit(slot)]
            case 2 if self._kind.waits_are_short or not self._random.randrange(5):
                return [WaitForLock(slot)]
            case 3 if self._kind.waits_are_short or not self._random.randrange(5):
                number = self._state.numbers
                return [HoldLock(number), *self._pay(), Commit(slot), LetGo(), Commit(slot)]
            case _:
                return self._pay()

    # -- bodies ------------------------------------------------------------------------------------------------------

    def _call(self) -> Sequence[Step]:
        if len(self._state.in_body) >= DEPTH_MAX:
            return self._pay()
        swallows, fails = self._random.random() < 0.7, self._random.random() < 0.2
        if self._random.random() < 0.25 and not self._kind.is_async:
            return [BoxBegin(self._body(BoxBegin), self._box(), swallows, fails)]
        propagation = self._random.choices(tuple(Propagation), (3, 2, 3))[0]
        return [Transactional(propagation, self._body(Transactional), self._box(), swallows, fails)]

    def _around(self) -> Sequence[Step]:
        if len(self._state.in_body) >= DEPTH_MAX:
            return self._pay()
        if self._kind.is_async and self._random.random() < 0.7:
            return [Cancelled(self._body(None), self._random.randint(1, 12))]
        return [InThread(self._body(None))]

    def _body(self, kind: type | None) -> tuple[Step, ...]:
        if kind is not None:
            self._state.in_body.append(kind)
        steps: list[Step] = []
        for _ in range(self._random.randint(1, BODY_STEPS_MAX)):
            steps += self._next()
        if kind is not None:
            self._state.in_body.pop()
        return tuple(steps)

    def _is_block(self) -> bool:
        return self._random.random() < 0.5

    def _number(self) -> int:
        self._state.numbers += 1
        return self._state.numbers - 1

    def _box(self) -> int:
        return 1 if self._random.random() < 0.15 else 0
