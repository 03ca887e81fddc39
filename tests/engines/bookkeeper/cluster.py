"""A BookKeeper cluster of the tests' own: one ZooKeeper and some bookies on loopback addresses, one process each."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.engines.java_server import JavaProgram, JavaServer, free_port, own_loopback_network

# How long ZooKeeper keeps the registration of a bookie that was killed, which then cannot register again.
BOOKIE_SESSION_MS = 4_000
# While ZooKeeper starts it may take a command and never answer it; later it always answers.
PROBE_SECONDS_MAX = 1
ANSWER_SECONDS_MAX = 60

# What netty and BookKeeper reach into, on Java 17 and later.
REFLECTION_OPTIONS = (
    "-Dio.netty.tryReflectionSetAccessible=true",
    *(
        f"--add-opens=java.base/{package}=ALL-UNNAMED"
        for package in ("java.nio", "jdk.internal.misc", "java.io", "java.util.zip", "sun.nio.ch")
    ),
)

_LOGGING = """\
<Configuration status="error">
  <Appenders><{appender} name="log"><PatternLayout pattern="%d{{ISO8601}} %p %c{{1}} %m%n"/></{kind}></Appenders>
  <Loggers><Root level="{level}"><AppenderRef ref="log"/></Root></Loggers>
</Configuration>
"""


def logging_option(config: Path, *, level: str, log: Path | None = None) -> str:
    """A JVM option that logs from a level on, to a file or else to standard output.

    Without it BookKeeper logs as a file in its jar says, which is much.
    """
    kind, target = ("File", f' fileName="{log}"') if log else ("Console", "")
    config.write_text(_LOGGING.format(kind=kind, appender=kind + target, level=level))
    return f"-Dlog4j2.configurationFile={config}"


BookieSettings = Callable[[int, str], Mapping[str, object]]


ZooKeeperSettings = Callable[[str], Mapping[str, object]]


def _no_settings(_number: int, _host: str) -> Mapping[str, object]:
    return {}


def _no_zookeeper_settings(_host: str) -> Mapping[str, object]:
    return {}


@dataclass(frozen=True, slots=True)
class Bookie:
    """One bookie: its id as clients and ZooKeeper know it, and its process."""

    id: str
    config: Path
    server: JavaServer


class BookKeeperCluster:
    """Servers that keep every acknowledged entry on disk, to be killed and started again."""

    def __init__(
        self,
        *,
        jars: Path,
        folder: Path,
        bookies: int,
        bookie_settings: BookieSettings = _no_settings,
        zookeeper_settings: ZooKeeperSettings = _no_zookeeper_settings,
        zookeeper_options: Sequence[str] = (),
    ) -> None:
        """`bookie_settings` are added to a bookie's, by its number and address, `zookeeper_settings` to zoo.cfg by
        ZooKeeper's address, `zookeeper_options` to its JVM's.
        """
        self._bookie_settings_of = bookie_settings
        self._jars = jars
        self._folder = folder
        self._network = own_loopback_network()
        self._options = (*REFLECTION_OPTIONS, logging_option(folder / "log4j2.xml", level="warn"))
        self._zookeeper_address = (f"{self._network}.100", free_port(f"{self._network}.100"))
        self._zookeeper = self._new_zookeeper(zookeeper_settings, zookeeper_options)
        self._bookies = {bookie.id: bookie for bookie in map(self._new_bookie, range(1, bookies + 1))}

    @property
    def bookie_ids(self) -> list[str]:
        """All bookies, alive or not."""
        return list(self._bookies)

    @property
    def zookeeper_hosts(self) -> str:
        """Where ZooKeeper's clients connect."""
        host, port = self._zookeeper_address
        return f"{host}:{port}"

    @property
    def metadata_uri(self) -> str:
        """Where clients find the metadata of the ledgers."""
        host, port = self._zookeeper_address
        return f"zk+longhierarchical://{host}:{port}/ledgers"

    def start(self) -> None:
        """Start on empty folders; returns when every bookie has registered. Main thread only."""
        self._zookeeper.start()
        self._zookeeper.wait_until(self._zookeeper_serves)
        self._initialize()
        self.restore()

    def kill9(self, bookie_id: str) -> None:
        """End a bookie as a crash would."""
        self._bookies[bookie_id].server.kill9()

    @contextmanager
    def paused(self, bookie_id: str) -> Iterator[None]:
        """Pause a bookie until its session with ZooKeeper has expired, or longer; afterwards it has registered again.

        Whoever is paused for about as long as a session lasts may lose its registration at any time after it goes on.
        """
        server = self._bookies[bookie_id].server
        server.send_signal(signal.SIGSTOP)
        try:
            yield
            server.wait_until(lambda: bookie_id not in self._registrations())
        finally:
            server.send_signal(signal.SIGCONT)
        server.wait_until(lambda: bookie_id in self._registrations())

    def restart_zookeeper(self) -> None:
        """End the only server of ZooKeeper as a crash would, and start it on what it has on its disk."""
        self._zookeeper.kill9()
        self._zookeeper.start()
        self._zookeeper.wait_until(self._zookeeper_serves)

    def restore(self) -> None:
        """Start every bookie that does not run on the data it has; returns when they have registered again."""
        stopped = [bookie for bookie in self._bookies.values() if not bookie.server.is_started]
        sessions_before = self._registrations()
        for bookie in stopped:
            bookie.server.start()
        for bookie in stopped:
            session_before = sessions_before.get(bookie.id)
            bookie.server.wait_until(partial(self._has_registered_since, bookie, session_before))

    def check_alive(self) -> None:
        """Raise if a server ended that was not killed."""
        for server in (self._zookeeper, *(bookie.server for bookie in self._bookies.values())):
            server.check_alive()

    def stop(self) -> None:
        """End all servers at once. Idempotent."""
        for server in (*(bookie.server for bookie in self._bookies.values()), self._zookeeper):
            server.kill9()

    def _new_zookeeper(self, settings: ZooKeeperSettings, options: Sequence[str]) -> JavaServer:
        host, port = self._zookeeper_address
        config = self._write_config(
            "zookeeper",
            {
                "tickTime": 500,
                "dataDir": self._folder / "zookeeper",
                "clientPort": port,
                "clientPortAddress": host,
                "admin.enableServer": "false",
                "maxClientCnxns": 0,
                "minSessionTimeout": 1_000,
                "maxSessionTimeout": 60_000,
                "4lw.commands.whitelist": "ruok,dump",
                **settings(host),
            },
        )
        main_class = "org.apache.zookeeper.server.ZooKeeperServerMain"
        options = (*self._options, *options)
        program = JavaProgram(main_class, [str(config)], self._jars, heap_mb=64, direct_mb=32, options=options)
        return JavaServer(program, log=self._folder / "zookeeper.log")

    def _new_bookie(self, number: int) -> Bookie:
        name, host = f"bookie{number}", f"{self._network}.{number}"
        port = free_port(host)
        settings = {**self._bookie_settings(name, host=host, port=port), **self._bookie_settings_of(number, host)}
        config = self._write_config(name, settings)
        program = JavaProgram(
            "org.apache.bookkeeper.server.Main",
            ["-c", str(config)],
            self._jars,
            heap_mb=128,
            direct_mb=128,
            options=self._options,
        )
        return Bookie(f"{host}:{port}", config, JavaServer(program, log=self._folder / f"{name}.log"))

    def _bookie_settings(self, name: str, *, host: str, port: int) -> dict[str, object]:
        return {
            "metadataServiceUri": self.metadata_uri,
            "zkTimeout": BOOKIE_SESSION_MS,
            "bookiePort": port,
            "advertisedAddress": host,
            "listeningInterface": "lo",  # without it the bookie listens on all addresses
            "allowLoopback": "true",
            "journalDirectories": self._folder / name / "journal",
            "ledgerDirectories": self._folder / name / "ledgers",
            "journalPreAllocSizeMB": 4,
            "journalMaxSizeMB": 32,
            "journalMaxBackups": 0,
            "journalWriteBufferSizeKB": 64,
            "skipListSizeLimit": 8 << 20,
            "logSizeLimit": 128 << 20,
            "entryLogFilePreallocationEnabled": "false",
            "numAddWorkerThreads": 1,
            "numReadWorkerThreads": 1,
            "numHighPriorityWorkerThreads": 1,
            "numLongPollWorkerThreads": 0,
            "serverNumIOThreads": 2,
            "diskUsageThreshold": 0.99,
            "diskUsageWarnThreshold": 0.98,
            "httpServerEnabled": "false",
            "enableStatistics": "false",
        }

    def _write_config(self, name: str, settings: dict[str, object]) -> Path:
        path = self._folder / f"{name}.conf"
        path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        return path

    def _initialize(self) -> None:
        # Not `metaformat`, which ignores the scheme of the URI and writes another layout than the bookies then expect.
        config = next(iter(self._bookies.values())).config
        program = JavaProgram(
            "org.apache.bookkeeper.bookie.BookieShell",
            ["-conf", str(config), "initnewcluster"],
            self._jars,
            heap_mb=64,
            direct_mb=32,
            options=self._options,
        )
        program.run()

    def _has_registered_since(self, bookie: Bookie, session_before: str | None) -> bool:
        # The registration of a bookie that was killed stays until its session expires.
        return self._registrations().get(bookie.id) not in {None, session_before}

    def _registrations(self) -> dict[str, str]:
        """The bookies that clients can choose, each with the ZooKeeper session that holds its registration.

        A bookie registers some time after it opened its port, so the port says nothing.
        """
        session, registered = "", {}
        for line in self._ask_zookeeper("dump").splitlines():
            if match := re.fullmatch(r"(0x[0-9a-f]+):", line.strip()):
                session = match[1]
            elif match := re.fullmatch(r"/ledgers/available/([0-9.]+:[0-9]+)", line.strip()):
                registered[match[1]] = session
        return registered

    def _zookeeper_serves(self) -> bool:
        try:
            return self._ask_zookeeper("ruok", seconds_max=PROBE_SECONDS_MAX) == "imok"
        except OSError:
            return False

    def _ask_zookeeper(self, command: str, *, seconds_max: float = ANSWER_SECONDS_MAX) -> str:
        """The answer to one of ZooKeeper's four-letter commands."""
        with socket.create_connection(self._zookeeper_address, timeout=seconds_max) as connection:
            connection.sendall(command.encode())
            return connection.makefile().read()
