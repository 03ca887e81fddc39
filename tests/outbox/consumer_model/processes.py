"""Runs a program of consumers whose processes, broker and database are killed under load: all three are real servers.

The consumers of a program run in one or two processes at once, on `outbox broker serve` and a MariaDB. Each event comes
after so many calls of handlers; a process that ends is replaced, as by a supervisor. Then all is let run to its end.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random

from sqlalchemy import create_engine, text

from broker_adapter.http import HttpBroker
from outbox.migrate import upgrade
from outbox_core import Message
from outbox_core.common.errors import BrokerRefused, BrokerThrottled
from tests.broker_adapter.servers import ServerProcess
from tests.fixtures.databases import Database
from tests.fixtures.fork_server import Program as RunningProgram
from tests.fixtures.fork_server import environment, fork_server
from tests.fixtures.local_server import LocalServer
from tests.outbox.consumer_model.administration import administrate, is_settled
from tests.outbox.consumer_model.handlers import TABLES, Calls
from tests.outbox.consumer_model.oracle import check
from tests.outbox.consumer_model.program import PROCESSES, TOPIC, Event, Program, Step, kind_of, message_ids, program

CHILD = "tests.outbox.consumer_model.consumer_process"
WAIT_SECONDS = 300
WORK_SECONDS_MAX = 1.0
POLL_SECONDS = 0.02
LIMITS = "[broker]\nbody_bytes_max = 2000\nwaiting_pulls_max = 2\npublishes_max = 1\ngroup_in_hand_max = 6\n"
"""Requests beyond them are answered with 413 and 429, and pulls with less than they ask for."""
UNHEARD = ("consumer_worker_died", "Exception in thread", "Task exception was never retrieved", "was never awaited")


class Consumers:
    """The processes of a program's consumers; what they count, and what they have logged."""

    def __init__(self, plan: Program, *, database_url: str, broker: ServerProcess, folder: Path) -> None:
        self._plan = plan
        self._database_url = database_url
        self._broker = broker
        self._folder = folder
        self._changed = threading.Condition()
        self._ready: set[int] = set()
        self._readers: dict[int, threading.Thread] = {}
        self._logs: dict[int, Path] = {}
        self.calls = Calls()
        self.running: list[RunningProgram] = []

    def add(self, *, hangs: bool = True) -> None:
        """Start one more; with `hangs` what hangs does so to its end."""
        counted = [(what, *pair, count) for what, pairs in self.calls.counted.items() for pair, count in pairs.items()]
        log = self._folder / f"consumer-{len(self._logs)}.log"
        with log.open("wb") as stream:
            process = fork_server().start(
                CHILD, str(self._plan.seed), self._database_url, self._broker.url, "hangs" if hangs else "ends",
                json.dumps(counted), env=environment(), text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=stream.fileno(),
            )  # fmt: skip
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._logs[process.pid], self._readers[process.pid] = log, reader
        reader.start()
        self.running.append(process)

    def end(self, process: RunningProgram, number: signal.Signals | None = None) -> int:
        """End one by a signal, or wait for one that ends; all that it has said is counted. Its exit code."""
        if number is not None:
            if number is signal.SIGTERM:  # before it is ready, that would be an ordinary death
                self.wait_for(lambda: process.pid in self._ready or process.poll() is not None)
            process.send_signal(number)
        code = process.wait(WAIT_SECONDS)
        self._readers[process.pid].join(WAIT_SECONDS)
        process.close()
        self.running.remove(process)
        return code

    def stop(self, process: RunningProgram) -> int:
        """Stop one in good order: it must end at its deadline, though a handler hangs, and say what it left."""
        code, log = self.end(process, signal.SIGTERM), self.log(process)
        if code == -signal.SIGTERM:  # a handler was ending the process already, and the signal hurries it
            assert "consumers_exit" in log, log
        else:
            assert code == 0 or (code == 1 and ("consumers_still_busy" in log or "consumers_exit" in log)), (code, log)
        return code

    def replace_ended(self, *, hangs: bool = True) -> None:
        """Start others for those that ended by themselves: a handler may end its process."""
        for process in [process for process in self.running if process.poll() is not None]:
            code, log = self.end(process), self.log(process)
            assert code == 1, (code, log)
            assert "consumers_exit" in log, log
            self.add(hangs=hangs)

    def close(self) -> None:
        """Kill those that run."""
        for process in [*self.running]:
            self.end(process, signal.SIGKILL)

    def wait_for(self, condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> bool:
        """Wait until what a process has said makes the condition true; whether it did."""
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def wait_for_calls(self, count: int) -> None:
        """Wait for so many more calls, or a moment: what is paused is not called."""
        total = self.calls.counted["call"].total
        wanted = total() + count
        self.wait_for(lambda: total() >= wanted, WORK_SECONDS_MAX)

    def log(self, process: RunningProgram) -> str:
        """What a process has logged."""
        return self._logs[process.pid].read_text(errors="replace")

    def check_logs(self) -> None:
        """No thread and no task has ended with an error that nobody met."""
        for log in self._logs.values():
            found = [words for words in UNHEARD if words in log.read_text(errors="replace")]
            assert not found, f"seed {self._plan.seed}: {found} in {log.name}:\n{log.read_text(errors='replace')}"

    def _read(self, process: RunningProgram) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._changed:
                match line.split():
                    case [what, group, message_id]:
                        self.calls.count(what, group, message_id)
                    case _:
                        self._ready.add(process.pid)
                self._changed.notify_all()


class World:
    """The servers of one program, and its consumers."""

    def __init__(self, plan: Program, *, folder: Path, server: LocalServer, database: Database) -> None:
        self.plan = plan
        self.random = Random(plan.seed + 1)
        self.server = server
        self.engine = create_engine(database.url, pool_pre_ping=True)
        upgrade(self.engine)
        with self.engine.begin() as connection:
            for statement in TABLES:
                connection.execute(text(statement))
            for group in plan.groups:
                connection.execute(text("INSERT INTO counter VALUES (:g, 'a', 0), (:g, 'b', 0)"), {"g": group.name})
        self.limits = folder / "limits.toml"
        self.limits.write_text(LIMITS)
        self.broker_process = ServerProcess(folder / "broker")
        self.broker_process.start()
        self.broker = HttpBroker(self.broker_process.url)
        self.consumers = Consumers(plan, database_url=database.url, broker=self.broker_process, folder=folder)

    def close(self) -> None:
        """End all of it but the database's server."""
        self.consumers.close()
        self.broker.close()
        self.broker_process.kill()
        self.engine.dispose()


def run(seed: int, folder: Path, server: LocalServer) -> Calls:
    """Run a program to its end; an AssertionError names what does not hold. Returns what was counted."""
    plan = program(seed, PROCESSES)
    with (
        server.fresh_database() as database,
        closing(World(plan, folder=folder, server=server, database=database)) as world,
    ):
        _run(world)
        world.consumers.check_logs()
        check(plan, engine=world.engine, broker=world.broker, admin=world.broker.admin, calls=world.consumers.calls)
        return world.consumers.calls


def _run(world: World) -> None:
    consumers, ids = world.consumers, message_ids()
    for _ in range(world.random.randint(1, 2)):
        consumers.add()
    share = -(-len(ids) // (len(world.plan.steps) + 1))
    _publish(world, ids[:share])
    for number, step in enumerate(world.plan.steps, 1):
        consumers.wait_for_calls(step.after)
        _happen(world, step)
        consumers.replace_ended()
        _publish(world, ids[number * share : (number + 1) * share])
    _let_all_end(world)


def _publish(world: World, ids: list[str]) -> None:
    messages = [
        Message(id=one, topic=TOPIC, body=b"", key=str(len(one) + ord(one[-1]) % 3), headers={"kind": kind_of(one)})
        for one in ids
    ]
    while messages:
        try:
            world.broker.publish(messages)
        except BrokerThrottled:
            _pause()
        else:
            return


def _happen(world: World, step: Step) -> None:
    consumers = world.consumers
    match step.event:
        case Event.STOP:
            consumers.stop(world.random.choice(consumers.running))
            consumers.add()
        case Event.KILL_CONSUMER:
            process = world.random.choice(consumers.running)
            if (code := consumers.end(process, signal.SIGKILL)) != -signal.SIGKILL:  # a handler was quicker
                assert (code, "consumers_exit" in consumers.log(process)) == (1, True), consumers.log(process)
            consumers.add()
        case Event.KILL_BROKER:
            world.broker_process.kill()
            world.broker_process.start()
        case Event.REFUSE:
            world.broker_process.kill()
            world.broker_process.start("--config", str(world.limits))
        case Event.KILL_DATABASE:
            world.server.kill9()
            world.server.start()
        case Event.PAUSE | Event.REDRIVE | Event.SEEK:
            with suppress(BrokerRefused):  # nobody has declared the group yet
                administrate(world.broker.admin, step)
        case Event.LOSE_ACKS:
            raise AssertionError("only kills lose acknowledgements here")


def _let_all_end(world: World) -> None:
    """Bring back what was taken away, end what hangs, and wait until nothing is left to do."""
    plan, consumers, admin = world.plan, world.consumers, world.broker.admin
    if Event.REFUSE in {step.event for step in plan.steps}:
        world.broker_process.kill()
        world.broker_process.start()
    for group in plan.groups:
        with suppress(BrokerRefused):
            admin.pause(TOPIC, group.name, paused=False)
    for process in [*consumers.running]:
        consumers.stop(process)
        consumers.add(hangs=False)
    deadline = time.monotonic() + WAIT_SECONDS
    while not _is_settled(world):
        assert time.monotonic() < deadline, [dict(admin.figures(TOPIC, group.name)) for group in plan.groups]
        consumers.replace_ended(hangs=False)
        _pause()
    for process in [*consumers.running]:
        consumers.stop(process)


def _is_settled(world: World) -> bool:
    try:
        return is_settled(world.broker.admin, world.plan)
    except BrokerRefused:
        return False  # nobody has declared a group yet


def _pause() -> None:
    threading.Event().wait(POLL_SECONDS)
