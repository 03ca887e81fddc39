"""The Redis of a demo run: a server or a cluster that the run starts, kills and empties, or one that is there already.

What the run starts keeps nothing on disk, so that each restart loses all timers.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.redis.redis_options import PORT
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError
from outbox_demo.ports import free_port
from outbox_demo.processes import Process, ProcessGroup
from outbox_demo.redis_client import UNREACHABLE, open_redis

HOST: Final = "127.0.0.1"
PROGRAMS: Final = ("redis-server", "valkey-server")
MASTERS: Final = 3
SLOTS: Final = 16_384
URL_OPTIONS: Final = frozenset({"prefix", "slots", "name"})
"""What the URL of a Redis may have."""
NODE_TIMEOUT_MS: Final = 2_000
"""How long a node of the cluster must be silent to count as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKeys:
    """What a run has in Redis: keys of its own, and its field in the hash of all sources."""

    own: Sequence[str]
    sources: str
    source: str


class RedisUnderDemo(Protocol):
    """The Redis of one run."""

    def start(self) -> str:
        """Start it, if it is the run's own; returns its URL."""

    def forget(self, keys: RunKeys) -> str:
        """Lose these keys, or all that there are; returns how, in words."""

    def kill(self) -> str | None:
        """Kill a server of the run's own; returns what that is, in words, or None."""

    def restart(self) -> str | None:
        """Start again what was killed; returns what that is, in words, or None."""

    def close(self, keys: RunKeys) -> None:
        """Remove these keys from a Redis that is not the run's own."""


class RunningRedis:
    """A Redis that is there already: nothing is killed, and only the run's keys are removed."""

    def __init__(self, url: str) -> None:
        """Raises ConfigurationError for a URL that cannot be read."""
        self._url = url
        self._parsed = BrokerUrl.parse(url, port=PORT, options=URL_OPTIONS)
        if "name" in self._parsed.options:
            raise ConfigurationError("the demo names its timers itself: leave name= out of the URL in --delay")

    def start(self) -> str:
        """Nothing is started."""
        return self._url

    def forget(self, keys: RunKeys) -> str:
        """Delete them. Raises BrokerUnavailable."""
        with self._client() as client:
            for key in keys.own:  # each by itself, since they may be on different nodes
                client.delete(key)
        return "their keys deleted"

    def kill(self) -> None:
        """Nothing is killed."""

    def restart(self) -> None:
        """Nothing was killed."""

    def close(self, keys: RunKeys) -> None:
        """Delete them. Raises BrokerUnavailable."""
        self.forget(keys)
        with self._client() as client:
            client.hdel(keys.sources, keys.source)

    @contextmanager
    def _client(self) -> Iterator[Any]:
        try:
            with closing(open_redis(self._parsed)) as client:
                yield client
        except UNREACHABLE as error:
            raise BrokerUnavailable(f"Redis at {self._parsed.addresses} does not answer: {error}") from error


class RedisServer:
    """A server process of the run's own, without persistence."""

    def __init__(self, name: str, *, folder: Path, processes: ProcessGroup, options: Sequence[str] = ()) -> None:
        """`folder`: that of the run; `options`: added to the command. Raises ConfigurationError without a program."""
        self.port = free_port(HOST)
        self.bus_port = free_port(HOST)
        """Where other nodes of a cluster reach it."""
        self._name = name
        self._folder = folder / name
        self._processes = processes
        self._command = [
            _program(), "--bind", HOST, "--port", str(self.port), "--dir", str(self._folder), "--save", "",
            "--appendonly", "no", "--cluster-port", str(self.bus_port), *options,
        ]  # fmt: skip
        self._process: Process | None = None

    def start(self) -> None:
        """Start it, the second time on the same port; returns when it answers."""
        self._folder.mkdir(exist_ok=True)
        self._process = self._processes.start_program(self._name, self._command)
        self._processes.wait_for(f"{self._name} to be ready", self._answers)

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.kill()

    def ask(self, *command: str | int) -> Any:
        """Returns the answer to a command, as it came."""
        with closing(open_redis(BrokerUrl.parse(f"redis://{HOST}:{self.port}", port=PORT))) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def _answers(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except UNREACHABLE:
            return False


class OwnRedis:
    """One server of the run's own."""

    def __init__(self, *, folder: Path, processes: ProcessGroup) -> None:
        """Raises ConfigurationError where there is no server to start."""
        self._server = RedisServer("redis", folder=folder, processes=processes)

    def start(self) -> str:
        """Start it."""
        self._server.start()
        return f"redis://{HOST}:{self._server.port}/"

    def forget(self, keys: RunKeys) -> str:
        """FLUSHALL."""
        del keys
        self._server.ask("FLUSHALL")
        return "FLUSHALL"

    def kill(self) -> str:
        """Kill it."""
        self._server.kill()
        return "Redis"

    def restart(self) -> str:
        """Start it, empty."""
        self._server.start()
        return "Redis, which is empty now,"

    def close(self, keys: RunKeys) -> None:
        """Nothing: its keys end with it."""


class OwnRedisCluster:
    """Three masters with a replica each, of the run's own."""

    def __init__(self, *, folder: Path, processes: ProcessGroup) -> None:
        """Raises ConfigurationError where there is no server to start."""
        self._processes = processes
        self._servers = [
            RedisServer(
                f"redis-{server_number}", folder=folder, processes=processes,
                options=["--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS)],
            )
            for server_number in range(1, 2 * MASTERS + 1)
        ]  # fmt: skip

    def start(self) -> str:
        """Start all, and join them."""
        for server in self._servers:
            server.start()
        self._join()
        return f"redis+cluster://{','.join(f'{HOST}:{server.port}' for server in self._servers)}/"

    def forget(self, keys: RunKeys) -> str:
        """FLUSHALL on each master."""
        del keys
        for server in self._servers:
            if server.ask("ROLE")[0] == b"master":
                server.ask("FLUSHALL")
        return "FLUSHALL on each master"

    def kill(self) -> str:
        """Kill a master."""
        self._servers[0].kill()
        return "a master of the Redis cluster"

    def restart(self) -> str:
        """Start it, empty: as a replica, where its own was promoted in between."""
        self._servers[0].start()
        return "that server of the Redis cluster, which was empty,"

    def close(self, keys: RunKeys) -> None:
        """Nothing: its keys end with it."""

    def _join(self) -> None:
        first_server, masters, replicas = self._servers[0], self._servers[:MASTERS], self._servers[MASTERS:]
        for server in self._servers[1:]:
            first_server.ask("CLUSTER", "MEET", HOST, server.port, server.bus_port)
        for master_index, master in enumerate(masters):
            begin, end = (-(-SLOTS * edge // MASTERS) for edge in (master_index, master_index + 1))
            master.ask("CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
        self._wait_for_all("know each other", f"cluster_known_nodes:{len(self._servers)}\r")
        for master, replica in zip(masters, replicas, strict=True):
            replica.ask("CLUSTER", "REPLICATE", master.ask("CLUSTER", "MYID"))
        self._wait_for_all("be one cluster", "cluster_state:ok\r")

    def _wait_for_all(self, goal: str, line: str) -> None:
        self._processes.wait_for(
            f"the Redis servers to {goal}",
            lambda: all(line.encode() in server.ask("CLUSTER", "INFO") for server in self._servers),
        )


def _program() -> str:
    for name in PROGRAMS:
        if (program := shutil.which(name)) is not None:
            return program
    raise ConfigurationError(
        f"there is no {' or '.join(PROGRAMS)} on the PATH: install Redis 7.0 or later, or name one that runs, "
        "--delay redis://HOST:6379"
    )
