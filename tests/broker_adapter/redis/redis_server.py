"""A Redis server of the tests' own: on a throw-away folder and a free port, as durable as its options say.

Debian 12's is version 7.0. scripts/test finds or fetches it. It dies with pytest, however pytest ends.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
import redis

from outbox_demo.ports import free_port
from tests.fixtures.local_server import guarded, scratch_folder, servers_folder
from tests.fixtures.stopped_process import stop_process

HOST: Final = "127.0.0.1"
PASSWORD: Final = "geheim"
START_SECONDS_MAX: Final = 120
START_ATTEMPTS_MAX: Final = 3
POLL_SECONDS: Final = 0.02
VERSION_TESTED: Final = 7
DURABLE: Final = {"appendonly": "yes", "appendfsync": "always", "aof-load-truncated": "no"}
"""As the guide asks for it."""


class RedisServer:
    """One server. `kill` and `start` are for tests of crashes: data and port stay."""

    def __init__(
        self,
        folder: Path,
        options: dict[str, str],
        *,
        port: int = 0,
        program: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`options`: those of redis.conf, without a password unless they name one. `port`: 0 for a free one. `program`:
        another server than the machine's; its append-only file is not repaired, so it loads what a kill left.
        `environment`: variables besides those of this process.
        """
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.program = program
        self._environment = environment or {}
        self.port = port

    @property
    def client(self) -> redis.Redis:
        """A new plain client; the caller closes it."""
        return redis.Redis(
            host=HOST, port=self.port, password=self._options.get("requirepass"), protocol=2, socket_timeout=60
        )

    @property
    def announced_port(self) -> int:
        """Where clients and replicas are told to reach it."""
        return int(self._options.get("cluster-announce-port", self.port))

    @property
    def announced_bus_port(self) -> int:
        """Where other nodes of its cluster reach it."""
        return int(self._options.get("cluster-announce-bus-port", self._options["cluster-port"]))

    def start(self) -> None:
        """Start, and wait until it serves. From the main thread only, whose end it shares."""
        is_new = self.port == 0
        if not is_new and self.program is None:
            self._repair_append_only_file()
        for _ in range(START_ATTEMPTS_MAX):
            self.port = self.port or free_port(HOST)
            if self._try_to_start():
                return
            self.port = 0 if is_new else self.port
        raise RuntimeError(f"Redis did not start; its log ends:\n{self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        """End it by SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def limit_files(self, size_bytes: int) -> None:
        """As a full disk: a write that would make a file larger fails from now on, until a restart."""
        assert self._process is not None
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (size_bytes, size_bytes))

    @property
    def is_started(self) -> bool:
        """Whether it was started and not killed by us since."""
        return self._process is not None

    def pause(self) -> None:
        """Stop it by SIGSTOP: connections stay, nothing is answered."""
        assert self._process is not None
        stop_process(self._process.pid)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stopped by SIGSTOP for the length of a block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def ask(self, *command: str | int) -> Any:
        """The answer to one command, as it came."""
        with contextlib.closing(self.client) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    @property
    def append_only_file(self) -> Path:
        """The file that the server appends to."""
        return next(self._folder.glob("appendonlydir/*.incr.aof"))

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _repair_append_only_file(self) -> None:
        """Cut off what a kill left half written, as an operator does: without it the server refuses to start."""
        for manifest in self._folder.glob("appendonlydir/*.manifest"):
            # The server is this tool, too, by the name that it is called by.
            repair = ["redis-check-aof", "--fix", str(manifest)]
            subprocess.run(repair, executable=server_program(), input=b"y\n", stdout=subprocess.DEVNULL, check=True)

    def _try_to_start(self) -> bool:
        given = {"bind": HOST, "dir": str(self._folder), "logfile": str(self._log), "save": "", **self._options}
        if "tls-port" in given:
            given |= {"port": "0", "tls-port": str(self.port)}
        else:
            given["port"] = str(self.port)
        arguments = [part for name, value in given.items() for part in (f"--{name}", value)]
        self._folder.mkdir(exist_ok=True)
        program = str(self.program or server_program())
        self._process = subprocess.Popen(
            guarded([program, *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self._environment},
        )
        if self._listens():
            return True
        self.kill()
        return False

    def _listens(self) -> bool:
        assert self._process is not None
        return wait_until(self._serves, ended=lambda: self._process is None or self._process.poll() is not None)

    def _serves(self) -> bool:
        """Whether this very server answers, its data loaded; with TLS, whether it has begun to listen."""
        if "tls-port" in self._options:
            return self._log.exists() and "Ready to accept connections" in self._log.read_text()
        try:
            info = self._info("server", "persistence")
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        assert self._process is not None
        return info["process_id"] == self._process.pid and not info["loading"]

    def _info(self, *sections: str) -> dict[str, Any]:
        with contextlib.closing(self.client) as client:
            return {name: value for section in sections for name, value in client.info(section).items()}


def wait_until(ready: Callable[[], bool], *, ended: Callable[[], bool] = lambda: False) -> bool:
    """Wait for a condition, a few milliseconds between two looks; False where it can come no more."""
    deadline, nothing = time.monotonic() + START_SECONDS_MAX, threading.Event()
    while time.monotonic() < deadline:
        if ready():
            return True
        if ended():
            return False
        nothing.wait(POLL_SECONDS)
    return False


@contextlib.contextmanager
def redis_server(
    *,
    port: int = 0,
    in_folder: str | None = None,
    program: Path | None = None,
    environment: Mapping[str, str] | None = None,
    **options: str,
) -> Iterator[RedisServer]:
    """A running server with these options, underscores for dashes, for the length of a block.

    `in_folder`: where its data are; by default where tests keep theirs, which may be memory. `program`: another server
    than the machine's. `environment`: variables of the server besides those of this process.
    """
    given = {name.replace("_", "-"): value for name, value in options.items()}
    durable = DURABLE if program is None else {**DURABLE, "aof-load-truncated": "yes"}
    with tempfile.TemporaryDirectory(
        dir=in_folder or scratch_folder(), prefix="outbox-redis-", ignore_cleanup_errors=True
    ) as folder:
        server = RedisServer(
            Path(folder) / "data", {**durable, **given}, port=port, program=program, environment=environment
        )
        server.start()
        try:
            yield server
        finally:
            server.kill()


@contextlib.contextmanager
def replica_of(master: RedisServer) -> Iterator[RedisServer]:
    """A replica of the same program that is in step with a master without a password."""
    # Without a delay: a master waits five seconds for more replicas before it sends the first its data.
    master.ask("CONFIG", "SET", "repl-diskless-sync-delay", 0)
    with redis_server(replicaof=f"{HOST} {master.port}", program=master.program) as replica:
        assert wait_until(lambda: _is_in_step(master))
        yield replica


def _is_in_step(master: RedisServer) -> bool:
    """Whether a replica confirms writes: it is listed as online before it has loaded what it was sent."""
    with contextlib.closing(master.client) as client:
        client.set("written-to-ask", 1)
        return bool(client.wait(1, 500))


def server_program() -> str:
    """The server that this machine has, or that scripts/test fetched; without one the test fails and says so."""
    fetched = servers_folder() / "redis" / "redis-server"
    program = shutil.which("redis-server") or (str(fetched) if fetched.exists() else None)
    if program is None:
        _missing()
    return program


def _missing() -> NoReturn:
    allowed = os.environ.get("OUTBOX_TEST_ALLOW_MISSING", "").split(",")
    if "redis" in allowed and os.environ.get("CI", "").lower() not in {"1", "true"}:
        pytest.skip("NOT TESTED on redis: no server, and OUTBOX_TEST_ALLOW_MISSING names it")
    pytest.fail(
        "no Redis server to test on. Run ./scripts/servers, which finds or fetches one; or go without: "
        "OUTBOX_TEST_ALLOW_MISSING=redis",
        pytrace=False,
    )
