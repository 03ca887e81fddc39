"""A BookKeeper cluster of the tests' own: ZooKeeper and some bookies on loopback addresses, one process each."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from pathlib import Path

from outbox_broker.cluster.bookkeeper.java_entry_copies import CONTENT_BEGIN
from outbox_demo.ports import free_port
from tests.engines.bookkeeper.zookeeper_ensemble import (
    ZooKeeperEnsemble,
    ZooKeeperSettings,
    no_zookeeper_settings,
    write_properties,
)
from tests.engines.java_server import JavaProgram, JavaServer, own_loopback_network

# How long ZooKeeper keeps the registration of a bookie that was killed, which then cannot register again. It is
# BookKeeper's own default: a bookie whose session ends because the machine stood still waits this long for its earlier
# registration to go, and ends itself where that does not happen.
BOOKIE_SESSION_MS = 10_000
# With which a bookie takes its disk for full, whatever is on it.
FULL = {"diskUsageThreshold": 0.000_02, "diskUsageWarnThreshold": 0.000_01}

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


def _no_settings(_number: int, _host: str) -> Mapping[str, object]:
    return {}


@dataclass(frozen=True, slots=True)
class Bookie:
    """One bookie: its id as clients and ZooKeeper know it, and its process."""

    id: str
    config: Path
    settings: Mapping[str, object]
    server: JavaServer

    def configure(self, changed: Mapping[str, object]) -> None:
        """Change settings of the next start, or none."""
        write_properties(self.config, {**self.settings, **changed})


class BookKeeperCluster:
    """Servers that keep every acknowledged entry on disk, to be killed and started again."""

    def __init__(
        self,
        *,
        jars: Path,
        folder: Path,
        bookies: int,
        zookeepers: int = 1,
        bookie_settings: BookieSettings = _no_settings,
        zookeeper_settings: ZooKeeperSettings = no_zookeeper_settings,
        zookeeper_options: Sequence[str] = (),
    ) -> None:
        """`bookie_settings` are added to a bookie's, by its number and address, `zookeeper_settings` to zoo.cfg by
        a server's address, `zookeeper_options` to its JVM's.
        """
        self._bookie_settings_of = bookie_settings
        self._jars = jars
        self._folder = folder
        self._network = own_loopback_network()
        self._options = (*REFLECTION_OPTIONS, logging_option(folder / "log4j2.xml", level="warn"))
        self.zookeeper = ZooKeeperEnsemble(
            [f"{self._network}.{100 + number}" for number in range(zookeepers)],
            jars=jars, folder=folder, settings=zookeeper_settings, options=(*self._options, *zookeeper_options),
        )  # fmt: skip
        self._bookies = {bookie.id: bookie for bookie in map(self._new_bookie, range(1, bookies + 1))}
        self._filled: set[str] = set()

    @property
    def bookie_ids(self) -> list[str]:
        """All bookies, alive or not."""
        return list(self._bookies)

    @property
    def zookeeper_hosts(self) -> str:
        """Where ZooKeeper's clients connect."""
        return self.zookeeper.hosts

    @property
    def metadata_uri(self) -> str:
        """Where clients find the metadata of the ledgers."""
        return f"zk+longhierarchical://{self.zookeeper.hosts.replace(',', ';')}/ledgers"

    @property
    def metadata_uri_of_one_server(self) -> str:
        """The same, at one server of ZooKeeper: what one client wrote, another one then reads. Others may be behind."""
        return f"zk+longhierarchical://{self.zookeeper.hosts.partition(',')[0]}/ledgers"

    def start(self) -> None:
        """Start on empty folders; returns when every bookie has registered. Main thread only."""
        self.zookeeper.start()
        self._initialize()
        self.restore()

    def kill9(self, bookie_id: str) -> None:
        """End a bookie as a crash would."""
        self._bookies[bookie_id].server.kill9()

    def flip_bit(self, bookie_id: str, ledger_id: int, entry: int, *, at: int) -> None:
        """Flip a bit in the content of an entry, wherever a bookie has it on its disk: its journal is read again as it
        starts. Of a bookie that does not run.
        """
        settings = self._bookies[bookie_id].settings
        folders = (Path(str(settings[f"{kind}Directories"])) for kind in ("journal", "ledger"))
        paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".txn", ".log"}]
        head, count = struct.pack(">qq", ledger_id, entry), 0
        for path in (path for path in paths if path.stat().st_size):
            with path.open("r+b") as file, mmap(file.fileno(), 0) as data:
                begin = data.find(head)
                while begin >= 0:
                    data[begin + CONTENT_BEGIN + at] ^= 1
                    count += 1
                    begin = data.find(head, begin + 1)
        assert count, f"{bookie_id} has no entry {entry} of ledger {ledger_id}"

    @contextmanager
    def paused(self, bookie_id: str) -> Iterator[None]:
        """Pause a bookie until its session with ZooKeeper has expired, or longer; afterwards it has registered again.

        Whoever is paused for about as long as a session lasts may lose its registration at any time after it goes on.
        """
        server = self._bookies[bookie_id].server
        server.pause()
        try:
            yield
            server.wait_until(lambda: bookie_id not in self.registrations())
        finally:
            server.resume()
        server.wait_until(lambda: bookie_id in self.registrations())

    def fill(self, *bookie_ids: str) -> None:
        """Restart bookies that then take their disks for full; returns when they have registered as read-only."""
        filled = [self._bookies[bookie_id] for bookie_id in bookie_ids]
        for bookie in filled:
            bookie.server.kill9()
            bookie.configure(FULL)
            self._filled.add(bookie.id)
        self._start(set(bookie_ids))
        for bookie in filled:
            bookie.server.wait_until(partial(self.is_read_only, bookie.id))

    def restore(self) -> None:
        """Start every server that does not run, or is full, on the data it has; returns when all serve, and the bookies
        have registered as writable.
        """
        self.zookeeper.start()
        for bookie_id in self._filled:
            self._bookies[bookie_id].server.kill9()
            self._bookies[bookie_id].configure({})
        self._filled.clear()
        self._start({bookie for bookie in self._bookies if not self._bookies[bookie].server.is_started})
        for bookie in self._bookies.values():
            bookie.server.wait_until(partial(self._is_registered, bookie))

    def registrations(self) -> set[str]:
        """The bookies that clients can choose, and those whose session has not ended since they were killed.

        A bookie registers some time after it opened its port, so the port says nothing.
        """
        return {match[1] for match in self.zookeeper.ephemerals(re.compile(r"/ledgers/available/([0-9.]+:[0-9]+)"))}

    def read_only_registrations(self) -> set[str]:
        """The bookies that clients only read from, and those whose session has not ended since they were killed."""
        path = re.compile(r"/ledgers/available/readonly/([0-9.]+:[0-9]+)")
        return {match[1] for match in self.zookeeper.ephemerals(path)}

    def is_read_only(self, bookie_id: str) -> bool:
        """Whether a bookie has registered as read-only, and as nothing else."""
        return bookie_id in self.read_only_registrations() - self.registrations()

    def is_writable(self, bookie_id: str) -> bool:
        """Whether a bookie has registered as writable, and as nothing else."""
        return bookie_id in self.registrations() - self.read_only_registrations()

    def check_alive(self) -> None:
        """Raise if a server ended that was not killed."""
        self.zookeeper.check_alive()
        for bookie in self._bookies.values():
            bookie.server.check_alive()

    def stop(self) -> None:
        """End all servers at once. Idempotent."""
        for bookie in self._bookies.values():
            bookie.server.kill9()
        self.zookeeper.kill9()

    def _new_bookie(self, number: int) -> Bookie:
        name, host = f"bookie{number}", f"{self._network}.{number}"
        port = free_port(host)
        settings = {**self._bookie_settings(name, host=host, port=port), **self._bookie_settings_of(number, host)}
        config = self._folder / f"{name}.conf"
        write_properties(config, settings)
        program = JavaProgram(
            "org.apache.bookkeeper.server.Main",
            ["-c", str(config)],
            self._jars,
            heap_mb=128,
            direct_mb=128,
            options=self._options,
        )
        server = JavaServer(program, log=self._folder / f"{name}.log")
        return Bookie(f"{host}:{port}", config, settings, server)

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

    def _start(self, bookie_ids: set[str]) -> None:
        """Start bookies whose earlier registrations have ended: they wait for that, for as long as a session lasts, and
        end themselves where it lasts longer than their own start and this.
        """
        self.zookeeper.wait_until(lambda: not bookie_ids & self.registrations())
        for bookie_id in bookie_ids:
            self._bookies[bookie_id].server.start()

    def _is_registered(self, bookie: Bookie) -> bool:
        return bookie.id in self.registrations()
