"""Three nodes of Kafka under an Outbox and a compensator: each fault, too few replicas, elections, weak topics."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack, closing

import pytest

from outbox_core.common.errors import BrokerUnavailable, StorageFailed
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.publishing.publisher_conformance import publish_until_stored
from tests.compensator.serving import WatchedMetrics, serving
from tests.engines.fault_conformance import *  # noqa: F403
from tests.engines.fault_conformance import check_fault_under_load, is_taken
from tests.engines.kafka.faulty_kafka import FaultyKafka
from tests.engines.kafka.kafka_engine import KafkaEngine
from tests.engines.outbox_load import wait_for
from tests.engines.recorded_broker import recorded_broker
from tests.outbox.shop import Shop

WAIT_SECONDS = 300
NOBODY = -1
"""As the leader of a partition that has none."""
TIMEOUT_MS = 2_000


def test_a_killed_controller_loses_no_message_and_no_order_of_a_key(
    faulty: FaultyKafka, shop: Shop, topic: str
) -> None:
    check_fault_under_load(faulty, shop, topic, lambda _, __: faulty.kill_controller())


def test_a_leader_that_is_isolated_from_its_peers_loses_no_message_and_no_order_of_a_key(
    faulty: FaultyKafka, shop: Shop, topic: str
) -> None:
    check_fault_under_load(faulty, shop, topic, lambda _, __: faulty.isolate_leader(topic), is_ridden_over=True)


def test_a_leader_that_is_isolated_from_its_peers_acknowledges_nothing_and_is_left(
    faulty: FaultyKafka, engine: KafkaEngine, topic: str
) -> None:
    engine.cluster.make_topic(topic)
    batch = [Message(id=f"m{n}", topic=topic, body=b"") for n in range(3)]
    with closing(connect(f"{faulty.url}?timeout_ms={TIMEOUT_MS}")) as broker, ExitStack() as ending:
        ending.callback(engine.cluster.start)
        publish_until_stored(broker, batch[0])
        isolated = faulty.isolate_leader(topic)
        with pytest.raises(BrokerUnavailable, match=r"timed out|_TIMED_OUT"):
            broker.publish(batch[1:2])
        publish_until_stored(broker, batch[2])
        wait_for(lambda: faulty.leader_by_others(topic, isolated) not in {isolated, NOBODY})
        engine.cluster.start()
        [partition] = engine.read_partitions(topic)

    assert [one.id for one in partition if one.id != "m1"] == ["m0", "m2"]


def test_below_the_minimum_of_replicas_nothing_is_acknowledged_and_the_breaker_opens_until_the_node_is_back(
    engine: KafkaEngine, shop: Shop, topic: str
) -> None:
    cluster, metrics, in_doubt = engine.cluster, WatchedMetrics(), Counter[str]()
    cluster.make_topic(topic, settings={"min.insync.replicas": "3"})
    broker = recorded_broker(engine.url, in_doubt, timeout_ms=TIMEOUT_MS)
    service, close = serving([shop], [broker], metrics=metrics)

    with ExitStack() as ending:
        for end in (cluster.start, broker.close, close, service.stop):
            ending.callback(end)
        cluster.kill9(next(node for node in cluster.nodes if node != cluster.leader(topic)))
        refusal = refusal_of(broker, Message(id="refused", topic=topic, body=b""))
        ids = shop.add_due(50, topic=topic)
        service.start()
        metrics.wait_for(lambda it: it.breakers.count("open") >= 3)
        waiting = shop.rows()
        cluster.start()
        wait_for(lambda: is_taken(broker, Message(id="after", topic=topic, body=b"")))  # else rows wait a minute more
        shop.end_delays()
        metrics.wait_for(lambda it: it.accepted == len(ids))
        [partition] = engine.read_partitions(topic)

    assert "NOT_ENOUGH_REPLICAS" in str(refusal)
    assert "start the brokers that are missing" in str(refusal)
    assert {(row["state"], row["attempts"] <= 2) for row in waiting} == {("pending", True)}
    assert metrics.breakers[-1] in {"closing", "closed"}  # by the first claim after its ramp
    copies = Counter(one.id for one in partition)
    assert set(ids) <= set(copies)
    assert copies - Counter([*ids, "after"]) <= in_doubt  # stored by the leader, and confirmed by too few


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
