"""Logins of Pulsar by token, plainly and over TLS, on a real server; and what is said where it refuses."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from outbox_core.common.errors import BrokerUnavailable, NotAuthenticated
from outbox_core.messages.broker_port import Broker, Inspectable
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.publishing.publisher_conformance import open_broker
from tests.engines.pulsar.pulsar_security import CERTIFIED, NAMED, PASSWORD, PulsarSecurity, signed_token
from tests.engines.pulsar.pulsar_server import PulsarServer

__all__ = ["open_broker"]

Open = Callable[[str], Broker]
Secured = tuple[PulsarServer, PulsarSecurity]
USER = "shop"
STORED, DEFERRED = PublishStatus.STORED, PublishStatus.DEFERRED


@pytest.fixture(scope="module")
def allowed(secured: Secured) -> Secured:
    """A server on which USER may produce, and read how topics are set."""
    secured[0].ask("POST", f"namespaces/public/default/permissions/{USER}", json=["produce", "consume"])
    return secured


@pytest.fixture
def topic(allowed: Secured) -> str:
    """A topic with a subscription."""
    name = f"t.{uuid.uuid4().hex}"
    allowed[0].create_topic(name)
    allowed[0].create_subscription(name, "plain")
    return name


def plain_url(server: PulsarServer, token: str) -> str:
    """With the token as the password."""
    return f"pulsar://:{token}@{server.addresses}?timeout_ms=20000"


def tls_url(server: PulsarServer, token: str, ca_file: Path) -> str:
    return f"pulsar+ssl://:{token}@{server.tls_addresses}?timeout_ms=20000&ca_file={quote(str(ca_file))}"


def status(broker: Broker, topic: str) -> PublishStatus:
    [result] = broker.publish([Message(id="1", topic=topic, body=b"x")])
    return result.status


def test_a_token_logs_in_plainly_and_over_tls(allowed: Secured, topic: str, open_broker: Open) -> None:
    server, security = allowed
    urls = [
        plain_url(server, security.token(USER)),
        tls_url(server, security.token(USER), security.tls.certificate),
    ]

    assert [status(open_broker(url), topic) for url in urls] == [STORED, STORED]


def test_a_clients_certificate_logs_in(allowed: Secured, topic: str, open_broker: Open) -> None:
    server, security = allowed
    server.ask("POST", f"namespaces/public/default/permissions/{quote(CERTIFIED)}", json=["produce"])
    files = {"ca_file": security.tls.certificate, "cert_file": security.tls.certificate, "key_file": security.tls.key}
    options = "&".join(f"{name}={quote(str(path))}" for name, path in files.items())

    assert status(open_broker(f"pulsar+ssl://{server.tls_addresses}?timeout_ms=20000&{options}"), topic) is STORED


def test_a_password_logs_in_and_a_wrong_one_is_not_authenticated(
    allowed: Secured, topic: str, open_broker: Open
) -> None:
    server, _ = allowed
    server.ask("POST", f"namespaces/public/default/permissions/{NAMED}", json=["produce"])
    address = f"{server.addresses}?timeout_ms=20000"

    assert status(open_broker(f"pulsar://{NAMED}:{PASSWORD}@{address}"), topic) is STORED
    with pytest.raises(NotAuthenticated):
        status(open_broker(f"pulsar://{NAMED}:wrong@{address}&admin={quote(server.admin_url)}"), topic)


def test_the_admin_api_is_asked_over_tls_with_the_same_token(allowed: Secured, topic: str, open_broker: Open) -> None:
    server, security = allowed
    admin = f"&admin={quote(server.tls_admin_url)}"
    broker = open_broker(tls_url(server, security.token("admin"), security.tls.certificate) + admin)
    assert isinstance(broker, Inspectable)

    inspection = broker.inspect([topic])

    assert (inspection.version, inspection.weaknesses) == ("4.0.7", ())
    assert status(broker, topic) is STORED


def test_a_token_that_somebody_else_signed_is_not_authenticated_where_the_admin_api_is_named(
    allowed: Secured, topic: str, open_broker: Open
) -> None:
    server, _ = allowed
    forged = signed_token(USER, secrets.token_bytes(32))

    with pytest.raises(NotAuthenticated) as raised:
        status(open_broker(f"{plain_url(server, forged)}&admin={quote(server.admin_url)}"), topic)

    assert forged not in str(raised.value)


def test_without_the_admin_api_a_refused_token_is_an_outage_that_names_it(
    allowed: Secured, topic: str, open_broker: Open
) -> None:
    server, _ = allowed
    forged = signed_token(USER, secrets.token_bytes(32))
    url = f"pulsar://:{forged}@{server.addresses}?timeout_ms=2000"

    with pytest.raises(BrokerUnavailable, match="refused login") as raised:
        status(open_broker(url), topic)

    assert forged not in str(raised.value)


def test_a_user_who_may_not_produce_has_his_messages_deferred(allowed: Secured, topic: str, open_broker: Open) -> None:
    server, security = allowed

    [result] = open_broker(plain_url(server, security.token("nobody"))).publish(
        [Message(id="1", topic=topic, body=b"x")]
    )

    assert result.status is DEFERRED


def test_a_user_who_may_not_see_how_topics_are_set_publishes_and_that_is_named(
    allowed: Secured, topic: str, open_broker: Open
) -> None:
    server, security = allowed
    broker = open_broker(plain_url(server, security.token(USER)) + f"&admin={quote(server.admin_url)}")
    assert isinstance(broker, Inspectable)

    [weakness] = broker.inspect([topic]).weaknesses

    assert (weakness.subject, "may not" in weakness.problem) == ("admin", True)
    assert status(broker, topic) is STORED


def test_a_server_that_nobody_vouches_for_is_unavailable(allowed: Secured, topic: str, open_broker: Open) -> None:
    server, security = allowed
    url = f"pulsar+ssl://:{security.token(USER)}@{server.tls_addresses}?timeout_ms=3000"

    with pytest.raises(BrokerUnavailable):
        status(open_broker(url), topic)
