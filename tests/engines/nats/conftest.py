"""NATS for the tests of this folder: three servers, which tests may kill, pause and cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.nats.nats_cluster import NatsCluster


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    """The servers of the whole run."""
    cluster = NatsCluster(tmp_path_factory.mktemp("nats"))
    try:
        cluster.restore()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def faulty(running_cluster: NatsCluster) -> NatsCluster:
    """The three servers, all alive."""
    running_cluster.restore()
    return running_cluster
