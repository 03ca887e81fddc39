"""Each login of Kafka, plainly and over TLS, on a real server; and what is said where it is refused."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from outbox_core.common.errors import BrokerError, BrokerUnavailable, NotAuthenticated
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.engines.kafka.kafka_cluster import CLIENT_SSL, PASSWORD, USER, KafkaCluster

PASSWORD_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
Open = Callable[..., Broker]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Connect to a URL; closed at the end of the test."""
    with ExitStack() as stack:

        def connected(url: str, **options: object) -> Broker:
            broker = connect(url, **options)
            stack.callback(broker.close)
            return broker

        yield connected


@pytest.fixture
def made_topic(node: KafkaCluster, topic: str) -> str:
    """A topic that is there."""
    node.make_topic(topic)
    return topic


def url_of(node: KafkaCluster, listener: str, *, login: str = "", **options: object) -> str:
    """The URL of a listener, over TLS with the server's own certificate."""
    tls = {"ca_file": node.ca_file} if listener.endswith("SSL") else {}
    query = "&".join(f"{name}={value}" for name, value in {**tls, **options}.items())
    return f"kafka://{login}{node.addresses(listener)}?{query}"


def is_stored(broker: Broker, topic: str) -> bool:
    return [one.status for one in broker.publish([Message(id="1", topic=topic, body=b"")])] == [PublishStatus.STORED]


def refusal(broker: Broker, topic: str) -> BrokerError:
    with pytest.raises(BrokerError) as raised:
        broker.publish([Message(id="1", topic=topic, body=b"")])
    return raised.value


@pytest.mark.parametrize("listener", ["SASL_PLAINTEXT", "SASL_SSL"])
@pytest.mark.parametrize("mechanism", PASSWORD_MECHANISMS)
def test_a_password_logs_in(node: KafkaCluster, made_topic: str, opened: Open, listener: str, mechanism: str) -> None:
    node.make_scram_user()

    broker = opened(url_of(node, listener, login=f"{USER}:{PASSWORD}@", sasl=mechanism))

    assert is_stored(broker, made_topic)


@pytest.mark.parametrize("mechanism", PASSWORD_MECHANISMS)
def test_a_wrong_password_is_not_authenticated_in_kafkas_words(
    node: KafkaCluster, made_topic: str, opened: Open, mechanism: str
) -> None:
    node.make_scram_user()

    error = refusal(
        opened(url_of(node, "SASL_SSL", login=f"{USER}:wrong-password@", sasl=mechanism, timeout_ms=60_000)), made_topic
    )

    assert type(error) is NotAuthenticated
    assert "Authentication failed" in str(error)
    assert "wrong-password" not in str(error)


def test_a_token_logs_in(node: KafkaCluster, made_topic: str, opened: Open) -> None:
    broker = opened(url_of(node, "SASL_SSL", sasl="OAUTHBEARER"), token=unsigned_token())

    assert is_stored(broker, made_topic)


def test_a_token_that_is_none_is_not_authenticated_in_kafkas_words(
    node: KafkaCluster, made_topic: str, opened: Open
) -> None:
    broker = opened(url_of(node, "SASL_SSL", sasl="OAUTHBEARER", timeout_ms=60_000), token="forged-token")

    error = refusal(broker, made_topic)

    assert type(error) is NotAuthenticated
    assert "invalid_token" in str(error)
    assert "forged-token" not in str(error)


def test_a_login_on_a_listener_without_logins_is_not_authenticated(
    node: KafkaCluster, made_topic: str, opened: Open
) -> None:
    error = refusal(opened(url_of(node, "PLAINTEXT", login=f"{USER}:{PASSWORD}@", timeout_ms=60_000)), made_topic)

    assert type(error) is NotAuthenticated
    assert "not valid in current SASL state" in str(error)


def test_messages_go_over_tls_without_a_login(node: KafkaCluster, made_topic: str, opened: Open) -> None:
    broker = opened(url_of(node, "SSL"))

    assert is_stored(broker, made_topic)


def test_a_client_shows_its_certificate_where_the_server_wants_one(
    node: KafkaCluster, made_topic: str, opened: Open
) -> None:
    tls = node.client_tls

    assert is_stored(opened(url_of(node, CLIENT_SSL, cert_file=tls.certificate, key_file=tls.key)), made_topic)
    assert type(refusal(opened(url_of(node, CLIENT_SSL, timeout_ms=3_000)), made_topic)) is BrokerUnavailable


@pytest.mark.parametrize(
    ("listener", "security", "words"),
    [
        ("SSL", "ssl", "certificate verify failed"),
        ("SSL", "plaintext", "security= of the broker's URL"),
        ("SASL_PLAINTEXT", "plaintext", "security= of the broker's URL"),
        # The client reads the server's plain answer, or that the server hung up, whichever it comes to first.
        ("PLAINTEXT", "ssl", r"connecting to a PLAINTEXT broker listener\?|security= of the broker's URL"),
    ],
    ids=["unknown_authority", "plain_on_tls", "no_login", "tls_on_plain"],
)
def test_a_connection_that_cannot_come_about_is_unavailable_and_says_why(
    node: KafkaCluster, made_topic: str, opened: Open, listener: str, security: str, words: str
) -> None:
    error = refusal(opened(f"kafka://{node.addresses(listener)}?security={security}&timeout_ms=3000"), made_topic)

    assert type(error) is BrokerUnavailable
    assert re.search(words, str(error))


def unsigned_token() -> str:
    """A token that names USER, for a server that takes unsigned ones."""
    now = int(time.time())
    parts = ({"alg": "none"}, {"sub": USER, "iat": now - 60, "exp": now + 3_600})
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*encoded, ""])
