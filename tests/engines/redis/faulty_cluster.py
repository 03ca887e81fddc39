"""A Redis cluster of three masters and three replicas, each server told to others by the address of a proxy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from tests.broker_adapter.publishing.engine_under_test import PlainMessage
from tests.broker_adapter.redis.redis_cluster import MASTERS, RedisClusterServers, redis_cluster
from tests.broker_adapter.redis.redis_engine import plain_message
from tests.broker_adapter.redis.redis_server import HOST, RedisServer
from tests.engines.java_server import free_port
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy


class FaultyRedisCluster:
    """An EngineUnderFault. A topic is a stream on one of the masters; what is acknowledged is on its replica, too.

    Clients and replicas come through the proxies, the cluster's bus does not.
    """

    copies_per_publish_max = 1

    def __init__(self, cluster: RedisClusterServers, proxies: Sequence[CuttingTcpProxy]) -> None:
        self._cluster = cluster
        self._proxies = proxies

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

    def kill_leader(self, topic: str) -> None:
        """The master, by SIGKILL."""
        self._master(topic).kill()

    def pause_leader(self, topic: str) -> None:
        """The master, by SIGSTOP."""
        self._master(topic).pause()

    def restore(self) -> None:
        """Start what was killed, let go on what was paused; returns when each master has a replica in step."""
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
    ports = [free_port(HOST) for _ in range(2 * MASTERS)]
    proxies = [CuttingTcpProxy(port) for port in ports]
    try:
        with redis_cluster([(port, proxy.port) for port, proxy in zip(ports, proxies, strict=True)]) as cluster:
            yield FaultyRedisCluster(cluster, proxies)
    finally:
        for proxy in proxies:
            proxy.close()


def _key(topic: str) -> str:
    return f"outbox:{{{topic}}}"
