"""`outbox delay status --store`: what each slot of a timing store holds, whether it has all timers, who serves it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from broker_adapter.redis.timing_store.timing_scripts import TimingKeys
from outbox_broker.delay_service.cli import app
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.connect import connect_timing
from outbox_core.messages.timing_port import SlotServer, TimedRow, Timer, TimingStore
from tests.broker_adapter.redis.redis_cluster import redis_cluster
from tests.broker_adapter.redis.redis_server import HOST, RedisServer

SLOTS = 2
ROWS = 20
SERVER = SlotServer(host="shop-7", process=4711, instance="ab12", rebuilt_rows=1_234, rows_to_rebuild=5_678)


def url_of(server: RedisServer) -> str:
    return f"redis://{HOST}:{server.port}/?name=shop&slots={SLOTS}"


def add_later(store: TimingStore) -> None:
    at_ms = time.time_ns() // 1_000_000 + 3_600_000
    store.add([Timer(TimedRow("message", f"m{number}"), at_ms) for number in range(ROWS)])


def status(url: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["status", "--store", url, *options])


def shown(url: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(status(url, "--json").output)
    return found


def states(found: dict[str, Any]) -> Sequence[str]:
    return [slot["state"] for slot in found["slots"]]


def test_the_status_shows_each_slot_and_fails_until_the_store_is_complete(server: RedisServer) -> None:
    with closing(connect_timing(url_of(server))) as store:
        add_later(store)
        lost = status(url_of(server))
        rebuild = store.begin_rebuild(range(SLOTS))
        rebuilding = shown(url_of(server))
        assert store.end_rebuild(rebuild)
    done = status(url_of(server), "--json")
    found = json.loads(done.output)

    assert lost.exit_code == 1
    assert lost.output.count("to be rebuilt") == SLOTS
    assert states(rebuilding) == ["being rebuilt"] * SLOTS
    assert not rebuilding["complete"]
    assert done.exit_code == 0, done.output
    assert found["complete"]
    assert states(found) == ["complete"] * SLOTS
    assert sum(slot["timers"] for slot in found["slots"]) == ROWS
    assert found["largest_slot"] == max(slot["timers"] for slot in found["slots"])
    assert found["slot_timers_max"] == 1_000_000
    assert [slot["server"] for slot in found["slots"]] == [None] * SLOTS


def test_the_table_names_who_announced_itself_and_how_far_its_rebuild_is(server: RedisServer) -> None:
    with closing(connect_timing(url_of(server))) as store:
        add_later(store)
        store.begin_rebuild(range(SLOTS))
        store.announce([1], SERVER)
        lines = status(url_of(server)).output.splitlines()
        store.announce([1], replace(SERVER, rows_to_rebuild=None))
        uncounted = status(url_of(server)).output

    assert lines[0].split() == ["slot", "timers", "due", "next", "in", "state", "served", "by"]
    assert lines[1].split()[-3:] == ["being", "rebuilt", "nobody"]
    assert "being rebuilt, 1,234 of 5,678 rows" in lines[2]
    assert "being rebuilt, 1,234 of an unknown number of rows" in uncounted
    assert re.search(r"process 4711 on shop-7, instance ab12, seen \d+ s ago", lines[2])
    assert lines[3].startswith("largest slot: ")
    assert lines[3].endswith(" of at most 1,000,000 timers")


def test_a_url_with_another_number_of_slots_than_the_stores_is_refused(server: RedisServer) -> None:
    with closing(connect_timing(url_of(server))) as store:
        add_later(store)

    refused = status(url_of(server).replace(f"slots={SLOTS}", f"slots={SLOTS + 2}"))

    assert isinstance(refused.exception, ConfigurationError)
    assert f"has {SLOTS} slots" in str(refused.exception)


def test_an_announcement_of_another_program_is_nobodys(server: RedisServer) -> None:
    server.ask("SET", TimingKeys("outbox:", "shop").server(0), "not ours")
    with closing(connect_timing(url_of(server))) as store:
        add_later(store)
        [first] = store.statuses([0])

    assert first.figures is not None
    assert first.server is None


@pytest.mark.slow
def test_slots_of_a_shard_that_is_out_are_named_and_the_others_shown() -> None:
    keys = TimingKeys("outbox:", "shop")
    with redis_cluster(cluster_require_full_coverage="no") as cluster:
        url = f"{cluster.url}?name=shop&slots=8&timeout_ms=5000"
        with closing(connect_timing(url)) as store:
            add_later(store)
            assert store.end_rebuild(store.begin_rebuild(range(8)))
        gone = cluster.master_of(keys.due(0))
        out = {slot for slot in range(8) if cluster.master_of(keys.due(slot)) is gone}
        cluster.replica_of(gone).kill()
        gone.kill()
        found = shown(url)
        table = status(url)

    silent = {slot["slot"] for slot in found["slots"] if not slot["answers"]}
    assert 0 < len(out) < 8
    assert silent == out
    assert all(slot["problem"] for slot in found["slots"] if slot["slot"] in out)
    assert all(slot["state"] == "complete" for slot in found["slots"] if slot["slot"] not in out)
    assert not found["complete"]
    assert table.exit_code == 1
    assert table.output.count("does not answer") == len(out)
