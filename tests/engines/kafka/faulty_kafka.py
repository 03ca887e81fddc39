"""Three nodes of Kafka, whose clients come through proxies, for the tests of faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tests.broker_adapter.publishing.engine_under_test import PlainMessage
from tests.engines.kafka.kafka_cluster import PROXIED, KafkaCluster
from tests.engines.kafka.kafka_engine import KafkaEngine
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy

PARTITIONS: Final = 3


class FaultyKafka:
    """An EngineUnderFault. Clients come through the proxies, the nodes reach each other through others."""

    copies_per_publish_max = 1

    def __init__(self, cluster: KafkaCluster) -> None:
        self._cluster = cluster
        self.url = f"kafka://{cluster.addresses(PROXIED)}"

    @property
    def proxies(self) -> Sequence[CuttingTcpProxy]:
        """One a node."""
        return [self._cluster.proxy(node) for node in self._cluster.nodes]

    def proxy_in_use(self, topic: str) -> CuttingTcpProxy:
        """That of the node which leads the first partition."""
        return self._cluster.proxy(self._cluster.leader(topic))

    def make_ordered_topic(self, topic: str) -> None:
        """Each node leads a partition, and has a replica of each."""
        self._cluster.make_topic(topic, partitions=PARTITIONS)

    def read_partitions(self, topic: str) -> list[list[PlainMessage]]:
        """Of each partition all records."""
        return KafkaEngine(self._cluster).read_partitions(topic)

    def kill_leader(self, topic: str) -> None:
        """Of the first partition, by SIGKILL."""
        self._cluster.kill9(self._cluster.leader(topic))

    def kill_controller(self) -> None:
        """Of three partitions on three nodes it leads one."""
        self._cluster.kill9(self._cluster.active_controller())

    def pause_leader(self, topic: str) -> None:
        """Of the first partition, by SIGSTOP."""
        self._cluster.pause(self._cluster.leader(topic))

    def isolate_leader(self, topic: str) -> int:
        """Of the first partition, from the other nodes until `restore`: clients reach it. Returns which one that is."""
        leader = self._cluster.leader(topic)
        self._cluster.isolate(leader)
        return leader

    def leader_by_others(self, topic: str, isolated: int) -> int:
        """The leader of the first partition, as a node says that is not the isolated one."""
        other = next(node for node in self._cluster.nodes if node != isolated)
        return self._cluster.leader(topic, asked=other)

    def restore(self) -> None:
        """Returns when all nodes serve and all replicas are in sync."""
        self._cluster.start()
