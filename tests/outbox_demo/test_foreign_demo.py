"""The main job on Redis, NATS and RabbitMQ: a real server, and everything else is killed but the broker."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from outbox_core import CancelStatus
from outbox_demo.foreign_broker import StandstillWatch
from outbox_demo.plan import NOTIFICATION, PAYMENT_COMPLETED, TICKETING, TRIP_REMINDER
from outbox_demo.proof import Fate, ObservedEffect, Records, SentMessage, compare
from tests.broker_adapter.http.test_tls import certificate
from tests.broker_adapter.nats.nats_server import NatsServer, run_plain
from tests.broker_adapter.rabbitmq.rabbitmq_engine import RabbitMqEngine
from tests.broker_adapter.rabbitmq.rabbitmq_server import ADMIN, RabbitMqServer
from tests.broker_adapter.redis.redis_server import HOST, redis_server
from tests.fixtures.local_server import scratch_folder
from tests.outbox_demo.foreign_demo import SMALL, WAIT_SECONDS, WRONG, check_main_job, demo_command, run_demo

DUE_MS = 1_000
A_TICKET = (TICKETING, PAYMENT_COMPLETED, "a")
A_NOTICE = (NOTIFICATION, PAYMENT_COMPLETED, "a")
A_REMINDER = (NOTIFICATION, TRIP_REMINDER, "b")
MISSED = 20
WORKER_KILLED = "booking worker killed"


def effect(mark: tuple[str, str, str], *, order_id: int = 1, at_us: int = DUE_MS * 1_000) -> ObservedEffect:
    """What the handler of a message wrote, when the reminder was due."""
    return ObservedEffect(group=mark[0], topic=mark[1], message_id=mark[2], order_id=order_id, at_us=at_us)


RIGHT = Records(
    payments=frozenset({1}),
    reminders={"b": 1},
    sent=[
        SentMessage(id="a", topic=PAYMENT_COMPLETED, order_id=1, deliver_at_ms=None),
        SentMessage(id="b", topic=TRIP_REMINDER, order_id=1, deliver_at_ms=DUE_MS),
    ],
    marks=frozenset({A_TICKET, A_NOTICE, A_REMINDER}),
    effects=[effect(A_TICKET), effect(A_NOTICE), effect(A_REMINDER)],
)


def changed(**parts: Any) -> Records:
    """The records of a right run, but for these parts."""
    return replace(RIGHT, **parts)


def undelivered(**parts: Any) -> Records:
    """The records of a run in which the reminder has not come."""
    return changed(marks=RIGHT.marks - {A_REMINDER}, effects=RIGHT.effects[:2], **parts)


def moved(**parts: Any) -> Records:
    """The records of a run in which a reminder was moved: the cancel came too late, and both have come."""
    another = (NOTIFICATION, TRIP_REMINDER, "c")
    made = {
        "reminders": {"b": 1, "c": 1},
        "sent": [*RIGHT.sent, replace(RIGHT.sent[1], id="c")],
        "marks": RIGHT.marks | {another},
        "effects": [*RIGHT.effects, effect(another)],
        "withdrawals": {"b": CancelStatus.TOO_LATE},
    }
    return changed(**{**made, **parts})


@pytest.mark.parametrize(
    ("records", "wrong"),
    [
        (RIGHT, {}),
        (changed(sent=RIGHT.sent[:1], marks=RIGHT.marks - {A_REMINDER}, effects=RIGHT.effects[:2]), {"lost": 1}),
        (changed(marks=RIGHT.marks - {A_TICKET}), {"lost": 1}),
        (changed(effects=RIGHT.effects[1:]), {"lost": 1}),
        (changed(payments=frozenset()), {"phantom": 2}),
        (changed(marks=RIGHT.marks | {(TICKETING, PAYMENT_COMPLETED, "c")}), {"phantom": 1}),
        (changed(effects=[*RIGHT.effects, effect(A_TICKET, order_id=2)]), {"phantom": 1}),
        (changed(effects=[*RIGHT.effects, effect(A_NOTICE)]), {"doubled": 1}),
        (changed(sent=[*RIGHT.sent, replace(RIGHT.sent[0], id="c")]), {"doubled": 1, "lost": 2}),
        (changed(effects=[*RIGHT.effects[:2], effect(A_REMINDER, at_us=DUE_MS * 1_000 - 1)]), {"early": 1}),
        (changed(reminders={}), {"phantom": 1}),
        (changed(withdrawals={"b": CancelStatus.CANCELED}), {"revived": 1}),
        (changed(withdrawals={"b": CancelStatus.TOO_LATE}), {}),
        (changed(withdrawals={"b": CancelStatus.UNKNOWN}), {}),
        (changed(withdrawals={"b": None}), {"lost": 1}),
        (undelivered(), {"lost": 1}),
        (undelivered(withdrawals={"b": CancelStatus.CANCELED}), {}),
        (undelivered(withdrawals={"b": CancelStatus.UNKNOWN}), {}),
        (undelivered(withdrawals={"b": CancelStatus.TOO_LATE}), {"lost": 1}),
        (undelivered(pending=frozenset({"b"})), {}),
        (moved(), {}),
        (moved(withdrawals={}), {"doubled": 1}),
    ],
)
def test_what_is_wrong_in_the_records_is_counted(records: Records, wrong: dict[str, int]) -> None:
    figures = compare(records).figures

    assert {name: count for name, count in figures.items() if count and name in WRONG} == wrong


def test_each_message_has_one_fate_for_each_group_that_reads_it() -> None:
    moved_later = changed(
        reminders={"b": 1, "c": 1, "d": 1},
        sent=[*RIGHT.sent, replace(RIGHT.sent[1], id="c"), replace(RIGHT.sent[1], id="d")],
        withdrawals={"b": CancelStatus.TOO_LATE, "c": CancelStatus.CANCELED},
        pending=frozenset({"d"}),
    )

    comparison = compare(moved_later)

    assert comparison.fates == {Fate.DELIVERED: 3, Fate.CANCELED: 1, Fate.PENDING: 1}
    assert (comparison.messages, comparison.reminders, comparison.findings) == (4, 3, [])


@pytest.mark.parametrize(
    ("records", "named"),
    [
        (changed(sent=RIGHT.sent[:1], marks=RIGHT.marks - {A_REMINDER}, effects=RIGHT.effects[:2]), "of order 1"),
        (changed(marks=RIGHT.marks - {A_TICKET}), "message a (payment.completed, order 1) never came to ticketing"),
        (changed(effects=RIGHT.effects[1:]), "message a (payment.completed, order 1) has a mark of ticketing"),
        (changed(marks=RIGHT.marks | {(TICKETING, PAYMENT_COMPLETED, "c")}), "message c (payment.completed)"),
        (changed(effects=[*RIGHT.effects[:2], effect(A_REMINDER, at_us=DUE_MS * 1_000 - 1)]), "1 us early"),
    ],
)
def test_what_is_wrong_is_named(records: Records, named: str) -> None:
    [finding] = compare(records).findings

    assert named in finding.words


def test_a_message_counts_as_lost_only_after_nothing_has_moved_for_a_while() -> None:
    seconds = iter([0.0, 29.0, 29.5, 59.0, 59.5])
    progress = StandstillWatch(patience_s=30, monotonic=lambda: next(seconds))

    looked = [progress.has_ended(marks) for marks in (5, 5, 6, 6, 6)]

    assert looked == [False, False, False, False, True]


@pytest.fixture
def redis_url() -> Iterator[str]:
    """A durable server, which must be empty in the end: the demo removes what it made."""
    with redis_server() as server:
        yield f"redis://{HOST}:{server.port}/?wait=0"
        assert server.ask("DBSIZE") == 0


@pytest.fixture
def nats_url(tmp_path: Path) -> Iterator[str]:
    """A server, which must be without streams in the end."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield f"nats://{server.address}"
    assert run_plain([f"nats://{server.address}"], lambda client: client.jetstream().streams_info()) == []
    server.kill()


@pytest.fixture
def rabbitmq(tmp_path: Path) -> Iterator[RabbitMqEngine]:
    """A server, which must be without queues in the end."""
    with tempfile.TemporaryDirectory(dir=scratch_folder(), ignore_cleanup_errors=True) as folder:
        server = RabbitMqServer(Path(folder) / "server", tls=certificate(tmp_path, address=HOST))
        server.start()
        try:
            yield RabbitMqEngine(server)
            assert server.api("GET", "queues") == []
        finally:
            server.kill()


@pytest.fixture
def rabbitmq_url(rabbitmq: RabbitMqEngine) -> str:
    """The administrator's, since the demo declares queues."""
    return rabbitmq.url_of(*ADMIN)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("engine", ["redis", "nats", "rabbitmq"])
def test_everything_that_was_paid_has_its_effects_once_although_worker_delay_service_and_consumer_are_killed(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    check_main_job(tmp_path / "run", request.getfixturevalue(f"{engine}_url"))


@pytest.mark.slow
@pytest.mark.processes
def test_messages_that_do_not_reach_a_queue_are_named_as_lost(
    rabbitmq: RabbitMqEngine, rabbitmq_url: str, tmp_path: Path
) -> None:
    command = demo_command(tmp_path / "run", rabbitmq_url, *SMALL)
    earlier, log = queues_of(TICKETING, rabbitmq), tmp_path / "log"

    with log.open("w") as lines, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=lines, text=True) as demo:
        try:
            bound = wait_for_binding(rabbitmq, demo, earlier=earlier)
            missed = unbind_for_a_while(bound, rabbitmq, is_killed=lambda: WORKER_KILLED in log.read_text())
            said, _ = demo.communicate(timeout=WAIT_SECONDS)
        finally:
            demo.terminate()

    assert demo.returncode == 1, log.read_text()
    _, _, named = said.partition("NOT proven:\n")
    lost = {line for line in named.splitlines() if not line.startswith("and ")}
    # Not each one: what the killed worker had sent comes again, from the compensator.
    assert lost
    assert lost <= {f"lost: {one} never came to ticketing: it has no mark in the inbox" for one in missed}


def queues_of(group: str, rabbitmq: RabbitMqEngine) -> set[str]:
    return {
        one["name"] for one in rabbitmq.server.api("GET", "queues?columns=name") if one["name"].endswith(f".{group}")
    }


def wait_for_binding(rabbitmq: RabbitMqEngine, demo: subprocess.Popen[str], *, earlier: set[str]) -> dict[str, str]:
    """Wait until the queue of a group in this demo is bound. `earlier`: those of earlier demos, maybe still listed."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        assert time.monotonic() < deadline, "no queue was bound"
        assert demo.poll() is None, "the demo has ended without a queue"
        for queue in queues_of(TICKETING, rabbitmq) - earlier:
            for one in rabbitmq.server.api("GET", f"queues/%2F/{queue}/bindings"):
                if one["source"]:
                    return one


def unbind_for_a_while(bound: dict[str, str], rabbitmq: RabbitMqEngine, *, is_killed: Callable[[], bool]) -> set[str]:
    """Have a queue miss messages of its exchange, which other queues get; returns what they are called.

    Some of them come after the worker was killed: those before may all be among what it had sent, and come again.
    """
    queue, behind_the_kill = bound["destination"], 0
    missed: set[str] = set()
    with rabbitmq.plain_channel() as channel:
        own = channel.queue_declare("", exclusive=True).method.queue
        channel.queue_bind(own, bound["source"], bound["routing_key"])
        channel.queue_unbind(queue, bound["source"], bound["routing_key"])
        for name in messages_in(own, channel, wait_s=WAIT_SECONDS):
            missed.add(name)
            behind_the_kill += is_killed()
            if behind_the_kill == MISSED:
                break
        assert behind_the_kill == MISSED, "no message came"
        channel.queue_bind(queue, bound["source"], bound["routing_key"])
        channel.queue_unbind(own, bound["source"], bound["routing_key"])
        # What came between the last one and the binding was missed, too.
        missed.update(messages_in(own, channel, wait_s=10))
    return missed


def messages_in(queue: str, channel: BlockingChannel, *, wait_s: float) -> Iterator[str]:
    """Read a queue until nothing comes for a while; yields what the messages are called."""
    for method, properties, body in channel.consume(queue, auto_ack=True, inactivity_timeout=wait_s):
        if method is None:
            return
        yield f"message {properties.message_id} (payment.completed, order {json.loads(body)['order_id']})"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("amqp://127.0.0.1", "not on 'amqp'"),
        ("redis://127.0.0.1:1/?delay=http://127.0.0.1:2", "leave delay= out"),
        ("redis://127.0.0.1:1/?no_such=1", "unknown option 'no_such'"),
        ("redis://127.0.0.1:1", "127.0.0.1:1"),
        ("nats://127.0.0.1:1?timeout_ms=1000", "127.0.0.1:1"),
        ("rabbitmq://127.0.0.1:1", "127.0.0.1:1"),
    ],
)
def test_a_broker_that_the_demo_cannot_use_is_refused_in_one_line(url: str, said: str, tmp_path: Path) -> None:
    ended = run_demo(tmp_path / "run", url)

    assert ended.returncode in {1, 2}
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
