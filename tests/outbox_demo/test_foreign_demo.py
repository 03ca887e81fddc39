"""The main job on Redis and on NATS: a real server, and everything else is killed but the broker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outbox_demo.plan import NOTIFICATION, PAYMENT_COMPLETED, TICKETING, TRIP_REMINDER
from outbox_demo.proof import Archived, ObservedEffect, Records, compare
from tests.broker_adapter.nats.nats_server import NatsServer, run_plain
from tests.broker_adapter.redis.redis_server import HOST, redis_server

BOOKINGS = 200
WAIT_SECONDS = 540
DUE_MS = 1_000
A_TICKET = (TICKETING, PAYMENT_COMPLETED, "a")
A_NOTICE = (NOTIFICATION, PAYMENT_COMPLETED, "a")
A_REMINDER = (NOTIFICATION, TRIP_REMINDER, "b")


def effect(mark: tuple[str, str, str], *, order_id: int = 1, at_us: int = DUE_MS * 1_000) -> ObservedEffect:
    """What the handler of a message wrote, when the reminder was due."""
    return ObservedEffect(group=mark[0], topic=mark[1], order_id=order_id, at_us=at_us)


RIGHT = Records(
    payments=frozenset({1}),
    archive=[
        Archived(id="a", topic=PAYMENT_COMPLETED, order_id=1, deliver_at_ms=None),
        Archived(id="b", topic=TRIP_REMINDER, order_id=1, deliver_at_ms=DUE_MS),
    ],
    marks=frozenset({A_TICKET, A_NOTICE, A_REMINDER}),
    effects=[effect(A_TICKET), effect(A_NOTICE), effect(A_REMINDER)],
)


def changed(**parts: Any) -> Records:
    """The records of a right run, but for these parts."""
    return replace(RIGHT, **parts)


@pytest.mark.parametrize(
    ("records", "wrong"),
    [
        (RIGHT, {}),
        (changed(archive=RIGHT.archive[:1], marks=RIGHT.marks - {A_REMINDER}, effects=RIGHT.effects[:2]), {"lost": 1}),
        (changed(marks=RIGHT.marks - {A_TICKET}), {"lost": 1}),
        (changed(effects=RIGHT.effects[1:]), {"lost": 1}),
        (changed(payments=frozenset()), {"phantom": 2}),
        (changed(marks=RIGHT.marks | {(TICKETING, PAYMENT_COMPLETED, "c")}), {"phantom": 1}),
        (changed(effects=[*RIGHT.effects, effect(A_TICKET, order_id=2)]), {"phantom": 1}),
        (changed(effects=[*RIGHT.effects, effect(A_NOTICE)]), {"doubled": 1}),
        (changed(archive=[*RIGHT.archive, replace(RIGHT.archive[0], id="c")]), {"doubled": 1, "lost": 2}),
        (changed(effects=[*RIGHT.effects[:2], effect(A_REMINDER, at_us=DUE_MS * 1_000 - 1)]), {"early": 1}),
    ],
)
def test_what_is_wrong_in_the_records_is_counted(records: Records, wrong: dict[str, int]) -> None:
    figures = compare(records)

    assert {name: count for name, count in figures.items() if count and name in LOSSES} == wrong


LOSSES = ("lost", "phantom", "doubled", "early")


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


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("engine", ["redis", "nats"])
def test_everything_that_was_paid_has_its_effects_once_although_worker_delay_service_and_consumer_are_killed(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = request.getfixturevalue(f"{engine}_url")

    ended = _demo("--folder", str(tmp_path / "run"), "--bookings", str(BOOKINGS), "--broker", url, "--json")

    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout)
    paid = figures["payments"]
    assert paid >= BOOKINGS
    assert (figures["messages"], figures["delivered"]) == (2 * paid, 3 * paid)
    assert figures["rolled_back"] > 0
    assert [figures[name] for name in LOSSES] == [0, 0, 0, 0]
    assert "killed between commit and send" in ended.stderr
    assert "delay service and a consumer killed" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("amqp://127.0.0.1", "not on 'amqp'"),
        ("redis://127.0.0.1:1/?prefix=mine", "chooses prefix="),
        ("redis://127.0.0.1:1/?no_such=1", "unknown option 'no_such'"),
        ("redis://127.0.0.1:1", "127.0.0.1:1"),
        ("nats://127.0.0.1:1?timeout_ms=1000", "127.0.0.1:1"),
    ],
)
def test_a_broker_that_the_demo_cannot_use_is_refused_in_one_line(url: str, said: str, tmp_path: Path) -> None:
    ended = _demo("--folder", str(tmp_path / "run"), "--broker", url)

    assert ended.returncode in {1, 2}
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def _demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outbox", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
