"""`outbox compensator once | run` as people run it: reports, exit statuses, signals, two side by side."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_adapter.http import HttpBroker
from outbox_broker.engine.engine import Engine
from tests.broker_adapter.servers import ServerProcess
from tests.compensator.receiving import pull_some
from tests.fixtures.databases import Database
from tests.fixtures.fork_server import Program, environment, fork_server
from tests.outbox.shop import Shop

pytestmark = pytest.mark.processes

WAIT_SECONDS = 300
ENVIRONMENT = environment(COLUMNS="200")


def compensator(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`outbox compensator`, to its end."""
    return fork_server().run("outbox", "compensator", *arguments, env=ENVIRONMENT)


def once(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`outbox compensator once`, to its end."""
    return compensator("once", *arguments)


def on(shop: Shop, broker_url: str) -> list[str]:
    """The options that name this database and broker."""
    schema = ["--schema", shop.database.schema] if shop.database.schema else []
    return ["--url", shop.database.url, *schema, "--broker", broker_url]


def test_once_makes_one_pass_and_reports_it_as_json(shop: Shop, tmp_path: Path) -> None:
    shop.add_due(3)

    done = once(*on(shop, f"embedded:{tmp_path / 'data'}"), "--json", "--batch", "2")

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "batches": 2, "claimed": 3, "accepted": 3, "retried": 0, "held": 0, "parked": 0, "stale": 0, "outage": None,
    }  # fmt: skip
    assert shop.rows() == []
    assert shop.archived() == 3


def test_once_without_json_is_for_people_and_keeps_no_archive_where_told(sqlite_shop: Shop, tmp_path: Path) -> None:
    sqlite_shop.add_due(1)

    done = once(*on(sqlite_shop, f"embedded:{tmp_path / 'data'}"), "--no-archive")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "batches 1, claimed 1, accepted 1, retried 0, held 0, parked 0, stale 0"
    assert sqlite_shop.archived() == 0


def test_a_pass_shows_a_program_how_far_it_is(sqlite_shop: Shop, tmp_path: Path) -> None:
    sqlite_shop.add_due(3)

    done = once(*on(sqlite_shop, f"embedded:{tmp_path / 'data'}"), "--progress", "json")

    last = json.loads(done.stderr.splitlines()[-1])
    assert (done.returncode, last["operation"], last["done"], last["total"]) == (0, "sending", 3, 3)


def test_rows_stay_while_the_broker_is_cordoned_and_are_sent_when_it_is_not(sqlite_shop: Shop, tmp_path: Path) -> None:
    sqlite_shop.add_due(2)
    engine = Engine.open(tmp_path / "data")
    engine.operations.cordon.begin(reason="moving")
    engine.close()

    refused = once(*on(sqlite_shop, f"embedded:{tmp_path / 'data'}"), "--json")
    rows = sqlite_shop.rows()
    engine = Engine.open(tmp_path / "data")
    engine.operations.cordon.end()
    engine.close()
    sqlite_shop.end_delays()
    sent = once(*on(sqlite_shop, f"embedded:{tmp_path / 'data'}"), "--json")

    report = json.loads(refused.stdout)
    assert (refused.returncode, report["parked"], len(rows)) == (1, 0, 2)
    assert "cordoned (moving)" in report["outage"]
    assert (sent.returncode, json.loads(sent.stdout)["accepted"]) == (0, 2)


def test_once_says_by_its_status_that_the_broker_was_out(sqlite_shop: Shop) -> None:
    sqlite_shop.add_due(1)

    done = once(*on(sqlite_shop, "http://127.0.0.1:1"), "--json")

    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert (report["retried"], report["parked"]) == (1, 0)
    assert report["outage"]
    assert "Traceback" not in done.stderr


def test_once_says_that_a_wrong_token_lets_nothing_through_and_where_to_look(sqlite_shop: Shop, tmp_path: Path) -> None:
    sqlite_shop.add_due(1)
    (tmp_path / "wrong").write_text("not the token")
    (tmp_path / "tokens.toml").write_text(
        f'[[tokens]]\nname = "a"\nsha256 = "{"0" * 64}"\nroles = ["publish"]\ntopics = ["*"]\n'
    )
    process = ServerProcess(tmp_path / "broker-data")
    process.start("--tokens", str(tmp_path / "tokens.toml"))
    try:
        done = once(*on(sqlite_shop, process.url), "--token-file", str(tmp_path / "wrong"))
    finally:
        process.kill()

    assert done.returncode == 1
    assert done.stdout.startswith("batches 1, claimed 1, accepted 0, retried 1")
    assert "the broker was out: " in done.stderr
    assert "the token is not known" in done.stderr


def test_what_cannot_work_is_one_line_with_the_cure(sqlite: Database, tmp_path: Path) -> None:
    broker = f"embedded:{tmp_path / 'data'}"
    token_file = str(tmp_path / "no-such-token")
    cases = [
        (2, "outbox db upgrade", ["--url", sqlite.url, "--broker", broker]),
        (1, "cannot reach the database", ["--url", "mysql+pymysql://root@127.0.0.1:1/x", "--broker", broker]),
        (2, "no broker adapter for the URL", ["--url", sqlite.url, "--broker", "carrier-pigeon:home"]),
        (2, "token file", ["--url", sqlite.url, "--broker", "http://h", "--token-file", token_file]),
    ]

    for sub_command, (status, says, arguments) in zip(("run", "once", "run", "once"), cases, strict=True):
        done = compensator(sub_command, *arguments)
        assert done.returncode == status, done.stderr
        assert re.fullmatch(rf"error: .*{re.escape(says)}.*\n", done.stderr)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """The project's broker as a process."""
    process = ServerProcess(tmp_path / "broker-data")
    process.start()
    yield process
    process.kill()


def test_two_services_side_by_side_send_each_row_once_and_end_on_sigterm(
    mysql_shop: Shop, server: ServerProcess
) -> None:
    mysql_shop.add_due(1_000)
    arguments = [*on(mysql_shop, server.url), "--interval-ms", "50", "--batch", "20", "--port", "0"]
    with running(*arguments) as one, running(*arguments) as two:
        services = [one, two]
        ports = [wait_until_it_runs(service) for service in services]
        broker = HttpBroker(server.url)
        bodies = receive(broker, 1_000)
        ready = [read(port, "/readyz") for port in ports]
        wait_until_empty(ports)
        for service in services:
            service.send_signal(signal.SIGTERM)
        statuses = [service.wait(WAIT_SECONDS) for service in services]
        broker.close()

    assert statuses == [0, 0]
    assert len(bodies) == len(set(bodies)) == 1_000
    assert all('"status": "ok"' in one for one in ready)
    assert mysql_shop.rows() == []


def test_a_sighup_ends_no_service(mysql_shop: Shop, tmp_path: Path) -> None:
    with running(*on(mysql_shop, f"embedded:{tmp_path / 'data'}"), "--port", "0") as service:
        wait_until_it_runs(service)
        service.send_signal(signal.SIGHUP)
        assert service.stderr is not None
        line = next(line for line in service.stderr if "reload" in line)
        service.send_signal(signal.SIGTERM)

        assert service.wait(WAIT_SECONDS) == 0
    assert "nothing_to_reload" in line


def running(*arguments: str) -> Program:
    """`outbox compensator run`, until its block ends."""
    command = ["compensator", "run", *arguments]
    return fork_server().start("outbox", *command, env=ENVIRONMENT, text=True, stderr=subprocess.PIPE)


def wait_until_it_runs(service: Program) -> int:
    """The port of its status page, from the line that says that it runs."""
    assert service.stderr is not None
    for line in service.stderr:  # ends when the process does
        found = re.search(r"compensator runs.* status on port (\d+)", line)
        if found:
            return int(found[1])
    pytest.fail("the service ended before it ran")


def receive(broker: HttpBroker, count: int) -> list[str]:
    """The ids of so many messages, in the order of their delivery."""
    ids: list[str] = []
    while len(ids) < count:
        ids += [delivery.id for delivery in pull_some(broker)]
    return ids


def read(port: int, path: str) -> str:
    """A page of the status server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_SECONDS) as answer:
        return str(answer.read().decode())


def wait_until_empty(ports: list[int]) -> None:
    """Until both have seen, in a look, that nothing is pending."""
    tries_max = 15_000
    for port in ports:
        for _ in range(tries_max):
            if re.search(r"\noutbox_pending_messages{source=\"[^\"]+\"} 0\.0", read(port, "/metrics")):
                break
            threading.Event().wait(0.02)
        else:
            pytest.fail("rows are left")
