"""Fixtures of the rooms that publish: a shop on each database, and brokers. Each conftest names those it uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_adapter.embedded import EmbeddedBroker
from tests.fixtures.databases import Database
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop, open_shop


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    """The shop on SQLite, MariaDB and MySQL."""
    with open_shop(database) as opened:
        yield opened


@pytest.fixture
def mysql_shop(mysql_like: Database) -> Iterator[Shop]:
    """The shop on MariaDB and MySQL."""
    with open_shop(mysql_like) as opened:
        yield opened


@pytest.fixture
def sqlite_shop(sqlite: Database) -> Iterator[Shop]:
    """The shop on SQLite alone, for what no server changes."""
    with open_shop(sqlite) as opened:
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
