"""The newest Valkey for the tests of this folder: one server that all share, and servers of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.broker_adapter.publishing.publisher_conformance import foreign, made_topic, open_broker
from tests.broker_adapter.redis.redis_engine import BULK_BYTES_MAX, RedisEngine
from tests.broker_adapter.redis.redis_server import PASSWORD, RedisServer, redis_server
from tests.fixtures.local_server import servers_folder
from tests.outbox.shop_fixtures import sqlite_shop

__all__ = ["foreign", "made_topic", "open_broker", "sqlite_shop"]

SERIES: Final = "9.1"


@pytest.fixture(scope="session")
def program() -> Path:
    """The server that `./scripts/test --engines valkey` fetched."""
    folder = servers_folder().parent / "engines" / f"valkey-{SERIES}"
    if not folder.is_dir():
        pytest.fail(f"Valkey {SERIES} is not there. Run ./scripts/test --engines valkey", pytrace=False)
    return folder / "valkey-server"


@pytest.fixture(scope="session")
def engine(program: Path) -> Iterator[RedisEngine]:
    """The server that tests share; they keep apart by their topics."""
    options = {"proto_max_bulk_len": str(BULK_BYTES_MAX), "aof_load_truncated": "no"}
    with redis_server(program=program, requirepass=PASSWORD, **options) as server:
        yield RedisEngine(server)


@pytest.fixture
def own_engine(program: Path) -> Iterator[RedisEngine]:
    """A server that the test may kill."""
    with redis_server(program=program, requirepass=PASSWORD) as server:
        yield RedisEngine(server)


@pytest.fixture
def server(program: Path) -> Iterator[RedisServer]:
    """A durable server of the test's own, without a password and a replica."""
    with redis_server(program=program) as running:
        yield running
