"""Fixtures of the rooms that publish: a shop on each database, and brokers. Each conftest names those it uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_adapter.embedded import EmbeddedBroker
from tests.fixtures.databases import Database
from tests.fixtures.servers import MYSQL_LIKE, ReadyDatabase
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop, make_tables, open_shop


@pytest.fixture(params=["sqlite", *MYSQL_LIKE])
def shop(request: pytest.FixtureRequest, ready_database: ReadyDatabase) -> Iterator[Shop]:
    """The shop on SQLite, MariaDB and MySQL."""
    with ready_database(request.param, make_tables) as database, open_shop(database, has_tables=True) as opened:
        yield opened


@pytest.fixture(params=MYSQL_LIKE)
def mysql_shop(request: pytest.FixtureRequest, ready_database: ReadyDatabase) -> Iterator[Shop]:
    """The shop on MariaDB and MySQL."""
    with ready_database(request.param, make_tables) as database, open_shop(database, has_tables=True) as opened:
        yield opened


@pytest.fixture
def fresh_mysql_shop(mysql_like: Database) -> Iterator[Shop]:
    """The shop on MariaDB and MySQL, on tables that never had a row: for tests that count what is read and locked.

    A row that another test deleted stays in the indexes until the server purges it.
    """
    with open_shop(mysql_like) as opened:
        yield opened


@pytest.fixture
def sqlite_shop(ready_database: ReadyDatabase) -> Iterator[Shop]:
    """The shop on SQLite alone, for what no server changes."""
    with ready_database("sqlite", make_tables) as database, open_shop(database, has_tables=True) as opened:
        yield opened


@pytest.fixture
def broker() -> RecordingBroker:
    """A broker that records."""
    return RecordingBroker()


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """The project's own broker, in this process."""
    opened = EmbeddedBroker(f"embedded:{tmp_path / 'broker-data'}")
    yield opened
    opened.close()
