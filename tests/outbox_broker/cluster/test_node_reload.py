"""SIGHUP has a node of a delay cluster show a renewed certificate to clients and other nodes, and take new tokens."""

from __future__ import annotations

import hashlib
import signal
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests

from outbox_demo.ports import free_port
from tests.fixtures.certificate_authority import Authority
from tests.fixtures.zookeeper_server import ZooKeeper
from tests.outbox_broker.cluster.conftest import eventually
from tests.outbox_broker.cluster.node_process import NodeProcess
from tests.outbox_broker.cluster.running_cluster import RunningCluster

pytestmark = [pytest.mark.processes, pytest.mark.slow]

HOST = "127.0.0.1"
PATIENT = "[broker]\nrequest_head_ms_max = 120000\n"
"""What a handshake may take on a busy machine."""


def shown(port: int) -> bytes:
    """The certificate that a new connection is shown."""
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((HOST, port), timeout=120))


def allow(tokens: Path, token: str) -> None:
    digest = hashlib.sha256(token.encode()).hexdigest()
    tokens.write_text(f'[[tokens]]\nname = "a"\nsha256 = "{digest}"\nroles = ["read"]\ntopics = ["*"]\n')


def is_allowed(send: Callable[..., requests.Response], url: str, token: str, authority: Authority) -> bool:
    """Whether a request is not refused for its token; a node without shards yet may refuse it for that."""
    response = send(url, headers={"authorization": f"Bearer {token}"}, verify=authority.file, timeout=120)
    return response.status_code not in {401, 403}


def test_a_node_reloads_what_clients_and_other_nodes_see(running_zookeeper: ZooKeeper, tmp_path: Path) -> None:
    authority, config = Authority(tmp_path / "authority"), tmp_path / "outbox.toml"
    tokens, peer_token = tmp_path / "tokens.toml", tmp_path / "peer-token"
    config.write_text(PATIENT)
    files, peer_port = authority.certificate(HOST), free_port(HOST)
    allow(tokens, "first")
    peer_token.write_text("the peers' own")
    with ExitStack() as stack:
        running = RunningCluster(running_zookeeper.hosts, tmp_path, stack)
        settings = {
            "shared_folder": str(tmp_path / "segments"), "session_ms": "30000",
            "peer_port": str(peer_port), "peer_token_file": str(peer_token),
        }  # fmt: skip
        node = NodeProcess("n1", store=running.store, target=running.target, folder=tmp_path, settings=settings)
        running.nodes.append(node)
        tls = ("--tls-cert", str(files.certificate), "--tls-key", str(files.key))
        node.start(*tls, "--tokens", str(tokens), "--config", str(config))
        port = urlsplit(node.url).port
        assert port is not None
        first = [shown(port), shown(peer_port)]
        authority.certificate(HOST)
        allow(tokens, "second")

        node.send(signal.SIGHUP)
        eventually(lambda: "credentials_reloaded" in node.log, what="the line of the reload")

        second = [shown(port), shown(peer_port)]
        clients = [is_allowed(requests.get, f"{node.url}/metrics", token, authority) for token in ("first", "second")]
        peer = is_allowed(requests.post, f"https://{HOST}:{peer_port}/v1/peer/topics", "the peers' own", authority)
    written = ssl.PEM_cert_to_DER_cert(files.certificate.read_text())
    assert second == [written, written]
    assert written not in first
    assert (clients, peer) == ([False, True], True)
