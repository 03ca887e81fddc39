"""The server that all tests of a session share. Those that kill it start it again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_broker.http.server import Tls
from tests.broker_adapter.http.test_tls import certificate
from tests.broker_adapter.publishing.publisher_conformance import foreign, made_topic, open_broker
from tests.broker_adapter.rabbitmq.rabbitmq_engine import PASSWORD, USER, RabbitMqEngine
from tests.broker_adapter.rabbitmq.rabbitmq_server import HOST, RabbitMqServer
from tests.fixtures.local_server import scratch_folder
from tests.outbox.shop_fixtures import sqlite_shop

__all__ = ["foreign", "made_topic", "open_broker", "sqlite_shop"]


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """The server's certificate, which vouches for itself and for its clients."""
    return certificate(tmp_path_factory.mktemp("tls"), address=HOST)


@pytest.fixture(scope="session")
def engine(tls: Tls) -> Iterator[RabbitMqEngine]:
    """The server."""
    with tempfile.TemporaryDirectory(
        dir=scratch_folder(), prefix="outbox-rabbitmq-", ignore_cleanup_errors=True
    ) as folder:
        server = RabbitMqServer(Path(folder) / "server", tls=tls)
        server.start()
        try:
            server.add_user(USER, PASSWORD, tags="monitoring")
            yield RabbitMqEngine(server)
        finally:
            server.kill()


@pytest.fixture
def own_engine(engine: RabbitMqEngine) -> Iterator[RabbitMqEngine]:
    """The same server, which the test may kill: a second one would take as long as a restart."""
    yield RabbitMqEngine(engine.server, keeps_topics=True)
    engine.start()
