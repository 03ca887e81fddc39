"""A real ZooKeeper of the jars that PySpark carries, as a process: killed, paused, started again on its data."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.engines.java_server import JavaProgram, JavaServer, free_port

HOST = "127.0.0.1"
PROBE_SECONDS_MAX = 2
_JARS = ("zookeeper-", "zookeeper-jute-", "slf4j-api-", "netty-", "metrics-core-", "snappy-java-", "commons-io-")


class ZooKeeper:
    """One server on a free port, with short ticks."""

    def __init__(
        self, folder: Path, *, settings: Mapping[str, object] | None = None, options: Sequence[str] = ()
    ) -> None:
        """`settings` are added to zoo.cfg, `options` to the JVM's."""
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port(HOST)
        config = folder / "zoo.cfg"
        values: dict[str, object] = {
            "tickTime": 500, "dataDir": folder / "data", "clientPort": self.port, "clientPortAddress": HOST,
            "admin.enableServer": "false", "maxClientCnxns": 0, "minSessionTimeout": 1_000,
            "maxSessionTimeout": 60_000, "4lw.commands.whitelist": "ruok", **(settings or {}),
        }  # fmt: skip
        config.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
        program = JavaProgram(
            "org.apache.zookeeper.server.ZooKeeperServerMain", [str(config)], _jars(folder / "jars"),
            heap_mb=64, direct_mb=32, options=options,
        )  # fmt: skip
        self._server = JavaServer(program, log=folder / "zookeeper.log")

    @property
    def hosts(self) -> str:
        """Where clients connect."""
        return f"{HOST}:{self.port}"

    def start(self) -> None:
        """Start it; returns when it answers."""
        self._server.start()
        self._server.wait_until(self._answers)

    def kill9(self) -> None:
        """End it as a crash would. Idempotent."""
        self._server.kill9()

    def send_signal(self, number: int) -> None:
        """Send a signal: SIGSTOP, SIGCONT."""
        self._server.send_signal(number)

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=PROBE_SECONDS_MAX) as connection:
                connection.sendall(b"ruok")
                return connection.makefile().read() == "imok"
        except OSError:
            return False


@contextmanager
def zookeeper(folder: Path, **options: object) -> Iterator[ZooKeeper]:
    """A server for the length of a block."""
    server = ZooKeeper(folder, **options)  # type: ignore[arg-type]
    try:
        server.start()
        yield server
    finally:
        server.kill9()
        shutil.rmtree(folder / "data", ignore_errors=True)


def _jars(folder: Path) -> Path:
    """A folder of links to the jars that the server needs; all of PySpark's take it twice the time and memory."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    folder.mkdir(exist_ok=True)
    for jar in (Path(spec.origin).parent / "jars").iterdir():
        link = folder / jar.name
        if jar.name.startswith(_JARS) and not link.exists():
            link.symlink_to(jar)
    return folder
