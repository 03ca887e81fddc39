"""A Kubernetes of the run's own: a control plane, a kubelet that runs pods as processes, operators that tests start."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engines.kubernetes.cluster import (
    EVERYWHERE,
    SYSTEM,
    Cluster,
    Operator,
    StartOperator,
    controlplane_binary,
)
from tests.fixtures.local_server import guarded


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster of the whole run, which knows the resource."""
    folder = tmp_path_factory.mktemp("kubernetes")
    with ExitStack() as stack:

        def start(name: str, command: list[str]) -> subprocess.Popen[bytes]:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(guarded(command), stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        server = start("controlplane", [str(controlplane_binary()), str(folder / "controlplane")])
        made = Cluster(folder, server)
        made.wait_until_ready()
        start("kubelet", [
            sys.executable, "-m", "tests.engines.kubernetes.process_kubelet", str(made.kubeconfig),
            str(folder / "pods"),
        ])  # fmt: skip
        made.apply_manifests(EVERYWHERE)
        yield made


@pytest.fixture
def namespace(cluster: Cluster) -> str:
    """A namespace of the test's own, with the secrets of a broker in it."""
    name = f"shop-{uuid.uuid4().hex[:8]}"
    cluster.make_namespace(name)
    return name


@pytest.fixture
def start_operator(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[StartOperator]:
    """Starts `outbox operator run`, with the rights of its ServiceAccount and no others."""
    with ExitStack() as stack:

        def start(*, leads: bool = True, everywhere: bool = False) -> Operator:
            log = tmp_path / f"operator-{uuid.uuid4().hex[:8]}.log"
            lease_namespace = EVERYWHERE if everywhere else SYSTEM
            kubeconfig = cluster.kubeconfig_of_operator(tmp_path, lease_namespace=lease_namespace)
            namespaces = [] if everywhere else [namespace]
            operator = Operator(kubeconfig, *namespaces, lease_namespace=lease_namespace, log=log)
            stack.callback(operator.end_if_it_runs)
            if leads:
                operator.wait_until_leading()
            return operator

        yield start
