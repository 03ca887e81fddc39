"""Brokers that an operator keeps, with the rights of its ServiceAccount alone: made, changed, and refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outbox_core import Broker, Message
from outbox_operator.kubernetes_api import KubernetesApi, KubernetesRefused
from outbox_operator.resource import API_VERSION, KIND, MANAGER
from tests.engines.kubernetes.api_requests import APPLY, Refused
from tests.engines.kubernetes.cluster import SYSTEM, Cluster, KeptBroker, StartOperator, eventually

TOPIC, GROUP = "orders", "billing"
BATCH = 500


def publish(client: Broker, ids: list[str]) -> None:
    """Publish messages, all of which are stored."""
    for first in range(0, len(ids), BATCH):
        batch = [Message(id=one, topic=TOPIC, body=one.encode()) for one in ids[first : first + BATCH]]
        assert {result.status for result in client.publish(batch)} == {"stored"}


def consume(client: Broker, count: int) -> list[str]:
    """Consume so many messages, each once."""
    got: list[str] = []
    while len(got) < count:
        deliveries = client.pull(TOPIC, GROUP, max_messages=BATCH, wait_ms=30_000)
        assert deliveries, f"after {len(got)} nothing came any more"
        assert set(client.ack([delivery.receipt for delivery in deliveries])) == {"acked"}
        got += [delivery.id for delivery in deliveries]
    return got


def test_a_broker_takes_10000_messages_and_delivers_them_and_its_resource_says_how_many_are_left(
    cluster: Cluster, namespace: str, start_operator: StartOperator
) -> None:
    start_operator()
    broker = cluster.create(namespace, "orders", config={"retention_ms": "7d"})
    broker.wait_until_ready()
    client = broker.client()
    assert client.pull(TOPIC, GROUP) == []  # the group is there from the first message on

    ids = [f"m{number}" for number in range(10_000)]
    publish(client, ids)
    eventually(lambda: broker.status.get("backlog") == len(ids), what="a status with the backlog")
    row = columns(cluster, broker)
    got = consume(client, len(ids))
    eventually(lambda: broker.status["backlog"] == 0, what="a status without a backlog")

    assert sorted(got) == sorted(ids)
    assert (row["Ready"], row["Backlog"], row["Scheduled"], row["Dead"]) == ("True", 10_000, 0, 0)
    assert row["Version"]
    assert row["Oldest"]
    assert broker.status.get("oldestMessageTime") is None


def columns(cluster: Cluster, broker: KeptBroker) -> dict[str, Any]:
    """What `kubectl get outboxbrokers` shows of one."""
    table = cluster.requests.ask("GET", broker.path, accept="application/json;as=Table;v=v1;g=meta.k8s.io")
    names = [column["name"] for column in table["columnDefinitions"]]
    return dict(zip(names, table["rows"][0]["cells"], strict=True))


def test_a_changed_setting_rolls_the_pod_which_keeps_what_is_on_its_volume(
    cluster: Cluster, namespace: str, start_operator: StartOperator
) -> None:
    start_operator()
    broker = cluster.create(namespace, "orders")
    broker.wait_until_ready()
    before, client = broker.url, broker.client()
    client.pull(TOPIC, GROUP)
    publish(client, ["a", "b"])

    broker.change(config={"topics_max": "1"})
    broker.wait_until_ready()

    client = broker.client()
    assert broker.url != before
    assert sorted(consume(client, 2)) == ["a", "b"]
    [refused] = client.publish([Message(id="c", topic="another", body=b"")])
    assert refused.error is not None
    assert "topics_max" in refused.error


def test_a_change_whose_pod_is_never_ready_is_taken_back_and_named_until_the_spec_is_corrected(
    cluster: Cluster, namespace: str, start_operator: StartOperator
) -> None:
    start_operator()
    broker = cluster.create(namespace, "orders")
    broker.wait_until_ready()
    client, good = broker.client(), broker.status["readyRevision"]
    client.pull(TOPIC, GROUP)
    publish(client, ["a"])

    broker.change(config={"no_such_setting": "1"}, rolloutDeadlineSeconds=3)
    degraded = broker.wait_until("Degraded", "True", "RevisionRefused")
    broker.wait_until("Ready", "True")
    refused = broker.status["refusedRevision"]

    events = cluster.requests.ask("GET", f"/api/v1/namespaces/{namespace}/events")["items"]
    assert "RevisionRefused" in {event["reason"] for event in events}
    assert refused in degraded["message"]
    assert broker.status["readyRevision"] == good != refused
    assert consume(broker.client(), 1) == ["a"]

    broker.change(config={"no_such_setting": None, "topics_max": "5"}, rolloutDeadlineSeconds=600)
    broker.wait_until("Degraded", "False")
    broker.wait_until_ready()

    assert "refusedRevision" not in broker.status


def test_an_eviction_is_not_refused_and_the_pod_is_made_again_on_its_volume(
    cluster: Cluster, namespace: str, start_operator: StartOperator
) -> None:
    start_operator()
    broker = cluster.create(namespace, "orders")
    broker.wait_until_ready()
    before, client = broker.pod(), broker.client()
    assert before is not None
    client.pull(TOPIC, GROUP)
    publish(client, ["a"])
    budget = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/orders"
    eventually(
        lambda: cluster.requests.ask("GET", budget)["status"].get("disruptionsAllowed") == 1,
        what="a budget that is known",
    )

    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "orders-0"}}
    cluster.requests.ask("POST", f"/api/v1/namespaces/{namespace}/pods/orders-0/eviction", eviction)
    eventually(lambda: broker.ready_pod() not in {"", before["metadata"]["uid"]}, what="another pod, which is ready")

    assert consume(broker.client(), 1) == ["a"]


def test_a_secret_that_is_not_there_is_named_and_waited_for(
    cluster: Cluster, namespace: str, start_operator: StartOperator
) -> None:
    start_operator()
    tokens, other = {"name": "outbox-mq", "key": "tokens.toml"}, {"name": "other", "key": "operator-token"}
    broker = cluster.create(namespace, "orders", auth={"tokens": tokens, "operatorToken": other})

    degraded = broker.wait_until("Degraded", "True", "SecretMissing")
    assert "key operator-token of Secret other" in degraded["message"]
    assert broker.found("apps/v1", "StatefulSet") is None

    cluster.make_secret(namespace, "other", {"operator-token": cluster.token})
    broker.wait_until_ready()


def test_a_set_of_its_name_that_is_somebody_elses_is_left_alone_and_named(
    cluster: Cluster, namespace: str, start_operator: StartOperator
) -> None:
    theirs = {
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "orders"},
        "spec": {
            "replicas": 0, "selector": {"matchLabels": {"app": "x"}},
            "template": {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [{"name": "x", "image": "x"}]}},
        },
    }  # fmt: skip
    made = cluster.requests.ask("POST", f"/apis/apps/v1/namespaces/{namespace}/statefulsets", theirs)
    start_operator()
    broker = cluster.create(namespace, "orders")

    degraded = broker.wait_until("Degraded", "True", "Refused")
    found = broker.found("apps/v1", "StatefulSet")

    assert "choose another name" in degraded["message"]
    assert found is not None
    assert found["metadata"]["generation"] == made["metadata"]["generation"]


def test_what_was_changed_by_hand_is_put_back(cluster: Cluster, namespace: str, start_operator: StartOperator) -> None:
    start_operator()
    broker = cluster.create(namespace, "orders")
    broker.wait_until_ready()
    path = f"/api/v1/namespaces/{namespace}/services/orders"
    by_hand = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "orders"},
        "spec": {"selector": {"app.kubernetes.io/instance": "another"}},
    }  # fmt: skip

    cluster.requests.ask("PATCH", path, by_hand, kind=APPLY)

    eventually(
        lambda: cluster.requests.ask("GET", path)["spec"]["selector"]["app.kubernetes.io/instance"] == "orders",
        what="a service that selects its broker again",
    )


def test_another_operator_waits_for_the_lease_and_has_it_when_the_first_one_ends(
    cluster: Cluster, namespace: str, start_operator: StartOperator
) -> None:
    first, second = start_operator(), start_operator(leads=False)
    broker = cluster.create(namespace, "orders")
    broker.wait_until_ready()
    waiting = json.loads(second.page("/readyz"))

    assert first.end() == 0
    second.wait_until_leading()
    broker.change(config={"topics_max": "7"})
    broker.wait_until_ready()

    assert (waiting["status"], waiting["leader"]) == ("ok", False)
    assert json.loads(second.page("/readyz"))["leader"] is True
    assert "\noutbox_operator_leader 1.0" in second.page("/metrics")


@pytest.mark.parametrize("may_grow", [True, False])
def test_a_volume_grows_where_its_class_allows_that_and_else_the_resource_says_why_not(
    cluster: Cluster, namespace: str, start_operator: StartOperator, may_grow: bool
) -> None:
    name = f"class-{namespace}"
    kind = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name}}
    cluster.apply(kind | {"provisioner": "process/folder", "allowVolumeExpansion": may_grow})
    start_operator()
    broker = cluster.create(namespace, "orders", volume={"size": "1Gi", "storageClassName": name})
    broker.wait_until_ready()
    before = broker.pod()

    broker.change(volume={"size": "2Gi"})

    if may_grow:
        eventually(lambda: asked(broker) == "2Gi", what="a claim that asks for more")
        broker.wait_until("Degraded", "False")
    else:
        degraded = broker.wait_until("Degraded", "True", "Refused")
        assert "GrowClaim" in degraded["message"]
    after = broker.pod()
    assert before is not None
    assert after is not None
    assert before["metadata"]["uid"] == after["metadata"]["uid"]


def asked(broker: KeptBroker) -> str:
    """The size that a broker's claim asks for."""
    claim = broker.found("v1", "PersistentVolumeClaim", "data-orders-0")
    assert claim is not None
    return str(claim["spec"]["resources"]["requests"]["storage"])


def test_the_operators_account_may_not_list_secrets_nor_touch_what_is_not_its_own(
    cluster: Cluster, namespace: str, tmp_path: Any
) -> None:
    api = KubernetesApi.connected(cluster.kubeconfig_of_operator(tmp_path))

    for kind in ("Secret", "Pod"):
        with pytest.raises(KubernetesRefused, match="forbidden"):
            api.items("v1", kind, namespace, {})
    for where, name in ((namespace, MANAGER), (SYSTEM, "another")):
        with pytest.raises(KubernetesRefused, match="forbidden"):
            api.get("coordination.k8s.io/v1", "Lease", where, name)
    api.get("coordination.k8s.io/v1", "Lease", SYSTEM, MANAGER)


def test_an_operator_of_named_namespaces_may_do_nothing_in_another_one(
    cluster: Cluster, namespace: str, tmp_path: Any
) -> None:
    api = KubernetesApi.connected(cluster.kubeconfig_of_operator(tmp_path))

    assert api.get(API_VERSION, KIND, namespace, "orders") is None
    for api_version, kind in ((API_VERSION, KIND), ("v1", "Secret"), ("apps/v1", "StatefulSet")):
        with pytest.raises(KubernetesRefused, match="forbidden"):
            api.get(api_version, kind, "default", "orders")


def test_an_operator_that_no_namespace_is_named_to_keeps_the_brokers_of_all(
    cluster: Cluster, namespace: str, start_operator: StartOperator
) -> None:
    start_operator(everywhere=True)
    broker = cluster.create(namespace, "orders", deletionPolicy="Discard")

    broker.wait_until_ready()
    broker.delete()

    broker.wait_until_gone()


AUTH = {"insecureNoAuth": True}
LONG = "x" * 41


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"storage": "tape"}, "Unsupported value"),
        ({"volume": {"size": "much"}}, "size is a quantity"),
        ({"volume": {}}, "Required value"),
        ({"auth": {}}, "give tokens, or"),
        (
            {"auth": {"insecureNoAuth": True, "tokens": {"name": "s", "key": "k"}}},
            "tokens and operatorToken go together",
        ),
        ({"auth": AUTH, "config": {"port": "1"}}, "the operator itself gives"),
        ({"auth": AUTH, "config": {"Retention": "1"}}, "names of settings are like"),
        ({"auth": AUTH, "deletionPolicy": "Keep"}, "Unsupported value"),
        ({"auth": AUTH, "rolloutDeadlineSeconds": 0}, "should be greater than or equal to 1"),
        ({"auth": AUTH, "size": "1Gi"}, "unknown field"),
    ],
)
def test_a_resource_that_contradicts_itself_is_refused(
    cluster: Cluster, namespace: str, spec: dict[str, Any], says: str
) -> None:
    with pytest.raises(Refused) as refused:
        cluster.create(namespace, "orders", **spec)

    assert says in str(refused.value)


def test_a_name_that_pods_could_not_carry_is_refused(cluster: Cluster, namespace: str) -> None:
    with pytest.raises(Refused) as refused:
        cluster.create(namespace, LONG)

    assert "at most 40 characters" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"volume": {"size": "512Mi"}}, "does not shrink"),
        ({"volume": {"storageClassName": "fast"}}, "storageClassName is immutable"),
    ],
)
def test_what_cannot_change_is_refused(cluster: Cluster, namespace: str, change: dict[str, Any], says: str) -> None:
    broker = cluster.create(namespace, "orders")

    with pytest.raises(Refused) as refused:
        broker.change(**change)

    assert says in str(refused.value)
