"""RocketMQ's logins and TLS on a real proxy, and what is said where they are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from outbox_core.common.errors import BrokerError, BrokerUnavailable, NotAuthenticated
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishResult, PublishStatus
from tests.engines.rocketmq.rocketmq_cluster import USER, RocketMqCluster
from tests.engines.rocketmq.rocketmq_engine import RocketMqEngine

Open = Callable[..., Broker]

ATTEMPTS = 5


@pytest.fixture
def opened() -> Iterator[Open]:
    """Connect to a URL; closed at the end of the test."""
    with ExitStack() as stack:

        def connected(url: str, **options: object) -> Broker:
            broker = connect(url, **options)
            stack.callback(broker.close)
            return broker

        yield connected


def publish(broker: Broker, topic: str) -> PublishResult:
    return broker.publish([Message(id="1", topic=topic, body=b"x")])[0]


def refusal(broker: Broker, topic: str) -> BrokerError:
    with pytest.raises(BrokerError) as raised:
        publish(broker, topic)
    return raised.value


def with_tls(cluster: RocketMqCluster, *, is_known: bool = True) -> str:
    """The proxy's URL over TLS, with its own certificate as the authority."""
    url = cluster.url().replace("rocketmq://", "rocketmqs://")
    return f"{url}&ca_file={cluster.ca_file}" if is_known else url


def test_messages_go_over_tls(cluster: RocketMqCluster, engine: RocketMqEngine, opened: Open, topic: str) -> None:
    engine.make_topic(topic)

    assert publish(opened(with_tls(cluster)), topic).status is PublishStatus.STORED


def test_a_certificate_of_an_unknown_authority_is_unavailable_and_each_attempt_says_why(
    cluster: RocketMqCluster, opened: Open, topic: str
) -> None:
    broker = opened(with_tls(cluster, is_known=False), timeout_ms=3_000)
    errors = [refusal(broker, topic) for _ in range(ATTEMPTS)]

    assert {type(one) for one in errors} == {BrokerUnavailable}
    assert [str(one) for one in errors if "CERTIFICATE_VERIFY_FAILED" not in str(one)] == []


@pytest.mark.parametrize(
    ("login", "words"), [(f"{USER}:wrong-password@", "check signature failed"), ("", "username cannot be null")]
)
def test_a_login_that_is_wrong_or_missing_is_not_authenticated_in_rocketmqs_words(
    cluster: RocketMqCluster, opened: Open, topic: str, login: str, words: str
) -> None:
    error = refusal(opened(cluster.url(login=login)), topic)

    assert type(error) is NotAuthenticated
    assert words in str(error)
    assert "wrong-password" not in str(error)


def test_an_access_key_that_is_not_known_may_be_an_outage_of_the_brokers(
    cluster: RocketMqCluster, opened: Open, topic: str
) -> None:
    error = refusal(opened(cluster.url(login="nobody:password@")), topic)

    assert type(error) is BrokerUnavailable
    assert "check the access key" in str(error)


def test_a_topic_that_a_user_may_not_publish_to_is_deferred_and_the_others_are_stored(
    cluster: RocketMqCluster, engine: RocketMqEngine, opened: Open, topic: str
) -> None:
    allowed = f"{topic}.allowed"
    engine.make_topic(topic)
    engine.make_topic(allowed)
    cluster.client.make_user("limited", "limited-password")
    cluster.client.allow_publish("limited", allowed.replace(".", "_"))
    broker = opened(cluster.url(login="limited:limited-password@"))

    results = broker.publish([Message(id=name, topic=name, body=b"x") for name in (topic, allowed)])

    assert [one.status for one in results] == [PublishStatus.DEFERRED, PublishStatus.STORED]
    assert "has no permission" in str(results[0].error)
    assert "mqadmin createAcl" in str(results[0].error)
    assert [one.id for one in engine.read(allowed, count=1)] == [allowed]
