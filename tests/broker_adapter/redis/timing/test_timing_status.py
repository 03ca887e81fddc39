"""`outbox delay status --store`: what a timing store holds, and whether it has all timers."""

from __future__ import annotations

import json
import time

from typer.testing import CliRunner

from outbox_broker.delay_service.cli import app
from outbox_core.messages.connect import connect_timing
from outbox_core.messages.timing_port import TimedRow, Timer
from tests.broker_adapter.redis.redis_server import HOST, RedisServer


def test_the_status_shows_each_slot_and_fails_until_the_store_is_complete(server: RedisServer) -> None:
    url = f"redis://{HOST}:{server.port}/?name=shop&slots=2"
    store = connect_timing(url)
    store.add([Timer(TimedRow("message", f"m{n}"), time.time_ns() // 1_000_000 + 3_600_000) for n in range(20)])
    rebuilding = CliRunner().invoke(app, ["status", "--store", url])
    assert rebuilding.exit_code == 1
    assert "to be rebuilt" in rebuilding.output

    assert store.end_rebuild(store.begin_rebuild(range(2)))
    store.close()
    shown = CliRunner().invoke(app, ["status", "--store", url, "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.output)
    assert found["complete"]
    assert sum(slot["timers"] for slot in found["slots"]) == 20
    assert found["largest_slot"] == max(slot["timers"] for slot in found["slots"])
