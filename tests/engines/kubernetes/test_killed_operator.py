"""Operators that are killed before and after each write to the API server; and which rights all these requests need."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from outbox_core import Message
from outbox_operator.handlers import FINALIZER
from outbox_operator.kubernetes_api import KubernetesApi
from outbox_operator.manifests import manifests_text
from outbox_operator.reconciliation import Reconciliation, RoundOutcome
from tests.engines.kubernetes.api_requests import APPLY, MERGE
from tests.engines.kubernetes.cluster import SYSTEM, Cluster, KeptBroker, eventually
from tests.engines.kubernetes.load import GROUP, TOPIC

KOPF_RIGHTS = {("outboxbrokers", "list"), ("outboxbrokers", "watch"), ("outboxbrokers", "patch"), ("events", "create")}
"""Which the framework uses: the watch, the finalizer, the events."""
OWNER_RIGHTS = {("outboxbrokers/finalizers", "update")}
"""Asked for by clusters that let nobody name an owner whom he may not free (OwnerReferencesPermissionEnforcement)."""
TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:]+Z")
WRITES = {"POST", "PATCH", "DELETE"}


class OperatorKilled(BaseException):
    """Nothing catches it, as nothing catches a kill."""


class DeadlyClient(client.ApiClient):
    """The official client, in which a process dies at each write twice: when it was not sent yet, and when it was done
    and nobody knows. The same write, but for the time in it, kills no third one.
    """

    def __init__(self, api: KubernetesApi) -> None:
        super().__init__(api.client.configuration)
        self.killed_before: set[tuple[str, str, str]] = set()
        self.killed_after: set[tuple[str, str, str]] = set()
        self.rights: set[tuple[str, str]] = set()
        """Kinds of objects, and what was done to them."""
        self.is_deadly = False

    def call_api(
        self, method: str, url: str, header_params: Any = None, body: Any = None, *rest: Any, **options: Any
    ) -> Any:
        """Send a request, or die."""
        self.rights |= {(kind_of(url), verb) for verb in verbs_of(method, url, header_params)}
        if method not in WRITES or not self.is_deadly:
            return super().call_api(method, url, header_params, body, *rest, **options)
        write = (method, url, TIME.sub("", json.dumps(body, sort_keys=True)))
        if write not in self.killed_before:
            self.killed_before.add(write)
            raise OperatorKilled
        answer = super().call_api(method, url, header_params, body, *rest, **options)
        if write not in self.killed_after:
            self.killed_after.add(write)
            raise OperatorKilled
        return answer

    def written(self) -> set[str]:
        """What kind of object was written to, and how, by operators that died of it both times."""
        return {f"{method} {kind_of(url)}" for method, url, _ in self.killed_before & self.killed_after}


def kind_of(url: str) -> str:
    """The plural of an object's kind, with its subresource."""
    _, _, inside = url.partition("?")[0].partition("/namespaces/")
    _, plural, *rest = inside.split("/")
    return "/".join([plural, *rest[1:]])


def verbs_of(method: str, url: str, headers: dict[str, str]) -> list[str]:
    """The verbs that a Role needs for a request."""
    if method == "GET":
        return ["list"] if "labelSelector" in url else ["get"]
    if method == "PATCH":
        return ["patch", "create"] if headers["Content-Type"] == APPLY else ["patch"]
    return ["delete"] if method == "DELETE" else ["create"]


class Operators:
    """One operator after another, each of which knows only what the API server and the broker say. The finalizer,
    which is kopf's in a whole operator, is the story's.
    """

    def __init__(self, cluster: Cluster, broker: KeptBroker, folder: Path) -> None:
        self.client = DeadlyClient(KubernetesApi.connected(cluster.kubeconfig_of_operator(folder)))
        self._broker = broker
        cluster.requests.ask("PATCH", broker.path, {"metadata": {"finalizers": [FINALIZER]}}, kind=MERGE)

    def run(self, until: Callable[[RoundOutcome], bool], *, deadly: bool) -> None:
        """Have operators look at the resource until a round came to this."""
        self.client.is_deadly = deadly
        reconciliation = Reconciliation(KubernetesApi(self.client))

        def look() -> bool:
            nonlocal reconciliation
            try:
                return until(reconciliation.run(self._broker.namespace, self._broker.name))
            except OperatorKilled:
                reconciliation = Reconciliation(KubernetesApi(self.client))
                return False

        eventually(look, what="a round of an operator that came to what was wanted")

    def until_ready(self, *, deadly: bool) -> None:
        """Until the pod of the newest spec serves, and the status says so."""
        self.run(lambda outcome: outcome.settled and bool(self._broker.ready_pod()), deadly=deadly)

    def until_released(self, *, deadly: bool) -> None:
        """Until the resource may go, and let it go."""
        self.run(lambda outcome: outcome.released, deadly=deadly)
        self._broker.free()


@pytest.fixture
def broker(cluster: Cluster, namespace: str) -> KeptBroker:
    """A resource that nobody looks after yet."""
    return cluster.create(namespace, "orders")


@pytest.fixture
def operators(cluster: Cluster, broker: KeptBroker, tmp_path: Path) -> Operators:
    """Operators of it, with the rights of the ServiceAccount."""
    return Operators(cluster, broker, tmp_path)


def publish_two(broker: KeptBroker) -> None:
    """Publish a message that is ready, and one that is due in a while."""
    client = broker.client()
    client.pull(TOPIC, GROUP)
    soon_ms = time.time_ns() // 1_000_000 + 2_000
    results = client.publish(
        [Message(id="now", topic=TOPIC, body=b""), Message(id="soon", topic=TOPIC, body=b"", deliver_at_ms=soon_ms)]
    )
    assert [result.status for result in results] == ["stored", "stored"]


def consume_two(broker: KeptBroker) -> list[str]:
    """Consume both."""
    client, got = broker.client(), []
    while len(got) < 2:
        deliveries = client.pull(TOPIC, GROUP, wait_ms=30_000)
        assert deliveries
        assert set(client.ack([delivery.receipt for delivery in deliveries])) == {"acked"}
        got += [delivery.id for delivery in deliveries]
    return sorted(got)


def test_a_broker_is_made_though_operators_die_before_and_after_each_write(
    broker: KeptBroker, operators: Operators
) -> None:
    operators.until_ready(deadly=True)

    publish_two(broker)
    assert consume_two(broker) == ["now", "soon"]
    assert operators.client.written() == {
        "PATCH configmaps", "PATCH serviceaccounts", "PATCH services", "PATCH poddisruptionbudgets",
        "PATCH statefulsets", "PATCH outboxbrokers/status",
    }  # fmt: skip


def test_settings_are_rolled_out_though_operators_die_before_and_after_each_write(
    broker: KeptBroker, operators: Operators
) -> None:
    operators.until_ready(deadly=False)
    publish_two(broker)
    before = broker.status["readyRevision"]

    broker.change(config={"topics_max": "1"})
    operators.until_ready(deadly=True)

    assert consume_two(broker) == ["now", "soon"]
    assert broker.status["readyRevision"] != before
    [refused] = broker.client().publish([Message(id="c", topic="another", body=b"")])
    assert "topics_max" in str(refused.error)
    assert {"PATCH configmaps", "PATCH statefulsets", "DELETE configmaps"} <= operators.client.written()


@pytest.mark.parametrize("policy", ["Drain", "Retain", "Discard"])
def test_a_broker_ends_as_its_policy_says_though_operators_die_before_and_after_each_write(
    broker: KeptBroker, operators: Operators, policy: str
) -> None:
    broker.change(deletionPolicy=policy)
    operators.until_ready(deadly=False)
    publish_two(broker)

    broker.delete()
    if policy == "Drain":
        operators.run(lambda _: broker.condition("Progressing").get("reason") == "Draining", deadly=True)
        assert consume_two(broker) == ["now", "soon"]
    operators.until_released(deadly=True)
    broker.wait_until_gone()

    discards = {"DELETE persistentvolumeclaims"} if policy == "Discard" else set()
    # Where the pod is gone before a third operator looks, there is nothing left to tell.
    assert operators.client.written() - {"PATCH outboxbrokers/status"} == {"DELETE statefulsets"} | discards
    assert broker.pod() is None
    claim = broker.found("v1", "PersistentVolumeClaim", "data-orders-0")
    assert (claim is None or "deletionTimestamp" in claim["metadata"]) == (policy == "Discard")


def test_each_right_that_the_manifests_give_is_used(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    growing = {"size": "1Gi", "storageClassName": f"class-{namespace}"}
    kind = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "provisioner": "process/folder"}
    cluster.apply(kind | {"metadata": {"name": growing["storageClassName"]}, "allowVolumeExpansion": True})
    broker = cluster.create(namespace, "orders", volume=growing)
    operators = Operators(cluster, broker, tmp_path)
    [role] = [
        one
        for one in yaml.safe_load_all(manifests_text(lease_namespace=SYSTEM, namespaces=[namespace]))
        if one["kind"] == "Role" and one["metadata"]["namespace"] == namespace
    ]

    operators.until_ready(deadly=False)
    broker.change(config={"topics_max": "1"}, volume={"size": "2Gi"}, deletionPolicy="Discard")
    operators.until_ready(deadly=False)
    broker.delete()
    operators.until_released(deadly=False)

    given = {(name, verb) for rule in role["rules"] for name in rule["resources"] for verb in rule["verbs"]}
    assert operators.client.rights | KOPF_RIGHTS | OWNER_RIGHTS == given
