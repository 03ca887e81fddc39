"""Publishing to the newest Valkey does what publishing to every broker does, and each of its errors has a meaning."""

from __future__ import annotations

import re
from pathlib import Path

from broker_adapter.redis.errors import CODES
from tests.broker_adapter.publishing.publisher_conformance import *  # noqa: F403
from tests.broker_adapter.redis.redis_engine import RedisEngine
from tests.broker_adapter.redis.test_errors import codes_in
from tests.engines.valkey.conftest import SERIES


def test_the_server_is_the_one_that_was_fetched(engine: RedisEngine) -> None:
    [version] = re.findall(rb"valkey_version:(\d+\.\d+)\.", engine.server.ask("INFO", "server"))

    assert version.decode() == SERIES


def test_every_code_in_the_servers_program_has_a_meaning(program: Path) -> None:
    found = codes_in(program.parent / "root" / "usr" / "bin" / "valkey-check-rdb")

    assert {"WRONGTYPE", "OOM", "MISCONF", "NOPERM", "CLUSTERDOWN", "UNBLOCKED"} <= found
    assert found - set(CODES) == set()
