"""`outbox delay sweep --store`: a timing store agrees with its database afterwards, whatever it lost or kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from outbox_broker.delay_service.cli import app
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.timing_port import TimingStore
from tests.broker_adapter.redis.redis_server import RedisServer, wait_until
from tests.compensator.timers.timer_workers import held, publish, store_url, timer, worker_over
from tests.outbox.recording_broker import PromptBroker
from tests.outbox.shop import Shop

HOUR_MS = 3_600_000


def run(shop: Shop, server: RedisServer, *options: str) -> Result:
    schema = ["--schema", shop.database.schema] if shop.database.schema else []
    return CliRunner().invoke(
        app, ["sweep", "--store", store_url(server), "--url", shop.database.url, *schema, *options]
    )


def sweep(shop: Shop, server: RedisServer) -> dict[str, Any]:
    done = run(shop, server, "--json")
    assert done.exit_code == 0, done.output
    report: dict[str, Any] = json.loads(done.output)
    return report


def test_what_is_missing_is_added_and_what_has_no_row_is_removed(
    shop: Shop, server: RedisServer, store: TimingStore
) -> None:
    messages = publish(shop, PromptBroker(), store_url(server), count=20)
    with worker_over(shop, PromptBroker(), store_url(server)):
        assert wait_until(lambda: all(one.complete for one in store.figures()))
    lost = [one.row for slot in range(store.slots) for one in remove_half(store, slot)]
    assert 0 < len(lost) < 20
    store.add([timer(shop, f"gone-{number}", in_ms=HOUR_MS) for number in range(7)])
    assert all(one.complete for one in store.figures()), "no generation shows either"

    assert sweep(shop, server) == {
        "rows": 20, "added": len(lost), "timers": 27, "removed": 7, "complete": True, "stopped": False,
    }  # fmt: skip
    assert sweep(shop, server) == {
        "rows": 20, "added": 0, "timers": 20, "removed": 0, "complete": True, "stopped": False,
    }  # fmt: skip
    left = {one.row.id for slot in range(store.slots) for one in store.list_timers(slot, cursor=0, limit=500).timers}
    assert left == {one.id for one in messages}


def test_a_store_that_lost_everything_is_complete_after_a_sweep(
    sqlite_shop: Shop, server: RedisServer, store: TimingStore
) -> None:
    publish(sqlite_shop, PromptBroker(), store_url(server), count=20)
    server.ask("FLUSHALL")

    report = sweep(sqlite_shop, server)

    assert (report["rows"], report["added"], report["complete"]) == (20, 20, True)
    assert held(store) == (20, 0)


def test_a_timer_that_a_worker_has_taken_stays_with_its_lease(
    sqlite_shop: Shop, server: RedisServer, store: TimingStore
) -> None:
    [message] = publish(sqlite_shop, PromptBroker(), store_url(server), count=1)
    store.add([timer(sqlite_shop, message.id)])
    taken = store.take(range(store.slots), limit=100, lease_ms=HOUR_MS)

    report = sweep(sqlite_shop, server)

    assert (report["added"], report["removed"]) == (0, 0)
    store.settle(taken, later_ms={})
    assert held(store) == (0, 0), "the lease was still the taker's"


def test_people_read_what_a_sweep_did(sqlite_shop: Shop, server: RedisServer, store: TimingStore) -> None:
    publish(sqlite_shop, PromptBroker(), store_url(server), count=3)

    done = run(sqlite_shop, server)

    assert done.exit_code == 0, done.output
    assert "3 pending rows: 0 timers were missing and added; 3 timers: 0 without a pending row removed" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sweep", "--dry-run", "--url", "sqlite:///shop.db"], "--dry-run: not with a timing store"),
        (["sweep"], "no database is named"),
        (["sweep", "--url", "sqlite:///a.db", "--url", "sqlite:///b.db"], "a timing store is of one message schema"),
        (["serve", "--target", "memory:", "--data", "folder"], "--data: not with a timing store"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_with_the_cure(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, [arguments[0], "--store", "redis://127.0.0.1:1/?name=shop", *arguments[1:]])

    assert isinstance(done.exception, ConfigurationError)
    assert said in str(done.exception)


def test_a_store_that_no_command_knows_is_refused() -> None:
    done = CliRunner().invoke(app, ["status", "--store", "kafka://127.0.0.1:1"])

    assert isinstance(done.exception, ConfigurationError)
    assert "redis+cluster" in str(done.exception)


def remove_half(store: TimingStore, slot: int) -> list[Any]:
    """As a failover that lost acknowledged adds; returns what was lost."""
    lost = store.list_timers(slot, cursor=0, limit=500).timers[::2]
    assert store.remove_timers(slot, lost) == len(lost)
    return list(lost)
