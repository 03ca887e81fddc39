"""The BookKeeper of a demo run: a ZooKeeper and bookies that the run starts and kills, or such that are there already.

Those of the run are on the loopback address, keep their data in its folder, and are as small as they can be made.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from outbox_broker.cluster.bookie_list import read_bookies
from outbox_broker.cluster.bookkeeper.java_runtime import (
    JARS_CURE,
    LOGGING_CONFIG,
    REFLECTION_OPTIONS,
    check_jars,
    find_jars,
)
from outbox_broker.cluster.cluster_settings import ADDRESS_EXAMPLE
from outbox_core.common.errors import ConfigurationError, OutboxError
from outbox_core.zookeeper.zookeeper_session import SessionOptions
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperAddress
from outbox_demo.java import find_java, java_home
from outbox_demo.ports import free_port
from outbox_demo.processes import Process, ProcessGroup

HOST: Final = "127.0.0.1"
BOOKIES: Final = 4
"""One more than a ledger has, so that one can be lost."""
ENSEMBLE: Final = 3
SERVER_JARS: Final = ("hppc", "http-server", "jcommander", "metrics-core", "snappy-java")
"""What bookies and ZooKeeper need, and clients do not."""
PROBE_SECONDS_MAX: Final = 1.0
_JVM: Final = (
    "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError", "-Djava.net.preferIPv4Stack=true",
)  # fmt: skip
_LOOPBACK: Final = "lo0" if sys.platform == "darwin" else "lo"


class BookKeeperUnderDemo(Protocol):
    """The ZooKeeper and the bookies of one run."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Returns what nodes need in theirs."""

    def start(self) -> str:
        """Start them, if they are the run's own; returns an address below which the run may make its cluster."""

    def kill(self) -> str | None:
        """Kill one of the run's own bookies; returns what that is, in words, or None."""

    def restart(self) -> str | None:
        """Start it again on its data; returns what that is, in words, or None."""

    @property
    def is_own(self) -> bool:
        """Returns whether they end with the run, and what it wrote with them."""


class RunningBookKeeper:
    """Servers that are there already: none is killed."""

    is_own = False

    def __init__(self, store: str) -> None:
        """`store`: an address, as of a delay cluster. Raises ConfigurationError, also without Java or jars."""
        ZooKeeperAddress.parse(store, example=ADDRESS_EXAMPLE)
        self._java = find_java(os.environ)
        check_jars(find_jars(os.environ))
        self._store = store.rstrip("/")

    @property
    def environment(self) -> Mapping[str, str]:
        """The Java that was found."""
        return {"JAVA_HOME": str(java_home(self._java))}

    def start(self) -> str:
        """Nothing is started."""
        return self._store

    def kill(self) -> None:
        """Nothing is killed."""

    def restart(self) -> None:
        """Nothing was killed."""


class JavaServer:
    """A server process of the run's own."""

    def __init__(
        self, name: str, *, main: Sequence[str], java: Path, jars: Path, heap_mb: int, direct_mb: int,
        processes: ProcessGroup,
    ) -> None:  # fmt: skip
        """`main`: its main class and arguments."""
        self._name = name
        self._processes = processes
        self._command = [
            str(java), *_JVM, f"-Xmx{heap_mb}m", f"-XX:MaxDirectMemorySize={direct_mb}m", *REFLECTION_OPTIONS,
            f"-Dlog4j2.configurationFile={LOGGING_CONFIG}", "-cp", f"{jars}/*", *main,
        ]  # fmt: skip
        self._process: Process | None = None

    def start(self) -> Process:
        """Start it, the second time on the data that it has."""
        self._process = self._processes.start_program(self._name, self._command)
        return self._process

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.kill()


class OwnBookKeeper:
    """A ZooKeeper and bookies of the run's own."""

    is_own = True

    def __init__(self, *, folder: Path, processes: ProcessGroup) -> None:
        """`folder`: that of the run. Raises ConfigurationError where Java or jars are missing."""
        self._folder = folder / "bookkeeper"
        self._processes = processes
        self._java = find_java(os.environ)
        self._jars = _server_jars()
        self._port = free_port(HOST)
        self._zookeeper = self._server(
            "zookeeper", ["org.apache.zookeeper.server.ZooKeeperServerMain", str(self._folder / "zookeeper.conf")],
            heap_mb=64, direct_mb=32,
        )  # fmt: skip
        self._bookies = [
            self._server(
                f"bookie-{bookie_number}",
                ["org.apache.bookkeeper.server.Main", "-c", str(self._bookie_config(bookie_number))],
                heap_mb=128, direct_mb=128,
            )
            for bookie_number in range(1, BOOKIES + 1)
        ]  # fmt: skip

    @property
    def environment(self) -> Mapping[str, str]:
        """The same Java."""
        return {"JAVA_HOME": str(java_home(self._java))}

    def start(self) -> str:
        """Start ZooKeeper and all bookies on empty folders."""
        self._write_configs()
        self._zookeeper.start()
        self._processes.wait_for("ZooKeeper to be ready", self._zookeeper_serves)
        self._make_metadata()
        for bookie in self._bookies:
            bookie.start()
        self._processes.wait_for("the bookies to be registered", lambda: self._writable() == BOOKIES)
        return f"bookkeeper://{HOST}:{self._port}/demo"

    def kill(self) -> str:
        """Kill a bookie."""
        self._bookies[0].kill()
        return "a bookie"

    def restart(self) -> str:
        """Start it again."""
        self._bookies[0].start()
        self._processes.wait_for("the bookie to be registered", lambda: self._writable() == BOOKIES)
        return "the bookie"

    def _server(self, name: str, main: Sequence[str], *, heap_mb: int, direct_mb: int) -> JavaServer:
        return JavaServer(
            name, main=main, java=self._java, jars=self._jars, heap_mb=heap_mb, direct_mb=direct_mb,
            processes=self._processes,
        )  # fmt: skip

    @property
    def _metadata_uri(self) -> str:
        return f"zk+longhierarchical://{HOST}:{self._port}/ledgers"

    def _bookie_config(self, bookie_number: int) -> Path:
        return self._folder / f"bookie-{bookie_number}.conf"

    def _write_configs(self) -> None:
        self._folder.mkdir()
        zookeeper = {
            "tickTime": 500, "dataDir": self._folder / "zookeeper", "clientPort": self._port,
            "clientPortAddress": HOST, "admin.enableServer": "false", "minSessionTimeout": 1_000,
            "maxSessionTimeout": 60_000, "4lw.commands.whitelist": "ruok",
        }  # fmt: skip
        _write(self._folder / "zookeeper.conf", zookeeper)
        for bookie_number in range(1, BOOKIES + 1):
            _write(self._bookie_config(bookie_number), self._bookie_settings(self._folder / f"bookie-{bookie_number}"))

    def _bookie_settings(self, data: Path) -> Mapping[str, object]:
        return {
            "metadataServiceUri": self._metadata_uri,
            "zkTimeout": 4_000,
            "bookiePort": free_port(HOST),
            "advertisedAddress": HOST,
            "listeningInterface": _LOOPBACK,
            "allowLoopback": "true",
            "journalDirectories": data / "journal",
            "ledgerDirectories": data / "ledgers",
            "journalPreAllocSizeMB": 4,
            "journalMaxSizeMB": 32,
            "journalMaxBackups": 0,
            "skipListSizeLimit": 8 << 20,
            "logSizeLimit": 128 << 20,
            "entryLogFilePreallocationEnabled": "false",
            "numAddWorkerThreads": 1,
            "numReadWorkerThreads": 1,
            "numHighPriorityWorkerThreads": 1,
            "numLongPollWorkerThreads": 0,
            "serverNumIOThreads": 2,
            "httpServerEnabled": "false",
            "enableStatistics": "false",
        }

    def _make_metadata(self) -> None:
        shell = ["org.apache.bookkeeper.bookie.BookieShell", "-conf", str(self._bookie_config(1)), "initnewcluster"]
        self._server("bookkeeper-init", shell, heap_mb=64, direct_mb=32).start().wait()

    def _zookeeper_serves(self) -> bool:
        try:
            with socket.create_connection((HOST, self._port), timeout=PROBE_SECONDS_MAX) as connection:
                connection.sendall(b"ruok")
                return connection.makefile().read() == "imok"
        except OSError:
            return False

    def _writable(self) -> int:
        try:
            return len(read_bookies(self._metadata_uri, options=SessionOptions(), ensemble=ENSEMBLE).writable)
        except OutboxError:
            return 0


def _server_jars() -> Path:
    folder = find_jars(os.environ)
    check_jars(folder)
    names = [path.name for path in folder.glob("*.jar")]
    missing = [jar for jar in SERVER_JARS if not any(f"{jar}-" in name for name in names)]
    if missing:
        raise ConfigurationError(
            f"the jars in {folder} are for clients: bookies and ZooKeeper need {', '.join(missing)}, too; {JARS_CURE}, "
            "or name servers that run, --delay bookkeeper://ZOOKEEPER:2181/PATH"
        )
    return folder


def _write(path: Path, settings: Mapping[str, object]) -> None:
    path.write_text("".join(f"{name}={setting}\n" for name, setting in settings.items()))
