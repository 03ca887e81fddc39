"""Random programs of consumers, by seed, and what must hold when they have ended: a real broker and a real database.

One program: messages of one topic for one to three groups with handlers of every shape (plain, async, with an inbox
and without, ordered or not), which fail in every way that a handler can; runners that are stopped and started in the
middle, groups with filters, groups that are paused for a while, redriven and moved back to their beginning,
acknowledgements that the broker does not get or whose answers are lost. Then all is let run to its end. Not in it:
kills of processes, broker and database (test_killed.py and test_many_processes.py have them), deadlocks.

The oracle: with an inbox a message's effect is there once, or it is a dead letter whose reason names what the handler
did; without one it was handled at least once, or is a dead letter; a chained message is there if and only if its
handler's transaction committed; what a filter leaves out reached no handler; nothing is in flight or waiting; each
stop() returned in time and left no thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Backoff, Consumer, Delivery, Outbox, RetryLater, SenderLimits, consumer
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.migrate import upgrade
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.message import Message
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker

MESSAGES = 12
ATTEMPTS_MAX = 4
CHAINED = "chained"


class Fault(StrEnum):
    """What a handler does to one message, at its first `times` attempts."""

    NOTHING = "nothing"
    RAISES = "raises"
    RETRIES_LATER = "retries later"
    ROLLS_BACK = "rolls back"
    FORGETS_AWAIT = "forgets await"
    COMMITS_AND_RAISES = "commits and raises"
    BASE_EXCEPTION = "raises what is no Exception"


REASONS = {
    Fault.RAISES: "LookupError",
    Fault.RETRIES_LATER: "later",
    Fault.ROLLS_BACK: "NoTransaction",
    Fault.FORGETS_AWAIT: "nobody awaits or runs",
    Fault.BASE_EXCEPTION: "Interrupted",
}


class Interrupted(BaseException):
    """What is no Exception."""


@dataclass(slots=True)
class Program:
    """One seed's plan, and what was seen."""

    seed: int
    has_inbox: dict[str, bool]
    is_async: dict[str, bool]
    faults: dict[tuple[str, str], tuple[Fault, int]]
    ordered: dict[str, bool]
    workers: dict[str, int]
    filters: dict[str, str | None]
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    returned: Counter[tuple[str, str]] = field(default_factory=Counter)


def program(seed: int) -> Program:
    """Plan a program. Pure."""
    random = Random(seed)
    groups = [f"g{number}" for number in range(random.randint(1, 3))]
    faults: dict[tuple[str, str], tuple[Fault, int]] = {}
    for group in groups:
        for number in range(MESSAGES):
            fault = random.choice(list(Fault)) if random.random() < 0.6 else Fault.NOTHING
            faults[group, f"m-{number}"] = (fault, random.choice([1, 2, ATTEMPTS_MAX]))
    return Program(
        seed=seed, faults=faults,
        has_inbox={group: random.random() < 0.7 for group in groups},
        is_async={group: random.random() < 0.4 for group in groups},
        ordered={group: random.random() < 0.3 for group in groups},
        workers={group: random.randint(1, 3) for group in groups},
        filters={group: "kind = 'even'" if random.random() < 0.3 else None for group in groups},
    )  # fmt: skip


class World:
    """A broker, a database and the consumers of one program."""

    def __init__(self, plan: Program, folder: Path) -> None:
        self.plan = plan
        self.url = f"sqlite:///{folder / 'shop.db'}"
        self.engine = create_engine(self.url, connect_args={"timeout": 60})
        upgrade(self.engine)
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE effect (consumer TEXT, message TEXT)"))
        self.broker = WatchedBroker(folder / "broker")
        self.box = Outbox(self.engine, broker=self.broker, sender=SenderLimits(gather_ms=0))
        self.lock = threading.Lock()

    def close(self) -> None:
        """Close the connections."""
        self.box.close()
        self.broker.close()
        self.engine.dispose()

    def consumers(self) -> list[Consumer]:
        """The consumers of the program, with engines of their own."""
        made = []
        for group, has_inbox in self.plan.has_inbox.items():
            is_async = self.plan.is_async[group]
            inbox: Any = None
            if has_inbox:
                inbox = self.url.replace("sqlite:", "sqlite+aiosqlite:") if is_async else self.url
            decorate = consumer(
                "orders", group=group, inbox=inbox, ordered=self.plan.ordered[group], max_attempts=ATTEMPTS_MAX,
                workers=self.plan.workers[group], filter=self.plan.filters[group], prefetch=5,
                backoff=Backoff(initial_ms=1, max_ms=5),
            )  # fmt: skip
            made.append(decorate(self.handler(group, has_inbox=has_inbox, is_async=is_async)))
        return made

    def handler(self, group: str, *, has_inbox: bool, is_async: bool) -> Callable[..., Any]:
        """A handler of a group: its effect is a row, and with an inbox a chained message too."""

        def act(session: Session, one: Delivery) -> object:
            session.execute(text("INSERT INTO effect VALUES (:group, :id)"), {"group": group, "id": one.id})
            self.box.publish(CHAINED, "", message_id=f"{group}-{one.id}", session=session)
            return self.fail(group, one, session)

        def with_inbox(session: Session, one: Delivery) -> object:
            return act(session, one)

        def without(one: Delivery) -> object:
            return self.fail(group, one, None)

        async def with_inbox_async(session: AsyncSession, one: Delivery) -> object:
            return await session.run_sync(act, one)

        async def without_async(one: Delivery) -> object:
            await asyncio.sleep(0)
            return self.fail(group, one, None)

        if has_inbox:
            return with_inbox_async if is_async else with_inbox
        return without_async if is_async else without

    def fail(self, group: str, one: Delivery, session: Session | None) -> object:
        """What the plan has for this attempt; returns what the handler returns."""
        fault, times = self.plan.faults[group, one.id]
        with self.lock:
            self.plan.calls[group, one.id] += 1
            is_over = self.plan.calls[group, one.id] > times
        if fault is Fault.COMMITS_AND_RAISES and session is None:
            fault = Fault.RAISES
        if fault is Fault.ROLLS_BACK and session is None:
            fault = Fault.RAISES
        if not is_over:
            match fault:
                case Fault.RAISES:
                    raise LookupError(one.id)
                case Fault.RETRIES_LATER:
                    raise RetryLater(delay_ms=1, reason="later")
                case Fault.BASE_EXCEPTION:
                    raise Interrupted
                case Fault.FORGETS_AWAIT:
                    return asyncio.sleep(0)
                case Fault.ROLLS_BACK if session is not None:
                    session.rollback()
                case Fault.COMMITS_AND_RAISES if session is not None:
                    session.commit()
                    raise LookupError(one.id)
                case _:
                    pass
        with self.lock:
            self.plan.returned[group, one.id] += 1
        return None


def run(seed: int, folder: Path) -> None:
    """Run a program to its end; an AssertionError names what does not hold."""
    plan = program(seed)
    world = World(plan, folder)
    try:
        _run(world, Random(seed + 1))
        _check(world)
    finally:
        world.close()


def _run(world: World, random: Random) -> None:
    broker = world.broker
    broker.publish(
        [
            Message(id=f"m-{number}", topic="orders", body=b"", key=str(number % 3), headers={"kind": kind_of(number)})
            for number in range(MESSAGES)
        ]
    )
    paused: str | None = None
    for _ in range(random.randint(1, 3)):
        if random.random() < 0.5:
            broker.ack_fails = [BrokerUnavailable("lost")] * random.randint(1, 3)
            broker.ack_arrives = random.random() < 0.5
        runner = ConsumerRunner(world.consumers(), broker=broker)
        runner.start()
        seen, wanted = broker.acked, random.randint(0, 6)
        broker.wait_at_most(1, lambda seen=seen, wanted=wanted: broker.acked - seen >= wanted)  # type: ignore[misc]
        assert runner.stop(timeout_seconds=WAIT_SECONDS), "stop() did not end in time"
        if paused is not None:
            broker.admin.pause("orders", paused, paused=False)
        paused = _administrate(world, random)
    if paused is not None:
        broker.admin.pause("orders", paused, paused=False)
    before = set(threading.enumerate())
    broker.ack_fails = []
    runner = ConsumerRunner(world.consumers(), broker=broker)
    runner.start()
    broker.wait_for(lambda: all(_is_settled(world, group) for group in world.plan.has_inbox))
    assert runner.stop(timeout_seconds=WAIT_SECONDS), "stop() did not end in time"
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("consumer")]
    assert left == [], f"stop() left threads: {left}"


def _administrate(world: World, random: Random) -> str | None:
    """What an operator does to a group between two runners; returns a group that was paused."""
    admin, group = world.broker.admin, random.choice(list(world.plan.has_inbox))
    match random.choice(["pause", "redrive", "seek", "nothing"]):
        case "pause":
            admin.pause("orders", group, paused=True)
            return group
        case "redrive":
            admin.redrive("orders", group)
        case "seek":
            admin.seek("orders", group, to_offset=0)
        case _:
            pass
    return None


def kind_of(number: int) -> str:
    """What filters look at."""
    return "odd" if number % 2 else "even"


def _is_settled(world: World, group: str) -> bool:
    figures = world.broker.admin.figures("orders", group)
    return figures["backlog"] == 0 and figures["in_flight"] == 0


def _check(world: World) -> None:
    assert world.box.close(timeout_ms=int(WAIT_SECONDS * 1000))
    with world.engine.connect() as connection:
        effects = Counter((row.consumer, row.message) for row in connection.execute(text("SELECT * FROM effect")))
        unsent = set(connection.execute(text("SELECT id FROM outbox_message")).scalars())
    chained = unsent | {one.id for one in world.broker.pull(CHAINED, "oracle", max_messages=1000)}
    for group, has_inbox in world.plan.has_inbox.items():
        dead = {letter.id: letter.reason for letter in world.broker.admin.dead("orders", group, limit=1000)[0]}
        for number in range(MESSAGES):
            name = f"m-{number}"
            if world.plan.filters[group] and kind_of(number) == "odd":
                assert (world.plan.calls[group, name], name in dead) == (0, False), f"{group} {name} was filtered out"
            else:
                _check_message(world, group, name, dead=dead, has_inbox=has_inbox, effects=effects)
    assert chained == {f"{group}-{name}" for group, name in effects}, "a chained message parted from its effect"


def _check_message(
    world: World, group: str, name: str, *, dead: dict[str, str], has_inbox: bool, effects: Counter[tuple[str, str]]
) -> None:
    fault, _ = world.plan.faults[group, name]
    context = f"seed {world.plan.seed}, {group} {name}, {fault}, dead: {dead.get(name)}"
    if name in dead:
        assert has_inbox is False or effects[group, name] <= 1, context
        if has_inbox or fault not in (Fault.ROLLS_BACK, Fault.COMMITS_AND_RAISES):
            expected = REASONS.get(fault, "CommittedByHandler")
            assert expected in dead[name], context
    elif has_inbox:
        assert effects[group, name] == 1, context
    else:
        assert world.plan.returned[group, name] >= 1, context
