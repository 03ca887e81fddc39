"""ZooKeeper of a BookKeeper cluster: one server, or several of which one leads, on loopback addresses."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outbox_demo.ports import free_port
from tests.engines.java_server import JavaProgram, JavaServer

# While ZooKeeper starts it may take a command and never answer it; later it always answers.
PROBE_SECONDS_MAX = 1
ANSWER_SECONDS_MAX = 60
LEADING = frozenset({"leader", "standalone"})

ZooKeeperSettings = Callable[[str], Mapping[str, object]]


def no_zookeeper_settings(_host: str) -> Mapping[str, object]:
    """Nothing beyond what each server has."""
    return {}


def write_properties(file: Path, settings: Mapping[str, object]) -> None:
    """Write a configuration as Java's properties."""
    file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))


@dataclass(frozen=True, slots=True)
class Member:
    """One server of an ensemble."""

    host: str
    client_port: int
    peer_port: int
    election_port: int
    server: JavaServer

    def mode(self) -> str | None:
        """`leader`, `follower` or `standalone`; None while it does not serve."""
        try:
            found = re.search(r"^Mode: (\w+)$", self.ask("srvr", seconds_max=PROBE_SECONDS_MAX), re.MULTILINE)
        except OSError:
            return None
        return None if found is None else found[1]

    def serves(self) -> bool:
        """Whether it takes requests of clients."""
        return self.mode() is not None

    def ask(self, command: str, *, seconds_max: float = ANSWER_SECONDS_MAX) -> str:
        """The answer to one of ZooKeeper's four-letter commands."""
        with socket.create_connection((self.host, self.client_port), timeout=seconds_max) as connection:
            connection.sendall(command.encode())
            return connection.makefile().read()


class ZooKeeperEnsemble:
    """Servers that keep what they have on disk, to be killed and started again."""

    def __init__(
        self, hosts: Sequence[str], *, jars: Path, folder: Path, settings: ZooKeeperSettings, options: Sequence[str]
    ) -> None:
        """`settings` are added to zoo.cfg by a server's address, `options` to the JVMs'."""
        self._members: list[Member] = []
        for number, host in enumerate(hosts, 1):
            data = folder / f"zookeeper{number}"
            data.mkdir()
            (data / "myid").write_text(str(number))
            kind = "quorum.QuorumPeerMain" if len(hosts) > 1 else "ZooKeeperServerMain"
            program = JavaProgram(
                f"org.apache.zookeeper.server.{kind}", [str(data.with_suffix(".cfg"))], jars,
                heap_mb=64, direct_mb=32, options=options,
            )  # fmt: skip
            server = JavaServer(program, log=data.with_suffix(".log"))
            self._members.append(Member(host, free_port(host), free_port(host), free_port(host), server))
        for number, member in enumerate(self._members, 1):
            values = {**self._settings(member, folder / f"zookeeper{number}"), **settings(member.host)}
            write_properties(folder / f"zookeeper{number}.cfg", values)

    @property
    def hosts(self) -> str:
        """Where clients connect."""
        return ",".join(f"{member.host}:{member.client_port}" for member in self._members)

    def start(self) -> None:
        """Start the servers that do not run; returns when all serve. Main thread only."""
        for member in self._members:
            if not member.server.is_started:
                member.server.start()
        for member in self._members:
            member.server.wait_until(member.serves)

    def kill9(self) -> None:
        """End all servers as a crash would. Idempotent."""
        for member in self._members:
            member.server.kill9()

    def kill9_leader(self) -> str:
        """End the leader as a crash would; returns its address, when another server leads."""
        leader = self._leader()
        leader.server.kill9()
        self._leader()
        return f"{leader.host}:{leader.client_port}"

    def check_alive(self) -> None:
        """Raise if a server ended that was not killed."""
        for member in self._members:
            member.server.check_alive()

    def ephemerals(self, path: re.Pattern[str]) -> list[re.Match[str]]:
        """The ephemeral znodes whose whole path matches."""
        lines = self._leader().ask("dump").splitlines()
        return [match for line in lines if (match := path.fullmatch(line.strip()))]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for what the servers come to know."""
        next(member for member in self._members if member.server.is_started).server.wait_until(holds)

    def _leader(self) -> Member:
        """Wait until a server leads."""
        found: list[Member] = []

        def is_found() -> bool:
            found.extend(member for member in self._members if member.mode() in LEADING)
            return bool(found)

        self.wait_until(is_found)
        return found[0]

    def _settings(self, member: Member, data: Path) -> dict[str, object]:
        peers = {
            f"server.{number}": f"{one.host}:{one.peer_port}:{one.election_port}"
            for number, one in enumerate(self._members, 1)
        }
        return {
            "tickTime": 500, "dataDir": data, "clientPort": member.client_port, "clientPortAddress": member.host,
            "admin.enableServer": "false", "maxClientCnxns": 0, "minSessionTimeout": 1_000,
            "maxSessionTimeout": 60_000, "4lw.commands.whitelist": "dump,srvr",
            **({"initLimit": 60, "syncLimit": 60, **peers} if len(peers) > 1 else {}),
        }  # fmt: skip
