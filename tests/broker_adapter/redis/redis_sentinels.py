"""A Redis server with two replicas of the tests' own, watched by three Sentinels."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import redis

from outbox_demo.ports import free_port
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, redis_server, server_program, wait_until
from tests.fixtures.local_server import guarded, scratch_folder

SENTINELS: Final = 3
QUORUM: Final = 2
REPLICAS: Final = 2
NAME: Final = "shop"
DOWN_AFTER_MS: Final = 1_000
STEADY_MS: Final = 60_000
"""The same where a test fails no server: a busy machine may let one be silent for a second."""
FAILOVER_MS: Final = 5_000


class Sentinel:
    """One process that watches the master. It dies with pytest."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "sentinel.conf"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self) -> None:
        """Start, and wait until it answers. A Sentinel writes what it learns to its file."""
        self._file.touch()
        self.port = free_port(HOST)
        options = [
            "--sentinel",
            "--port",
            str(self.port),
            "--bind",
            HOST,
            "--logfile",
            str(self._file.with_suffix(".log")),
        ]
        self._process = subprocess.Popen(
            guarded([server_program(), str(self._file), *options]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert wait_until(self._answers, ended=lambda: self._process is None or self._process.poll() is not None)

    def watch(self, master: RedisServer, *, down_after_ms: int) -> None:
        """Watch a master, with time-outs for tests."""
        self.ask("MONITOR", NAME, HOST, master.port, QUORUM)
        for option, value in {"down-after-milliseconds": down_after_ms, "failover-timeout": FAILOVER_MS}.items():
            self.ask("SET", NAME, option, value)

    def ask(self, *command: str | int) -> Any:
        """The answer to `SENTINEL ...`, as it came."""
        with contextlib.closing(redis.Redis(host=HOST, port=self.port, protocol=2, socket_timeout=60)) as client:
            client.response_callbacks.clear()
            return client.execute_command("SENTINEL", *command)

    def kill(self) -> None:
        """End it by SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            return isinstance(self.ask("MYID"), bytes)
        return False


class SentinelSet:
    """The servers, the first of which began as the master, and the Sentinels."""

    def __init__(self, servers: Sequence[RedisServer], sentinels: Sequence[Sentinel]) -> None:
        self.servers = servers
        self.sentinels = sentinels

    @property
    def url(self) -> str:
        """Names all Sentinels."""
        hosts = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/?master={NAME}"

    @property
    def master(self) -> RedisServer:
        """The server that the Sentinels name."""
        port = int(self.sentinels[0].ask("GET-MASTER-ADDR-BY-NAME", NAME)[1])
        return next(server for server in self.servers if server.port == port)

    def wait_until_ready(self) -> None:
        """Wait until the Sentinels know each other and the replicas, so that a failover may begin."""
        assert wait_until(lambda: all(self._is_ready(sentinel) for sentinel in self.sentinels))

    def _is_ready(self, sentinel: Sentinel) -> bool:
        """A server counts as a replica once it was asked, which is what an election needs."""
        replicas = [_fields(one) for one in sentinel.ask("REPLICAS", NAME)]
        serving = [one for one in replicas if one["flags"] == "slave" and one["master-link-status"] == "ok"]
        return len(serving) == REPLICAS and len(sentinel.ask("SENTINELS", NAME)) == SENTINELS - 1


def _fields(answer: Sequence[bytes]) -> dict[str, str]:
    names = [part.decode() for part in answer]
    return dict(zip(names[::2], names[1::2], strict=True))


@contextlib.contextmanager
def redis_sentinels(*, down_after_ms: int = DOWN_AFTER_MS) -> Iterator[SentinelSet]:
    """A master with two replicas and three Sentinels for the length of a block."""
    with ExitStack() as stack:
        master = stack.enter_context(redis_server(repl_diskless_sync_delay="0"))
        servers = [master]
        for _ in range(REPLICAS):
            following = redis_server(replicaof=f"{HOST} {master.port}", repl_diskless_sync_delay="0")
            servers.append(stack.enter_context(following))
        sentinels = []
        for _ in range(SENTINELS):
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=scratch_folder(), prefix="outbox-sentinel-"))
            sentinel = Sentinel(Path(folder))
            stack.callback(sentinel.kill)
            sentinel.start()
            sentinel.watch(master, down_after_ms=down_after_ms)
            sentinels.append(sentinel)
        found = SentinelSet(servers, sentinels)
        found.wait_until_ready()
        yield found
