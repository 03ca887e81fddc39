"""What the tests of faults need of an engine: real servers that a test may break, behind proxies. Not a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tests.broker_adapter.publishing.engine_under_test import PlainMessage
from tests.engines.outbox_load import wait_for
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy


class EngineUnderFault(Protocol):
    """Servers of one engine: a cluster where the engine has one. One for all tests of a session."""

    copies_per_publish_max: int
    """How often one publish may store a message where its client sends again by itself: 1 where it does not."""

    @property
    def url(self) -> str:
        """A broker URL whose clients come through the proxies."""

    @property
    def proxies(self) -> Sequence[CuttingTcpProxy]:
        """What stands before each server."""

    def proxy_in_use(self, topic: str) -> CuttingTcpProxy:
        """The one through which a client publishes to a topic now."""

    def make_ordered_topic(self, topic: str) -> None:
        """Whose messages of a key are in order."""

    def read_partitions(self, topic: str) -> list[list[PlainMessage]]:
        """All that each queue, partition or stream of a topic has now, in order, by the plain client."""

    def kill_leader(self, topic: str) -> None:
        """End the server that stores a topic by SIGKILL."""

    def pause_leader(self, topic: str) -> None:
        """Stop it by SIGSTOP."""

    def restore(self) -> None:
        """Start what was killed, let go on what was paused; returns when all serve. From the main thread only."""


def used_proxy(proxies: Sequence[CuttingTcpProxy]) -> CuttingTcpProxy:
    """The proxy of a client that has one connection. Waits for it while the client connects again."""
    used: list[CuttingTcpProxy] = []

    def is_connected() -> bool:
        used.extend(proxy for proxy in proxies if proxy.is_used)
        return bool(used)

    wait_for(is_connected)
    return used[0]
