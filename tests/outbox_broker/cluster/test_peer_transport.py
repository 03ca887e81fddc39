"""What a node sends to the nodes that ZooKeeper names, and what it says of a ZooKeeper that anybody may write."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from outbox_broker.cluster.peer_client import PeerClient, PeerOptions
from outbox_broker.delay_service.cluster_node import ClusterNode, NodeOptions
from outbox_core import Message, PublishResult
from outbox_core.common.errors import BrokerError, BrokerUnavailable
from outbox_core.zookeeper.zookeeper_session import SessionOptions
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperAddress
from tests.broker_adapter.http.test_tls import certificate
from tests.fixtures.slow_http_server import TRICKLES, slow_http_server
from tests.outbox_broker.cluster.conftest import Cluster, eventually
from tests.outbox_broker.cluster.node_process import NodeProcess

pytestmark = pytest.mark.processes


def test_a_node_with_tls_sends_neither_token_nor_bodies_in_clear() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        peers = PeerClient(PeerOptions(token="of the peers", tls=True))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        with pytest.raises(BrokerUnavailable, match="give all nodes --tls-cert"):
            peers.publish(url, [("0-0000", Message(id="m", topic="t", body=b"b"))])

        peers.close()
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("part", TRICKLES)
def test_a_node_whose_answer_trickles_is_given_up_though_every_byte_comes_in_time(
    part: str, is_encrypted: bool, tmp_path: Path
) -> None:
    tls = certificate(tmp_path, address="127.0.0.1") if is_encrypted else None
    with slow_http_server(part, tls=tls) as server:
        ca_file = None if tls is None else tls.certificate
        peers = PeerClient(PeerOptions(timeout_ms=1_000, tls=is_encrypted, ca_file=ca_file))

        with pytest.raises(BrokerUnavailable, match="does not answer"):
            peers.publish(server.url, [("0-0000", Message(id="m", topic="t", body=b"b"))])
        peers.close()


class NoTarget:
    """A target that gets nothing, since the node has no shard."""

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        pytest.fail(f"{len(batch)} messages were sent")


def refused_publish(node: ClusterNode) -> str:
    """Why a node cannot forward a message; a shard that is being opened is a reason, too."""
    with pytest.raises(BrokerError) as refused:
        node.served().producers.publish([Message(id="m", topic="t", body=b"")], quota=None)
    return str(refused.value)


def test_a_node_with_tls_forwards_nothing_to_a_record_in_zookeeper_without(cluster: Cluster, tmp_path: Path) -> None:
    owner = cluster.node("n1")  # its record's URL for peers is http://n1:2
    options = NodeOptions(
        address=ZooKeeperAddress(hosts=cluster.server.hosts, root=cluster.root), name="n2", url="https://n2:1",
        version="1", capacity=0, session=SessionOptions(session_ms=30_000, request_ms_max=30_000),
        tls=certificate(tmp_path, address="127.0.0.1"),
    )  # fmt: skip
    node = ClusterNode(options, open_shard=pytest.fail, target=NoTarget())
    try:
        node.start()
        eventually(lambda: len(owner.serves()) == 8, what="one node with all shards")

        eventually(lambda: "sends nothing to a node at http://n1:2" in refused_publish(node), what="the refusal")
    finally:
        node.close()


@pytest.mark.parametrize(("with_login", "is_warned"), [(False, True), (True, False)])
def test_a_node_that_others_reach_warns_of_a_zookeeper_without_a_login(
    cluster: Cluster, tmp_path: Path, with_login: bool, is_warned: bool
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    login = {"zookeeper_user": "u", "zookeeper_password_file": str(secret)} if with_login else {}
    node = NodeProcess(
        "n1", store=f"bookkeeper://{cluster.server.hosts}{cluster.root}/other", target="http://127.0.0.1:1",
        folder=tmp_path,
        settings={"peer_host": "0.0.0.0", "peer_token_file": str(secret), "shared_folder": str(tmp_path), **login},
    )  # fmt: skip

    with pytest.raises(AssertionError, match="error: "):  # there is no such cluster, and no such user
        node.start()

    assert ("zookeeper_without_login" in node.log) == is_warned


def test_a_node_whose_clients_need_tokens_does_not_start_with_a_port_for_nodes_without_one(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[[tokens]]\nname = "a"\nsha256 = "{"0" * 64}"\nroles = ["publish"]\ntopics = ["t"]\n')
    command = [sys.executable, "-m", "outbox", "delay", "serve", "--store", "bookkeeper://127.0.0.1:1/delay"]

    ended = subprocess.run(
        [*command, "--target", "http://127.0.0.1:1", "--port", "0", "--tokens", str(tokens)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip

    assert ended.returncode == 2
    assert "peer_token_file" in ended.stderr
