"""The timer store on a real cluster: a topic in slots on all masters, and a master that dies under load."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest

from broker_adapter.redis.timers.slot_scripts import slot_of
from outbox_core.common.errors import BrokerUnavailable, StorageFailed
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.message import AckStatus, CancelStatus, GroupConfig, Message
from tests.broker_adapter.redis.redis_cluster import RedisClusterServers, redirections, redis_cluster
from tests.broker_adapter.redis.redis_server import wait_until

Answer = TypeVar("Answer")
SLOTS = 8
BATCH = 20
BATCHES = 20
"""Behind the fault."""
WAIT_MS = 60_000
THREAD_SECONDS_MAX = 300


@pytest.fixture
def cluster() -> Iterator[RedisClusterServers]:
    """A cluster of the test's own."""
    with redis_cluster() as joined:
        yield joined


@contextlib.contextmanager
def broker_on(cluster: RedisClusterServers, options: str) -> Iterator[Broker]:
    broker = connect(f"{cluster.url}?store=timers&{options}")
    yield broker
    broker.close()


def messages(count: int, *, deliver_at_ms: int | None = None) -> list[Message]:
    return [Message(id=new_message_id(), topic="t", body=b"x", deliver_at_ms=deliver_at_ms) for _ in range(count)]


def ids(batch: Sequence[Message]) -> list[str]:
    return [one.id for one in batch]


@pytest.mark.slow
def test_a_topic_lies_in_slots_on_all_masters_and_each_message_comes_once(cluster: RedisClusterServers) -> None:
    with broker_on(cluster, f"wait=1&slots={SLOTS}") as broker:
        now, later = messages(200), messages(40, deliver_at_ms=time.time_ns() // 1_000_000 + 3_600_000)
        broker.publish([*now, *later])

        pulled: list[str] = []
        while len(pulled) < len(now):
            deliveries = broker.pull("t", "g", max_messages=30, wait_ms=WAIT_MS)
            assert 0 < len(deliveries) <= 30
            assert set(broker.ack([one.receipt for one in deliveries])) == {AckStatus.ACKED}
            pulled += [one.id for one in deliveries]

        assert sorted(pulled) == sorted(ids(now))
        assert broker.admin.figures("t", "g")["scheduled"] == len(later)
        assert set(broker.cancel(ids(later))) == {CancelStatus.CANCELED}
        assert broker.admin.figures("t", "g")["scheduled"] == 0
    masters = {cluster.master_of(f"outbox:timers:{{t:{slot_of(one.id, SLOTS)}}}:log").port for one in now}
    assert masters == {server.port for server in cluster.masters}


@pytest.mark.slow
def test_nothing_is_acknowledged_on_a_topic_that_no_replica_knows_by_whoever_registers_it(
    cluster: RedisClusterServers,
) -> None:
    registry = cluster.master_of("outbox:timers:topics")
    topics = (f"topic-{number}" for number in itertools.count())
    topic = next(one for one in topics if cluster.master_of(f"outbox:timers:{{{one}:0}}:log") is not registry)
    batch = [Message(id=new_message_id(), topic=topic, body=b"x")]

    with cluster.replica_of(registry).paused():
        for _ in range(2):
            with (
                broker_on(cluster, "wait=1&timeout_ms=10000") as broker,  # its first inspection has a part of that
                pytest.raises(StorageFailed, match="0 of 1 replicas"),
            ):
                broker.publish(batch)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kill", "pause"])
def test_a_master_that_fails_under_load_with_wait_1_loses_nothing_that_was_acknowledged(
    cluster: RedisClusterServers, way: str
) -> None:
    victim = cluster.master_of("outbox:timers:{t:0}:log")
    heir = cluster.replica_of(victim)

    with under_load(cluster):
        victim.kill() if way == "kill" else victim.pause()
        cluster.wait_until_promoted(heir)
        victim.start() if way == "kill" else victim.resume()


@pytest.mark.slow
def test_slots_that_move_under_load_lose_nothing_that_was_acknowledged(cluster: RedisClusterServers) -> None:
    source, target = cluster.masters[:2]
    keys = [key for slot in range(SLOTS) if cluster.master_of(key := f"outbox:timers:{{t:{slot}}}:log") is source]
    assert keys

    with under_load(cluster):
        for key in keys:
            for before in cluster.move_slot(key, source=source, target=target):
                assert wait_until(lambda before=before: redirections(source) != before)

    assert redirections(source)["TRYAGAIN"] > 0


@pytest.mark.slow
def test_a_slot_that_is_being_moved_does_not_hold_up_the_others(cluster: RedisClusterServers) -> None:
    source, target = cluster.masters[:2]
    [slot, *_] = [slot for slot in range(SLOTS) if cluster.master_of(f"outbox:timers:{{t:{slot}}}:log") is source]
    batch = messages(200)
    of_slot = {one.id for one in batch if slot_of(one.id, SLOTS) == slot}
    delivered: set[str] = set()

    def pull_until(wanted: set[str]) -> None:
        while not wanted <= delivered:
            delivered.update(one.id for one in broker.pull("t", "g", max_messages=1_000))

    with broker_on(cluster, f"wait=1&slots={SLOTS}&timeout_ms={10 * THREAD_SECONDS_MAX * 1_000}") as broker:
        broker.publish(batch)
        broker.admin.declare_group("t", "g", GroupConfig())
        moving = cluster.move_slot(f"outbox:timers:{{t:{slot}}}:log", source=source, target=target)
        next(moving)
        pulling = threading.Thread(target=pull_until, args=({*ids(batch)} - of_slot,), daemon=True)
        pulling.start()
        pulling.join(THREAD_SECONDS_MAX)
        assert delivered == {*ids(batch)} - of_slot
        list(moving)
        pull_until({*ids(batch)})

    assert of_slot


@contextlib.contextmanager
def under_load(cluster: RedisClusterServers) -> Iterator[None]:
    """Publish, cancel and consume during a block and for a while behind it, and check what became of it."""
    acknowledged: set[str] = set()
    canceled: set[str] = set()
    delivered: set[str] = set()
    begun, ending, published = threading.Event(), threading.Event(), threading.Event()

    def publish(broker: Broker) -> None:
        batches_behind = 0
        while batches_behind < BATCHES:
            batches_behind += ending.is_set()
            batch = messages(BATCH, deliver_at_ms=time.time_ns() // 1_000_000 + 500)
            until_answered(lambda batch=batch: broker.publish(batch))
            acknowledged.update(ids(batch))
            statuses = until_answered(lambda batch=batch: broker.cancel(ids(batch)[:2]))
            canceled.update(one for one, status in zip(ids(batch), statuses, strict=False) if status == "canceled")
            if len(acknowledged) == 5 * BATCH:
                begun.set()
        published.set()

    def consume(broker: Broker) -> None:
        while not (published.is_set() and acknowledged <= delivered | canceled):
            deliveries = until_answered(lambda: broker.pull("t", "g", wait_ms=200, invisible_ms=5_000))
            delivered.update(one.id for one in deliveries)
            until_answered(lambda found=deliveries: broker.ack([one.receipt for one in found]))

    with broker_on(cluster, f"wait=1&slots={SLOTS}&timeout_ms=8000") as broker:
        threads = [threading.Thread(target=act, args=(broker,), daemon=True) for act in (publish, consume)]
        for thread in threads:
            thread.start()
        assert begun.wait(THREAD_SECONDS_MAX)
        yield
        ending.set()
        for thread in threads:
            thread.join(THREAD_SECONDS_MAX)
        assert published.is_set()

    assert acknowledged - delivered - canceled == set(), "acknowledged and lost"
    assert delivered & canceled == set(), "canceled and delivered"


def until_answered(act: Callable[[], Answer]) -> Answer:
    """Repeat while the broker says that it cannot now; what is repeated is idempotent, or comes back by itself."""
    while True:
        with contextlib.suppress(BrokerUnavailable, StorageFailed):
            return act()
