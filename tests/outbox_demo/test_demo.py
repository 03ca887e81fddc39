"""The main job end to end, small: what it prints comes from the databases and logs, and tampering with them shows."""

from __future__ import annotations

import json
import re
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from compensator.core.config import load
from outbox_demo.accelerated_clock import AcceleratedClock
from outbox_demo.flight_data_loader import FLIGHTS, read_flights
from outbox_demo.plan import DemoPlan

BOOKINGS = 300
US = 1_000_000


def test_the_demo_clock_maps_the_first_and_last_departure_to_the_ends_of_the_run() -> None:
    clock = AcceleratedClock.fit(first_us=0, last_us=86_400 * US, starts_at_us=1_000 * US, seconds=60)

    assert clock.ours(0).timestamp() == 1_000
    assert clock.ours(86_400 * US).timestamp() == 1_060


def test_a_reminder_is_due_two_hours_of_the_trips_time_before_departure() -> None:
    clock = AcceleratedClock.fit(first_us=0, last_us=86_400 * US, starts_at_us=1_000 * US, seconds=60)

    assert clock.ours(7_200 * US) - clock.reminder_at(7_200 * US) == timedelta(seconds=5)


def test_the_demo_clock_never_runs_slower_than_the_worlds() -> None:
    clock = AcceleratedClock.fit(first_us=0, last_us=10 * US, starts_at_us=0, seconds=60)

    assert clock.speed == 1.0


@pytest.mark.slow
def test_all_flights_of_the_package_are_trips_that_depart_in_2013() -> None:
    flights = list(read_flights())

    assert len(flights) == FLIGHTS
    assert min(one["departs_at_us"] for one in flights) == 1_357_034_400 * US + 15 * 60 * US  # 5:15 in New York
    assert len({one["id"] for one in flights}) == FLIGHTS


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One run of the demo, for all tests here to look at."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    command = ["demo", "--folder", str(folder), "--bookings", str(BOOKINGS)]
    return folder, _outbox(*command, timeout=540)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.processes
def test_everything_that_was_paid_arrives_although_worker_and_broker_are_killed(
    finished_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, ended = finished_run

    assert ended.returncode == 0, ended.stderr
    figures = _figures(ended.stdout)
    paid = _count(folder, "SELECT COUNT(*) FROM demo_payment")
    assert figures["payments"] == paid >= BOOKINGS
    assert figures["messages"] == 2 * paid == _count(folder, "SELECT COUNT(*) FROM outbox_archive")
    assert figures["delivered"] == 3 * paid
    assert figures["rolled back"] > 0
    assert figures["redelivered"] > 0
    assert figures["dead"] == 1
    assert [figures[name] for name in ("lost", "phantom", "early")] == [0, 0, 0]
    assert _count(folder, "SELECT COUNT(*) FROM demo_ticket") == paid
    assert "killed between commit and send" in ended.stderr
    assert "broker killed" in ended.stderr
    assert "Traceback" not in ended.stderr
    for operation in (
        "load: [0-9,]+ of 336,776 ",
        "book: [0-9,]+ of [0-9,]+ ",
        "settle: [0-9,]+ of [0-9,]+ ",
        "prove: ",
    ):
        assert re.search(rf"^{operation}\(?[0-9]+ %", ended.stderr, re.MULTILINE), operation
    assert list(folder.glob("reconciliation/*/report.html"))


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.processes
def test_a_payment_that_disappears_turns_its_messages_into_phantoms_and_the_exit_status_into_1(
    finished_run: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder, _ = finished_run
    with closing(sqlite3.connect(folder / "business.db")) as whole, closing(sqlite3.connect(tmp_path / "b.db")) as copy:
        whole.backup(copy)
        copy.execute("DELETE FROM demo_payment WHERE order_id = (SELECT MIN(order_id) FROM demo_payment)")
        copy.commit()
    settings = (folder / "reconcile.toml").read_text().replace(str(folder / "business.db"), str(tmp_path / "b.db"))
    (tmp_path / "reconcile.toml").write_text(settings)

    ended = _outbox("reconcile", "run", "--config", str(tmp_path / "reconcile.toml"), "--json", timeout=540)

    assert ended.returncode == 1, ended.stderr
    summary: dict[str, Any] = json.loads(ended.stdout)
    assert summary["phantom"] == 2  # the announcement and the reminder
    assert summary["lost"] == 0


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.processes
def test_the_plan_and_the_settings_of_the_reconciliation_which_may_hold_a_password_are_readable_by_their_owner_alone(
    finished_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = finished_run

    modes = [stat.S_IMODE((folder / name).stat().st_mode) for name in ("plan.json", "reconcile.toml")]
    assert modes == [0o600, 0o600]


def test_the_compensator_gets_urls_which_may_hold_a_password_by_its_environment_and_not_by_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = DemoPlan(
        url="mysql+pymysql://app:s3cret@db/shop", broker_url="rabbitmq://app:s3cret@mq/shop",
        timing_url="redis://:s3cret@redis/?name=shop", folder=tmp_path, first_us=0, last_us=1, bookings=1,
        poison_order=1, clock=AcceleratedClock.fit(first_us=0, last_us=1, starts_at_us=0, seconds=60),
    )  # fmt: skip
    for name, value in plan.compensator_environment.items():
        monkeypatch.setenv(name, value)
    chosen = load({}, file=None)

    assert not [one for one in plan.compensator_arguments if "s3cret" in one]
    assert (chosen.database.url, chosen.broker.url, chosen.timing.store) == (
        plan.url, plan.broker_url, plan.timing_url,
    )  # fmt: skip


@pytest.mark.processes
def test_a_folder_that_is_not_an_earlier_demos_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")

    ended = _outbox("demo", "--folder", str(tmp_path), timeout=300)

    assert ended.returncode == 2
    assert "choose another --folder" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert precious.read_text() == "mine"


@pytest.mark.processes
def test_fewer_flights_than_bookings_are_refused_with_the_cure(tmp_path: Path) -> None:
    ended = _outbox("demo", "--folder", str(tmp_path / "x"), "--bookings", "300", "--flights", "299", timeout=300)

    assert ended.returncode == 2
    assert "300 bookings need as many flights: raise --flights, 299 now" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.processes
def test_a_database_that_cannot_be_reached_is_said_in_one_line(tmp_path: Path) -> None:
    ended = _outbox("demo", "--folder", str(tmp_path / "x"), "--url", "mysql+pymysql://u:p@127.0.0.1:1/x", timeout=300)

    assert ended.returncode == 1
    assert "cannot reach the database" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ":p@" not in ended.stderr


def _outbox(*arguments: str, timeout: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outbox", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def _figures(printed: str) -> dict[str, int]:
    """The table of names and numbers that the demo prints."""
    lines = (line.rsplit(maxsplit=1) for line in printed.splitlines())
    return {
        line[0].strip(): int(line[1].replace(",", "")) for line in lines if len(line) == 2 and line[1][:1].isdigit()
    }


def _count(folder: Path, statement: str) -> int:
    with closing(sqlite3.connect(folder / "business.db")) as connection:
        count: int = connection.execute(statement).fetchone()[0]
    return count
