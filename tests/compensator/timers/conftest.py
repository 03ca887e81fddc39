"""A Redis and a timing store for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outbox_core.messages.timing_port import TimingStore
from tests.broker_adapter.redis.redis_server import RedisServer, redis_server
from tests.compensator.timers.timer_workers import opened, store_url
from tests.fixtures.zookeeper_server import running_zookeeper
from tests.outbox.recording_broker import PromptBroker

__all__ = ["prompt", "running_zookeeper", "server", "store"]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A Redis of the test's own."""
    with redis_server(appendfsync="no") as running:
        yield running


@pytest.fixture
def store(server: RedisServer) -> Iterator[TimingStore]:
    """The timing store on it."""
    with opened(store_url(server)) as found:
        yield found


@pytest.fixture
def prompt() -> PromptBroker:
    """A broker that answers at once."""
    return PromptBroker()
