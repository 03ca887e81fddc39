"""Pulsar for the tests of this folder: a server for all of them, and one that tests may kill."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_adapter.http.test_tls import certificate
from tests.engines.jars import fetched_jars
from tests.engines.pulsar.faulty_pulsar import FaultyPulsar
from tests.engines.pulsar.pulsar_engine import PulsarEngine
from tests.engines.pulsar.pulsar_security import PulsarSecurity
from tests.engines.pulsar.pulsar_server import PulsarServer
from tests.fixtures.local_server import scratch_folder


@pytest.fixture(scope="session")
def jars() -> Path:
    """The server's jars."""
    return fetched_jars(Path(__file__).with_name("pom.xml"))


@pytest.fixture(scope="session")
def running_server(jars: Path) -> Iterator[PulsarServer]:
    """A server that takes its defaults, but for the place."""
    with tempfile.TemporaryDirectory(prefix="pulsar-under-test-", dir=scratch_folder()) as folder:
        server = PulsarServer(jars=jars, folder=Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.close()


@pytest.fixture(scope="session")
def secured(jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PulsarServer, PulsarSecurity]]:
    """A server with logins and TLS, and what makes its tokens."""
    security = PulsarSecurity(certificate(tmp_path_factory.mktemp("tls"), address="127.0.0.1"))
    with tempfile.TemporaryDirectory(prefix="pulsar-under-test-", dir=scratch_folder()) as folder:
        server = PulsarServer(jars=jars, folder=Path(folder), security=security)
        try:
            server.start()
            yield server, security
        finally:
            server.close()


@pytest.fixture
def server(running_server: PulsarServer) -> PulsarServer:
    """The server, alive: if an earlier test killed it, it is started again."""
    running_server.start()
    return running_server


@pytest.fixture
def engine(server: PulsarServer) -> Iterator[PulsarEngine]:
    """The server, for the conformance tests."""
    with PulsarEngine(server) as engine:
        yield engine


@pytest.fixture
def own_engine(server: PulsarServer) -> Iterator[PulsarEngine]:
    """The same one, which the test may kill; the next test starts it again."""
    with PulsarEngine(server) as engine:
        yield engine


@pytest.fixture
def faulty(own_engine: PulsarEngine) -> FaultyPulsar:
    """The same one, for the tests of faults."""
    return FaultyPulsar(own_engine)
