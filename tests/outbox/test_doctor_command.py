"""`outbox doctor` on databases and brokers that are well, and on those that are not."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.engine import make_url

from outbox.migrate import upgrade
from outbox.store.row import publish_row
from outbox_broker.http.access_control import Access, Principal, Role
from outbox_core import Message
from tests.broker_adapter.servers import served
from tests.fixtures.command_line import outbox
from tests.fixtures.databases import Database, Server
from tests.outbox.shop import Shop

HOUR_MS = 3_600_000
CHECKS = ["versions", "database", "tables", "rights", "database clock", "compensator"]


def findings(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status, and the findings by their checks."""
    done = outbox("doctor", "--json", *arguments)
    return done.returncode, {found["check"]: found for found in json.loads(done.stdout)["checks"]}


def schema_arguments(database: Database) -> list[str]:
    """The schema, where there is one."""
    return ["--schema", database.schema] if database.schema else []


def test_all_is_well_where_everything_answers(database: Database, tmp_path: Path) -> None:
    upgrade(database.url, schema=database.schema)
    with served(tmp_path / "broker") as server:
        status, found = findings("--url", database.url, *schema_arguments(database), "--broker", server.url)

    assert status == 0, found
    assert list(found) == [*CHECKS, "broker", "broker clock"]
    assert {one["status"] for one in found.values()} == {"ok"}
    assert found["broker"]["says"] == f"outbox-mq {version('outbox-mq')} answers, and can serve"


@pytest.mark.parametrize(
    ("token", "status", "says"),
    [
        (None, "warn", "it asks for a token, and none was given"),
        ("a-producers-token", "ok", "answers, and can serve"),
        ("a-consumers-token", "fail", "the token has no role publish, but consume"),
        ("nobodys-token", "fail", "does not know the token"),
    ],
)
def test_a_broker_that_asks_for_a_token_is_well_for_one_that_may_publish_alone(
    tmp_path: Path, token: str | None, status: str, says: str
) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    upgrade(url)
    tokens = {
        hashlib.sha256(f"a-{role}rs-token".encode()).digest(): Principal(
            name=role, roles=frozenset({Role(word)}), topics=("paid",)
        )
        for role, word in (("produce", "publish"), ("consume", "consume"))
    }
    arguments = []
    if token is not None:
        (tmp_path / "token").write_text(token)
        arguments = ["--token-file", str(tmp_path / "token")]

    with served(tmp_path / "broker", access=Access(tokens=tokens)) as server:
        code, found = findings("--url", url, "--broker", server.url, *arguments)

    assert (found["broker"]["status"], code) == (status, 1 if status == "fail" else 0)
    assert says in found["broker"]["says"]


def test_a_broker_of_another_release_whose_clock_is_wrong_is_told(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    upgrade(url)

    wrong_ms = time.time_ns() // 1_000_000 - HOUR_MS
    with ready_answer({"version": "9.9", "roles": ["publish"], "now_ms": wrong_ms}) as broker:
        code, found = findings("--url", url, "--broker", broker)

    assert (code, found["broker"]["status"], found["broker clock"]["status"]) == (0, "warn", "warn")
    assert found["broker"]["says"] == f"outbox-mq 9.9 answers, and can serve; this client is {version('outbox-mq')}"
    [apart_ms] = re.findall(r"differs from this machine's by ([0-9,]+) ms", found["broker clock"]["says"])
    assert int(apart_ms.replace(",", "")) >= HOUR_MS - 1
    assert "NTP" in found["broker clock"]["cure"]


def test_a_broker_that_tells_neither_its_clock_nor_its_release_is_asked_for_no_more(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    upgrade(url)

    with ready_answer({}) as broker:
        code, found = findings("--url", url, "--broker", broker)

    assert (code, "broker clock" in found, found["broker"]["status"]) == (0, False, "ok")
    assert found["broker"]["says"] == "outbox-mq answers, and can serve"


@contextmanager
def ready_answer(told: dict[str, Any]) -> Iterator[str]:
    """The URL of a server that answers each request as a broker that can serve, and tells this besides."""
    body = json.dumps({"status": "ok", "checks": [], **told}).encode()

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def test_a_line_a_check_and_its_cure_below(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    upgrade(url)

    done = outbox("doctor", "--url", url, "--broker", "http://127.0.0.1:1")

    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [*(f"ok    {name}" for name in CHECKS), "fail  broker"]
    assert "Connection refused" in lines[-1]


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    status, found = findings("--url", f"sqlite:///{tmp_path / 'shop.db'}")

    assert (status, list(found), found["database"]["status"]) == (1, ["versions", "database"], "fail")
    assert "outbox db upgrade" in found["database"]["cure"]
    assert list(tmp_path.iterdir()) == []


def test_missing_tables_are_named_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "shop.db").touch()

    status, found = findings("--url", f"sqlite:///{tmp_path / 'shop.db'}")

    assert (status, found["tables"]["status"]) == (1, "fail")
    assert "outbox db upgrade" in found["tables"]["says"]


def test_what_a_user_may_not_do_is_named_by_table(mariadb: Database, shared_mariadb: Server) -> None:
    schema = str(mariadb.schema)
    upgrade(mariadb.url, schema=schema)
    user = f"doctor_{schema}"[:32]
    url = make_url(mariadb.url).set(username=user, password="r").render_as_string(hide_password=False)
    arguments = ["--url", url, "--schema", schema, "--role", "compensator"]
    shared_mariadb.execute(f"CREATE USER '{user}'@'%' IDENTIFIED BY 'r'", f"GRANT SELECT ON *.* TO '{user}'@'%'")
    try:
        lacking = findings(*arguments)
        granted = outbox(
            "db", "grants", "--url", mariadb.url, "--schema", schema, "--role", "compensator", "--user", user
        )
        shared_mariadb.execute(*(line.rstrip(";") for line in granted.stdout.splitlines()))
        able = findings(*arguments)
    finally:
        shared_mariadb.execute(f"DROP USER '{user}'@'%'")

    assert (lacking[0], lacking[1]["rights"]["status"], able[0]) == (1, "fail", 0), able
    assert (
        f"UPDATE on {schema}.message, DELETE on {schema}.message, INSERT on {schema}.archive"
        in (lacking[1]["rights"]["says"])
    )
    assert "outbox db grants --role compensator" in lacking[1]["rights"]["cure"]


def test_a_check_ends_at_its_time_limit(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and says nothing
        url = f"mysql+pymysql://app@127.0.0.1:{silent.getsockname()[1]}/shop"

        status, found = findings("--url", url, "--timeout-s", "0.2")

    assert (status, list(found)) == (1, ["versions", "database"])
    assert found["database"]["says"] == "no answer in 0.2 s"


def test_messages_that_wait_show_that_no_compensator_works(sqlite_shop: Shop) -> None:
    row = publish_row(Message(id="m-1", topic="topic", body=b""))
    message = sqlite_shop.tables.message
    with sqlite_shop.engine.begin() as connection:
        sqlite_shop.store.insert(connection, [row], token="d" * 32, lease_us=-3_600_000_000)
        connection.execute(update(message).values(token=None))

    _status, found = findings("--url", sqlite_shop.database.url)

    assert found["compensator"]["status"] == "fail"
    assert "outbox compensator run" in found["compensator"]["cure"]
