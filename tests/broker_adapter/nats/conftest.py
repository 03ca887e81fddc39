"""Servers of NATS: one for a session, and some that a test may stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_adapter.nats.nats_server import NatsEngine
from tests.broker_adapter.publishing.publisher_conformance import made_topic, open_broker
from tests.outbox.shop_fixtures import sqlite_shop

__all__ = ["made_topic", "open_broker", "sqlite_shop"]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsEngine]:
    """A server for all tests that leave it running."""
    made = NatsEngine(tmp_path_factory.mktemp("nats"))
    made.start()
    yield made
    made.kill()


@pytest.fixture
def own_engine(tmp_path: Path) -> Iterator[NatsEngine]:
    """A server of the test's own."""
    made = NatsEngine(tmp_path / "own")
    made.start()
    yield made
    made.kill()
