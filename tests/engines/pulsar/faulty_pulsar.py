"""A server of Pulsar whose clients come through a proxy, for the tests of faults."""

from __future__ import annotations

from collections.abc import Sequence

from tests.broker_adapter.publishing.engine_under_test import PlainMessage
from tests.engines.pulsar.pulsar_engine import SUBSCRIPTION, PulsarEngine
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy


class FaultyPulsar:
    """An EngineUnderFault."""

    copies_per_publish_max = 2
    """Pulsar's client connects again within a publish, and sends what had no receipt again."""

    def __init__(self, engine: PulsarEngine) -> None:
        self._engine = engine
        self.url = f"pulsar://{engine.server.host}:{engine.server.proxy.port}"

    @property
    def proxies(self) -> Sequence[CuttingTcpProxy]:
        """The one."""
        return [self._engine.server.proxy]

    def proxy_in_use(self, topic: str) -> CuttingTcpProxy:
        """The one."""
        return self._engine.server.proxy

    def make_ordered_topic(self, topic: str) -> None:
        """Of one partition, with a subscription."""
        self._engine.make_topic(topic)

    def read_partitions(self, topic: str) -> list[list[PlainMessage]]:
        """All that the subscription has: each message is an entry of its own."""
        stats = self._engine.server.ask("GET", f"persistent/public/default/{topic}/stats").json()
        return [self._engine.read(topic, count=stats["subscriptions"][SUBSCRIPTION]["msgBacklog"])]

    def kill_leader(self, topic: str) -> None:
        """The server, by SIGKILL."""
        self._engine.kill()

    def pause_leader(self, topic: str) -> None:
        """The server, by SIGSTOP."""
        self._engine.server.pause()

    def restore(self) -> None:
        """Let it go on, or start it; returns when it serves."""
        self._engine.start()
