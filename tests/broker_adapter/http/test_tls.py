"""Over TLS a broker is who it says it is, or it is not spoken to."""

from __future__ import annotations

import datetime as dt
import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from urllib3.connection import HTTPSConnection

from broker_adapter.http import HttpBroker
from outbox_broker.http.server import HttpServer, Tls
from outbox_core import Message
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError
from outbox_core.messages.ids import new_message_id
from tests.broker_adapter.servers import served

Start = Callable[..., tuple[HttpServer, Path]]


def certificate(folder: Path, *, address: str) -> Tls:
    """A certificate for an IP address that vouches for itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "outbox-mq test")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    tls = Tls(folder / f"{address}.pem", folder / f"{address}.key")
    tls.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    tls.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return tls


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A server with a certificate for an address; and that certificate's file."""
    with ExitStack() as stack:

        def make(address: str = "127.0.0.1") -> tuple[HttpServer, Path]:
            tls = certificate(tmp_path, address=address)
            return stack.enter_context(served(tmp_path / "data", tls=tls)), tls.certificate

        yield make


def publish_and_pull(broker: HttpBroker) -> list[bytes]:
    try:
        broker.publish([Message(id=new_message_id(), topic="t", body=b"x" * 300_000)])
        return [one.body for one in broker.pull("t", "g")]
    finally:
        broker.close()


def test_requests_and_large_answers_go_over_tls(start: Start) -> None:
    server, ca_file = start()

    assert publish_and_pull(HttpBroker(server.url, ca_file=str(ca_file))) == [b"x" * 300_000]


def test_a_connection_is_kept_over_tls(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server, ca_file = start()
    broker = HttpBroker(server.url, ca_file=str(ca_file))
    connect, connected = HTTPSConnection.connect, []

    def count(connection: HTTPSConnection) -> None:
        connected.append(connection)
        connect(connection)

    monkeypatch.setattr(HTTPSConnection, "connect", count)
    for _ in range(5):
        broker.pull("orders", "billing")
    broker.close()

    assert len(connected) == 1


def test_a_certificate_that_nobody_vouches_for_is_not_trusted(start: Start) -> None:
    server, _ = start()

    with pytest.raises(BrokerUnavailable, match="certificate"):
        publish_and_pull(HttpBroker(server.url))


def test_a_certificate_of_another_host_is_not_trusted(start: Start) -> None:
    server, ca_file = start("127.0.0.9")

    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1"):
        publish_and_pull(HttpBroker(server.url, ca_file=str(ca_file)))


def test_a_file_of_certificates_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.pem"):
        publish_and_pull(HttpBroker("https://127.0.0.1:1", ca_file=str(tmp_path / "none.pem")))


def test_a_server_that_never_greets_is_given_up_after_the_time_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        broker = HttpBroker(f"https://127.0.0.1:{listener.getsockname()[1]}", timeout_ms=100)

        with pytest.raises(BrokerUnavailable):
            publish_and_pull(broker)
