"""A delay cluster of nodes as processes, in front of a broker, and what its tests ask of it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from typer.testing import CliRunner

from broker_adapter.http import HttpBroker
from broker_adapter.http.publish_batching import REQUESTS_IN_FLIGHT_MAX
from outbox_broker.cluster.shard_names import ShardMap
from outbox_broker.delay_service.cli import app
from outbox_broker.engine.engine import Engine
from outbox_broker.http.service_ports import ServicePorts
from outbox_core import Message
from outbox_core.common.errors import BrokerError
from outbox_core.zookeeper.zookeeper_errors import CoordinatorUnavailable
from tests.broker_adapter.servers import serving
from tests.outbox_broker.cluster.conftest import SECONDS_MAX, eventually
from tests.outbox_broker.cluster.node_process import NodeProcess
from tests.outbox_broker.cluster.recorded_target import RecordedTarget

SHARDS = 8
DUE_MS = 3_000
PATIENCE = {"OUTBOX_CLUSTER__SESSION_MS": "30000"}
"""How long commands wait for ZooKeeper: not the 5 s of the default, which an election on a busy machine outlasts."""
_numbers = itertools.count()


class RunningCluster:
    """A broker, and nodes in front of it."""

    def __init__(
        self, hosts: str, folder: Path, stack: ExitStack, *, settings: Mapping[str, str] | None = None
    ) -> None:
        """`hosts`: ZooKeeper's. `settings`: of all nodes; without them their segments are in a folder."""
        self.store = f"bookkeeper://{hosts}/nodes/{next(_numbers)}"
        self._hosts = hosts
        self._settings = settings or {"shared_folder": str(folder / "segments")}
        self.folder = folder
        self._engine = Engine.open(folder / "broker")
        stack.callback(self._engine.close)
        self._stack = stack
        self.target = stack.enter_context(serving(self._engine)).url
        self.nodes: list[NodeProcess] = []
        assert self.command("init", "--shards", str(SHARDS)).exit_code == 0
        stack.callback(self._kill)

    @property
    def environment(self) -> dict[str, str]:
        """The settings as a process has them, for commands that need more than the cluster's address."""
        return {f"OUTBOX_CLUSTER__{name.upper()}": value for name, value in self._settings.items()}

    def recorded_target(self) -> tuple[RecordedTarget, str]:
        """Returns another way to the same broker, and its URL."""
        recorded = RecordedTarget(self._engine)
        self._stack.callback(recorded.release)
        ports = replace(ServicePorts.of(self._engine), producers=recorded)
        server = self._stack.enter_context(serving(ports))
        self._stack.callback(recorded.release)
        return recorded, server.url

    def node(
        self, name: str, *, target: str | None = None, zookeeper: str | None = None, **settings: str
    ) -> NodeProcess:
        """Start a node. `zookeeper`: the way by which it reaches ZooKeeper."""
        merged = {**self._settings, **settings}
        store = self.store if zookeeper is None else self.store.replace(self._hosts, zookeeper)
        node = NodeProcess(name, store=store, target=target or self.target, folder=self.folder, settings=merged)
        self.nodes.append(node)
        node.start()
        return node

    def command(self, name: str, *arguments: str) -> Any:
        """Run a command of `outbox delay`. Raises its error: what it has printed then says nothing."""
        command = [name, "--store", self.store, *arguments]
        return CliRunner().invoke(app, command, env=PATIENCE, catch_exceptions=False)

    def status(self) -> dict[str, Any]:
        """What `outbox delay status` shows."""
        shown: dict[str, Any] = json.loads(self.command("status", "--json").stdout)
        return shown

    def sweep(self, *arguments: str) -> dict[str, Any]:
        """What `outbox delay sweep` prints, in a process of its own, since it starts a JVM."""
        command = ["outbox", "delay", "sweep", "--store", self.store, "--json", *arguments]
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True,
            env=os.environ | self.environment | PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        shown: dict[str, Any] = json.loads(done.stdout)
        return shown

    def wait_until_shown(self, holds: Callable[[dict[str, Any]], bool], *, what: str) -> None:
        """Wait until `outbox delay status` shows what holds. While no server of ZooKeeper answers it shows nothing."""

        def is_shown() -> bool:
            try:
                return holds(self.status())
            except CoordinatorUnavailable:
                return False

        eventually(is_shown, what=what)

    def wait_until_served(self, *nodes: NodeProcess) -> None:
        """Wait until these nodes, and no others, serve every shard."""
        names = {node.name for node in nodes}

        def is_served(status: Mapping[str, Any]) -> bool:
            owners = [one["node"] for one in status["shards"].values() if one["state"] == "serving"]
            return len(owners) == SHARDS and set(owners) == names and not status["waiting"]

        self.wait_until_shown(is_served, what=f"all shards served by {names}")

    def wait_until_alive(self, *names: str) -> None:
        """Wait until the nodes that are alive are these."""
        self.wait_until_shown(
            lambda status: [one["name"] for one in status["nodes"]] == list(names), what=f"{names} are alive"
        )

    def pause_while_sending(self) -> set[str]:
        """Pause a node that has handed messages to its sender until another node has sent everything, and let it go on.

        Returns the ids that the paused node had handed over. Fails unless that is all that it sends of these messages,
        and unless its successor sends them again, since what the paused node does afterwards does not count.
        """
        (first_sent, first_url), (second_sent, second_url) = self.recorded_target(), self.recorded_target()
        paused, successor = self.node("paused", target=first_url), self.node("successor", target=second_url)
        self.wait_until_served(paused, successor)
        first_sent.hold()
        batch = messages(400, prefix="in-flight-")
        publish(successor.url, batch)
        eventually(
            lambda: first_sent.held == REQUESTS_IN_FLIGHT_MAX,
            what="as many requests as are in flight at a time",
        )
        firsts = self._first_of_each_shard(batch, node=paused)
        eventually(
            lambda: not any(self._is_scheduled(one, at=successor) for one in firsts),
            what="something of each shard, handed over",
        )
        paused.pause()
        self.wait_until_alive("successor")
        self.remove_locks()
        self.wait_until_served(successor)
        ids = {message.id for message in batch}
        came = self.consume(ids)
        handed = first_sent.sent
        first_sent.release()
        paused.resume()
        self.wait_until_served(paused, successor)
        later = messages(100, prefix="later-")
        publish(paused.url, later)
        came += self.consume({message.id for message in later})

        beyond = (first_sent.sent & ids) - handed
        assert not beyond, f"{len(beyond)} more than {len(handed)} messages: {sorted(beyond)[:9]}"
        assert handed <= second_sent.sent
        assert len({one for one, _ in came}) == len(came) == 500, "a repetition was not dropped by its id"
        assert min(late_ms for _, late_ms in came) >= 0
        return handed

    def _first_of_each_shard(self, batch: Sequence[Message], *, node: NodeProcess) -> list[Message]:
        """Returns the first message of each shard of a node."""
        shards = {shard for shard, one in self.status()["shards"].items() if one["node"] == node.name}
        names = ShardMap([SHARDS])
        first = {names.shard_of(one.id): one for one in reversed(batch)}
        return [one for shard, one in first.items() if shard in shards]

    def _is_scheduled(self, message: Message, *, at: NodeProcess) -> bool:
        """Returns whether a message can still be canceled."""
        return requests.get(f"{at.url}/v1/scheduled/{message.id}", timeout=60).status_code == 200

    def remove_locks(self) -> None:
        """Remove the locks of the shards' folders, as on a shared disk where they do not hold: the epoch fences."""
        for lock in (self.folder / "segments").glob("*/lock"):
            lock.unlink(missing_ok=True)

    def consume(self, ids: set[str]) -> list[tuple[str, int]]:
        """Consume until all of these ids came; returns (id, milliseconds after the due time) of all deliveries."""
        broker, came = HttpBroker(self.target), []
        deadline = time.monotonic() + SECONDS_MAX
        try:
            while missing := ids - {one for one, _ in came}:
                assert time.monotonic() < deadline, f"{len(missing)} of {len(ids)} messages are missing"
                deliveries = broker.pull("t", "g", wait_ms=500)
                now_ms = time.time_ns() // 1_000_000
                came += [(one.id, now_ms - int(one.headers["outbox-deliver-at-ms"])) for one in deliveries]
                broker.ack([one.receipt for one in deliveries])
        finally:
            broker.close()
        return came

    def _kill(self) -> None:
        for node in self.nodes:
            node.end(signal.SIGKILL)


def messages(count: int, *, due_in_ms: int = DUE_MS, prefix: str = "m") -> list[Message]:
    deliver_at_ms = time.time_ns() // 1_000_000 + due_in_ms
    return [
        Message(id=f"{prefix}{number}", topic="t", body=b"body", deliver_at_ms=deliver_at_ms + number)
        for number in range(count)
    ]


def publish(url: str, batch: Sequence[Message]) -> None:
    """Publish until it is answered, as the SDK does."""
    broker = HttpBroker(url)
    try:
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            try:
                assert all(result.status.is_success for result in broker.publish(batch))
                return
            except BrokerError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        broker.close()


def refusal(url: str) -> str:
    """Returns why a batch for all shards is refused; a shard that is being opened is a reason, too."""
    broker = HttpBroker(url)
    try:
        with pytest.raises(BrokerError) as refused:
            broker.publish(messages(50))
    finally:
        broker.close()
    return str(refused.value)
