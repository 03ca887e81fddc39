"""Instances that share leases in one ZooKeeper, and what its znodes say. Not a fixture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

from kazoo.client import KazooClient

from compensator.assignment import LeasedAssignment, LeaseOptions
from compensator.assignment.zookeeper_lease_registry import ZooKeeperLeaseRegistry
from outbox_core.assignment.even_assignment import Resource
from outbox_core.zookeeper.zookeeper_session import SessionOptions, ZooKeeperSession
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperAddress
from tests.fixtures.ended_session import end_session
from tests.outbox_broker.cluster.conftest import eventually

SESSION_MS: Final = 30_000
"""No slow machine outlives it: deaths are made."""
ROUNDS_UNCHANGED: Final = 3
"""An offer that is not taken yet changes nothing for a round. Who has just joined may stay unnoticed for any number of
rounds: a beat reads what its session knows, and asks ZooKeeper nothing."""
_numbers = itertools.count()


class ZooKeeperFleet:
    """Instances on the ZooKeeper of these hosts, below a path of their own. Close it in the end."""

    def __init__(self, hosts: str) -> None:
        self.hosts = hosts
        self.root = f"/fleets/{next(_numbers)}"
        self._instances: list[LeasedAssignment] = []
        self._sessions: dict[str, ZooKeeperSession] = {}
        self._reader: KazooClient | None = None

    @property
    def url(self) -> str:
        """As in lease_url."""
        return f"zookeeper://{self.hosts}{self.root}"

    def instance(
        self,
        *,
        zone: str | None = None,
        hosts: str | None = None,
        options: LeaseOptions | None = None,
        session_ms: int = SESSION_MS,
        request_ms_max: int = SESSION_MS,
    ) -> LeasedAssignment:
        """One more, which has not joined yet; `hosts`: by which it reaches the servers."""
        address = ZooKeeperAddress(hosts=hosts or self.hosts, root=self.root)
        session_options = SessionOptions(session_ms=session_ms, request_ms_max=request_ms_max)

        def connect() -> ZooKeeperSession:
            session = ZooKeeperSession(address, options=session_options)
            self._sessions[session.id] = session
            return session

        registry = ZooKeeperLeaseRegistry(self.root, connect=connect, zone=zone, options=options or LeaseOptions())
        self._instances.append(LeasedAssignment(registry))
        return self._instances[-1]

    def die(self, instance: LeasedAssignment) -> None:
        """End an instance's session, as ZooKeeper does when it has heard nothing of it."""
        end_session(self.hosts, self._sessions[instance.instance])

    def settle(self, instances: Sequence[LeasedAssignment], sources: Sequence[Resource]) -> list[frozenset[str]]:
        """Let each beat in turn until each source has one instance, each instance as many of them but for one, and
        nothing changes; returns what each has.
        """
        held: list[frozenset[str]] = []
        rounds_unchanged = 0

        def is_settled() -> bool:
            nonlocal rounds_unchanged
            before = list(held)
            held[:] = [one.beat(sources) for one in instances]
            complete = sorted(name for one in held for name in one) == sorted(source.name for source in sources)
            sizes = [len(one) for one in held]
            even = max(sizes) - min(sizes) <= 1
            failed = any(one.failed_beats for one in instances)
            rounds_unchanged = rounds_unchanged + 1 if held == before and complete and even and not failed else 0
            return rounds_unchanged == ROUNDS_UNCHANGED

        eventually(is_settled, what="every source with one instance, and as many with each")
        return held

    def holders(self) -> dict[str, str]:
        """The session of each lease, by the resource's name, as the servers have it."""
        client, found = self._client(), {}
        for name in client.get_children(f"{self.root}/leases") if client.exists(f"{self.root}/leases") else ():
            stat = client.exists(f"{self.root}/leases/{name}")
            if stat is not None:
                found[unquote(name)] = f"{stat.ephemeralOwner & 0xFFFF_FFFF_FFFF_FFFF:016x}"
        return found

    def create(self, path: str, data: bytes) -> None:
        """Create a znode that no instance made."""
        self._client().create(f"{self.root}{path}", data, makepath=True)

    def delete_all(self) -> None:
        """Delete every record, as an operator might."""
        self._client().delete(self.root, recursive=True)

    def close(self) -> None:
        """End all."""
        for one in self._instances:
            one.leave()
        if self._reader is not None:
            self._reader.stop()
            self._reader.close()

    def _client(self) -> KazooClient:
        if self._reader is None:
            self._reader = KazooClient(hosts=self.hosts, timeout=30)
            self._reader.start(timeout=60)
        return self._reader
