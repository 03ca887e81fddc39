"""Nodes of one broker as processes, on a folder that they share in place of bookies: one serves, one stands by."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests
from click.testing import Result
from typer.testing import CliRunner

from broker_adapter.http.broker_cli import app as broker_app
from outbox_broker.server.cli import app
from outbox_broker.server.store_cli import app as store_app
from outbox_core import Message, connect
from outbox_core.common.errors import ConfigurationError
from tests.fixtures.zookeeper_server import ZooKeeper
from tests.outbox_broker.client_load import GROUP, TOPIC, Known, Load, check_restored
from tests.outbox_broker.cluster.broker_nodes import BrokerNodes
from tests.outbox_broker.cluster.conftest import eventually
from tests.outbox_broker.cluster.running_cluster import RunningCluster

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
def nodes(running_zookeeper: ZooKeeper, tmp_path: Path) -> Iterator[BrokerNodes]:
    """A broker without nodes."""
    with ExitStack() as stack:
        yield BrokerNodes(running_zookeeper.hosts, tmp_path, stack)


def test_a_node_that_stands_by_refuses_all_and_says_who_serves(nodes: BrokerNodes) -> None:
    first = nodes.start("n1", session_ms="30000")
    assert nodes.wait_for_owner() is first
    second = nodes.start("n2", session_ms="30000")

    ready = requests.get(f"{second.url}/readyz", timeout=60)
    refused = requests.post(f"{second.url}/v1/publish", json={"messages": []}, timeout=60)
    pulled = requests.post(f"{second.url}/v1/topics/{TOPIC}/groups/{GROUP}/pull", json={"wait_ms": 1000}, timeout=60)
    metrics = requests.get(f"{second.url}/metrics", timeout=60)

    assert ready.status_code == 503
    assert f"node n1 at {first.url} serves the broker" in ready.text
    assert (refused.status_code, pulled.status_code) == (503, 503)
    assert refused.headers["Retry-After"]
    assert f"node n1 at {first.url} serves the broker" in refused.json()["detail"]
    assert metrics.status_code == 200
    assert "disk_free_bytes" not in requests.get(f"{first.url}/metrics", timeout=60).text


def test_a_node_that_stops_hands_over_and_one_alone_stops_at_once(nodes: BrokerNodes) -> None:
    first = nodes.start("n1", session_ms="30000")
    nodes.wait_for_owner()
    second = nodes.start("n2", session_ms="30000")
    broker = connect(nodes.url)
    broker.publish([Message(id="a", topic=TOPIC, body=b"1"), Message(id="b", topic=TOPIC, body=b"2")])
    [kept] = broker.pull(TOPIC, GROUP, max_messages=1)

    assert first.end(signal.SIGTERM) == 0
    assert nodes.wait_for_owner() is second
    [other] = broker.pull(TOPIC, GROUP, wait_ms=60_000)
    statuses = broker.ack([kept.receipt, other.receipt])
    broker.close()

    assert [kept.id, other.id] == ["a", "b"]
    assert statuses == ["acked", "acked"]
    assert second.end(signal.SIGTERM) == 0


def test_a_node_that_is_killed_under_load_loses_nothing_that_was_acknowledged(nodes: BrokerNodes) -> None:
    nodes.start("n1")
    nodes.wait_for_owner()
    nodes.start("n2")
    load = Load(nodes.url, goes_on=True)

    with load.running():
        load.wait_for(5)
        for _ in range(2):
            owner = nodes.wait_for_owner()
            owner.end(signal.SIGKILL)
            nodes.wait_for_owner(but=owner)
            owner.start()
            load.wait_for(Known(load).settled_each + 5)
    check_restored(nodes.url, load, Known(load))


def test_a_cordon_outlives_the_owner_that_was_told_and_a_drain_says_what_is_left(nodes: BrokerNodes) -> None:
    first = nodes.start("n1")
    nodes.wait_for_owner()
    second = nodes.start("n2")
    broker = connect(nodes.url)
    broker.publish([Message(id="a", topic=TOPIC, body=b"1")])
    created = requests.put(f"{nodes.url}/v1/topics/{TOPIC}/groups/{GROUP}", json={"start": "earliest"}, timeout=60)
    assert created.ok
    assert "cordoned" in operate("cordon", nodes.url, "--reason", "moving").stdout

    first.end(signal.SIGKILL)
    assert nodes.wait_for_owner() is second
    refused = requests.post(f"{second.url}/v1/publish", json=ONE_MESSAGE, timeout=60)
    left = operate("drain", nodes.url)
    [delivery] = broker.pull(TOPIC, GROUP, wait_ms=60_000)
    broker.ack([delivery.receipt])
    drained = operate("drain", nodes.url)
    operate("uncordon", nodes.url)
    again = requests.post(f"{second.url}/v1/publish", json=ONE_MESSAGE, timeout=60)
    broker.close()

    assert (refused.status_code, refused.json()["type"]) == (503, "urn:outbox-mq:problem:cordoned")
    assert "moving" in refused.json()["detail"]
    assert left.exit_code != 0
    assert "not drained: 1 ready" in left.stdout
    assert drained.exit_code == 0
    assert again.status_code == 200


ONE_MESSAGE = {"messages": [{"id": "b", "topic": TOPIC, "body": "x"}]}


def operate(command: str, url: str, *options: str) -> Result:
    """Run `outbox broker COMMAND` in this process."""
    return CliRunner().invoke(broker_app, [command, "--url", url, *options], catch_exceptions=False)


def test_a_node_that_can_make_no_folder_leaves_the_broker_to_another_one_and_says_why(
    nodes: BrokerNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.setenv("TMPDIR", str(gone))
    first = nodes.start("n1", session_ms="30000")
    nodes.wait_for_owner()
    monkeypatch.delenv("TMPDIR")
    second = nodes.start("n2", session_ms="30000")
    drained = CliRunner().invoke(store_app, ["drain", "--store", nodes.store, "--node", "n1"], catch_exceptions=False)
    nodes.wait_for_owner(but=first)
    shutil.rmtree(gone)
    again = CliRunner().invoke(
        store_app, ["drain", "--store", nodes.store, "--node", "n1", "--undo"], catch_exceptions=False
    )

    second.end(signal.SIGKILL)
    eventually(
        lambda: "no temporary folder can be made" in requests.get(f"{first.url}/readyz", timeout=60).text,
        what="the node says why it does not serve",
    )
    second.start()

    assert (drained.exit_code, again.exit_code) == (0, 0)
    assert nodes.wait_for_owner() is second
    shown = CliRunner().invoke(store_app, ["status", "--store", nodes.store], catch_exceptions=False)
    assert "node n1" in shown.stdout


def test_a_server_that_cannot_be_announced_ends_its_process_with_an_error(nodes: BrokerNodes, tmp_path: Path) -> None:
    command = ["outbox", "broker", "serve", "--store", nodes.store, "--port", "0"]
    command += ["--ready-file", str(tmp_path / "missing" / "ready")]
    settings = {f"OUTBOX_CLUSTER__{name.upper()}": value for name, value in nodes.settings.items()}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=os.environ | settings, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "cannot write the ready file" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_path_of_the_other_kind_is_refused(running_zookeeper: ZooKeeper, tmp_path: Path) -> None:
    with ExitStack() as stack:
        delay = RunningCluster(running_zookeeper.hosts, tmp_path, stack)
        with pytest.raises(ConfigurationError, match="is the path of a delay cluster: name another path"):
            serve("--store", delay.store)
        nodes = BrokerNodes(running_zookeeper.hosts, tmp_path, stack)
        nodes.start("n1", session_ms="30000")
        delay.store = nodes.store
        with pytest.raises(ConfigurationError, match="is the path of a broker: name another path"):
            delay.command("init", "--shards", "8")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--store", "bookkeeper://zk/p", "--data", "d"), "give one of them"),
        (("--store", "bookkeeper://zk/p", "--durability", "os"), "bookies sync what they acknowledge"),
        (("--store", "bookkeeper://zk/p", "--config", "FILE"), "bookies sync what they acknowledge"),
        (("--data", "d", "--name", "n"), "give --store, too"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, options: tuple[str, ...], error: str) -> None:
    (tmp_path / "broker.toml").write_text('[broker]\ndurability = "os"\n')
    with pytest.raises(ConfigurationError, match=error):
        serve(*(str(tmp_path / "broker.toml") if one == "FILE" else one for one in options))


def serve(*options: str) -> None:
    """Run `outbox broker serve` in this process. Raises its error."""
    CliRunner().invoke(app, ["serve", *options], catch_exceptions=False)
