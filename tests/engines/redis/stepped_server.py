"""A Redis server whose wall clock a test steps while it runs, by libfaketime. Its monotonic clock goes on as it is."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.broker_adapter.redis.redis_cluster import MASTERS, RedisClusterServers, redis_cluster
from tests.broker_adapter.redis.redis_server import RedisServer, redis_server, wait_until
from tests.fixtures.local_server import scratch_folder, servers_folder

SHARED_MEMORY = Path("/dev/shm")
TOLERANCE_SECONDS = 30
"""Far below each step, and far above what a busy machine takes between two looks at a clock."""


class SteppedServer:
    """The server, and the file from which libfaketime reads how far its clock is ahead."""

    def __init__(self, server: RedisServer, offset: Path) -> None:
        self.server = server
        self._offset = offset

    def step_to(self, seconds_ahead: int) -> None:
        """Step the server's clock; returns when the server answers with the new time, fails if it does not."""
        # At once: the server reads the file with each look at its clock.
        following = self._offset.with_suffix(".new")
        following.write_text(f"{seconds_ahead:+d}\n")
        following.rename(self._offset)
        assert wait_until(lambda: abs(self.ahead_seconds() - seconds_ahead) < TOLERANCE_SECONDS), (
            f"the server's clock is {self.ahead_seconds():.1f} s ahead, not {seconds_ahead}: libfaketime does not work"
        )

    def ahead_seconds(self) -> float:
        """How far its clock is ahead of this machine's."""
        seconds, microseconds = self.server.ask("TIME")
        return int(seconds) + int(microseconds) / 1_000_000 - time.time()


@contextlib.contextmanager
def stepped_server(**options: str) -> Iterator[SteppedServer]:
    """A running server with these options, its clock right, for the length of a block."""
    with (
        _offsets(1) as [offset],
        redis_server(environment=_environment(offset), **options) as server,
        _leaving_no_shared_memory([server]),
    ):
        yield SteppedServer(server, offset)


@dataclass(frozen=True, slots=True)
class SteppedCluster:
    """The servers of a cluster, and the clock of each."""

    servers: RedisClusterServers
    clocks: Sequence[SteppedServer]

    def clock_of(self, server: RedisServer) -> SteppedServer:
        """That of one of the servers."""
        return next(clock for clock in self.clocks if clock.server is server)


@contextlib.contextmanager
def stepped_cluster() -> Iterator[SteppedCluster]:
    """A cluster of three masters and three replicas, all clocks right, for the length of a block."""
    with (
        _offsets(2 * MASTERS) as offsets,
        redis_cluster(environments=[_environment(offset) for offset in offsets]) as cluster,
        _leaving_no_shared_memory(cluster.servers),
    ):
        clocks = [SteppedServer(server, offset) for server, offset in zip(cluster.servers, offsets, strict=True)]
        yield SteppedCluster(cluster, clocks)


@contextlib.contextmanager
def _offsets(count: int) -> Iterator[list[Path]]:
    """So many files that say how far a clock is ahead."""
    with tempfile.TemporaryDirectory(dir=scratch_folder(), prefix="outbox-clock-") as folder:
        offsets = [Path(folder) / f"offset-{number}" for number in range(count)]
        for offset in offsets:
            offset.write_text("+0\n")
        yield offsets


def _environment(offset: Path) -> dict[str, str]:
    return {
        # The C library's malloc in front of jemalloc's, which looks at the clock before libfaketime is ready.
        "LD_PRELOAD": f"{_library()}:libc.so.6",
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


@contextlib.contextmanager
def _leaving_no_shared_memory(servers: Sequence[RedisServer]) -> Iterator[None]:
    """Remove what libfaketime leaves of servers that are killed."""
    numbers = [re.findall(rb"process_id:(\d+)", server.ask("INFO", "server"))[0].decode() for server in servers]
    try:
        yield
    finally:
        for number in numbers:
            for name in (f"faketime_shm_{number}", f"sem.faketime_sem_{number}"):
                (SHARED_MEMORY / name).unlink(missing_ok=True)


def _library() -> Path:
    library = servers_folder().parent / "engines" / "faketime" / "libfaketime.so.1"
    if not library.exists():
        pytest.fail("libfaketime is not there. Run ./scripts/test --engines redis", pytrace=False)
    return library
