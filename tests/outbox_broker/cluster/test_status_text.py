"""What a node wrote to ZooKeeper, `outbox delay status` shows as text: it sends a terminal no codes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from outbox_broker.cluster.cluster_admin import read_state
from outbox_broker.delay_service.cli import app
from tests.outbox_broker.cluster.conftest import Cluster, eventually
from tests.outbox_broker.cluster.running_cluster import PATIENCE

pytestmark = pytest.mark.processes


def test_status_shows_names_of_nodes_as_text(cluster: Cluster) -> None:
    cluster.node("n\x1b[2J\nnode n2")
    eventually(lambda: read_state(cluster.session, cluster.layout).view.nodes, what="the node's record")

    address = f"bookkeeper://{cluster.server.hosts}{cluster.root}"
    shown = CliRunner().invoke(app, ["status", "--store", address], env=PATIENCE, catch_exceptions=False)

    assert "\nnode n\\x1b[2J\\nnode n2 at " in shown.stdout
    assert "\x1b" not in shown.stdout
