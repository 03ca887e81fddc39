"""Logins, permissions and TLS on a real server."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from outbox_broker.http.server import Tls
from outbox_core.common.errors import BrokerUnavailable, NotAuthenticated, NotAuthorized
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.http.test_tls import certificate
from tests.broker_adapter.rabbitmq.rabbitmq_engine import RabbitMqEngine
from tests.broker_adapter.rabbitmq.rabbitmq_server import HOST
from tests.fixtures.cutting_tcp_proxy import cutting_tcp_proxy

Open = Callable[[str], Broker]


@pytest.fixture
def user(engine: RabbitMqEngine) -> str:
    """A user of the test's own, with the password s3cret."""
    name = f"u{uuid.uuid4().hex}"
    engine.server.add_user(name, "s3cret")
    return name


def signed_certificate(folder: Path, *, authority: Tls) -> Tls:
    """A client's certificate. RabbitMQ refuses one that vouches for itself."""
    issuer = x509.load_pem_x509_certificate(authority.certificate.read_bytes())
    issuer_key = serialization.load_pem_private_key(authority.key.read_bytes(), None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "outbox-mq client")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(issuer.not_valid_before_utc)
        .not_valid_after(issuer.not_valid_after_utc)
        .sign(issuer_key, hashes.SHA256())
    )
    own = Tls(folder / "client.pem", folder / "client.key")
    own.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    own.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return own


def is_stored(broker: Broker, topic: str) -> bool:
    [result] = broker.publish([Message(id="1", topic=topic, body=b"")])
    return result.status is PublishStatus.STORED


def test_a_password_comes_from_its_file(
    engine: RabbitMqEngine, open_broker: Open, user: str, made_topic: str, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text("s3cret\n")

    assert is_stored(
        open_broker(f"rabbitmq://{user}@{HOST}:{engine.server.port}?password_file={tmp_path / 'password'}"), made_topic
    )


def test_a_virtual_host_is_the_path(engine: RabbitMqEngine, open_broker: Open, user: str) -> None:
    engine.server.api("PUT", "vhosts/shop%2Feu")
    engine.server.api("PUT", f"permissions/shop%2Feu/{user}", configure="", write=".*", read="")
    engine.server.api("PUT", "queues/shop%2Feu/paid", durable=True)

    assert is_stored(open_broker(f"{engine.url_of(user, 's3cret')}/shop%2Feu"), "paid")


def test_a_virtual_host_that_is_not_there_or_not_the_users_is_not_authorized_and_named(
    engine: RabbitMqEngine, open_broker: Open, user: str, made_topic: str
) -> None:
    engine.server.api("PUT", "vhosts/other")

    for vhost in ("missing", "other"):
        with pytest.raises(NotAuthorized, match=vhost):
            open_broker(f"{engine.url_of(user, 's3cret')}/{vhost}").publish([Message(id="1", topic="t", body=b"")])


def test_a_user_who_may_not_publish_is_not_authorized_and_publishes_once_permitted(
    engine: RabbitMqEngine, open_broker: Open, made_topic: str
) -> None:
    engine.server.add_user("reader", "s3cret", write="^$")
    broker = open_broker(engine.url_of("reader", "s3cret"))

    with pytest.raises(NotAuthorized, match="set_permissions") as raised:
        broker.publish([Message(id=str(n), topic=made_topic, body=b"") for n in range(20)])
    engine.server.add_user("reader", "s3cret", write="^amq.default$")

    assert not isinstance(raised.value, NotAuthenticated)
    assert is_stored(broker, made_topic)


def test_messages_go_over_tls_with_a_clients_certificate(
    engine: RabbitMqEngine, open_broker: Open, tls: Tls, user: str, made_topic: str, tmp_path: Path
) -> None:
    own = signed_certificate(tmp_path, authority=tls)
    files = f"ca_file={tls.certificate}&cert_file={own.certificate}&key_file={own.key}"
    with cutting_tcp_proxy(engine.server.tls_port) as proxy:
        broker = open_broker(f"rabbitmqs://{user}:s3cret@{HOST}:{proxy.port}?{files}")

        assert is_stored(broker, made_topic)
        broker.close()
        assert (b"s3cret" in proxy.requests, proxy.requests[:1]) == (False, b"\x16")  # a handshake of TLS


def test_a_server_of_another_authority_is_not_spoken_to(
    engine: RabbitMqEngine, open_broker: Open, tmp_path: Path
) -> None:
    other = certificate(tmp_path, address=HOST)

    with pytest.raises(BrokerUnavailable, match=r"(?i)certificate.verify.failed"):
        open_broker(f"rabbitmqs://app:s3cret@{HOST}:{engine.server.tls_port}?ca_file={other.certificate}").publish(
            [Message(id="1", topic="t", body=b"")]
        )


def test_a_server_without_tls_gets_no_password_from_a_url_that_asks_for_tls(
    engine: RabbitMqEngine, open_broker: Open, tls: Tls
) -> None:
    with cutting_tcp_proxy(engine.server.port) as proxy:
        with pytest.raises(BrokerUnavailable):
            open_broker(f"rabbitmqs://app:s3cret@{HOST}:{proxy.port}?ca_file={tls.certificate}").publish(
                [Message(id="1", topic="t", body=b"")]
            )
        assert (len(proxy.requests) > 0, b"s3cret" in proxy.requests) == (True, False)


def test_of_several_hosts_one_that_answers_is_enough(
    engine: RabbitMqEngine, open_broker: Open, user: str, made_topic: str
) -> None:
    url = f"rabbitmq://{user}:s3cret@{HOST}:1,{HOST}:2,{HOST}:{engine.server.port}"

    assert is_stored(open_broker(url), made_topic)
