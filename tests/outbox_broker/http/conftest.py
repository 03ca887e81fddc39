"""Servers with settings of a test's own, and a plain HTTP client."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from outbox_broker.http.server import HttpServer
from tests.broker_adapter.servers import ServerProcess, served


@pytest.fixture(scope="session")
def shared_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that many tests share; they keep apart by their topics."""
    with served(tmp_path_factory.mktemp("broker")) as server:
        yield server.url


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., HttpServer]]:
    """Start a server with a test's own settings, access or storage."""
    with ExitStack() as stack:
        yield lambda *given, **more: stack.enter_context(served(tmp_path / "data", *given, **more))


@pytest.fixture
def client() -> Iterator[Callable[..., requests.Response]]:
    """Send one request: client("POST", url, json=...)."""
    with requests.Session() as session:
        session.trust_env = False

        def send(method: str, url: str, **more: Any) -> requests.Response:
            return session.request(method, url, timeout=120, **more)

        yield send


@pytest.fixture
def topic() -> str:
    """A topic of the test's own."""
    return f"t.{uuid.uuid4().hex}"


@pytest.fixture
def server_process(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server process, not started yet."""
    process = ServerProcess(tmp_path / "data")
    yield process
    process.kill()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("certificate")
    chain_file, key_file = folder / "chain.pem", folder / "key.pem"
    chain_file.write_bytes(signed.public_bytes(Encoding.PEM))
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return chain_file, key_file
