"""A broker whose shard is owned by one of several processes, and the balancer before them. Not a test."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import SIGKILL

import requests

from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy
from tests.outbox_broker.cluster.conftest import SECONDS_MAX
from tests.outbox_broker.cluster.node_process import NodeProcess

PROBE_SECONDS_MAX = 5
_numbers = itertools.count()


class BrokerNodes:
    """Nodes of one broker, and a balancer that leads clients to the one that says that it is ready."""

    def __init__(
        self, hosts: str, folder: Path, stack: ExitStack, *, settings: Mapping[str, str] | None = None
    ) -> None:
        """`hosts`: ZooKeeper's. `settings`: of all nodes; without them their segments are in a folder."""
        self.store = f"bookkeeper://{hosts}/broker/{next(_numbers)}"
        self.nodes: dict[str, NodeProcess] = {}
        self._folder = folder
        self.settings = settings or {"shared_folder": str(folder / "segments")}
        self._proxy = CuttingTcpProxy(0)
        self.url = f"http://127.0.0.1:{self._proxy.port}"
        self._ended = threading.Event()
        self._balancing = threading.Thread(target=self._balance, daemon=True)
        stack.callback(self._close)
        self._balancing.start()

    def start(self, name: str, **settings: str) -> NodeProcess:
        """Start a node; returns once it answers, whether it serves or stands by."""
        node = self.nodes[name] = NodeProcess(
            name, store=self.store, target=None, folder=self._folder, settings={**self.settings, **settings}
        )
        node.start()
        return node

    def wait_for_owner(self, *, but: NodeProcess | None = None) -> NodeProcess:
        """Wait until a node is ready, other than `but`; returns it."""
        deadline = time.monotonic() + SECONDS_MAX
        while time.monotonic() < deadline:
            for node in self.nodes.values():
                if node is not but and node.url and is_ready(node.url):
                    return node
            self._ended.wait(0.05)
        raise AssertionError("no node became ready:\n" + "\n".join(node.log for node in self.nodes.values()))

    def _balance(self) -> None:
        owner = ""
        while not self._ended.wait(0.05):
            ready = [node.url for node in list(self.nodes.values()) if node.url and is_ready(node.url)]
            if ready and owner not in ready:
                owner = ready[0]
                self._proxy.lead_to(int(owner.rpartition(":")[2]))
                self._proxy.hang_up()

    def _close(self) -> None:
        self._ended.set()
        self._balancing.join()
        self._proxy.close()
        for node in self.nodes.values():
            node.end(SIGKILL)


def is_ready(url: str) -> bool:
    """Whether a node says that it serves the broker."""
    with suppress(requests.RequestException):
        return requests.get(f"{url}/readyz", timeout=PROBE_SECONDS_MAX).status_code == 200
    return False
