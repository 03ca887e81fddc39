"""Users of Kafka who may not do all: what they may not see is named, and stops no publish."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka.admin import AclOperation

from outbox_core.common.errors import NotAuthorized
from outbox_core.messages.broker_port import Broker, Inspectable
from outbox_core.messages.message import Message, PublishResult, PublishStatus
from tests.broker_adapter.publishing.publisher_conformance import open_broker
from tests.engines.kafka.kafka_cluster import PASSWORD, USER, KafkaCluster

__all__ = ["open_broker"]

Open = Callable[[str], Broker]


def url_of(node: KafkaCluster) -> str:
    """Of the user."""
    return f"kafka://{USER}:{PASSWORD}@{node.addresses('SASL_PLAINTEXT')}"


def publish(broker: Broker, topic: str) -> PublishResult:
    [result] = broker.publish([Message(id="m-0", topic=topic, body=b"x")])
    return result


def problems(broker: Broker, topic: str) -> str:
    assert isinstance(broker, Inspectable)
    return "; ".join(one.problem for one in broker.inspect([topic]).weaknesses)


def test_a_user_who_may_only_write_publishes_and_is_told_what_is_not_checked(
    node_with_permissions: KafkaCluster, open_broker: Open, topic: str
) -> None:
    node = node_with_permissions
    node.make_topic(topic)
    node.allow(topic, AclOperation.WRITE)
    broker = open_broker(url_of(node))

    assert publish(broker, topic).status is PublishStatus.STORED
    assert "its settings are unknown" in problems(broker, topic)
    assert "DescribeConfigs" in str(publish(open_broker(f"{url_of(node)}?strict=true"), topic).error)

    node.allow(topic, AclOperation.DESCRIBE_CONFIGS)
    assert "unknown" not in problems(broker, topic)


def test_a_user_who_may_write_nowhere_is_not_authorized_and_publishes_when_that_is_mended(
    node_with_permissions: KafkaCluster, open_broker: Open, topic: str
) -> None:
    """Such a user gets no producer id: librdkafka's producer has a fatal error then, and is made anew."""
    node = node_with_permissions
    node.make_topic(topic)
    node.allow(topic, AclOperation.DESCRIBE)
    broker = open_broker(url_of(node))

    with pytest.raises(NotAuthorized, match="IdempotentWrite"):
        publish(broker, topic)
    node.allow(topic, AclOperation.WRITE)

    assert publish(broker, topic).status is PublishStatus.STORED
