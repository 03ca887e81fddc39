"""Consumer processes on a broker server, killed and stopped while they work: every effect happens, and once."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from random import Random

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from broker_adapter.http import HttpBroker
from outbox_core import GroupConfig
from tests.broker_adapter.servers import ServerProcess
from tests.fixtures.fork_server import Program, environment, fork_server
from tests.outbox.shop import Payment, Shop
from tests.outbox.watched_broker import message

pytestmark = pytest.mark.processes

CHILD = "tests.outbox.consuming.working_consumer"
MESSAGES = 600
INVISIBLE_MS = 1_500
SETTLED_SECONDS = 300
POLL_SECONDS = 0.05


class Workers:
    """Three consumer processes; what each says goes to one queue."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self.said: SimpleQueue[str] = SimpleQueue()
        self.running: list[Program] = []
        self._begun: list[Program] = []
        self._readers: list[threading.Thread] = []
        self._ready: dict[int, threading.Event] = {}

    def add(self) -> None:
        """One more."""
        process = fork_server().start(
            CHILD, *self._arguments, env=environment(), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.running.append(process)
        self._begun.append(process)
        self._ready[process.pid] = threading.Event()
        self._readers.append(threading.Thread(target=self._read, args=(process,), daemon=True))
        self._readers[-1].start()

    def replace(self, position: int, number: signal.Signals) -> int:
        """End one by a signal and start another; the exit code of the one that ended."""
        process = self.running.pop(position)
        self._signal(process, number)
        code = process.wait(SETTLED_SECONDS)
        self.add()
        return code

    def end(self) -> list[int]:
        """Stop all in good order; their exit codes."""
        for process in self.running:
            self._signal(process, signal.SIGTERM)
        codes = [process.wait(SETTLED_SECONDS) for process in self.running]
        self.close()
        return codes

    def close(self) -> None:
        """Kill those that run, and read what they have said."""
        for process in self._begun:
            process.kill()
        for reader in self._readers:
            reader.join(SETTLED_SECONDS)
        for process in self._begun:
            process.close()

    def _signal(self, process: Program, number: signal.Signals) -> None:
        """A SIGTERM before run_until_signal() has begun would be an ordinary death."""
        assert self._ready[process.pid].wait(SETTLED_SECONDS)
        process.send_signal(number)

    def _read(self, process: Program) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line == "ready\n":
                    self._ready[process.pid].set()
                else:
                    self.said.put(line)


@contextmanager
def workers(shop: Shop, url: str) -> Iterator[Workers]:
    """Three processes, gone in the end."""
    made = Workers([shop.database.url, shop.database.schema or "", url, str(INVISIBLE_MS)])
    for _ in range(3):
        made.add()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_processes_that_are_killed_and_stopped_at_work_have_every_effect_once(
    mysql_shop: Shop, tmp_path: Path, random_seed: int
) -> None:
    random = Random(random_seed)
    mysql_shop.execute("INSERT INTO payment (id, note) VALUES (-1, '0')")
    server = ServerProcess(tmp_path / "data")
    server.start()
    broker = HttpBroker(server.url)
    try:
        broker.admin.declare_group("orders", "payments", GroupConfig(backoff_initial_ms=50, backoff_max_ms=200))
        broker.publish([message(number) for number in range(MESSAGES)])
        with workers(mysql_shop, server.url) as working:
            for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
                for _ in range(random.randrange(20, 50)):
                    working.said.get(timeout=SETTLED_SECONDS)
                code = working.replace(random.randrange(3), number)
                assert code == (0 if number is signal.SIGTERM else -number)
            figures = settled(broker)
            codes = working.end()
    finally:
        broker.close()
        server.kill()

    assert (figures["backlog"], figures["in_flight"], figures["dead"]) == (0, 0, 0)
    assert codes == [0, 0, 0]
    assert mysql_shop.payments() == [-1, *range(MESSAGES)]
    with Session(mysql_shop.engine) as session:
        assert session.get_one(Payment, -1).note == str(MESSAGES)
        assert session.scalar(select(func.count()).select_from(mysql_shop.tables.inbox)) == MESSAGES


def settled(broker: HttpBroker) -> dict[str, int]:
    """The group's figures when nothing is left to do, or when time is up."""
    deadline = time.monotonic() + SETTLED_SECONDS
    while True:
        figures = dict(broker.admin.figures("orders", "payments"))
        if figures["backlog"] + figures["in_flight"] == 0 or time.monotonic() > deadline:
            return figures
        threading.Event().wait(POLL_SECONDS)
