"""Nodes as processes in front of a real broker: killed, paused, drained and restarted; nothing lost, nothing early."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests
from typer.testing import CliRunner

from broker_adapter.http import HttpBroker
from outbox_broker.delay_service.cli import app
from outbox_core import Message
from outbox_core.common.errors import BrokerError
from tests.broker_adapter.servers import served
from tests.outbox_broker.cluster.conftest import eventually
from tests.outbox_broker.cluster.node_process import NodeProcess
from tests.outbox_broker.cluster.zookeeper_server import ZooKeeper

pytestmark = [pytest.mark.processes, pytest.mark.slow]
SHARDS = 8
DUE_MS = 3_000
_numbers = itertools.count()


class RunningCluster:
    """A broker, and nodes in front of it."""

    def __init__(self, server: ZooKeeper, folder: Path, stack: ExitStack) -> None:
        self.store = f"bookkeeper://{server.hosts}/nodes/{next(_numbers)}"
        self.folder = folder
        self.target = stack.enter_context(served(folder / "broker")).url
        self.nodes: list[NodeProcess] = []
        assert self.command("init", "--shards", str(SHARDS)).exit_code == 0
        stack.callback(self._kill)

    def node(self, name: str, **settings: str) -> NodeProcess:
        """Start a node."""
        node = NodeProcess(name, store=self.store, target=self.target, folder=self.folder, settings=settings)
        self.nodes.append(node)
        node.start()
        return node

    def command(self, name: str, *arguments: str) -> Any:
        """Run a command of `outbox delay`."""
        return CliRunner().invoke(app, [name, "--store", self.store, *arguments])

    def status(self) -> dict[str, Any]:
        """What `outbox delay status` shows."""
        shown: dict[str, Any] = json.loads(self.command("status", "--json").stdout)
        return shown

    def wait_until_served(self, *nodes: NodeProcess) -> None:
        """Wait until these nodes, and no others, serve every shard."""
        names = {node.name for node in nodes}

        def is_served() -> bool:
            status = self.status()
            owners = [one["node"] for one in status["shards"].values() if one["state"] == "serving"]
            return len(owners) == SHARDS and set(owners) == names and not status["waiting"]

        eventually(is_served, what=f"all shards served by {names}")

    def remove_locks(self) -> None:
        """Remove the locks of the shards' folders, as on a shared disk where they do not hold: the epoch fences."""
        for lock in (self.folder / "segments").glob("*/lock"):
            lock.unlink(missing_ok=True)

    def consume(self, ids: set[str]) -> list[tuple[str, int]]:
        """Consume until all of these ids came; returns (id, milliseconds after the due time) of all deliveries."""
        broker, came = HttpBroker(self.target), []
        deadline = time.monotonic() + 240
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


def refusal(url: str) -> str:
    """Returns why a batch for all shards is refused; a shard that is being opened is a reason, too."""
    broker = HttpBroker(url)
    try:
        with pytest.raises(BrokerError) as refused:
            broker.publish(messages(50))
    finally:
        broker.close()
    return str(refused.value)


@pytest.fixture
def running(running_zookeeper: ZooKeeper, tmp_path: Path) -> Iterator[RunningCluster]:
    """A cluster without nodes."""
    with ExitStack() as stack:
        yield RunningCluster(running_zookeeper, tmp_path, stack)


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
        deadline = time.monotonic() + 120
        while True:
            try:
                assert all(result.status.is_success for result in broker.publish(batch))
                return
            except BrokerError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        broker.close()


def test_any_node_takes_any_request_and_every_message_comes_once_at_its_time(running: RunningCluster) -> None:
    first, second = running.node("n1"), running.node("n2")
    running.wait_until_served(first, second)
    batch = messages(200)
    publish(first.url, batch)
    broker = HttpBroker(second.url)

    again = broker.publish(batch[:50])
    canceled = broker.cancel([message.id for message in batch[50:100]])
    counts = requests.get(f"{first.url}/v1/scheduled?bucket=day&topic=t", timeout=60).json()["counts"]
    one = requests.get(f"{first.url}/v1/scheduled/{batch[199].id}", timeout=60).json()
    came = running.consume({message.id for message in [*batch[:50], *batch[100:]]})
    broker.close()

    assert {result.status for result in again} == {"duplicate"}
    assert set(canceled) == {"canceled"}
    assert sum(count["messages"] for count in counts) == 150
    assert one["deliver_at_ms"] == batch[199].deliver_at_ms
    assert len(came) == 150
    assert min(late_ms for _, late_ms in came) >= 0


def test_a_node_that_is_killed_loses_nothing(running: RunningCluster) -> None:
    first, second = running.node("n1"), running.node("n2")
    running.wait_until_served(first, second)
    batch = messages(300)
    publish(second.url, batch[:150])

    first.end(signal.SIGKILL)
    publish(second.url, batch[150:])
    came = running.consume({message.id for message in batch})

    running.wait_until_served(second)
    assert len({one for one, _ in came}) == len(came) == 300


def test_a_paused_owner_that_wakes_up_neither_accepts_nor_sends_for_its_former_shards(running: RunningCluster) -> None:
    first, second = running.node("n1"), running.node("n2")
    running.wait_until_served(first, second)
    batch = messages(200, due_in_ms=8_000)
    publish(second.url, batch)

    first.send_signal(signal.SIGSTOP)
    eventually(lambda: [one["name"] for one in running.status()["nodes"]] == ["n2"], what="the paused node is gone")
    running.remove_locks()
    running.wait_until_served(second)
    came = running.consume({message.id for message in batch})
    first.send_signal(signal.SIGCONT)
    running.wait_until_served(first, second)
    more = messages(100, prefix="later")
    publish(first.url, more)
    came += running.consume({message.id for message in more})

    assert len({one for one, _ in came}) == len(came) == 300
    assert min(late_ms for _, late_ms in came) >= 0


def test_a_rolling_restart_under_load_loses_nothing_and_waits_for_nobody_for_long(running: RunningCluster) -> None:
    nodes = running.node("n1"), running.node("n2"), running.node("n3")
    running.wait_until_served(*nodes)
    published: set[str] = set()
    is_over = threading.Event()

    def load() -> None:
        for number in itertools.count():
            if is_over.is_set():
                return
            batch = messages(20, prefix=f"b{number}-")
            publish(nodes[number % 3].url, batch)
            published.update(message.id for message in batch)

    loader = threading.Thread(target=load)
    loader.start()
    try:
        for node in nodes:
            assert node.end(signal.SIGTERM) == 0
            assert "Traceback" not in node.log
            node.start()
            running.wait_until_served(*nodes)
    finally:
        is_over.set()
        loader.join()
    came = running.consume(published)

    assert len({one for one, _ in came}) == len(came) == len(published)


def test_a_node_that_is_drained_gives_its_shards_away_until_the_drain_is_undone(running: RunningCluster) -> None:
    first, second = running.node("n1"), running.node("n2")
    running.wait_until_served(first, second)

    assert running.command("drain", "--node", "n1").exit_code == 0
    running.wait_until_served(second)
    assert {one["name"]: one["unable"] for one in running.status()["nodes"]} == {"n1": "it is draining", "n2": None}
    publish(first.url, messages(10, prefix="through-the-drained-node"))
    assert running.command("drain", "--node", "n1", "--undo").exit_code == 0

    running.wait_until_served(first, second)


def test_nodes_with_different_tokens_refuse_each_other_and_say_so(running: RunningCluster) -> None:
    tokens = [running.folder / "one", running.folder / "two"]
    for number, token in enumerate(tokens):
        token.write_text(f"token of node {number}")
    first = running.node("n1", peer_token_file=str(tokens[0]))
    second = running.node("n2", peer_token_file=str(tokens[1]))
    running.wait_until_served(first, second)

    eventually(lambda: "peer_token_file" in refusal(first.url), what="the refusal of the token")


def test_a_cluster_without_nodes_shows_why_its_shards_wait(running: RunningCluster) -> None:
    shown = running.command("status")

    assert shown.exit_code == 1
    assert "shard 0-0000 waits: no node is alive" in shown.stdout


def test_a_node_without_a_cluster_ends_with_the_cure(running: RunningCluster) -> None:
    node = NodeProcess("n1", store=running.store + "/other", target=running.target, folder=running.folder)

    with pytest.raises(AssertionError, match="outbox delay init"):
        node.start()


def test_a_node_refuses_what_it_cannot_forward(running: RunningCluster) -> None:
    only = running.node("n1", capacity="4")
    eventually(lambda: len(running.status()["shards"]) == 4, what="four shards served")

    eventually(lambda: "no node has room" in refusal(only.url), what="the refusal for lack of room")
