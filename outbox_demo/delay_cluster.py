"""The delay cluster in the demo: two nodes, whose shards are on BookKeeper.

In the middle a bookie and an owner are killed; then a node is paused until its session with ZooKeeper has expired, and
goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from outbox_broker.cluster.cluster_admin import ClusterState, init_cluster, read_state
from outbox_broker.cluster.cluster_settings import ClusterSettings, load_cluster_settings
from outbox_broker.cluster.shard_host import ShardState
from outbox_broker.cluster.znode_records import ZnodeLayout
from outbox_core.common.errors import BrokerUnavailable, OutboxError
from outbox_core.zookeeper.zookeeper_errors import CoordinatorUnavailable
from outbox_core.zookeeper.zookeeper_session import ZooKeeperSession
from outbox_demo.bookkeeper_servers import BookKeeperUnderDemo
from outbox_demo.delay_engine_port import ProducerRoute, with_option
from outbox_demo.plan import DemoPlan, RunTopics
from outbox_demo.processes import ProcessGroup
from outbox_demo.scheduled_message_query import ScheduledMessageQuery
from outbox_demo.server_process import ServerProcess

SHARDS: Final = 4
SETTINGS: Final = {"OUTBOX_CLUSTER__SESSION_MS": "4000", "OUTBOX_CLUSTER__DRAIN_MS": "0"}
"""Of the demo's nodes, where the environment says nothing else: at its end there is nobody to hand shards over to."""


class DelayCluster:
    """A DelayEngine on bookies of the run's own, or such that are there already."""

    def __init__(
        self, servers: BookKeeperUnderDemo, *, topics: RunTopics, folder: Path, processes: ProcessGroup,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`folder`: that of the run; `say` reports what happens to the nodes."""
        self._servers = servers
        self._topics = topics
        self._processes = processes
        self._say = say
        environment = {
            **{name: setting for name, setting in SETTINGS.items() if name not in os.environ}, **servers.environment
        }  # fmt: skip
        self._first, self._second = (
            ServerProcess(
                f"delay-{node_number}", ["outbox", "delay", "serve"], folder=folder, processes=processes,
                environment=environment,
            )
            for node_number in (1, 2)
        )  # fmt: skip
        self._environment = environment
        self._target_url = ""
        self._settings: ClusterSettings | None = None
        self._session: ZooKeeperSession | None = None
        self._messages: ScheduledMessageQuery | None = None

    def start(self, target_url: str) -> ProducerRoute:
        """Start the servers, make a cluster of the run's own, and start its nodes; producers know the second one."""
        self._target_url = target_url
        address = f"{self._servers.start()}/{self._topics.run}"
        self._settings = load_cluster_settings({"store": address}, file=None)
        init_cluster(self._connected(), self._layout, shards=SHARDS)
        for node in (self._first, self._second):
            self._start(node)
        self._wait_until_served(self._first, self._second)
        self._messages = ScheduledMessageQuery(self._second.url)
        return ProducerRoute(broker_url=with_option(target_url, "delay", self._second.url))

    def start_workers(self, plan: DemoPlan) -> None:
        """Nothing: it needs no database."""

    def kill(self) -> str:
        """Kill a bookie of the run's own, and a node that owns shards."""
        killed = self._servers.kill()
        self._first.kill()
        return ", ".join(victim for victim in (killed, "an owner of shards") if victim)

    def restart(self) -> str:
        """Start both again when the other node owns all shards; then have a session expire, and let its node go on."""
        self._wait_until_served(self._second)
        self._say("the other node owns all shards")
        restarted = self._servers.restart()
        self._start(self._first)
        self._wait_until_served(self._first, self._second)
        self._first.pause()
        self._say("a node paused, until ZooKeeper has ended its session")
        self._wait_until_served(self._second)
        self._first.go_on()
        self._wait_until_served(self._first, self._second)
        self._say("it went on, and owns shards again, by a new session")
        return ", ".join(restarted_part for restarted_part in (restarted, "the owner of shards") if restarted_part)

    def scheduled(self) -> int:
        """Returns how many messages wait in all shards."""
        return self._asked().count(self._topics.names)

    def waiting(self, ids: Collection[str]) -> frozenset[str]:
        """Returns those of these messages that wait."""
        return self._asked().find(ids)

    def close(self) -> None:
        """Remove the run's cluster from servers that are not its own, and close the connections."""
        if self._messages is not None:
            self._messages.close()
        if self._session is None:
            return
        try:
            if not self._servers.is_own:
                self._remove(self._connected())
        except OutboxError as error:
            self._say(f"the run's cluster was left at {self._layout.root}: {error}")
        finally:
            self._session.close()

    def _start(self, node: ServerProcess) -> None:
        node.start("--store", self._store, "--target", self._target_url, "--name", node.name)

    def _remove(self, session: ZooKeeperSession) -> None:
        """Delete the manifests first: the sweep deletes what none names."""
        for shard in session.children(self._layout.shards):
            session.delete(f"{self._layout.shards}/{shard}")
        sweep = ["outbox", "delay", "sweep", "--store", self._store, "--retention", "0s"]
        process = self._processes.start("delay-sweep", sweep, environment=self._environment)
        process.wait()
        for folder in (self._layout.nodes, self._layout.contacts, self._layout.owners, self._layout.drains):
            for name in session.children(folder):
                session.delete(f"{folder}/{name}")
        for path in (self._layout.config, self._layout.assignment, self._layout.leader, *self._layout.folders):
            session.delete(path)
        session.delete(self._layout.root)

    @property
    def _store(self) -> str:
        return self._loaded().store

    @property
    def _layout(self) -> ZnodeLayout:
        return ZnodeLayout(self._loaded().address.root)

    def _loaded(self) -> ClusterSettings:
        if self._settings is None:
            raise BrokerUnavailable("the delay cluster was not started")
        return self._settings

    def _asked(self) -> ScheduledMessageQuery:
        if self._messages is None:
            raise BrokerUnavailable("the delay cluster was not started")
        return self._messages

    def _wait_until_served(self, *nodes: ServerProcess) -> None:
        names = {node.name for node in nodes}
        self._processes.wait_for(
            f"{' and '.join(sorted(names))} to own all shards", lambda: _is_served(self._state(), names)
        )

    def _state(self) -> ClusterState | None:
        """Returns the cluster as it is; None while ZooKeeper does not answer."""
        try:
            return read_state(self._connected(), self._layout)
        except CoordinatorUnavailable:
            return None

    def _connected(self) -> ZooKeeperSession:
        """Returns a session of the demo's own, a new one where the last one has ended."""
        if self._session is None or self._session.is_ended:
            if self._session is not None:
                self._session.close()
            settings = self._loaded()
            self._session = ZooKeeperSession(settings.address, options=settings.session)
        return self._session


def _is_served(state: ClusterState | None, names: set[str]) -> bool:
    """Whether these nodes are all that are alive, each owns shards, and every shard is served."""
    if state is None or state.waiting or {node.name for node in state.view.nodes.values()} != names:
        return False
    owners = state.view.owners.values()
    serving = [state.view.nodes[shard.node].name for shard in owners if shard.node in state.view.nodes]
    return (
        len(serving) == SHARDS and set(serving) == names and all(shard.state == ShardState.SERVING for shard in owners)
    )
