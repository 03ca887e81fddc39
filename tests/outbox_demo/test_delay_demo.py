"""The demo with a timing store on Redis, which loses everything in the middle, and trips that change; and what it says
where Java or the jars of BookKeeper are missing.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from outbox_demo.accelerated_clock import AcceleratedClock
from outbox_demo.planned_trip_changes import TripChange, change_of, changed_reminder_at
from tests.broker_adapter.redis.redis_server import HOST, redis_server, server_program
from tests.outbox_demo.delay_demo import check_delay_demo, rows, run_delay_demo, with_program

US = 1_000_000
CLOCK = AcceleratedClock(trips_start_us=0, starts_at_us=1_000 * US, speed=3_600)


def test_four_of_ten_trips_change_each_in_another_way() -> None:
    changes = [change_of(order_id) for order_id in range(10)]

    assert sorted(one for one in changes if one is not None) == sorted(TripChange)


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        (TripChange.EARLIER, timedelta(seconds=-1)),
        (TripChange.LATER, timedelta(seconds=1)),
        (TripChange.POSTPONED, timedelta(days=1)),
    ],
)
def test_a_moved_trip_has_its_reminder_moved(change: TripChange, moved: timedelta) -> None:
    departs_at_us = 7_200 * US

    due_at = changed_reminder_at(change, departs_at_us=departs_at_us, clock=CLOCK)

    assert due_at is not None
    assert due_at - CLOCK.reminder_at(departs_at_us) == moved


def test_a_canceled_trip_has_no_reminder() -> None:
    assert changed_reminder_at(TripChange.CANCELED, departs_at_us=0, clock=CLOCK) is None


@pytest.mark.slow
@pytest.mark.processes
def test_each_reminder_comes_once_is_canceled_or_waits_although_redis_loses_everything_and_is_killed(
    tmp_path: Path,
) -> None:
    program = server_program()

    said = check_delay_demo(tmp_path / "run", "redis:", environment=with_program(program))

    assert "Redis has lost all timers: FLUSHALL" in said
    assert "all timers rebuilt from the message table" in said
    assert "Redis, a timer worker and a consumer killed" in said
    assert rows(tmp_path / "run", "outbox_message") > 0, "what waits is in the message table"


@pytest.mark.slow
@pytest.mark.processes
def test_a_redis_that_is_there_already_is_left_as_it_was(tmp_path: Path) -> None:
    with redis_server(appendfsync="no") as server:
        server.ask("SET", "precious", "mine")

        said = check_delay_demo(tmp_path / "run", f"redis://{HOST}:{server.port}/?slots=2")

        assert server.ask("KEYS", "*") == [b"precious"]
    assert "their keys deleted" in said
    assert "FLUSHALL" not in said


@pytest.mark.processes
@pytest.mark.parametrize(
    ("delay", "said"),
    [
        ("nats:", "--delay names an engine for which the demo starts servers, redis:"),
        ("redis", "--delay names an engine"),
        ("redis://127.0.0.1:1/?name=shop", "leave name= out"),
        ("redis://127.0.0.1:1/?no_such=1", "unknown option 'no_such'"),
        ("redis://127.0.0.1:1/?timeout_ms=500", "127.0.0.1:1"),
        ("bookkeeper://127.0.0.1:1", "the path in ZooKeeper is one or more names"),
    ],
)
def test_an_engine_that_the_demo_cannot_use_is_refused_in_one_line(delay: str, said: str, tmp_path: Path) -> None:
    ended = run_delay_demo(tmp_path / "run", delay)

    assert ended.returncode in {1, 2}
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.processes
def test_without_a_redis_to_start_the_cure_is_named(tmp_path: Path) -> None:
    ended = run_delay_demo(tmp_path / "run", "redis:", environment={"PATH": str(tmp_path)})

    assert ended.returncode == 2
    assert "install Redis 7.0 or later, or name one that runs, --delay redis://HOST:6379" in ended.stderr
    assert "Traceback" not in ended.stderr


def fake_java(folder: Path, *, version: str) -> dict[str, str]:
    """The environment of a machine with a Java of this version."""
    program = folder / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    return {"JAVA_HOME": str(folder)}


@pytest.mark.processes
def test_without_java_the_cure_is_named(tmp_path: Path) -> None:
    check_refusal(
        tmp_path, {"PATH": str(tmp_path), "JAVA_HOME": ""},
        "there is no Java on the PATH: install Java 17 or later, or set JAVA_HOME",
    )  # fmt: skip


@pytest.mark.processes
def test_an_old_java_is_refused(tmp_path: Path) -> None:
    check_refusal(tmp_path, fake_java(tmp_path, version="11.0.2"), "is not Java 17 or later: install Java 17 or later")


@pytest.mark.processes
def test_without_jars_both_ways_to_them_are_named(tmp_path: Path) -> None:
    given = {**fake_java(tmp_path, version="17.0.9"), "OUTBOX_BOOKKEEPER_JARS": ""}

    said = check_refusal(tmp_path, given, "the jars of BookKeeper's client are missing; set OUTBOX_BOOKKEEPER_JARS")

    assert "or install the wheel outbox-mq-bookkeeper-jars" in said


@pytest.mark.processes
def test_jars_that_cannot_run_a_bookie_are_refused(tmp_path: Path) -> None:
    jars = tmp_path / "jars"
    jars.mkdir()
    (jars / "bookkeeper-server-4.18.0.jar").touch()

    check_refusal(
        tmp_path, {**fake_java(tmp_path, version="17.0.9"), "OUTBOX_BOOKKEEPER_JARS": str(jars)},
        f"the jars in {jars} are for clients: bookies and ZooKeeper need hppc, ",
    )  # fmt: skip


def check_refusal(folder: Path, environment: dict[str, str], said: str) -> str:
    ended = run_delay_demo(folder / "run", "bookkeeper:", environment=environment)

    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr
