"""RocketMQ for the tests of this folder: one name server, broker and proxy for all of them, which tests may kill."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.broker_adapter.http.test_tls import certificate
from tests.engines.jars import fetched_jars
from tests.fixtures.cutting_tcp_proxy import cutting_tcp_proxy
from tests.fixtures.local_server import scratch_folder

if TYPE_CHECKING:
    from tests.engines.rocketmq.faulty_rocketmq import FaultyRocketMq
    from tests.engines.rocketmq.rocketmq_cluster import RocketMqCluster
    from tests.engines.rocketmq.rocketmq_engine import RocketMqEngine


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[RocketMqCluster]:
    """The servers of the whole run."""
    from tests.engines.rocketmq.java_client import start_jvm
    from tests.engines.rocketmq.rocketmq_cluster import HOST, RocketMqCluster

    jars = fetched_jars(Path(__file__).with_name("pom.xml"))
    with tempfile.TemporaryDirectory(prefix="rocketmq-under-test-", dir=scratch_folder()) as name:
        folder = Path(name)
        start_jvm(jars=jars, home=folder / "client")
        cluster = RocketMqCluster(jars=jars, folder=folder, tls=certificate(folder, address=HOST))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture
def cluster(running_cluster: RocketMqCluster) -> RocketMqCluster:
    """The servers, all alive: those that an earlier test killed are started again."""
    running_cluster.start()
    running_cluster.check_alive()
    return running_cluster


@pytest.fixture
def engine(cluster: RocketMqCluster) -> RocketMqEngine:
    """The servers, for the conformance tests."""
    from tests.engines.rocketmq.rocketmq_engine import RocketMqEngine

    return RocketMqEngine(cluster)


@pytest.fixture
def faulty(cluster: RocketMqCluster) -> Iterator[FaultyRocketMq]:
    """The servers, for the tests of faults."""
    from tests.engines.rocketmq.faulty_rocketmq import FaultyRocketMq

    with cutting_tcp_proxy(cluster.proxy_port) as proxy:
        yield FaultyRocketMq(cluster, proxy)


@pytest.fixture
def own_engine(engine: RocketMqEngine) -> RocketMqEngine:
    """The same, which the test may kill; the next test starts them again."""
    return engine
