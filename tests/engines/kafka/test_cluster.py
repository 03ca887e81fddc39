"""Three nodes under an Outbox and a compensator: one is killed or paused, or too few replicas are left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from compensator.admission.circuit_breaker import BreakerState
from outbox_core.common.errors import BrokerUnavailable, StorageFailed
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.publishing.publisher_conformance import publish_until_stored
from tests.compensator.serving import WatchedMetrics, add_due, serving
from tests.engines.kafka.kafka_cluster import KafkaCluster
from tests.engines.kafka.kafka_engine import KafkaEngine
from tests.engines.kafka.recorded_broker import recorded_broker
from tests.engines.outbox_load import Load, first_copies_by_key, wait_for
from tests.fixtures.databases import Database
from tests.outbox.shop import Shop, open_shop

WAIT_SECONDS = 300
PARTITIONS = 3
TIMEOUT_MS = 2_000
"""Shorter than the election, so that publishes end without an answer and the compensator has work."""


@pytest.fixture
def shop(sqlite: Database) -> Iterator[Shop]:
    """A shop on SQLite."""
    with open_shop(sqlite) as opened:
        yield opened


def kill(cluster: KafkaCluster, topic: str) -> None:
    cluster.kill9(cluster.leader(topic))


def kill_controller(cluster: KafkaCluster, topic: str) -> None:
    """Of three partitions on three nodes it leads one."""
    cluster.kill9(cluster.active_controller())


def pause(cluster: KafkaCluster, topic: str) -> None:
    cluster.pause(cluster.leader(topic))


@pytest.mark.parametrize("fault", [kill, kill_controller, pause])
def test_a_leader_that_fails_under_load_loses_no_message_and_no_order_of_a_key(
    engine: KafkaEngine, shop: Shop, topic: str, fault: Callable[[KafkaCluster, str], None]
) -> None:
    engine.cluster.make_topic(topic, partitions=PARTITIONS)
    metrics, in_doubt = WatchedMetrics(), Counter[str]()
    broker = recorded_broker(engine.cluster.addresses(), in_doubt, timeout_ms=TIMEOUT_MS)
    box = shop.box(broker, ordered={topic})
    load = Load(shop, box, topic)
    service, close = serving([shop], [broker], metrics=metrics)

    with ThreadPoolExecutor(1) as pool, ExitStack() as ending:
        for end in (engine.cluster.start, broker.close, box.close, close, service.stop, load.end):
            ending.callback(end)
        service.start()
        loading = pool.submit(load.run)
        load.wait_for_more(200)
        fault(engine.cluster, topic)
        load.wait_for_more(100)  # there are new leaders
        engine.cluster.start()
        load.wait_for_more(100)
        load.end()
        loading.result(WAIT_SECONDS)
        wait_for(lambda: not load.left())
        partitions = engine.read_partitions(topic)

    copies = Counter(one.id for partition in partitions for one in partition)
    repeated = copies - Counter(set(load.ids))
    print(f"{len(load.ids)} committed, {len(in_doubt)} in doubt, {repeated.total()} duplicates, {metrics.breakers}")
    assert set(copies) == set(load.ids)
    assert repeated <= in_doubt  # one copy at most for each publish that ended without an answer
    assert metrics.accepted > 0
    assert all(partitions)
    for partition in partitions:
        for numbers in first_copies_by_key(partition).values():
            assert numbers == sorted(numbers)


def test_below_the_minimum_of_replicas_nothing_is_acknowledged_and_the_breaker_opens_until_the_node_is_back(
    engine: KafkaEngine, shop: Shop, topic: str
) -> None:
    cluster, metrics, in_doubt = engine.cluster, WatchedMetrics(), Counter[str]()
    cluster.make_topic(topic, settings={"min.insync.replicas": "3"})
    broker = recorded_broker(cluster.addresses(), in_doubt, timeout_ms=TIMEOUT_MS)
    service, close = serving([shop], [broker], metrics=metrics)

    with ExitStack() as ending:
        for end in (cluster.start, broker.close, close, service.stop):
            ending.callback(end)
        cluster.kill9(next(node for node in cluster.nodes if node != cluster.leader(topic)))
        refusal = refusal_of(broker, Message(id="refused", topic=topic, body=b""))
        ids = add_due(shop, 50, topic=topic)
        service.start()
        metrics.wait_for(lambda it: it.breakers.count(BreakerState.OPEN) >= 3)
        waiting = shop.rows()
        cluster.start()
        shop.end_delays()
        metrics.wait_for(lambda it: it.accepted == len(ids))
        [partition] = engine.read_partitions(topic)

    assert "NOT_ENOUGH_REPLICAS" in str(refusal)
    assert "start the brokers that are missing" in str(refusal)
    assert {(row["state"], row["attempts"] <= 2) for row in waiting} == {("pending", True)}
    assert metrics.breakers[-1] is BreakerState.CLOSING  # and closed with the first claim after its ramp
    copies = Counter(one.id for one in partition)
    assert set(ids) <= set(copies)
    assert copies - Counter(ids) <= in_doubt  # stored by the leader, and confirmed by too few


def refusal_of(broker: Broker, message: Message) -> StorageFailed:
    """What the servers say once they know that a replica is missing; until then a publish waits in vain."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            broker.publish([message])
        except StorageFailed as error:
            return error
        except BrokerUnavailable:
            continue
    raise TimeoutError("the servers stored it")


def test_an_election_is_ridden_over_within_one_publish(engine: KafkaEngine, topic: str) -> None:
    engine.cluster.make_topic(topic)
    broker = connect(engine.url + "?timeout_ms=60000")
    with ExitStack() as ending:
        for end in (engine.cluster.start, broker.close):
            ending.callback(end)
        batches = [[Message(id=f"m{n}-{i}", topic=topic, body=b"") for i in range(20)] for n in range(2)]
        before = broker.publish(batches[0])
        engine.cluster.kill9(engine.cluster.leader(topic))
        during = broker.publish(batches[1])
        [partition] = engine.read_partitions(topic)

    assert {one.status for one in (*before, *during)} == {PublishStatus.STORED}
    assert [one.id for one in partition] == [one.id for batch in batches for one in batch]


def test_a_strict_broker_defers_what_is_for_a_weak_topic_and_stores_it_once_that_is_mended(
    engine: KafkaEngine, topic: str
) -> None:
    weak = f"{topic}.weak"
    engine.cluster.make_topic(topic)
    engine.cluster.make_topic(weak, settings={"min.insync.replicas": "1"})
    batch = [Message(id=name, topic=name, body=b"") for name in (topic, weak, f"{topic}.missing")]
    with closing(connect(f"{engine.url}?strict=true")) as broker:
        refused = broker.publish(batch)
        engine.cluster.set_topic(weak, {"min.insync.replicas": "2"})
        publish_until_stored(broker, batch[1])  # each node learns of the change in its own time

    assert [one.status for one in refused] == [PublishStatus.STORED, PublishStatus.DEFERRED, PublishStatus.DEFERRED]
    assert "strict=true" in str(refused[1].error)
    assert "min.insync.replicas=2" in str(refused[1].error)
    assert [[one.id for one in engine.read(name, count=1)] for name in (topic, weak)] == [[topic], [weak]]
