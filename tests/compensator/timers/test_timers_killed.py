"""A compensator that is killed at any step of a turn of timers: each row is sent once by effect, by the next one."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path

import pytest

from broker_adapter.embedded import EmbeddedBroker
from tests.broker_adapter.redis.redis_server import RedisServer, wait_until
from tests.compensator.timers.timer_workers import held, move, opened, patient, store_url, timer, worker_over
from tests.fixtures.fork_server import environment, fork_server
from tests.outbox.recording_broker import PromptBroker
from tests.outbox.shop import Shop

pytestmark = pytest.mark.processes

CHILD = "tests.compensator.timers.dying_worker"
ROWS = 3
POINTS = {
    # point: rows that are left
    "after take": ROWS,
    "before claim": ROWS,
    "in claim": ROWS,
    "before publish": ROWS,
    "after publish": ROWS,
    "before delete": ROWS,
    "in delete": ROWS,
    "before the timers go": 0,
    "the end": 0,
}


def run_until_killed(point: str, shop: Shop, broker_url: str, store: str) -> None:
    """Run the dying worker; anything but its death by SIGKILL is a failure of the test."""
    arguments = [point, shop.database.url, shop.database.schema or "", broker_url, patient(store)]
    with shop.last_connections_ended():
        done = fork_server().run(CHILD, *arguments, env=environment())
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("point", "successor"),
    [*((point, "worker") for point in POINTS), ("before publish", "polls"), ("after publish", "polls")],
)
def test_a_worker_killed_at_any_step_leaves_each_row_to_be_sent_once(
    mysql_shop: Shop, server: RedisServer, embedded: EmbeddedBroker, tmp_path: Path, point: str, successor: str
) -> None:
    shop = mysql_shop
    box = shop.box(PromptBroker(), timing=patient(store_url(server)))
    with box.begin():
        messages = [box.publish("reminder", {"n": number}, delay=timedelta(hours=1)) for number in range(ROWS)]
    assert box.close()
    move(shop, in_ms=0)
    with opened(store_url(server)) as store:
        store.add([timer(shop, one.id) for one in messages])
        run_until_killed(point, shop, f"embedded:{tmp_path / 'broker-data'}", store_url(server))
        assert len(shop.rows()) == POINTS[point]

        move(shop, in_ms=0)  # leases are over
        if successor == "polls":
            server.ask("FLUSHALL")
            shop.scan(embedded).run()
        else:
            store.add([timer(shop, one.id) for one in messages])
            with worker_over(shop, embedded, store_url(server)):
                assert wait_until(lambda: held(store) == (0, 0) and not shop.rows())

    assert shop.rows() == []
    assert shop.archived() == ROWS
    found = embedded.pull("reminder", "mail", max_messages=100)
    assert sorted(one.id for one in found) == sorted(one.id for one in messages)
