"""RabbitMQ for the tests of this folder: a node for all of them, and three nodes, all of which tests may kill."""

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
from tests.engines.rabbitmq.rabbitmq_cluster import RabbitMqCluster, newest_programs
from tests.fixtures.local_server import scratch_folder
from tests.outbox.shop_fixtures import sqlite_shop

__all__ = ["foreign", "made_topic", "open_broker", "sqlite_shop"]


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """The servers' certificate, which vouches for itself and for its clients."""
    return certificate(tmp_path_factory.mktemp("tls"), address=HOST)


@pytest.fixture(scope="session")
def running_node(tls: Tls) -> Iterator[RabbitMqServer]:
    """One node."""
    with _scratch() as folder:
        server = RabbitMqServer(Path(folder) / "server", tls=tls, programs=newest_programs())
        try:
            server.start()
            server.add_user(USER, PASSWORD, tags="monitoring")
            yield server
        finally:
            server.kill()


@pytest.fixture
def engine(running_node: RabbitMqServer) -> RabbitMqEngine:
    """The node, alive: if an earlier test killed it, it is started again."""
    running_node.start()
    return RabbitMqEngine(running_node)


@pytest.fixture
def own_engine(engine: RabbitMqEngine) -> RabbitMqEngine:
    """The same node, which the test may kill."""
    return engine


@pytest.fixture(scope="session")
def running_cluster(tls: Tls) -> Iterator[RabbitMqCluster]:
    """Three nodes."""
    with _scratch() as folder:
        cluster = RabbitMqCluster(Path(folder), tls=tls, programs=newest_programs())
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture
def faulty(running_cluster: RabbitMqCluster) -> RabbitMqCluster:
    """The three nodes, all alive."""
    running_cluster.restore()
    return running_cluster


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=scratch_folder(), prefix="rabbitmq-under-test-", ignore_cleanup_errors=True)
