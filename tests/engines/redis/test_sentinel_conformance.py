"""The timer store behind Sentinels does what every broker of ours does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker_adapter.redis.redis_sentinels import redis_sentinels
from tests.broker_adapter.redis.timers.test_timer_conformance import *  # noqa: F403


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of Sentinels that all tests of this module share."""
    with redis_sentinels() as sentinels:
        yield f"{sentinels.url}&store=timers&wait=1"
