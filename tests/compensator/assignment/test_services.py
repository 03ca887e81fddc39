"""Two compensator services that share sources: one is killed, the other has all of them, and every message arrives."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_adapter.http import HttpBroker
from outbox.migrate import schema_upgrade
from outbox.store.database import background_engine, open_engine
from outbox.store.message_table import MessageStore
from outbox.store.row import publish_row
from outbox_core import Message
from tests.broker_adapter.servers import ServerProcess
from tests.compensator.receiving import pull_some
from tests.fixtures.databases import Server
from tests.fixtures.fork_server import environment, fork_server

pytestmark = pytest.mark.processes

WAIT_SECONDS = 300
SCHEMAS = 4
HOUR_US = 3_600_000_000


class Service:
    """`outbox compensator run` as a process."""

    def __init__(self, arguments: list[str]) -> None:
        command = ["outbox", "compensator", "run", "--leases", "--port", "0", *arguments]
        self.process = fork_server().start(*command, env=environment(), text=True, stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        # The rest of what it says must be read, or it stands still once the pipe is full.
        said = (re.search(r"status on port (\d+)", line) for line in self.process.stderr)
        self._port = next(found[1] for found in said if found)
        self._reader = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._reader.start()

    def serves(self) -> set[str]:
        """The sources that are its own now, as Prometheus sees it."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=WAIT_SECONDS) as answer:
            text = answer.read().decode()
        return set(re.findall(r'^outbox_compensator_leader\{source="([^"]*)"\} 1\.0$', text, re.MULTILINE))

    def wait_until_it_serves(self, count: int) -> set[str]:
        """Its sources, once there are so many."""
        for _ in range(WAIT_SECONDS * 50):
            if len(found := self.serves()) == count:
                return found
            threading.Event().wait(0.02)
        pytest.fail(f"it serves {self.serves()}")

    def end(self) -> None:
        """Kill it and let go of its pipe."""
        self.process.kill()
        self.process.wait(WAIT_SECONDS)
        self._reader.join(WAIT_SECONDS)
        self.process.close()


def wait_for_shares(services: list[Service]) -> list[set[str]]:
    """What each serves, once it is the half of all for each: a lease that ran out may have changed one meanwhile."""
    for _ in range(WAIT_SECONDS * 50):
        shares = [service.serves() for service in services]
        if all(len(share) == SCHEMAS // 2 for share in shares) and shares[0].isdisjoint(shares[1]):
            return shares
        threading.Event().wait(0.02)
    pytest.fail("the sources were not shared out")


@pytest.fixture
def schemas(shared_mariadb: Server) -> Iterator[tuple[str, list[str]]]:
    """A database's URL, and the outbox schemas on its server."""
    with contextlib.ExitStack() as stack:
        databases = [stack.enter_context(shared_mariadb.fresh_database()) for _ in range(SCHEMAS)]
        names = [database.schema or "" for database in databases]
        for name in names:
            schema_upgrade.upgrade(databases[0].url, schema=name)
        yield databases[0].url, names


def add_due(url: str, schema: str, *ids: str) -> None:
    """Rows of a dead sender, their leases over."""
    first = open_engine(url)
    engine = background_engine(first)
    store = MessageStore(dialect=engine.dialect, schema=schema)
    rows = [publish_row(Message(id=one, topic="topic", body=b"")) for one in ids]
    with engine.begin() as connection:
        store.insert(connection, rows, token="d" * 32, lease_us=-HOUR_US)
    engine.dispose()
    first.dispose()


@pytest.mark.mariadb
@pytest.mark.slow
def test_the_sources_of_a_killed_service_are_the_others_soon_and_every_message_arrives_once(
    schemas: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, names = schemas
    server = ServerProcess(tmp_path / "data")
    server.start()
    arguments = ["--url", url, *(word for name in names for word in ("--schema", name)), "--broker", server.url]
    services: list[Service] = []
    broker = HttpBroker(server.url)
    try:
        services += [Service(arguments), Service(arguments)]
        shares = wait_for_shares(services)
        for name in names:
            add_due(url, name, f"before-{name}")
        before = receive(broker, SCHEMAS)
        services[0].process.kill()
        for name in names:
            add_due(url, name, f"after-{name}")
        everything = services[1].wait_until_it_serves(SCHEMAS)
        after = receive(broker, SCHEMAS)
        services[1].process.send_signal(signal.SIGTERM)
        status = services[1].process.wait(WAIT_SECONDS)
    finally:
        for service in services:
            service.end()
        broker.close()
        server.kill()

    assert shares[0] | shares[1] == everything
    assert sorted(before) == sorted(f"before-{name}" for name in names)
    assert sorted(after) == sorted(f"after-{name}" for name in names)
    assert status == 0


def receive(broker: HttpBroker, count: int) -> list[str]:
    """The ids of so many messages."""
    ids: list[str] = []
    while len(ids) < count:
        found = pull_some(broker, max_messages=100)
        broker.ack([delivery.receipt for delivery in found])
        ids += [delivery.id for delivery in found]
    return ids
