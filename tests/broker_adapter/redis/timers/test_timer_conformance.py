"""The timer store does what every broker of ours does, on one server and on a cluster of three masters and replicas.

Left out is what it refuses by design: reading by offset, seek, ordered groups; and the cancel of an id before its topic
exists, for which test_timer_broker.py has its own case.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing

import pytest

from outbox_core import Broker
from outbox_core.messages.connect import connect
from tests.broker_adapter.conformance.test_groups import *  # noqa: F403
from tests.broker_adapter.conformance.test_joining import *  # noqa: F403
from tests.broker_adapter.conformance.test_publish_and_pull import *  # noqa: F403
from tests.broker_adapter.conformance.test_schedule import *  # noqa: F403
from tests.broker_adapter.conformance.test_settling import *  # noqa: F403
from tests.broker_adapter.publishing.forking_program import PUBLISHED, publish_across_fork
from tests.broker_adapter.redis.redis_cluster import STEADY_MS, redis_cluster
from tests.broker_adapter.redis.redis_server import HOST, redis_server
from tests.fixtures.forks import FORK_IDS

del test_a_seek_to_an_offset_replays_from_there_and_makes_old_receipts_stale  # noqa: F821
del test_a_seek_to_a_time_replays_what_came_from_then_on  # noqa: F821
del test_a_seek_needs_either_a_time_or_an_offset  # noqa: F821
del test_a_seek_beyond_the_end_is_refused_and_moves_nothing  # noqa: F821
del test_a_message_that_was_canceled_before_it_came_is_not_delivered  # noqa: F821


@pytest.fixture(scope="module", params=["server", "cluster"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of servers that all tests of this module share."""
    if request.param == "server":
        with redis_server() as server:
            yield f"redis://{HOST}:{server.port}/?store=timers&wait=0"
    else:
        with redis_cluster(node_timeout_ms=STEADY_MS) as cluster:
            yield f"{cluster.url}?store=timers&wait=1"


@pytest.fixture
def broker(url: str) -> Iterator[Broker]:
    """One with topics of its own: a cancel asks all topics, and has little time in some tests."""
    opened = connect(f"{url}&prefix={uuid.uuid4().hex}:")
    yield opened
    opened.close()


@pytest.mark.processes
@pytest.mark.parametrize("fork", FORK_IDS)
def test_a_forked_child_publishes_by_a_connection_of_its_own_and_its_parent_keeps_its_own(url: str, fork: str) -> None:
    prefixed = f"{url}&prefix={uuid.uuid4().hex}:"

    publish_across_fork(prefixed, "t", fork=fork)

    with closing(connect(prefixed)) as broker:
        assert broker.admin.figures("t")["stored"] == len(PUBLISHED)
