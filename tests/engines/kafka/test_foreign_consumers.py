"""The examples of consumers on Kafka: the effect happens once, whenever the consumer is killed."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from tests.engines.kafka.kafka_cluster import ANSWER_SECONDS_MAX, KafkaCluster
from tests.engines.kafka.kafka_engine import KafkaEngine
from tests.examples.foreign_consumer import (
    DONE,
    GROUP,
    TOPIC,
    WAIT_SECONDS,
    ForeignConsumer,
    check_effect_after_failed_commit,
    check_one_effect,
    wait_until,
)
from tests.outbox.shop import Shop
from tests.outbox.shop_fixtures import sqlite_shop

__all__ = ["sqlite_shop"]

PARTITION = TopicPartition(TOPIC, 0)
COORDINATOR_LOADS = {
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
}


@pytest.mark.parametrize("step", sorted(DONE))
@pytest.mark.parametrize("program", ["confluent_kafka_consumer.py", "aiokafka_consumer.py", "faststream_kafka.py"])
def test_a_consumer_of_kafka_has_each_effect_once(
    sqlite_shop: Shop, node: KafkaCluster, own_engine: KafkaEngine, program: str, step: str
) -> None:
    check_one_effect(sqlite_shop, kafka_consumer(program, sqlite_shop, node, own_engine), step=step)


def test_faststream_on_kafka_reads_a_message_again_whose_commit_failed(
    sqlite_shop: Shop, node: KafkaCluster, own_engine: KafkaEngine
) -> None:
    consumer = kafka_consumer("faststream_kafka.py", sqlite_shop, node, own_engine)

    check_effect_after_failed_commit(sqlite_shop, consumer)


def kafka_consumer(program: str, shop: Shop, node: KafkaCluster, engine: KafkaEngine) -> ForeignConsumer:
    """An example that reads the topic, which is made anew."""
    _make_topic_anew(node)
    url = shop.database.url
    if not program.startswith("confluent"):
        url = url.replace("sqlite://", "sqlite+aiosqlite://")
    return ForeignConsumer(
        program=(program,),
        environment={"DATABASE_URL": url, "KAFKA": node.addresses()},
        broker_url=engine.url,
        unsettled=lambda: _unsettled(node),
    )


def _unsettled(node: KafkaCluster) -> int:
    """The group's lag: the end of the topic less the committed offset."""
    ends = node.admin.list_offsets({PARTITION: OffsetSpec.latest()})[PARTITION].result(ANSWER_SECONDS_MAX)
    return int(ends.offset) - max(0, _committed_offset(node))


def _committed_offset(node: KafkaCluster) -> int:
    """Asks again while the group's coordinator loads: a cluster's first group makes the topic that keeps offsets."""
    asked = [ConsumerGroupTopicPartitions(GROUP, [PARTITION])]
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            group = node.admin.list_consumer_group_offsets(asked)[GROUP].result(ANSWER_SECONDS_MAX)
        except KafkaException as error:
            if error.args[0].code() not in COORDINATOR_LOADS or time.monotonic() > deadline:
                raise
        else:
            return int(group.topic_partitions[0].offset)


def _make_topic_anew(node: KafkaCluster) -> None:
    """Without the messages and the offsets of an earlier test."""
    if TOPIC in node.admin.list_topics(timeout=ANSWER_SECONDS_MAX).topics:
        node.admin.delete_topics([TOPIC], operation_timeout=ANSWER_SECONDS_MAX)[TOPIC].result(ANSWER_SECONDS_MAX)
        wait_until(lambda: TOPIC not in node.admin.list_topics(timeout=ANSWER_SECONDS_MAX).topics)
        wait_until(lambda: _committed_offset(node) < 0)
    node.make_topic(TOPIC)
