"""A consumer by another broker's own client, as a process that is killed at each step, and what must hold after that.

Not a test: those of each engine say how the consumer is started and what its group has not settled.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from sqlalchemy import select, text

from outbox_core import Message, connect
from tests.fixtures.fork_server import ForkServer, Program
from tests.outbox.shop import Shop

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "examples" / "inbox"
TOPIC: Final = "payment.completed"
GROUP: Final = "ticketing"
WAIT_SECONDS: Final = 300
POLL_SECONDS: Final = 0.05

PRELOADED: Final = (
    "aiosqlite",
    "celery.apps.worker",
    "celery.bin.celery",
    "celery.bin.worker",
    "celery.concurrency.prefork",
    "faststream.nats",
    "faststream.rabbit",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
    "nats",
    "outbox",
    "outbox.migrate",
    "pika",
    "redis",
    "sqlalchemy.dialects.sqlite.aiosqlite",
    "sqlalchemy.ext.asyncio",
)

BEFORE_COMMIT: Final = "before_commit"
AFTER_COMMIT: Final = "after_commit"
AFTER_ACK: Final = "after_ack"
DONE: Final = {BEFORE_COMMIT: 0, AFTER_COMMIT: 1, AFTER_ACK: 3}
"""Of three messages, how many have their effect when the consumer has been killed at a step."""

_KILL_POINT: Final = "tests.examples.kill_point"


def nothing() -> None:
    """Where a broker delivers again at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignConsumer:
    """A consumer of the topic that is a program of one process group."""

    program: tuple[str, ...]
    """An example's file name, or a module, and arguments."""
    environment: Mapping[str, str]
    broker_url: str
    """Where the outbox publishes."""
    unsettled: Callable[[], int]
    """How many messages its group has not acknowledged, read or not."""
    expire: Callable[[], None] = nothing
    """Has the broker deliver again what was read and not acknowledged, as it would after a time."""

    @contextmanager
    def running(self, *, moment: str = "none") -> Iterator[Program]:
        """For the length of a block, or until it comes to a moment of kill_point.py; then killed by SIGKILL."""
        with running(self.program, self.environment, moment=moment) as process:
            yield process

    def run_until_settled(self, *, moment: str = "none") -> None:
        """Run until every message is acknowledged, and kill it after that."""
        with self.running(moment=moment) as process:
            wait_until(lambda: self.unsettled() == 0, process)


@contextmanager
def running(program: tuple[str, ...], environment: Mapping[str, str], *, moment: str = "none") -> Iterator[Program]:
    """A program that runs, with what it forks, for the length of a block; then killed by SIGKILL."""
    example = EXAMPLES / program[0]
    command = [str(example) if example.is_file() else program[0], *program[1:]]
    paths = [str(EXAMPLES), str(ROOT), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryFile() as log:
        process = _fork_server().start(
            _KILL_POINT, moment, *command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
            stdin=subprocess.DEVNULL, stdout=log.fileno(), stderr=log.fileno(), new_session=True,
        )  # fmt: skip
        try:
            yield process
        except BaseException as error:
            log.seek(0)
            error.add_note(f"{program[0]} wrote:\n{log.read().decode()[-4_000:]}")
            raise
        finally:
            process.close()


@lru_cache(maxsize=1)
def _fork_server() -> ForkServer:
    """The one of this process for programs that use other libraries than ours do."""
    server = ForkServer(PRELOADED)
    atexit.register(server.close)
    return server


def wait_until(done: Callable[[], bool], *processes: Program) -> None:
    """Wait for what the processes bring about."""
    deadline, nothing = time.monotonic() + WAIT_SECONDS, threading.Event()
    while not done():
        assert time.monotonic() < deadline, "it did not come about in time"
        assert [one.poll() for one in processes] == [None] * len(processes), "a program ended"
        nothing.wait(POLL_SECONDS)


def check_one_effect(shop: Shop, consumer: ForeignConsumer, *, step: str) -> None:
    """Publish, kill the consumer at a step, publish more, start it again: each message has one ticket and one mark."""
    make_ticket_table(shop)
    publish(consumer.broker_url, range(3))
    if step == AFTER_ACK:
        consumer.run_until_settled()
    else:
        with consumer.running(moment=step) as process:
            assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
        wait_until(lambda: consumer.unsettled() >= 3)  # nothing is acknowledged before its commit
        consumer.expire()
    assert len(tickets(shop)) == len(marks(shop)) == DONE[step]

    publish(consumer.broker_url, range(3, 5))
    consumer.run_until_settled()

    check_each_once(shop, range(5))


def check_effect_after_failed_commit(shop: Shop, consumer: ForeignConsumer) -> None:
    """The first commit fails, the program goes on: its message comes again, and each has its effect once."""
    make_ticket_table(shop)
    publish(consumer.broker_url, range(3))

    with consumer.running(moment="failed_commit") as process:
        wait_until(lambda: len(marks(shop)) >= 2, process)
        consumer.expire()
        wait_until(lambda: consumer.unsettled() == 0, process)

    check_each_once(shop, range(3))


def check_each_once(shop: Shop, orders: Iterable[int]) -> None:
    """Each order has one ticket, and its message one mark in the inbox."""
    expected = list(orders)
    assert tickets(shop) == expected
    assert marks(shop) == [f"payment-{order}" for order in expected]


def make_ticket_table(shop: Shop) -> None:
    """As tickets.py makes it; two tickets of one order are two rows."""
    shop.execute("CREATE TABLE ticket (id INTEGER PRIMARY KEY, order_id INTEGER NOT NULL)")


def publish(broker_url: str, orders: Iterable[int]) -> None:
    """Publish one message for each order."""
    headers = {"content-type": "application/json"}
    broker = connect(broker_url)
    try:
        results = broker.publish(
            [
                Message(id=f"payment-{order}", topic=TOPIC, body=b'{"order_id": %d}' % order, headers=headers)
                for order in orders
            ]
        )
    finally:
        broker.close()
    assert all(one.status.is_success for one in results), results


def tickets(shop: Shop) -> list[int]:
    """The orders of the tickets, doubles included."""
    with shop.engine.connect() as connection:
        return list(connection.scalars(text("SELECT order_id FROM ticket ORDER BY order_id")))


def marks(shop: Shop) -> list[str]:
    """The ids of the messages that the group's inbox has."""
    inbox = shop.tables.inbox
    statement = select(inbox.c.message_id).where(inbox.c.consumer_group == GROUP).order_by(inbox.c.message_id)
    with shop.engine.connect() as connection:
        return list(connection.scalars(statement))
