"""The timer store on the newest Valkey does what every broker of ours does, on one server and on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_adapter.redis.redis_cluster import redis_cluster
from tests.broker_adapter.redis.redis_server import HOST, redis_server
from tests.broker_adapter.redis.timers.test_timer_conformance import *  # noqa: F403


@pytest.fixture(scope="module", params=["server", "cluster"])
def url(request: pytest.FixtureRequest, program: Path) -> Iterator[str]:
    """Of servers that all tests of this module share."""
    if request.param == "server":
        with redis_server(program=program) as server:
            yield f"redis://{HOST}:{server.port}/?store=timers&wait=0"
    else:
        with redis_cluster(program=program) as cluster:
            yield f"{cluster.url}?store=timers&wait=1"
