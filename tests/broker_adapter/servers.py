"""Real brokers to test against: in this process, in a thread over HTTP, and as a process of its own. Not fixtures."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from broker_adapter.embedded import EmbeddedBroker
from broker_adapter.http import HttpBroker
from outbox_broker.engine.engine import Engine
from outbox_broker.http.access_control import Access
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.routes import ROUTES, Route
from outbox_broker.http.server import HttpServer, Tls, bind
from outbox_broker.http.service_ports import ServicePorts
from outbox_broker.log.storage import Storage
from outbox_core import Broker
from tests.fixtures.fork_server import Program, environment, fork_server

DEADLINE_S = 120.0


@contextmanager
def served(
    folder: Path,
    settings: HttpSettings | None = None,
    *,
    access: Access | None = None,
    storage: Storage | None = None,
    tls: Tls | None = None,
    send_bytes: int | None = None,
) -> Iterator[HttpServer]:
    """A server in a thread of this process, ready; stopped in the end."""
    engine = Engine.open(folder, storage=storage)
    try:
        with serving(engine, settings, access=access, tls=tls, send_bytes=send_bytes) as server:
            yield server
    finally:
        engine.close()


@contextmanager
def serving(
    engine: Engine | ServicePorts,
    settings: HttpSettings | None = None,
    *,
    access: Access | None = None,
    tls: Tls | None = None,
    send_bytes: int | None = None,
    routes: Sequence[Route] = ROUTES,
) -> Iterator[HttpServer]:
    """A server of what is open already, in a thread of this process, ready; stopped in the end.

    `send_bytes`: the kernel's buffer for what a client has not received yet.
    """
    bound = bind("127.0.0.1", 0)
    if send_bytes is not None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)  # what it accepts inherits it
    served = engine if isinstance(engine, ServicePorts) else ServicePorts.of(engine)
    server = HttpServer(served, bound, settings=settings or HttpSettings(), access=access, tls=tls, routes=routes)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, kwargs={"on_ready": lambda _url: ready.set()})
    thread.start()
    try:
        assert ready.wait(DEADLINE_S)
        yield server
    finally:
        server.stop()
        thread.join(DEADLINE_S)
        bound.close()


class ServerProcess:
    """`outbox broker serve`, or another command that serves, on one data folder and one port: to be killed and started
    again.

    A fork of the fork server; `is_fresh` where the interpreter itself is to be a new one.
    """

    def __init__(self, folder: Path, *, command: Sequence[str] = ("broker", "serve"), is_fresh: bool = False) -> None:
        self._folder = folder
        self._command = command
        self._is_fresh = is_fresh
        self._ready_file = folder.with_name(folder.name + ".ready")
        self._process: subprocess.Popen[bytes] | Program | None = None
        self._port = 0
        self.url = ""
        self.log: list[str] = []
        """The lines that it has written since it was ready."""

    def start(self, *options: str) -> None:
        command = [
            *(*self._command, "--data", str(self._folder)),
            *("--port", str(self._port), "--ready-file", str(self._ready_file), *options),
        ]
        self._ready_file.unlink(missing_ok=True)
        self.log.clear()
        process = self._begin(command, environment())
        self._process = process
        assert process.stderr is not None
        first_line = process.stderr.readline().decode()  # blocks until it is ready, or gone
        assert " ready at " in first_line, first_line + process.stderr.read().decode()
        self._reader = threading.Thread(target=self._read_log, args=(process.stderr,), daemon=True)
        self._reader.start()
        self.url = self._ready_file.read_text().strip()
        self._port = int(self.url.rpartition(":")[2])

    @property
    def folder(self) -> Path:
        """The data folder."""
        return self._folder

    @property
    def ready_file(self) -> Path:
        """Where it writes its URL."""
        return self._ready_file

    @property
    def pid(self) -> int:
        """The process that runs now."""
        assert self._process is not None
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it without warning, if it runs."""
        self.end(signal.SIGKILL)

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; the exit code."""
        if self._process is None:
            return 0
        self._process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait until it ends; the exit code."""
        assert self._process is not None
        code = self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self._process.stderr is not None
        self._process.stderr.close()
        if isinstance(self._process, Program):
            self._process.close()
        self._process = None
        return code

    def _read_log(self, stream: IO[bytes]) -> None:
        for line in stream:
            self.log.append(line.decode())

    def _begin(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes] | Program:
        if self._is_fresh:
            return subprocess.Popen([sys.executable, "-m", "outbox", *command], stderr=subprocess.PIPE, env=env)
        return fork_server().start("outbox", *command, stderr=subprocess.PIPE, env=env)


def delay_process(folder: Path, *, target_url: str) -> ServerProcess:
    """`outbox delay serve` in front of a broker, not started yet."""
    return ServerProcess(folder, command=("delay", "serve", "--target", target_url))


class Restartable:
    """A broker that a test may take down without warning and bring back on the same data."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind = kind
        self._folder = folder
        self._server = ServerProcess(folder) if kind == "http" else None
        self.broker: Broker
        self._open()

    def restart(self) -> None:
        """Take it down, the hard way where it is a process, and up again."""
        self.broker.close()
        if self._server is not None:
            self._server.kill()
        self._open()

    def close(self) -> None:
        self.broker.close()
        if self._server is not None:
            self._server.kill()

    def _open(self) -> None:
        if self._server is None:
            self.broker = EmbeddedBroker(f"embedded:{self._folder}")
        else:
            self._server.start()
            self.broker = HttpBroker(self._server.url)
