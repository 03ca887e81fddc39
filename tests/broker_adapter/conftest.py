"""Any broker of ours, for the conformance suite and for tests of adapters."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from broker_adapter.embedded import EmbeddedBroker
from broker_adapter.http import HttpBroker
from outbox_broker.http.http_settings import HttpSettings
from outbox_core import Broker
from tests.broker_adapter.servers import Restartable, ServerProcess, served


@pytest.fixture(scope="session")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Broker]]:
    """One long-lived broker of each kind; tests keep apart by their topics."""
    with ExitStack() as stack:
        made: dict[str, Broker] = {}

        def broker(kind: str) -> Broker:
            if kind not in made:
                folder = tmp_path_factory.mktemp(kind)
                if kind == "embedded":
                    made[kind] = EmbeddedBroker(f"embedded:{folder}")
                else:
                    url = stack.enter_context(served(folder)).url
                    made[kind] = HttpBroker(url, codec=kind.partition("-")[2])
                stack.callback(made[kind].close)
            return made[kind]

        yield broker


@pytest.fixture(params=["embedded", "http-msgpack", "http-json"])
def broker(request: pytest.FixtureRequest, brokers: Callable[[str], Broker]) -> Broker:
    """Any broker of ours."""
    return brokers(request.param)


@pytest.fixture(params=["embedded", "http"])
def restartable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Restartable]:
    """A broker that can be restarted."""
    made = Restartable(request.param, tmp_path / "data")
    yield made
    made.close()


@pytest.fixture
def server_process(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server process that has been started."""
    process = ServerProcess(tmp_path / "data")
    process.start()
    yield process
    process.end(signal.SIGKILL)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[HttpSettings], str]]:
    """Start a server in a thread with settings of one's own; gives its URL."""
    with ExitStack() as stack:
        yield lambda settings: stack.enter_context(served(tmp_path / "data", settings)).url


@pytest.fixture
def topic() -> str:
    """A topic of the test's own."""
    return f"t.{uuid.uuid4().hex}"
