"""What no replica of the newest Valkey has is not acknowledged, nor is its repeat: there a WAIT is about the writes of
its own connection, while that of Redis 7.0 is about all that came before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_adapter.redis.redis_cluster import RedisClusterServers, redis_cluster
from tests.broker_adapter.redis.test_failures import (
    test_what_a_replica_has_not_confirmed_is_not_acknowledged_nor_is_its_repeat,
)
from tests.broker_adapter.redis.timers.test_timer_broker import (
    test_a_cancel_that_no_replica_has_is_not_acknowledged_nor_is_its_repeat,
)
from tests.broker_adapter.redis.timers.test_timer_cluster import (
    test_nothing_is_acknowledged_on_a_topic_that_no_replica_knows_by_whoever_registers_it,
)

__all__ = [
    "test_a_cancel_that_no_replica_has_is_not_acknowledged_nor_is_its_repeat",
    "test_nothing_is_acknowledged_on_a_topic_that_no_replica_knows_by_whoever_registers_it",
    "test_what_a_replica_has_not_confirmed_is_not_acknowledged_nor_is_its_repeat",
]


@pytest.fixture
def cluster(program: Path) -> Iterator[RedisClusterServers]:
    """A cluster of the test's own."""
    with redis_cluster(program=program) as joined:
        yield joined
