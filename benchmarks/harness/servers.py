"""Starts the servers of a benchmark: a database as durable as in production, and the broker as a process.

Every commit is fsynced and the binary log is on and fsynced, as in production. The buffer pool and the redo log, which
tests keep as small as can be, get the size of a small production server's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fixtures.databases import Server, ServerByUrl
from tests.fixtures.local_server import Durability, LocalServer, find_program

READY_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
_POLL_SECONDS = 0.05
_REPOSITORY = Path(__file__).parent.parent.parent
_SETTINGS = ("version", "innodb_flush_log_at_trx_commit", "log_bin", "sync_binlog", "innodb_buffer_pool_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """A fresh database to measure on: `url` names it, `schema` is for the outbox; both are dropped afterwards."""

    server: Server
    url: str
    schema: str

    @property
    def async_url(self) -> str:
        """The same for an asyncio engine."""
        return self.url.replace("+pymysql", "+asyncmy")

    def cpu_seconds(self) -> float | None:
        """Processor time that the server has used; None where it is not ours or this is no Linux."""
        return cpu_seconds_of(self.server.pid) if isinstance(self.server, LocalServer) else None

    def settings(self) -> dict[str, Any]:
        """What the server says it is and how durable it is."""
        names = ", ".join(f"@@{name}" for name in _SETTINGS)
        (row,) = self.server.execute(f"SELECT {names}")
        return dict(zip(_SETTINGS, row, strict=True))


@dataclass(frozen=True, slots=True)
class BrokerProcess:
    """A broker in a process of its own, and its data folder."""

    url: str
    pid: int
    data: Path


@contextlib.contextmanager
def database(*, kind: str, url: str | None, memory_mb: int) -> Iterator[Database]:
    """A fresh database on the server at `url`, or on one of our own of this kind (mariadb or mysql)."""
    with _server(kind=kind, url=url, memory_mb=memory_mb) as server, server.fresh_database() as fresh:
        yield Database(server=server, url=fresh.url, schema=str(fresh.schema))


@contextlib.contextmanager
def _server(*, kind: str, url: str | None, memory_mb: int) -> Iterator[Server]:
    if url is not None:
        yield ServerByUrl(name=kind, url=url)
        return
    program = find_program(kind)
    if program is None:
        sys.exit(f"no {kind} server on this machine: run ./scripts/servers, or name one with --url")
    with tempfile.TemporaryDirectory(prefix=f"outbox-bench-{kind}-", ignore_cleanup_errors=True) as folder:
        server = LocalServer(program, Path(folder), options=Durability.FULL.value)
        try:
            server.start()
            _grow(server, memory_mb=memory_mb)
            yield server
        finally:
            server.kill9()


def _grow(server: Server, *, memory_mb: int) -> None:
    size = memory_mb * 1024 * 1024
    redo = "innodb_log_file_size" if server.name == "mariadb" else "innodb_redo_log_capacity"
    server.execute(f"SET GLOBAL innodb_buffer_pool_size = {size}", f"SET GLOBAL {redo} = {size}")


@contextlib.contextmanager
def broker() -> Iterator[BrokerProcess]:
    """The broker as a process of its own on a new folder, durable before each answer."""
    with tempfile.TemporaryDirectory(prefix="outbox-bench-broker-", ignore_cleanup_errors=True) as folder:
        ready = Path(folder) / "url"
        command = ["broker", "serve", "--data", f"{folder}/data", "--port", "0", "--ready-file", str(ready)]
        with outbox_process(command) as process:
            _wait_for(ready, process)
            yield BrokerProcess(ready.read_text().strip(), process.pid, Path(folder) / "data")


@contextlib.contextmanager
def delay_process(data: Path, *, target: str) -> Iterator[BrokerProcess]:
    """The delay service as one process on a folder, in front of a broker."""
    ready = data.with_suffix(".url")
    command = ["delay", "serve", "--data", str(data / "data"), "--target", target, "--port", "0"]
    with outbox_process([*command, "--ready-file", str(ready)]) as process:
        try:
            _wait_for(ready, process)
            yield BrokerProcess(ready.read_text().strip(), process.pid, data / "data")
        finally:
            ready.unlink(missing_ok=True)


@contextlib.contextmanager
def outbox_process(arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """`outbox ARGUMENTS` as a process, ended on the way out."""
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox", *arguments], cwd=_REPOSITORY, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cpu_seconds_of(pid: int) -> float | None:
    """Processor time that a process has used; None where nobody says (this is no Linux)."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return None
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_cpu_seconds() -> float:
    """Processor time that the running children of this process have used. Linux only."""
    children = [int(pid) for one in Path("/proc/self/task").glob("*/children") for pid in one.read_text().split()]
    return sum(cpu_seconds_of(pid) or 0.0 for pid in children)


def resident_mib(pid: int) -> float:
    """Memory of a process that is in RAM, in MiB. Linux only."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1024 * 1024)


def environment() -> dict[str, str]:
    """For processes of ours: the repository's packages are found in whatever Python."""
    return {**os.environ, "PYTHONPATH": str(_REPOSITORY), "PYTHONUNBUFFERED": "1"}


def _wait_for(file: Path, process: subprocess.Popen[bytes]) -> None:
    waiting, deadline = threading.Event(), time.monotonic() + READY_SECONDS_MAX
    while not (file.exists() and file.read_text().strip()):
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit("the broker's process did not start")
        waiting.wait(_POLL_SECONDS)
