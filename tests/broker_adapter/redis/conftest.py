"""Redis servers: one that all tests share, and of a test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker_adapter.publishing.publisher_conformance import foreign, made_topic, open_broker
from tests.broker_adapter.redis.redis_engine import BULK_BYTES_MAX, RedisEngine
from tests.broker_adapter.redis.redis_server import PASSWORD, RedisServer, redis_server
from tests.outbox.shop_fixtures import sqlite_shop

__all__ = ["foreign", "made_topic", "open_broker", "sqlite_shop"]


@pytest.fixture(scope="session")
def engine() -> Iterator[RedisEngine]:
    """The server that tests share; they keep apart by their topics."""
    with redis_server(requirepass=PASSWORD, proto_max_bulk_len=str(BULK_BYTES_MAX)) as server:
        yield RedisEngine(server)


@pytest.fixture
def own_engine() -> Iterator[RedisEngine]:
    """A server that the test may kill."""
    with redis_server(requirepass=PASSWORD) as server:
        yield RedisEngine(server)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A durable server of the test's own, without a password and a replica."""
    with redis_server() as running:
        yield running
