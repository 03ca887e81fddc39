"""Two compensators whose sources and slots are leases in ZooKeeper: one dies or hangs, and every timer still fires."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from broker_adapter.http import HttpBroker
from compensator.assignment import LeaseOptions
from compensator.service.timer_worker import TimerWorker
from outbox_core import SystemClock
from outbox_core.messages.connect import connect_timing
from outbox_core.messages.timing_port import TimingStore
from tests.broker_adapter.redis.redis_server import RedisServer
from tests.broker_adapter.servers import ServerProcess
from tests.compensator.assignment.zookeeper_fleet import ZooKeeperFleet
from tests.compensator.serving import Serve, WatchedMetrics
from tests.compensator.timers.timer_workers import (
    SLOTS,
    SOON,
    held,
    move,
    opened,
    publish,
    source_over,
    store_url,
    timer,
)
from tests.fixtures.fork_server import Program, environment, fork_server
from tests.fixtures.servers import ReadyDatabase
from tests.fixtures.stopped_process import stop_process
from tests.fixtures.zookeeper_server import ZooKeeper
from tests.outbox.recording_broker import PromptBroker
from tests.outbox.shop import Shop, make_tables, open_shop
from tests.outbox_broker.cluster.conftest import eventually

MARIADB = "mariadb"
MESSAGES = 40
SECONDS_MAX = 240
PULL_MS = 10_000


@pytest.fixture
def fleet(running_zookeeper: ZooKeeper) -> Iterator[ZooKeeperFleet]:
    """A path of the test's own in ZooKeeper."""
    made = ZooKeeperFleet(running_zookeeper.hosts)
    yield made
    made.close()


class Stage:
    """A database with one source, a Redis, a broker, and compensators as processes."""

    def __init__(self, shop: Shop, server: RedisServer, fleet: ZooKeeperFleet, folder: Path, stack: ExitStack) -> None:
        self._shop, self._fleet, self._stack = shop, fleet, stack
        self._timing = store_url(server)
        self.store: TimingStore = stack.enter_context(opened(self._timing))
        broker = ServerProcess(folder / "broker")
        broker.start()
        stack.callback(broker.kill)
        self._broker_url = broker.url
        self._broker = HttpBroker(broker.url)
        stack.callback(self._broker.close)

    def compensator(self) -> Program:
        """One more."""
        database = self._shop.database
        schema = ["--schema", database.schema] if database.schema else []
        arguments = ["compensator", "run", "--url", database.url, *schema, "--broker", self._broker_url]
        arguments += ["--timing", self._timing, "--lease-url", self._fleet.url]
        return self._stack.enter_context(fork_server().start("outbox", *arguments, env=environment()))

    def wait_until_shared(self, *counts: int) -> Counter[str]:
        """Wait until the source and the slots have instances with so many each; returns these."""
        found: Counter[str] = Counter()

        def is_shared() -> bool:
            found.clear()
            found.update(self._fleet.holders().values())
            return sorted(found.values()) == sorted(counts)

        eventually(is_shared, what=f"leases of {counts}")
        return found

    def send_by_timers(self) -> list[str]:
        """Schedule messages, bring them forward, and return the ids of those that arrive."""
        messages = publish(self._shop, PromptBroker(), self._timing, count=MESSAGES)
        move(self._shop, in_ms=0)
        self.store.add([timer(self._shop, message.id) for message in messages])
        received: list[str] = []
        deadline = time.monotonic() + SECONDS_MAX
        while len(received) < MESSAGES:
            deliveries = self._broker.pull("reminder", "mail", max_messages=100, wait_ms=PULL_MS)
            assert deliveries or time.monotonic() < deadline, f"{len(received)} of {MESSAGES} came"
            self._broker.ack([delivery.receipt for delivery in deliveries])
            received += [delivery.id for delivery in deliveries]
        assert sorted(received) == sorted(message.id for message in messages)
        eventually(lambda: not self._shop.rows() and held(self.store) == (0, 0), what="no row and no timer left")
        return received


@pytest.fixture
def stage(ready_database: ReadyDatabase, server: RedisServer, fleet: ZooKeeperFleet, tmp_path: Path) -> Iterator[Stage]:
    """Two compensators can be started on it. On MariaDB alone: no database changes who has a lease in ZooKeeper."""
    with ExitStack() as stack:
        database = stack.enter_context(ready_database(MARIADB, make_tables))
        shop = stack.enter_context(open_shop(database, has_tables=True))
        yield Stage(shop, server, fleet, tmp_path, stack)


@pytest.mark.processes
def test_the_slots_of_a_compensator_that_hangs_and_of_one_that_dies_are_the_others(stage: Stage) -> None:
    first = stage.compensator()
    stage.wait_until_shared(1 + SLOTS)
    second = stage.compensator()
    before = stage.wait_until_shared(2, 3)
    sent = [stage.send_by_timers()]

    stop_process(first.pid)
    while_one_hangs = stage.wait_until_shared(1 + SLOTS)
    sent.append(stage.send_by_timers())
    first.send_signal(signal.SIGCONT)
    after = stage.wait_until_shared(2, 3)
    second.kill()
    while_one_is_dead = stage.wait_until_shared(1 + SLOTS)
    sent.append(stage.send_by_timers())

    assert set(while_one_hangs) < set(before)
    assert len(set(after) - set(before)) == 1
    assert set(while_one_is_dead) == set(after) - set(before)
    assert len({one for ids in sent for one in ids}) == 3 * MESSAGES


def test_a_compensator_that_finds_no_zookeeper_fires_every_timer(
    sqlite_shop: Shop,
    server: RedisServer,
    store: TimingStore,
    prompt: PromptBroker,
    serve: Serve,
    metrics: WatchedMetrics,
) -> None:
    fleet = ZooKeeperFleet("127.0.0.1:1")
    messages = publish(sqlite_shop, prompt, store_url(server), count=MESSAGES)
    alone = fleet.instance(request_ms_max=100, options=LeaseOptions(alone_after_beats=2))
    with source_over(sqlite_shop, prompt) as source:
        worker = TimerWorker(
            source, connect_timing(store_url(server)), options=SOON, metrics=metrics, clock=SystemClock()
        )
        service = serve(sqlite_shop, prompt, assignment=alone, timers=[worker], beat_ms=100)
        service.start()
        eventually(lambda: all(one.complete for one in store.figures()), what="every slot served")

        move(sqlite_shop, in_ms=0)
        store.add([timer(sqlite_shop, message.id) for message in messages])
        eventually(lambda: not sqlite_shop.rows() and held(store) == (0, 0), what="no row and no timer left")
        [beats] = [check.observed for check in service.health().checks if check.name == "assignment"]
        assert service.stop()

    assert "the latest one failed: no ZooKeeper server of 127.0.0.1:1 accepts a session" in beats
    assert sorted(prompt.ids) == sorted(message.id for message in messages)
    fleet.close()
