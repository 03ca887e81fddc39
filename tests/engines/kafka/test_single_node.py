"""Kafka on one node: small messages beside a low limit, weak topics, a paused server, logins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial

import pytest

from broker_adapter.kafka.client_settings import KafkaServers, client_settings, producer_settings
from broker_adapter.kafka.kafka_publisher import KafkaPublisher
from broker_adapter.kafka.record_sender import KafkaRecord, KafkaRecordSender, KafkaReport
from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.publishing.client_pool import ClientPool
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.broker_port import Inspectable
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from outbox_core.messages.refused_batch_isolation import publish_isolated
from tests.broker_adapter.publishing.publisher_conformance import publish_until_stored
from tests.engines.kafka.kafka_cluster import KafkaCluster
from tests.engines.kafka.kafka_engine import KafkaEngine

MANY = 500
TIMEOUT_MS = 120_000


def message(topic: str, number: int, **parts: object) -> Message:
    """The message of a number."""
    return Message(id=f"m-{number}", topic=topic, **{"body": b"%03d" % number * 30, **parts})  # type: ignore[arg-type]


def test_small_messages_are_stored_though_together_they_pass_the_topics_limit(
    own_engine: KafkaEngine, node: KafkaCluster, topic: str
) -> None:
    node.make_topic(topic, settings={"max.message.bytes": "1000"})
    broker = connect(own_engine.url)
    batch = [message(topic, number) for number in range(40)]
    batch[20] = message(topic, 20, body=b"x" * 5_000)

    results = publish_isolated(broker.publish, batch).results
    broker.close()

    rejected = [one.id for one in results.values() if one.status is PublishStatus.REJECTED]
    assert rejected == ["m-20"]
    assert {one.id for one in own_engine.read(topic, count=39)} == {one.id for one in batch} - {"m-20"}


class CountedConnection(KafkaRecordSender):
    """Counts its round trips."""

    trips = 0

    def store(self, records: Sequence[KafkaRecord], *, deadline_ms: int) -> list[KafkaReport]:
        """Store them."""
        self.trips += 1
        return super().store(records, deadline_ms=deadline_ms)


def test_many_small_messages_beyond_the_topics_limit_cost_few_round_trips(
    own_engine: KafkaEngine, node: KafkaCluster, topic: str
) -> None:
    node.make_topic(topic, settings={"max.message.bytes": "10000"})
    clock, url = SystemClock(), BrokerUrl.parse(own_engine.url, port=9092)
    settings = producer_settings(client_settings(url, timeout_ms=TIMEOUT_MS), timeout_ms=TIMEOUT_MS)
    connection = CountedConnection(settings, addresses=url.addresses, clock=clock)
    servers = KafkaServers(client_settings(url, timeout_ms=TIMEOUT_MS), url.addresses)
    batch = [message(topic, number) for number in range(MANY)]
    batch[MANY // 2] = message(topic, MANY // 2, body=b"x" * 20_000)

    with closing(KafkaPublisher(ClientPool(lambda: connection), servers, clock=clock)) as publisher:
        results = publish_isolated(partial(publisher.publish, timeout_ms=TIMEOUT_MS), batch).results

    assert connection.trips < MANY / 5
    rejected = [one.id for one in results.values() if one.status is PublishStatus.REJECTED]
    assert rejected == [f"m-{MANY // 2}"]
    read = [one.id for one in own_engine.read(topic, count=MANY - 1)]
    assert sorted(read) == sorted({f"m-{number}" for number in range(MANY)} - set(rejected))


def test_each_weakness_of_a_topic_is_named_with_its_cure(
    own_engine: KafkaEngine, node: KafkaCluster, topic: str
) -> None:
    node.make_topic(topic, settings={"min.insync.replicas": "1", "unclean.leader.election.enable": "true"})
    broker = connect(own_engine.url)
    assert isinstance(broker, Inspectable)

    weaknesses = broker.inspect([topic, f"{topic}.missing"]).weaknesses
    broker.close()

    cures = [(one.subject, one.cure) for one in weaknesses]
    assert [subject for subject, _ in cures] == [topic, topic, topic, f"{topic}.missing"]
    assert ["kafka-reassign" in cures[0][1], "min.insync" in cures[1][1], "unclean" in cures[2][1]] == [True] * 3


def test_a_paused_server_is_unavailable_within_the_time_out(
    own_engine: KafkaEngine, node: KafkaCluster, topic: str
) -> None:
    node.make_topic(topic)
    broker = connect(f"{own_engine.url}?timeout_ms=1000")
    publish_until_stored(broker, message(topic, 0))  # a node that has just started is slow to give producers their ids
    node.pause(1)
    begin = time.monotonic()
    try:
        with pytest.raises(BrokerUnavailable):
            broker.publish([message(topic, 1)])
        took_seconds = time.monotonic() - begin
    finally:
        node.start()
    broker.close()

    assert took_seconds < 60
