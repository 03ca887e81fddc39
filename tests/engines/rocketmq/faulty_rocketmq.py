"""A broker of RocketMQ whose proxy is reached through a proxy of ours, for the tests of faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tests.broker_adapter.publishing.engine_under_test import PlainMessage
from tests.engines.rocketmq.rocketmq_cluster import RocketMqCluster
from tests.engines.rocketmq.rocketmq_engine import RocketMqEngine
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy

QUEUES: Final = 4


class FaultyRocketMq:
    """An EngineUnderFault."""

    copies_per_publish_max = 1

    def __init__(self, cluster: RocketMqCluster, proxy: CuttingTcpProxy) -> None:
        self._cluster = cluster
        self._proxy = proxy
        self.url = cluster.url(port=proxy.port)

    @property
    def proxies(self) -> Sequence[CuttingTcpProxy]:
        """The one."""
        return [self._proxy]

    def proxy_in_use(self, topic: str) -> CuttingTcpProxy:
        """The one."""
        return self._proxy

    def make_ordered_topic(self, topic: str) -> None:
        """Of kind FIFO."""
        RocketMqEngine(self._cluster).make_topic(topic, kind="FIFO", queues=QUEUES)

    def read_partitions(self, topic: str) -> list[list[PlainMessage]]:
        """Of each queue all messages."""
        return RocketMqEngine(self._cluster).read_queues(topic)

    def kill_leader(self, topic: str) -> None:
        """The broker, by SIGKILL."""
        self._cluster.kill_broker()

    def pause_leader(self, topic: str) -> None:
        """The broker, by SIGSTOP."""
        self._cluster.pause_broker()

    def restore(self) -> None:
        """Returns when all serve."""
        self._cluster.start()
