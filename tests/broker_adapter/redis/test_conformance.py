"""What every publisher does alike, on a real Redis server."""

from __future__ import annotations

import re

from tests.broker_adapter.publishing.publisher_conformance import *  # noqa: F403
from tests.broker_adapter.redis.redis_engine import RedisEngine
from tests.broker_adapter.redis.redis_server import VERSION_TESTED


def test_the_server_is_not_older_than_the_guide_asks_for(engine: RedisEngine) -> None:
    [version] = re.findall(rb"redis_version:(\d+)\.", engine.server.ask("INFO", "server"))

    assert int(version) >= VERSION_TESTED
