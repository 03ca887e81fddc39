"""Runs a program of consumers with a broker in this process and an SQLite database; both are real.

Runners are started, stopped and started again; a broker loses acknowledgements and refuses, an operator acts. Then all
is let run to its end. Every stop() must return at its deadline, whatever hangs, and leave no thread once it says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from sqlalchemy import create_engine, text

from outbox import Outbox, SenderLimits
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.consumers.consumer_runner import RunnerTimes
from outbox.migrate import upgrade
from outbox_core import Message, PublishResult, PublishStatus
from outbox_core.common.backoff import Backoff
from outbox_core.common.errors import BrokerRefused, BrokerThrottled, BrokerUnavailable, StorageFailed
from tests.outbox.consumer_model.administration import administrate, is_settled
from tests.outbox.consumer_model.handlers import TABLES, Calls, Handlers
from tests.outbox.consumer_model.oracle import check
from tests.outbox.consumer_model.program import (
    CHAINED,
    IN_PROCESS,
    TOPIC,
    Event,
    Program,
    Step,
    kind_of,
    message_ids,
    program,
)
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker

WORK_SECONDS_MAX = 0.5
DEADLINE_SECONDS = 0.05
PAUSES = Backoff(initial_ms=1, max_ms=20)


class RefusingBroker(WatchedBroker):
    """The embedded broker, which refuses the next chained messages: with an error, or as it would one message."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.refusals: list[Exception | PublishStatus] = []

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        refusal = self.refusals.pop() if self.refusals and batch[0].topic == CHAINED else None
        if isinstance(refusal, Exception):
            raise refusal
        if refusal is not None:
            return [PublishResult(one.id, refusal, "as the model has it") for one in batch]
        return super().publish(batch)


class World:
    """A broker, a database and the consumers of one program."""

    def __init__(self, plan: Program, folder: Path) -> None:
        self.plan = plan
        self.random = Random(plan.seed + 1)
        self.calls = Calls()
        self.may_end = threading.Event()
        url = f"sqlite:///{folder / 'shop.db'}"
        self.engine = create_engine(url, connect_args={"timeout": 60})
        upgrade(self.engine)
        with self.engine.begin() as connection:
            for statement in TABLES:
                connection.execute(text(statement))
            for group in plan.groups:
                connection.execute(text("INSERT INTO counter VALUES (:g, 'a', 0), (:g, 'b', 0)"), {"g": group.name})
        self.broker = RefusingBroker(folder / "broker")
        self.box = Outbox(self.engine, broker=self.broker, sender=SenderLimits(gather_ms=0))
        self.handlers = Handlers(
            plan, urls=(url, url.replace("sqlite:", "sqlite+aiosqlite:")), box=self.box, calls=self.calls,
            may_end=self.may_end,
        )  # fmt: skip

    def close(self) -> None:
        """Close the connections."""
        self.may_end.set()
        self.box.close()
        self.broker.close()
        self.engine.dispose()

    def runner(self) -> ConsumerRunner:
        """Consumers at work."""
        runner = ConsumerRunner(
            self.handlers.consumers(), broker=self.broker, random=self.random, pauses=PAUSES,
            times=RunnerTimes(ack_delay_ms=5),
        )  # fmt: skip
        runner.start()
        return runner


def run(seed: int, folder: Path) -> Calls:
    """Run a program to its end; an AssertionError names what does not hold. Returns what was counted."""
    plan = program(seed, IN_PROCESS)
    world = World(plan, folder)
    try:
        _run(world)
        assert world.box.close(timeout_ms=int(WAIT_SECONDS * 1000))
        check(plan, engine=world.engine, broker=world.broker, admin=world.broker.admin, calls=world.calls)
    finally:
        world.close()
    return world.calls


def _run(world: World) -> None:
    broker = world.broker
    broker.publish(
        [
            Message(id=message_id, topic=TOPIC, body=b"", key=str(number % 3), headers={"kind": kind_of(message_id)})
            for number, message_id in enumerate(message_ids())
        ]
    )
    for step in world.plan.steps:
        runner = world.runner()
        settled = broker.acked + len(broker.nacks)
        broker.wait_at_most(
            WORK_SECONDS_MAX, lambda: broker.acked + len(broker.nacks) - settled >= step.after  # noqa: B023
        )  # fmt: skip
        _act(world, step, is_over=False)
        _stop(world, runner)
        _act(world, step, is_over=True)
    for group in world.plan.groups:
        broker.admin.pause(TOPIC, group.name, paused=False)
    world.may_end.set()
    before = set(threading.enumerate())
    while not is_settled(broker.admin, world.plan):
        runner = world.runner()
        broker.wait_for(lambda: runner.health().stopping or is_settled(broker.admin, world.plan))  # noqa: B023
        assert runner.stop(timeout_seconds=WAIT_SECONDS), "stop() did not end in time"
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("consumer")]
    for thread in left:
        if thread.name == "consumer-stop":  # it calls stop() as well, for a handler that ended its process
            thread.join(WAIT_SECONDS)
    names = [thread.name for thread in left if thread.is_alive()]
    assert names == [], f"stop() left threads: {names}"


def _stop(world: World, runner: ConsumerRunner) -> None:
    """Stop with a deadline that a handler which hangs exceeds; then let it end, and stop again."""
    began = time.monotonic()
    runner.stop(timeout_seconds=DEADLINE_SECONDS)
    assert time.monotonic() - began < WAIT_SECONDS / 5, "stop() did not keep its deadline"
    world.may_end.set()
    assert runner.stop(timeout_seconds=WAIT_SECONDS), "stop() did not end in time"
    world.may_end.clear()


def _act(world: World, step: Step, *, is_over: bool) -> None:
    """What happens while a runner works, and behind its stop."""
    broker, random = world.broker, world.random
    match step.event:
        case Event.STOP | Event.KILL_CONSUMER | Event.KILL_BROKER | Event.KILL_DATABASE:
            pass
        case Event.PAUSE | Event.REDRIVE | Event.SEEK:
            administrate(broker.admin, step)
        case Event.LOSE_ACKS:
            broker.ack_fails = [] if is_over else [BrokerUnavailable("lost")] * random.randint(1, 3)
            broker.ack_arrives = random.random() < 0.5
        case Event.REFUSE:
            _refuse(broker, random, is_over=is_over)


def _refuse(broker: RefusingBroker, random: Random, *, is_over: bool) -> None:
    errors: list[Any] = [
        BrokerThrottled("too much", retry_after_ms=5), StorageFailed("full"), BrokerUnavailable("out"),
        BrokerRefused("no"),
    ]  # fmt: skip
    broker.nack_fails, broker.extend_fails = not is_over, not is_over
    broker.pull_fails = [] if is_over else random.choices(errors, k=3)
    statuses = [PublishStatus.REJECTED, PublishStatus.DEFERRED]
    broker.refusals = [] if is_over else random.choices([*errors, *statuses], k=3)
