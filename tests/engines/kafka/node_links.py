"""The network between Kafka's nodes: a proxy for each way from one node to another, so that one can be isolated.

Nodes call each other by name. Each has a file of hosts of its own, by which a name is the address of its own link.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.engines.java_server import own_loopback_network
from tests.fixtures.cutting_tcp_proxy import HOST, CuttingTcpProxy


class NodeLinks:
    """Links of nodes that listen on HOST. A node without others has none."""

    def __init__(self, ports: Mapping[int, Sequence[int]]) -> None:
        """`ports`: where each node listens for others."""
        self._nodes = list(ports)
        self._network = own_loopback_network()
        self._proxies = {
            (source, target, port): CuttingTcpProxy(port, listen=(self._address(source, target), port))
            for source, target in itertools.permutations(self._nodes, 2)
            for port in ports[target]
        }

    def name_of(self, node: int) -> str:
        """What the nodes call it."""
        return f"node{node}"

    def write_hosts(self, path: Path, *, node: int) -> None:
        """Write the file by which this node finds the others (`jdk.net.hosts.file`)."""
        names = {self.name_of(one): HOST if one == node else self._address(node, one) for one in self._nodes}
        names |= {"localhost": HOST, socket.gethostname(): HOST}
        path.write_text("".join(f"{address} {name}\n" for name, address in names.items()))

    def isolate(self, node: int) -> None:
        """Pass nothing on from or to a node, until `heal`."""
        for (source, target, _), proxy in self._proxies.items():
            if node in (source, target):
                proxy.partition()

    def heal(self) -> None:
        """Mend all links."""
        for proxy in self._proxies.values():
            proxy.heal()

    def close(self) -> None:
        """End all proxies."""
        for proxy in self._proxies.values():
            proxy.close()

    def _address(self, source: int, target: int) -> str:
        return f"{self._network}.{10 * source + target}"
