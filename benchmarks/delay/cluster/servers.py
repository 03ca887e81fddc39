"""Starts what a delay cluster needs: ZooKeeper, bookies and BookKeeper's client in this process, and makes clusters."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outbox_broker.cluster.bookkeeper.java_ledgers import BookKeeperOptions, JavaLedgers
from outbox_broker.cluster.bookkeeper.java_runtime import JARS_VARIABLE, JavaRuntime, JvmOptions
from outbox_broker.cluster.cluster_admin import init_cluster, read_state
from outbox_broker.cluster.znode_records import ClusterConfig, ZnodeLayout
from outbox_core.zookeeper.zookeeper_session import SessionOptions, ZooKeeperSession
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperAddress
from tests.engines import bookkeeper as engine_tests
from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.engines.jars import fetched_jars
from tests.engines.java_server import java_home
from tests.outbox_broker.cluster.broker_nodes import is_ready
from tests.outbox_broker.cluster.node_process import NodeProcess

BOOKIES: Final = 3
SESSION_MS: Final = 30_000
"""Of the clients in this process, whose threads share it with those that publish."""
PASSWORD: Final = "of the ledgers"
SERVED_SECONDS_MAX: Final = 120
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Running servers, whose data are in `folder`."""

    folder: Path
    jars: Path
    bookkeeper: BookKeeperCluster

    def new_cluster(self, *, shards: int) -> tuple[ZooKeeperAddress, ClusterConfig]:
        """Make the znodes of another delay cluster."""
        address = ZooKeeperAddress(hosts=self.bookkeeper.zookeeper_hosts, root=f"/bench/{next(_numbers)}")
        with contextlib.closing(ZooKeeperSession(address, options=SessionOptions(session_ms=SESSION_MS))) as session:
            return address, init_cluster(session, ZnodeLayout(address.root), shards=shards)

    @contextlib.contextmanager
    def broker(self, name: str) -> Iterator[NodeProcess]:
        """A broker of one node, which serves, as a process with the default settings."""
        address = ZooKeeperAddress(hosts=self.bookkeeper.zookeeper_hosts, root=f"/bench/{next(_numbers)}")
        with self.nodes(address, name, target=None) as [node]:
            deadline = time.monotonic() + SERVED_SECONDS_MAX
            while not is_ready(node.url):
                if time.monotonic() > deadline:
                    raise SystemExit(f"the broker is not served: {node.log}")
                time.sleep(0.05)
            yield node

    @contextlib.contextmanager
    def nodes(self, address: ZooKeeperAddress, *names: str, target: str | None) -> Iterator[list[NodeProcess]]:
        """Nodes as processes with the default settings: three copies, of which two are waited for. Without a target: of
        a broker.
        """
        folder = self.folder / f"nodes-{next(_numbers)}"
        folder.mkdir()
        password = folder / "ledgers-password"
        password.write_text(PASSWORD)
        settings = {
            "ledgers_uri": self.bookkeeper.metadata_uri, "ledgers_password_file": str(password),
            "session_ms": str(SessionOptions().session_ms),
        }  # fmt: skip
        store = f"bookkeeper://{address.hosts}{address.root}"
        nodes = [NodeProcess(name, store=store, target=target, folder=folder, settings=settings) for name in names]
        try:
            for node in nodes:
                node.start()
            yield nodes
        finally:
            for node in nodes:
                node.end(signal.SIGKILL)

    @contextlib.contextmanager
    def ledgers(self) -> Iterator[JavaLedgers]:
        """A client of the bookies in this process, with the quorums of a node's."""
        runtime = JavaRuntime.start(jars=self.jars, options=JvmOptions(jvm=next(java_home().rglob("libjvm.so"))))
        # On a busy machine a bookie that answers late is not a lost one.
        options = BookKeeperOptions(password=PASSWORD.encode(), request_s_max=30, session_ms=SESSION_MS)
        with contextlib.closing(JavaLedgers(runtime, self.bookkeeper.metadata_uri, options=options)) as opened:
            yield opened


class ClusterWatch:
    """Reads a cluster's state from ZooKeeper."""

    def __init__(self, address: ZooKeeperAddress) -> None:
        self._layout = ZnodeLayout(address.root)
        self._session = ZooKeeperSession(address, options=SessionOptions(session_ms=SESSION_MS))

    def close(self) -> None:
        """End the session."""
        self._session.close()

    def owners(self) -> dict[str, str]:
        """Returns the node of each shard that is served, by name."""
        view = read_state(self._session, self._layout).view
        return {
            shard: view.nodes[owner.node].name
            for shard, owner in view.owners.items()
            if owner.state == "serving" and owner.node in view.nodes
        }

    def wait_until_served(self, *, shards: int, by: set[str]) -> dict[str, str]:
        """Wait until these nodes serve all shards; returns the node of each."""
        deadline = time.monotonic() + SERVED_SECONDS_MAX
        while len(owners := self.owners()) < shards or set(owners.values()) != by:
            if time.monotonic() > deadline:
                raise SystemExit(f"the shards are not served by {by}: {owners}")
            time.sleep(0.05)
        return owners


@contextlib.contextmanager
def servers(folder: Path | None) -> Iterator[Servers]:
    """One ZooKeeper and three bookies on folders below `folder`, which sync before they answer. Main thread only."""
    jars = fetched_jars(Path(engine_tests.__path__[0]) / "pom.xml")
    os.environ[JARS_VARIABLE] = str(jars)
    os.environ["JAVA_HOME"] = str(java_home())
    with tempfile.TemporaryDirectory(prefix="outbox-bench-bookkeeper-", dir=folder, ignore_cleanup_errors=True) as name:
        bookkeeper = BookKeeperCluster(jars=jars, folder=Path(name), bookies=BOOKIES)
        try:
            bookkeeper.start()
            yield Servers(folder=Path(name), jars=jars, bookkeeper=bookkeeper)
        finally:
            bookkeeper.stop()


def arguments(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Returns a parser with the options that these programs share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=rounds, help=f"medians of so many ({rounds})")
    parser.add_argument("--folder", type=Path, help="where the servers have their data; the system's by default")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    return parser
