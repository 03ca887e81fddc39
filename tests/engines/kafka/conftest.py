"""Kafka for the tests of this folder: three nodes for all of them, and one node that tests may kill."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.engines.jars import fetched_jars
from tests.engines.kafka.faulty_kafka import FaultyKafka
from tests.engines.kafka.kafka_cluster import PERMISSIONS, KafkaCluster
from tests.engines.kafka.kafka_engine import KafkaEngine
from tests.fixtures.local_server import scratch_folder

NODES = 3


@pytest.fixture(scope="session")
def jars() -> Path:
    """The server's jars."""
    return fetched_jars(Path(__file__).with_name("pom.xml"))


@pytest.fixture(scope="session")
def running_cluster(jars: Path) -> Iterator[KafkaCluster]:
    """Three nodes, with every topic on each."""
    yield from _running(jars, nodes=NODES)


@pytest.fixture(scope="session")
def running_node(jars: Path) -> Iterator[KafkaCluster]:
    """One node."""
    yield from _running(jars, nodes=1)


@pytest.fixture
def node_with_permissions(jars: Path) -> Iterator[KafkaCluster]:
    """One node that lets users do what they were allowed alone."""
    yield from _running(jars, nodes=1, settings=PERMISSIONS)


@pytest.fixture
def cluster(running_cluster: KafkaCluster) -> KafkaCluster:
    """Three nodes, all alive: those that an earlier test killed are started again."""
    running_cluster.start()
    running_cluster.check_alive()
    return running_cluster


@pytest.fixture
def node(running_node: KafkaCluster) -> KafkaCluster:
    """One node, alive."""
    running_node.start()
    return running_node


@pytest.fixture
def engine(cluster: KafkaCluster) -> KafkaEngine:
    """The three nodes, for the conformance tests."""
    return KafkaEngine(cluster)


@pytest.fixture
def faulty(cluster: KafkaCluster) -> FaultyKafka:
    """The three nodes, for the tests of faults."""
    return FaultyKafka(cluster)


@pytest.fixture
def own_engine(node: KafkaCluster) -> KafkaEngine:
    """The node, which the test may kill; the next test starts it again."""
    return KafkaEngine(node)


def _running(jars: Path, *, nodes: int, settings: Mapping[str, object] | None = None) -> Iterator[KafkaCluster]:
    with tempfile.TemporaryDirectory(prefix="kafka-under-test-", dir=scratch_folder()) as folder:
        cluster = KafkaCluster(jars=jars, folder=Path(folder), nodes=nodes, settings=settings)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
