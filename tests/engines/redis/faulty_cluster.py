"""A Redis cluster of three masters and three replicas, each server told to others by the address of a proxy."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence

from outbox_demo.ports import free_port
from tests.broker_adapter.publishing.engine_under_test import PlainMessage
from tests.broker_adapter.redis.redis_cluster import MASTERS, NodeAddress, RedisClusterServers, redis_cluster
from tests.broker_adapter.redis.redis_engine import plain_message
from tests.broker_adapter.redis.redis_server import HOST, RedisServer
from tests.engines.java_server import own_loopback_network
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy


class ProxiedNode:
    """The proxies before a server, one for its clients and replicas and one for the bus."""

    def __init__(self, source: str) -> None:
        """`source`: the address that the server's own connections come from."""
        port, bus_port = free_port(HOST), free_port(HOST)
        self.source = source
        self.proxy, self._bus = CuttingTcpProxy(port), CuttingTcpProxy(bus_port)
        self.address = NodeAddress(
            port=port,
            bus_port=bus_port,
            announced_port=self.proxy.port,
            announced_bus_port=self._bus.port,
            source=source,
        )

    def partition(self, sources: Container[str]) -> None:
        """Pass nothing on that comes from these addresses, nor answers to it."""
        for proxy in (self.proxy, self._bus):
            proxy.partition(sources)

    def heal(self) -> None:
        """Pass on all."""
        for proxy in (self.proxy, self._bus):
            proxy.heal()

    def close(self) -> None:
        """End the proxies."""
        for proxy in (self.proxy, self._bus):
            proxy.close()


class FaultyRedisCluster:
    """An EngineUnderFault. A topic is a stream on one of the masters; what is acknowledged is on its replica, too.

    Clients, replicas and the cluster's bus come through proxies, servers each from an address of its own.
    """

    copies_per_publish_max = 1

    def __init__(self, cluster: RedisClusterServers, network: Sequence[ProxiedNode]) -> None:
        self._cluster = cluster
        self._network = network
        self._proxies = [node.proxy for node in network]
        self._isolated: RedisServer | None = None

    @property
    def url(self) -> str:
        """Of all servers, through their proxies."""
        return f"redis+cluster://{','.join(f'{HOST}:{proxy.port}' for proxy in self._proxies)}/?wait=1"

    @property
    def proxies(self) -> Sequence[CuttingTcpProxy]:
        """One a server."""
        return self._proxies

    def proxy_in_use(self, topic: str) -> CuttingTcpProxy:
        """That of the topic's master."""
        return self._proxies[self._cluster.servers.index(self._master(topic))]

    def make_ordered_topic(self, topic: str) -> None:
        """The first message makes it."""

    def read_partitions(self, topic: str) -> list[list[PlainMessage]]:
        """The stream's entries."""
        with contextlib.closing(self._master(topic).client) as client:
            return [[plain_message(place, fields) for place, fields in client.xrange(_key(topic))]]

    def keys(self) -> set[bytes]:
        """Of all masters: a replica may lag behind."""
        return self._cluster.keys()

    def kill_leader(self, topic: str) -> None:
        """The master, by SIGKILL."""
        self._master(topic).kill()

    def kill_all(self) -> None:
        """All servers, by SIGKILL."""
        for server in self._cluster.servers:
            server.kill()

    def pause_leader(self, topic: str) -> None:
        """The master, by SIGSTOP."""
        self._master(topic).pause()

    def isolate_leader(self, topic: str) -> None:
        """Cut the master off from all other servers, its replica too, both ways, until `restore`. Clients reach it."""
        self._isolated = self._master(topic)
        isolated = self._network[self._cluster.servers.index(self._isolated)]
        others = [node for node in self._network if node is not isolated]
        isolated.partition({node.source for node in others})
        for node in others:
            node.partition({isolated.source})

    def wait_for_second_master(self, topic: str) -> None:
        """Wait until the replica of an isolated master is a master, too."""
        [replica] = [server for server in self._cluster.pair_of(_key(topic)) if server is not self._isolated]
        self._cluster.wait_until_promoted(replica)

    def restore(self) -> None:
        """Mend the network, start what was killed, let go on what was paused; returns when each master has a replica
        in step.
        """
        for node in self._network:
            node.heal()
        self._isolated = None
        for server in self._cluster.servers:
            if server.is_started:
                server.resume()
            else:
                server.start()
        self._cluster.wait_until_whole()

    def _master(self, topic: str) -> RedisServer:
        return self._cluster.master_now(_key(topic))


@contextlib.contextmanager
def faulty_redis_cluster() -> Iterator[FaultyRedisCluster]:
    """A cluster behind proxies for the length of a block."""
    network = own_loopback_network()
    nodes = [ProxiedNode(f"{network}.{number}") for number in range(1, 2 * MASTERS + 1)]
    try:
        with redis_cluster([node.address for node in nodes], min_replicas_to_write="1") as cluster:
            yield FaultyRedisCluster(cluster, nodes)
    finally:
        for node in nodes:
            node.close()


def _key(topic: str) -> str:
    return f"outbox:{{{topic}}}"
