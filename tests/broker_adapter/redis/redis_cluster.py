"""A Redis cluster of the tests' own: three masters with a replica each."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import redis

from outbox_demo.ports import free_port
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, redis_server, wait_until

MASTERS: Final = 3
SLOTS: Final = 16_384
MIGRATE_MS: Final = 60_000
NODE_TIMEOUT_MS: Final = 2_000
"""How long a node must be silent to count as failed."""
STEADY_MS: Final = 10_000
"""The same where a test fails no node: a busy machine may let one be silent for two seconds."""


class RedisClusterServers:
    """Six running servers: the masters, and behind them their replicas in the same order."""

    def __init__(self, servers: Sequence[RedisServer]) -> None:
        self.servers = servers

    @property
    def masters(self) -> Sequence[RedisServer]:
        """Those that began as masters."""
        return self.servers[:MASTERS]

    @property
    def url(self) -> str:
        """Names two of the nodes; the others are found."""
        hosts = ",".join(f"{HOST}:{server.port}" for server in self.servers[1:3])
        return f"redis+cluster://{hosts}/"

    @property
    def client(self) -> redis.RedisCluster[Any]:
        """A new plain client; the caller closes it."""
        return redis.RedisCluster(host=HOST, port=self.servers[1].port, protocol=2, socket_timeout=60)

    def master_of(self, key: str) -> RedisServer:
        """The server that began as the master of a key's slot."""
        slot = int(self.servers[0].ask("CLUSTER", "KEYSLOT", key))
        return self.masters[slot * MASTERS // SLOTS]

    def replica_of(self, master: RedisServer) -> RedisServer:
        """The server that began as this one's replica."""
        return self.servers[MASTERS + list(self.servers).index(master)]

    def keys(self) -> set[bytes]:
        """Those of all masters."""
        return {key for server in self.servers if _is_master(server) for key in server.ask("KEYS", "*")}

    def join(self) -> None:
        """Make one cluster of the servers, as `redis-cli --cluster create` does it.

        Each has an epoch of its own from the first. Masters that met with equal epochs would choose new ones during the
        first seconds; one that died just then would have no successor, since Redis 7.0's other masters refuse to vote
        for a replica that has not heard of its master's new epoch, and do not tell it (valkey-io/valkey 2169).
        """
        for number, server in enumerate(self.servers, start=1):
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", number)
        for server in self.servers[1:]:
            self.servers[0].ask("CLUSTER", "MEET", HOST, server.announced_port, server.announced_bus_port)
        for number, master in enumerate(self.masters):
            bounds = [-(-SLOTS * edge // MASTERS) for edge in (number, number + 1)]
            master.ask("CLUSTER", "ADDSLOTSRANGE", bounds[0], bounds[1] - 1)
            master.ask("CONFIG", "SET", "repl-diskless-sync-delay", 0)
        assert wait_until(lambda: all(self._knows_all(server) for server in self.servers))
        for master in self.masters:
            self.replica_of(master).ask("CLUSTER", "REPLICATE", master.ask("CLUSTER", "MYID").decode())
        self.wait_until_whole()

    def move_slot(self, key: str, *, source: RedisServer, target: RedisServer) -> Iterator[Counter[str]]:
        """Move all keys that are in a slot with this one, one by one, by the commands of `redis-cli --cluster reshard`.

        Yields after each key what the source had refused before it was moved. Between two keys both servers refuse a
        script that needs both: nothing of it may have been done.
        """
        number = source.ask("CLUSTER", "KEYSLOT", key)
        source_id, target_id = (server.ask("CLUSTER", "MYID").decode() for server in (source, target))
        target.ask("CLUSTER", "SETSLOT", number, "IMPORTING", source_id)
        source.ask("CLUSTER", "SETSLOT", number, "MIGRATING", target_id)
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", number, 1):
            before = redirections(source)
            source.ask("MIGRATE", HOST, target.port, keys[0].decode(), 0, MIGRATE_MS)
            yield before
        others = [server for server in self.masters if server not in {source, target}]
        for server in (target, source, *others):
            server.ask("CLUSTER", "SETSLOT", number, "NODE", target_id)

    def master_now(self, key: str) -> RedisServer:
        """The server that is the master of a key's slot."""
        return next(server for server in self.pair_of(key) if _is_master(server))

    def pair_of(self, key: str) -> tuple[RedisServer, RedisServer]:
        """Master and replica of a key's slot, as they began."""
        began = self.master_of(key)
        return began, self.replica_of(began)

    def wait_until_whole(self) -> None:
        """Wait until each slot has one master, each master a replica in step, and all know the epochs of all."""
        assert wait_until(
            lambda: (
                all(self._is_whole(server) for server in self.servers)
                and sum(_is_master(server) for server in self.servers) == MASTERS
                and self._agree_on_epochs()
            )
        )

    def wait_until_replicated(self, master: RedisServer) -> None:
        """Wait until a master's replica has all that is written by now."""
        written = _number(master, "master_repl_offset")
        assert wait_until(lambda: _number(self.replica_of(master), "slave_repl_offset") >= written)

    def wait_until_promoted(self, replica: RedisServer) -> None:
        """Wait until a replica is a master."""
        assert wait_until(lambda: _is_master(replica)), replica.ask("CLUSTER", "NODES").decode()

    def _knows_all(self, server: RedisServer) -> bool:
        return f"cluster_known_nodes:{len(self.servers)}\r".encode() in server.ask("CLUSTER", "INFO")

    def _agree_on_epochs(self) -> bool:
        """Whether a replica of any master would get the votes of the other masters."""
        first, *others = (epochs(server) for server in self.servers)
        return all(one == first for one in others)

    def _is_whole(self, server: RedisServer) -> bool:
        replication = server.ask("INFO", "replication")
        if _is_master(server):
            in_step = b"state=online" in replication
        else:
            in_step = re.findall(rb"master_link_status:(\w+)", replication) == [b"up"]
        return in_step and b"cluster_state:ok" in server.ask("CLUSTER", "INFO")


def redirections(server: RedisServer) -> Counter[str]:
    """How often a server said that a slot is elsewhere, or in between."""
    found = server.ask("INFO", "errorstats").decode()
    return Counter(
        {kind: int(count) for kind, count in re.findall(r"errorstat_(ASK|MOVED|TRYAGAIN):count=(\d+)", found)}
    )


def epochs(server: RedisServer) -> dict[str, int]:
    """What a server knows of the configuration epochs: by the id of a node, its own, or its master's."""
    lines = [line.split() for line in server.ask("CLUSTER", "NODES").decode().splitlines()]
    return {fields[0]: int(fields[6]) for fields in lines}


def _number(server: RedisServer, field: str) -> int:
    found = re.search(rf"{field}:(\d+)".encode(), server.ask("INFO", "replication"))
    assert found is not None
    return int(found[1])


def _is_master(server: RedisServer) -> bool:
    return b"role:master" in server.ask("INFO", "replication")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """Where a server listens and is told to listen, and the address that its own connections come from."""

    port: int
    bus_port: int
    announced_port: int
    announced_bus_port: int
    source: str

    def options(self) -> dict[str, str]:
        """Those of the server, but for its port."""
        return {
            "cluster_port": str(self.bus_port),
            "cluster_announce_ip": HOST,
            "cluster_announce_port": str(self.announced_port),
            "cluster_announce_bus_port": str(self.announced_bus_port),
            "bind_source_addr": self.source,
        }


@contextlib.contextmanager
def redis_cluster(
    addresses: Sequence[NodeAddress] = (),
    *,
    program: Path | None = None,
    environments: Sequence[Mapping[str, str]] = (),
    node_timeout_ms: int = NODE_TIMEOUT_MS,
    **options: str,
) -> Iterator[RedisClusterServers]:
    """A cluster for the length of a block, on free ports where no addresses are given; `environments`: of each server;
    `options`: of all servers.
    """
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                redis_server(
                    port=0 if address is None else address.port,
                    program=program,
                    environment=environment,
                    cluster_enabled="yes",
                    cluster_node_timeout=str(node_timeout_ms),
                    # A replica may stand for election however far behind: what is lost then is what the tests look for.
                    cluster_replica_validity_factor="0",
                    **({"cluster_port": str(free_port(HOST))} if address is None else address.options()),
                    **options,
                )
            )
            for address, environment in zip(
                addresses or [None] * (2 * MASTERS), environments or [None] * (2 * MASTERS), strict=True
            )
        ]
        cluster = RedisClusterServers(servers)
        cluster.join()
        yield cluster
