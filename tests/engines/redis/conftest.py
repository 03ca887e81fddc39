"""Redis for the tests of this folder: three masters and three replicas, which tests may kill, pause and cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.redis.faulty_cluster import FaultyRedisCluster, faulty_redis_cluster


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[FaultyRedisCluster]:
    """The servers of the whole run."""
    with faulty_redis_cluster() as cluster:
        yield cluster


@pytest.fixture
def faulty(running_cluster: FaultyRedisCluster) -> FaultyRedisCluster:
    """The six servers, all alive and in step."""
    running_cluster.restore()
    return running_cluster
