"""What is applied to a cluster: the printed manifests, and the objects of a broker, as in deploy/kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from outbox_broker.config.broker_config import BrokerConfig
from outbox_core.runtime.command import main
from outbox_operator.broker import BrokerSpec
from outbox_operator.broker_objects import Names, objects_of
from outbox_operator.manifests import manifests_text
from outbox_operator.resource import OWN_SETTINGS
from tests.deploy.manifests import KUBERNETES, documents

GOLDEN = Path(__file__).with_name("manifests.golden.yaml")
NAMES = Names(namespace="shop", name="orders", uid="0000")
SPEC = {
    "image": "outbox-mq",
    "volume": {"size": "20Gi"},
    "auth": {
        "tokens": {"name": "outbox-mq", "key": "tokens.toml"},
        "operatorToken": {"name": "outbox-mq", "key": "operator-token"},
    },
    "config": {"retention_ms": "7d"},
}


def made(**changes: Any) -> dict[str, dict[str, Any]]:
    """The objects of a broker, by kind and name."""
    spec = BrokerSpec.of(SPEC | changes)
    return {f"{one['kind']} {one['metadata']['name']}": one for one in objects_of(NAMES, spec, spec.pod, claimed=None)}


def container(**changes: Any) -> dict[str, Any]:
    """The container of a broker."""
    [found] = made(**changes)["StatefulSet orders"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_the_printed_manifests_are_those_that_were_reviewed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["operator", "manifests", "--image", "outbox-mq:0.1.0"])

    # After a change: outbox operator manifests --image outbox-mq:0.1.0 > tests/outbox_operator/manifests.golden.yaml
    assert capsys.readouterr().out == GOLDEN.read_text()


def test_the_operator_may_read_secrets_one_by_one_and_may_not_list_them() -> None:
    [role] = [one for one in documents(GOLDEN) if one["kind"] == "ClusterRole"]
    [secrets] = [rule for rule in role["rules"] if "secrets" in rule["resources"]]

    assert secrets["verbs"] == ["get"]
    assert [rule for rule in role["rules"] if "*" in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]] == []


def test_where_namespaces_are_named_the_operator_has_rights_in_these_alone_and_looks_after_these_alone() -> None:
    text = manifests_text(lease_namespace="outbox-system", namespaces=["shop", "bank"], image="outbox-mq:0.1.0")
    objects = list(yaml.safe_load_all(text))
    everywhere = [one for one in documents(GOLDEN) if one["kind"] == "ClusterRole"]

    roles = {one["metadata"]["namespace"]: one["rules"] for one in objects if one["kind"] == "Role"}
    bound = {one["metadata"]["namespace"]: one["subjects"] for one in objects if one["kind"] == "RoleBinding"}
    [container] = objects[-1]["spec"]["template"]["spec"]["containers"]

    assert [one for one in objects if one["kind"].startswith("ClusterRole")] == []
    assert roles["shop"] == roles["bank"] == everywhere[0]["rules"]
    assert list(roles) == list(bound) == ["shop", "bank", "outbox-system"]
    assert {subjects[0]["namespace"] for subjects in bound.values()} == {"outbox-system"}
    assert container["args"][-2:] == ["--namespace=shop", "--namespace=bank"]


def test_a_namespace_that_has_the_lease_and_brokers_has_one_role_for_both() -> None:
    objects = list(yaml.safe_load_all(manifests_text(lease_namespace="shop", namespaces=["shop"])))

    [role] = [one for one in objects if one["kind"] == "Role"]

    resources = {name for rule in role["rules"] for name in rule["resources"]}
    assert {"leases", "outboxbrokers", "statefulsets"} <= resources


def test_a_broker_has_its_objects_and_its_resource_owns_each() -> None:
    objects = made()
    revision = BrokerSpec.of(SPEC).pod.revision

    assert list(objects) == [
        f"ConfigMap orders-{revision}", "ServiceAccount orders", "Service orders-pods", "Service orders",
        "PodDisruptionBudget orders", "StatefulSet orders",
    ]  # fmt: skip
    assert {one["metadata"]["ownerReferences"][0]["uid"] for one in objects.values()} == {"0000"}
    assert objects[f"ConfigMap orders-{revision}"]["data"] == {"OUTBOX_BROKER__RETENTION_MS": "7d"}


def test_the_pod_is_that_of_the_manifests_of_deploy_but_for_what_the_resource_says() -> None:
    [by_hand] = [one for one in documents(KUBERNETES / "broker.yaml") if one["kind"] == "StatefulSet"]
    [theirs], ours = by_hand["spec"]["template"]["spec"]["containers"], container()
    same = {"startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "securityContext", "ports", "command"}

    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    assert {*theirs["args"]} - {*ours["args"]} == set()
    assert {*ours["args"]} - {*theirs["args"]} == {"--durability=fsync", "--credentials-interval-ms=1000"}
    hand_pod, pod = by_hand["spec"]["template"]["spec"], made()["StatefulSet orders"]["spec"]["template"]["spec"]
    assert pod["securityContext"] == hand_pod["securityContext"]
    assert pod["terminationGracePeriodSeconds"] == hand_pod["terminationGracePeriodSeconds"]


def test_a_secret_is_named_and_never_held() -> None:
    text = yaml.safe_dump(list(made().values()))
    [volume] = made()["StatefulSet orders"]["spec"]["template"]["spec"]["volumes"]

    assert volume["secret"]["secretName"] == "outbox-mq"
    assert "operator-token" not in text


def test_without_tokens_the_broker_is_told_that_it_serves_everybody() -> None:
    assert "--insecure-no-auth" in container(auth={"insecureNoAuth": True})["args"]
    assert "--insecure-no-auth" not in container()["args"]


def test_another_setting_is_another_revision_and_another_pod() -> None:
    before, after = (
        made(config=config)["StatefulSet orders"]["spec"]["template"] for config in ({}, {"topics_max": "9"})
    )

    assert before["metadata"]["labels"] != after["metadata"]["labels"]
    assert before["spec"]["containers"][0]["envFrom"] != after["spec"]["containers"][0]["envFrom"]


def test_the_size_in_the_template_of_a_set_stays_since_it_cannot_change() -> None:
    spec = BrokerSpec.of(SPEC | {"volume": {"size": "40Gi"}})
    [template] = objects_of(NAMES, spec, spec.pod, claimed="20Gi")[-1]["spec"]["volumeClaimTemplates"]

    assert template["spec"]["resources"]["requests"]["storage"] == "20Gi"


def test_what_the_operator_gives_itself_are_settings_of_the_broker() -> None:
    assert set(OWN_SETTINGS) <= BrokerConfig.model_fields.keys()
