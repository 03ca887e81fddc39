"""Clocks of a Redis cluster step by an hour, and a replica with another clock takes over: nothing is lost or early."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pytest

from broker_adapter.redis.timers.slot_scripts import slot_of
from compensator.service.timer_worker import TimerWorker
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect, connect_timing
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.message import AckStatus, CancelStatus, Message, PublishStatus
from tests.broker_adapter.redis.redis_server import RedisServer, wait_until
from tests.compensator.conftest import metrics, serve
from tests.compensator.serving import Serve, WatchedMetrics
from tests.compensator.timers.timer_workers import SOON, opened, publish, source_over
from tests.engines.redis.stepped_server import SteppedCluster, stepped_cluster
from tests.engines.redis.test_clock_steps import HOUR_SECONDS, DueTimes
from tests.outbox.shop import Shop
from tests.outbox.shop_fixtures import sqlite_shop

__all__ = ["metrics", "serve", "sqlite_shop"]
STEPS = [(HOUR_SECONDS, 0), (-HOUR_SECONDS, 0), (HOUR_SECONDS, -HOUR_SECONDS), (-HOUR_SECONDS, HOUR_SECONDS)]
"""Of the clock of a master, and of the clock of the replica that takes over."""
COUNT = 32
SLOTS = 8
TOPIC_SLOTS = 32
"""So many that each master has some."""


@pytest.fixture
def cluster() -> Iterator[SteppedCluster]:
    """Three masters and three replicas, all clocks right."""
    with stepped_cluster() as stepped:
        yield stepped


@pytest.mark.parametrize(("ahead", "ahead_after"), STEPS)
def test_rows_are_sent_once_and_not_early_when_a_master_steps_and_a_replica_with_another_clock_takes_over(
    sqlite_shop: Shop,
    cluster: SteppedCluster,
    serve: Serve,
    metrics: WatchedMetrics,
    ahead: int,
    ahead_after: int,
) -> None:
    target = DueTimes()
    url = f"{cluster.servers.url}?name=shop&slots={SLOTS}&timeout_ms=5000"
    master = cluster.servers.masters[0]
    replica = cluster.servers.replica_of(master)
    with opened(url) as store, source_over(sqlite_shop, target) as source:
        worker = TimerWorker(source, connect_timing(url), options=SOON, metrics=metrics, clock=SystemClock())
        worker.check()
        service = serve(sqlite_shop, target, timers=[worker])
        service.start()
        assert wait_until(lambda: all(one.complete for one in store.figures()))
        before = publish(sqlite_shop, target, url, count=COUNT, delay=timedelta(seconds=4))
        between = publish(sqlite_shop, target, url, count=COUNT, delay=timedelta(seconds=20))
        later = publish(sqlite_shop, target, url, count=COUNT, delay=timedelta(minutes=30))

        cluster.clock_of(master).step_to(ahead)
        target.wait_for(lambda seen: len(seen.stored) >= len(before))
        cluster.clock_of(replica).step_to(ahead_after)
        master.kill()
        cluster.servers.wait_until_promoted(replica)
        target.wait_for(lambda seen: len(seen.stored) >= len(before) + len(between))
        cluster.clock_of(replica).step_to(0)
        assert wait_until(lambda: len(sqlite_shop.rows()) == len(later))
        left = sorted(row["id"] for row in sqlite_shop.rows())
        assert service.stop()

    assert target.early == []
    assert sorted(target.ids) == sorted(one.id for one in [*before, *between])
    assert target.duplicates == []
    assert left == sorted(one.id for one in later)


@pytest.mark.parametrize(("ahead", "ahead_after"), STEPS)
def test_the_broker_delivers_all_and_nothing_early_when_a_master_steps_and_a_replica_with_another_clock_takes_over(
    cluster: SteppedCluster, topic: str, ahead: int, ahead_after: int
) -> None:
    master = cluster.servers.masters[0]
    replica = cluster.servers.replica_of(master)
    now_ms = time.time_ns() // 1_000_000
    soon = [new_message(topic, now_ms + 15_000) for _ in range(COUNT)]
    later = [new_message(topic, now_ms + HOUR_SECONDS * 500) for _ in range(COUNT)]
    of_master = {one.id for one in soon if master_of(cluster, topic, one.id) is master}
    assert 0 < len(of_master) < COUNT
    # Without WAIT: the replica that takes over has none of its own, which could confirm.
    options = f"store=timers&slots={TOPIC_SLOTS}&wait=0&timeout_ms=10000"
    with closing(connect(f"{cluster.servers.url}?{options}")) as broker:
        broker.pull(topic, "g")
        assert {one.status for one in broker.publish([*soon, *later])} == {PublishStatus.STORED}
        cluster.servers.wait_until_replicated(master)

        cluster.clock_of(master).step_to(ahead)
        cluster.clock_of(replica).step_to(ahead_after)
        master.kill()
        cluster.servers.wait_until_promoted(replica)
        received: dict[str, int] = {}
        if ahead_after < 0:  # Redis 7.0 then says CLUSTERDOWN until its clock has caught up (redis/redis 6416)
            assert wait_until(lambda: pull(broker, topic, received) >= COUNT - len(of_master))
            assert of_master.isdisjoint(received)
            cluster.clock_of(replica).step_to(0)
        assert wait_until(lambda: pull(broker, topic, received) >= COUNT)
        cluster.clock_of(replica).step_to(0)
        canceled = broker.cancel([one.id for one in later])

    due_ms = {one.id: one.deliver_at_ms or 0 for one in soon}
    assert sorted(received) == sorted(due_ms)
    assert [one for one, at_ms in received.items() if at_ms < due_ms[one]] == []
    assert set(canceled) == {CancelStatus.CANCELED}


def pull(broker: Broker, topic: str, received: dict[str, int]) -> int:
    """Pull and acknowledge once, and note when each message came first; returns how many came so far."""
    try:
        deliveries = broker.pull(topic, "g", max_messages=100, wait_ms=1_000)
    except BrokerUnavailable:  # the other nodes still name the master that was killed, or its successor refuses
        return len(received)
    at_ms = time.time_ns() // 1_000_000
    for delivery in deliveries:
        received.setdefault(delivery.id, at_ms)
    acked = broker.ack([delivery.receipt for delivery in deliveries]) if deliveries else []
    assert set(acked) <= {AckStatus.ACKED}
    return len(received)


def master_of(cluster: SteppedCluster, topic: str, message_id: str) -> RedisServer:
    """The server that began as the master of a message."""
    return cluster.servers.master_of(f"outbox:timers:{{{topic}:{slot_of(message_id, TOPIC_SLOTS)}}}:log")


def new_message(topic: str, deliver_at_ms: int) -> Message:
    return Message(id=new_message_id(), topic=topic, body=b"x" * 100, deliver_at_ms=deliver_at_ms)
