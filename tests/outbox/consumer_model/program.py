"""A random program of consumers, drawn from a seed: groups, what their handlers do, and what happens meanwhile. Pure.

Two worlds run programs: in_process has a broker in this process and SQLite, processes has consumers, broker and
database each in a process of its own, and kills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from outbox_core.messages.failure_history import EXPIRED

TOPIC = "orders"
CHAINED = "chained"
MESSAGES = 12
ATTEMPTS_MAX = 4
LARGE_BODY_BYTES = 4_000
"""A chained message of this size is refused by a broker with LIMITS."""


class Fault(StrEnum):
    """What a handler does to one message, at its first `times` attempts."""

    NOTHING = "nothing"
    RAISES = "raises"
    RETRIES_LATER = "retries later"
    ROLLS_BACK = "rolls back"
    FORGETS_AWAIT = "forgets await"
    COMMITS_AND_RAISES = "commits and raises"
    BASE_EXCEPTION = "raises what is no Exception"
    EXITS = "raises SystemExit"
    COMMITS_AND_EXITS = "commits and raises SystemExit"
    HANGS = "hangs until its runner has been stopped"


REASONS = {
    Fault.RAISES: "LookupError",
    Fault.RETRIES_LATER: "later",
    Fault.ROLLS_BACK: "NoTransaction",
    Fault.FORGETS_AWAIT: "nobody awaits or runs",
    Fault.COMMITS_AND_RAISES: "CommittedByHandler",
    Fault.BASE_EXCEPTION: "Interrupted",
    Fault.EXITS: "SystemExit",
    Fault.COMMITS_AND_EXITS: "CommittedByHandler",
}
"""What a dead letter says of each."""


class Shape(StrEnum):
    """What the handler is."""

    FUNCTION = "function"
    PARTIAL = "partial"
    OBJECT = "object"
    DECORATED = "decorated"


class Event(StrEnum):
    """What happens while consumers work, or between two runners."""

    STOP = "stop"
    """In good order; what hangs is left at the deadline."""
    PAUSE = "pause"
    REDRIVE = "redrive"
    SEEK = "seek"
    LOSE_ACKS = "lose acks"
    """The broker takes acknowledgements and does not answer, or does not get them."""
    REFUSE = "refuse"
    """The broker refuses: pulls, settlements and chained messages, for a while or for good."""
    KILL_CONSUMER = "kill consumer"
    KILL_BROKER = "kill broker"
    KILL_DATABASE = "kill database"


IN_PROCESS = (Event.STOP, Event.PAUSE, Event.REDRIVE, Event.SEEK, Event.LOSE_ACKS, Event.REFUSE)
KILLS = (Event.KILL_CONSUMER, Event.KILL_BROKER, Event.KILL_DATABASE)
PROCESSES = (Event.STOP, Event.PAUSE, Event.REDRIVE, Event.SEEK, Event.REFUSE, *KILLS, *KILLS)
_LOSING = frozenset({Event.STOP, Event.LOSE_ACKS, Event.REFUSE, Event.KILL_CONSUMER, Event.KILL_BROKER})
"""Behind these an invisible time may run out; behind a stop, that of a handler which hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A consumer group and its consumer."""

    name: str
    has_inbox: bool
    is_async: bool
    shape: Shape
    ordered: bool
    workers: int
    filter: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An event, after so many more calls of handlers, and the group that it is about, if it is about one."""

    event: Event
    after: int
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One seed's plan. `crossing` messages update two rows, half of them in the opposite order, which deadlocks where
    the database can; of these, handlers swallow the deadlocks of `swallowing`. Handlers with a session publish one
    for each of `chaining`, which is `large` for some.
    """

    seed: int
    groups: tuple[Group, ...]
    faults: dict[tuple[str, str], tuple[Fault, int]]
    crossing: frozenset[tuple[str, str]]
    swallowing: frozenset[tuple[str, str]]
    chaining: frozenset[tuple[str, str]]
    large: frozenset[tuple[str, str]]
    steps: tuple[Step, ...]

    def fault(self, group: Group, message_id: str) -> Fault:
        """What the handler of a group does to a message: without a session, the nearest that it can do."""
        fault, _ = self.faults[group.name, message_id]
        if group.has_inbox:
            return fault
        match fault:
            case Fault.COMMITS_AND_RAISES | Fault.ROLLS_BACK:
                return Fault.RAISES
            case Fault.COMMITS_AND_EXITS:
                return Fault.EXITS
            case _:
                return fault

    def true_reasons(self, group: Group, message_id: str) -> set[str]:
        """What the last attempt at a message can have failed by, as its dead letter says it."""
        events = {step.event for step in self.steps}
        reasons = {REASONS[fault]} if (fault := self.fault(group, message_id)) in REASONS else set()
        if events & _LOSING:
            reasons.add(EXPIRED)
        if group.has_inbox and Event.KILL_DATABASE in events:
            reasons |= {"OperationalError", "InterfaceError", "DatabaseUnavailable"}
        if group.has_inbox and (group.name, message_id) in self.crossing:
            reasons |= {"OperationalError: (1213", "OperationalError: (1205"}
        if (group.name, message_id) in self.swallowing:
            reasons |= {"NoTransaction", "TransactionDoomed"}
        return reasons


def message_ids() -> list[str]:
    """The messages of a program."""
    return [f"m-{number}" for number in range(MESSAGES)]


def kind_of(message_id: str) -> str:
    """What filters look at."""
    return "odd" if int(message_id.removeprefix("m-")) % 2 else "even"


def chained_id(group: str, message_id: str) -> str:
    """The message that a group's handler publishes for a message."""
    return f"{group}-{message_id}"


def program(seed: int, events: Sequence[Event]) -> Program:
    """Draw a program of a world in which these events can happen."""
    random = Random(seed)
    groups = tuple(_group(random, f"g{number}") for number in range(random.randint(1, 3)))
    faults: dict[tuple[str, str], tuple[Fault, int]] = {}
    for group in groups:
        for message_id in message_ids():
            fault = random.choice(list(Fault)) if random.random() < 0.5 else Fault.NOTHING
            faults[group.name, message_id] = (fault, random.choice([1, 2, ATTEMPTS_MAX]))
    crossing = frozenset(pair for pair in faults if random.random() < 0.8)
    return Program(
        seed=seed, groups=groups, faults=faults, crossing=crossing,
        swallowing=frozenset(pair for pair in sorted(crossing) if random.random() < 0.5),
        chaining=frozenset(pair for pair in faults if random.random() < 0.7),
        large=frozenset(pair for pair in faults if random.random() < 0.2),
        steps=tuple(
            Step(event=random.choice(events), after=random.randint(0, 8), group=random.choice(groups).name)
            for _ in range(random.randint(2, 4))
        ),
    )  # fmt: skip


def _group(random: Random, name: str) -> Group:
    return Group(
        name=name, has_inbox=random.random() < 0.7, is_async=random.random() < 0.4, shape=random.choice(list(Shape)),
        ordered=random.random() < 0.3, workers=random.randint(1, 4),
        filter="kind = 'even'" if random.random() < 0.3 else None,
    )  # fmt: skip
