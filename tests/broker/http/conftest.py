"""Servers with settings of a test's own, and a plain HTTP client."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from broker.http.server import HttpServer
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
            return session.request(method, url, timeout=20, **more)

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
