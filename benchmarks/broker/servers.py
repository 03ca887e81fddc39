"""Starts the contestants' servers: durable before each answer, on free ports and temporary folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.broker import peer_programs
from benchmarks.harness import servers
from benchmarks.harness.servers import cpu_seconds_of
from outbox_demo.ports import free_port

READY_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 20.0
_POLL_SECONDS: Final = 0.05
_NATS_CONFIG: Final = """
listen: "127.0.0.1:{port}"
max_payload: 8388608
jetstream {{ store_dir: "{folder}/jetstream", sync_interval: always }}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A running server."""

    address: str
    pid: int
    folder: Path
    version: str

    def cpu_seconds(self) -> float:
        """Processor time that it has used."""
        return cpu_seconds_of(self.pid) or 0.0


@contextlib.contextmanager
def outbox_http() -> Iterator[Peer]:
    """`outbox broker serve`, as users run it."""
    with servers.broker() as process:
        yield Peer(address=process.url, pid=process.pid, folder=Path(os.devnull), version="this tree")


@contextlib.contextmanager
def outbox_bookkeeper() -> Iterator[Peer]:
    """`outbox broker serve --store` on three bookies, of which two have each entry before it is answered. Its processor
    time is that of the broker's process alone.
    """
    from benchmarks.delay.cluster.servers import servers as bookies  # with libraries that the others do not need

    with bookies(None) as running, running.broker("bench") as node:
        yield Peer(address=node.url, pid=node.pid, folder=Path(os.devnull), version="this tree")


@contextlib.contextmanager
def redis_streams() -> Iterator[Peer]:
    """Redis that syncs its append-only file before it answers."""
    program, port = peer_programs.redis_server(), free_port("127.0.0.1")
    with _folder("redis") as folder:
        command = [
            program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "",
            "--appendonly", "yes", "--appendfsync", "always", "--daemonize", "no",
        ]  # fmt: skip
        with _process(command, folder, port=port) as pid:
            yield Peer(
                address=f"redis://127.0.0.1:{port}", pid=pid, folder=folder, version=_version([program, "--version"])
            )


@contextlib.contextmanager
def nats_jetstream() -> Iterator[Peer]:
    """NATS with JetStream in files, synced before each acknowledgement."""
    program, port = peer_programs.nats_server(), free_port("127.0.0.1")
    with _folder("nats") as folder:
        config = folder / "nats.conf"
        config.write_text(_NATS_CONFIG.format(port=port, folder=folder))
        with _process([program, "-c", str(config)], folder, port=port) as pid:
            yield Peer(
                address=f"nats://127.0.0.1:{port}", pid=pid, folder=folder, version=_version([program, "--version"])
            )


@contextlib.contextmanager
def rabbitmq() -> Iterator[Peer]:
    """RabbitMQ, whose quorum queues sync before they confirm. Its port mapper is ours to start, and so to end."""
    program, port, mapper_port = peer_programs.rabbitmq_server(), free_port("127.0.0.1"), free_port("127.0.0.1")
    with _folder("rabbitmq") as folder:
        environment = _rabbitmq_environment(folder, port=port, mapper_port=mapper_port)
        mapper = [_epmd(), "-port", str(mapper_port), "-address", "127.0.0.1", "-relaxed_command_check"]
        with (
            _process(mapper, folder, port=mapper_port, environment=environment),
            _process([program], folder, port=port, environment=environment) as pid,
        ):
            yield Peer(
                address=f"amqp://guest:guest@127.0.0.1:{port}/%2F?heartbeat=0", pid=_beam(folder) or pid,
                folder=folder, version=_debian_version("rabbitmq-server"),
            )  # fmt: skip


CONTESTANTS: Final[dict[str, Callable[[], contextlib.AbstractContextManager[Peer]]]] = {
    "outbox_http": outbox_http,
    "outbox_bookkeeper": outbox_bookkeeper,
    "redis_streams": redis_streams,
    "nats_jetstream": nats_jetstream,
    "rabbitmq": rabbitmq,
}
"""By the name of the module with its client."""


def _rabbitmq_environment(folder: Path, *, port: int, mapper_port: int) -> dict[str, str]:
    config = folder / "rabbitmq.conf"
    config.write_text("vm_memory_high_watermark.relative = 0.6\ndisk_free_limit.absolute = 100MB\n")
    return {
        **os.environ,
        "HOME": str(folder), "LC_ALL": "C.UTF-8", "RABBITMQ_USE_LONGNAME": "true",
        "RABBITMQ_NODENAME": "bench@127.0.0.1", "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1", "RABBITMQ_DIST_PORT": str(free_port("127.0.0.1")),
        "ERL_EPMD_PORT": str(mapper_port), "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_MNESIA_BASE": f"{folder}/mnesia", "RABBITMQ_LOG_BASE": f"{folder}/log",
        "RABBITMQ_PID_FILE": f"{folder}/pid", "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/plugins",
        "RABBITMQ_CONFIG_FILE": str(config.with_suffix("")), "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }  # fmt: skip


@contextlib.contextmanager
def _process(
    command: list[str], folder: Path, *, port: int, environment: dict[str, str] | None = None
) -> Iterator[int]:
    """A process in a session of its own, ready once its port is open; ended with all that it started."""
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
            start_new_session=True,
        )  # fmt: skip
    try:
        _wait_for(port, process, folder)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    waiting, deadline = threading.Event(), time.monotonic() + READY_SECONDS_MAX
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args} did not start: {(folder / 'output').read_text()[-1000:]}")
        waiting.wait(_POLL_SECONDS)


@contextlib.contextmanager
def _folder(name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f"outbox-bench-{name}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _epmd() -> str:
    found = shutil.which("epmd") or next((str(one) for one in Path("/usr/lib/erlang").glob("erts-*/bin/epmd")), None)
    if found is None:
        raise RuntimeError("no epmd, which comes with RabbitMQ's Erlang: apt-get install rabbitmq-server")
    return found


def _beam(folder: Path) -> int | None:
    """The process of the Erlang machine, whose number RabbitMQ writes down."""
    file = folder / "pid"
    return int(file.read_text()) if file.exists() else None


def _version(command: list[str]) -> str:
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()[:80]


def _debian_version(package: str) -> str:
    return _version(["dpkg-query", "-W", "-f", "${Package} ${Version}", package])
