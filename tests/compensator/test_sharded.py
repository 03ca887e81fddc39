"""1,024 message tables over 8 schemas, served by two processes of which one is killed. On real servers, all of it.

MySQL has 128 of them, since making and reading a thousand takes a minute.
"""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy.schema import CreateSchema, DropSchema

from broker_adapter.http import HttpBroker
from outbox.store.message_table import MessageStore
from outbox.store.row import publish_row
from outbox.store.schema import outbox_tables, split_message_table_name
from outbox_core import Message
from outbox_core.common.table_namespace import TableNamespace
from tests.broker_adapter.servers import ServerProcess
from tests.compensator.receiving import pull_some
from tests.fixtures.fork_server import environment, fork_server
from tests.outbox.shop import Shop

SCHEMAS = 8
TABLES_EACH = {"mariadb": 128, "mysql": 16}
HOUR_US = 3_600_000_000
WAIT_SECONDS = 300
POLL_SECONDS = 0.05
POLLS_MAX = int(WAIT_SECONDS / POLL_SECONDS)

pytestmark = [pytest.mark.slow, pytest.mark.processes]


class Town:
    """The schemas of one instance, with their tables."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.schemas = [f"{shop.database.schema}_{number}" for number in range(SCHEMAS)]
        each = TABLES_EACH[shop.database.name]
        self.tables = [
            (self.schemas[number // each], split_message_table_name(TableNamespace("any"), number))
            for number in range(SCHEMAS * each)
        ]

    def make(self) -> None:
        with self.shop.engine.begin() as connection:
            for schema in self.schemas:
                connection.execute(CreateSchema(schema))
                outbox_tables(TableNamespace(schema)).metadata.create_all(connection)
            for schema, table in self.tables:
                connection.exec_driver_sql(f"CREATE TABLE {schema}.{table} LIKE {schema}.message")

    def drop(self) -> None:
        with self.shop.engine.begin() as connection:
            for schema in self.schemas:
                connection.execute(DropSchema(schema))

    def add_due(self, *, prefix: str, each: int) -> list[str]:
        """Rows of dead senders in every table."""
        ids = []
        with self.shop.engine.begin() as connection:
            for schema, table in self.tables:
                names = [f"{prefix}-{schema[-1]}-{table}-{number}" for number in range(each)]
                rows = [publish_row(Message(id=name, topic="topic", body=b"")) for name in names]
                store = MessageStore(dialect=self.shop.engine.dialect, schema=schema, table=table)
                store.insert(connection, rows, token="d" * 32, lease_us=-HOUR_US)
                ids += names
        return ids

    def left(self) -> int:
        """How many rows there are in all tables."""
        counts = [f"SELECT COUNT(*) AS n FROM {schema}.{table}" for schema, table in self.tables]
        with self.shop.engine.connect() as connection:
            return int(connection.exec_driver_sql(f"SELECT SUM(n) FROM ({' UNION ALL '.join(counts)}) c").scalar() or 0)


@pytest.fixture
def town(mysql_shop: Shop) -> Iterator[Town]:
    """Eight schemas with their tables."""
    made = Town(mysql_shop)
    try:
        made.make()
        yield made
    finally:
        made.drop()


class Instance:
    """`outbox compensator run` as a process, with its log and its status page read."""

    def __init__(self, config: Path) -> None:
        command = ["outbox", "compensator", "run", "--config", str(config), "--port", "0"]
        self.process = fork_server().start(*command, env=environment(), text=True, stderr=subprocess.PIPE)
        self.port = self._wait_until_it_runs()
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._reader.start()

    def _wait_until_it_runs(self) -> int:
        assert self.process.stderr is not None
        for line in self.process.stderr:  # ends when the process does
            found = re.search(r"compensator runs.* status on port (\d+)", line)
            if found:
                return int(found[1])
        pytest.fail("the process ended before it ran")

    def serves(self) -> set[str]:
        """The sources that are this instance's, by its metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=WAIT_SECONDS) as answer:
            page = answer.read().decode()
        return set(re.findall(r'\noutbox_compensator_leader{source="([^"]+)"} 1\.0', page))

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(WAIT_SECONDS)
        self._reader.join(WAIT_SECONDS)
        self.process.close()
        return status


def test_what_a_killed_instance_had_is_taken_over_and_everything_is_delivered(town: Town, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "broker-data")
    server.start()
    with ExitStack() as closing:
        closing.callback(server.kill)
        broker = HttpBroker(server.url)
        closing.callback(broker.close)
        config = write_config(tmp_path, town, server.url)
        ids = town.add_due(prefix="first", each=2)
        instances = [Instance(config) for _ in range(2)]
        for instance in instances:
            closing.callback(instance.process.close)
        got: list[str] = []
        receive(broker, got, until=len(ids) // 4)
        shares = wait_for_shares(instances)

        killed = instances[0].end(signal.SIGKILL)
        ids += town.add_due(prefix="second", each=1)
        receive(broker, got, until=len(ids))
        survivor = wait_for_all(instances[1])
        wait_until_empty(town)
        status = instances[1].end(signal.SIGTERM)

        assert killed == -signal.SIGKILL
        assert len(set.union(*shares)) == SCHEMAS
        assert len(survivor) == SCHEMAS
        assert status == 0
        assert sorted(set(got)) == sorted(ids)


def write_config(folder: Path, town: Town, broker_url: str) -> Path:
    """Short leases, so that a death is made up for within seconds."""
    path = folder / "outbox.toml"
    schemas = ", ".join(f'"{schema}"' for schema in town.schemas)
    url = town.shop.engine.url.render_as_string(hide_password=False)
    path.write_text(
        f'[broker]\nurl = "{broker_url}"\n'
        '[compensator]\ninterval = "200ms"\nlease = "2s"\nworkers = 4\nbatch_rows = 100\n'
        f'[[compensator.sources]]\nurl = "{url}"\nschemas = [{schemas}]\n'
    )
    return path


def receive(broker: HttpBroker, got: list[str], *, until: int) -> None:
    """Take messages until so many different ones have come."""
    while len(set(got)) < until:
        got += [delivery.id for delivery in pull_some(broker)]


def wait_for_shares(instances: list[Instance]) -> list[set[str]]:
    """Until both have their half of the sources: these halves."""
    pause = threading.Event()
    for _ in range(POLLS_MAX):
        shares = [instance.serves() for instance in instances]
        if [len(share) for share in shares] == [SCHEMAS // 2] * 2 and shares[0].isdisjoint(shares[1]):
            return shares
        pause.wait(POLL_SECONDS)
    pytest.fail("the sources were not shared out")


def wait_until_empty(town: Town) -> None:
    """Until the rows are gone as well that the killed one had sent and not settled: they are sent once more."""
    pause = threading.Event()
    for _ in range(POLLS_MAX):
        if town.left() == 0:
            return
        pause.wait(POLL_SECONDS)
    pytest.fail("rows were left")


def wait_for_all(instance: Instance) -> set[str]:
    """Until it has taken over what the other one had."""
    pause = threading.Event()
    for _ in range(POLLS_MAX):
        if len(found := instance.serves()) == SCHEMAS:
            return found
        pause.wait(POLL_SECONDS)
    pytest.fail("the sources of the killed instance were not taken over")
