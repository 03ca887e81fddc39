"""The Kubernetes manifests: they are YAML, they agree with each other and with the command that they run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from compensator.core.config import load
from outbox_broker.cluster.cluster_settings import ClusterSettings
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.durations_and_sizes import parse_duration_ms
from spark_reconcile.core.settings_file import read_config, settings_of
from tests.deploy.manifests import KUBERNETES, MANIFESTS, Container, containers, documents, of_kind, options

ENGINE_CLOSE_SECONDS = 10
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
KUSTOMIZATIONS: dict[Path, dict[str, Any]] = {
    path: yaml.safe_load(path.read_text()) for path in KUBERNETES.rglob("kustomization.yaml")
}
"""The one that stands for all, and those that are applied with it, or for themselves."""
ON_BOOKKEEPER = KUBERNETES / "broker-on-bookkeeper"
each_container = pytest.mark.parametrize("one", containers(), ids=lambda one: one.name)


def pod_spec(one: Container) -> dict[str, Any]:
    """The pod that a container is in."""
    found: dict[str, Any] = one.pod["spec"]
    return found


def grace_seconds(one: Container) -> int:
    """What a pod has from the order to stop until it is killed, without the time that preStop takes of it."""
    pause = one.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    return int(pod_spec(one)["terminationGracePeriodSeconds"]) - int(pause)


def test_every_manifest_is_listed_and_every_name_is_taken_once() -> None:
    listed = {path.parent / name for path, made in KUSTOMIZATIONS.items() for name in made["resources"]}
    names = [(one["kind"], one["metadata"]["name"]) for one in documents()]

    assert listed == set(MANIFESTS)
    assert len(names) == len(set(names))
    assert all("apiVersion" in one for one in documents())


def test_the_kustomization_names_files_and_images_that_are_there(tmp_path: Path) -> None:
    files = [KUBERNETES / name for made in KUSTOMIZATION["configMapGenerator"] for name in made["files"]]
    images = {image["name"] for made in KUSTOMIZATIONS.values() for image in made.get("images", [])}

    assert all(path.is_file() for path in files)
    assert images == {one.container["image"] for one in containers()}
    if shutil.which("kubectl"):
        assert built(ON_BOOKKEEPER) > {"StatefulSet", "Service"}
        assert built(KUBERNETES) > {"Deployment", "StatefulSet", "CronJob", "ConfigMap", "PodDisruptionBudget"}
        overlay = tmp_path / "kubernetes"
        shutil.copytree(KUBERNETES, overlay)
        with (overlay / "kustomization.yaml").open("a") as file:
            file.write("components: [monitoring]\n")
        assert built(overlay) - built(KUBERNETES) == {"ServiceMonitor", "PrometheusRule"}


def built(folder: Path) -> set[str]:
    """The kinds of objects that kustomize makes of a folder."""
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return {one["kind"] for one in yaml.safe_load_all(done.stdout) if one}


@each_container
def test_the_command_takes_its_command_line(one: Container) -> None:
    assert options(one.command)


@each_container
def test_every_path_of_its_command_line_is_mounted(one: Container) -> None:
    mounts = {Path(mount["mountPath"]): mount for mount in one.container["volumeMounts"]}
    paths = [found for found in options(one.command).values() if isinstance(found, Path)]

    assert paths
    for path in paths:
        [mount] = [mount for folder, mount in mounts.items() if folder in {path, *path.parents}]
        assert path == Path(mount["mountPath"]) or path.name in files_of(one, mount["name"]), path


def files_of(one: Container, volume_name: str) -> set[str]:
    """The files that a volume of secrets or settings has."""
    [volume] = [volume for volume in pod_spec(one)["volumes"] if volume["name"] == volume_name]
    if "secret" in volume:
        return {item["path"] for item in volume["secret"]["items"]}
    name = volume["configMap"]["name"]
    [generator] = [made for made in KUSTOMIZATION["configMapGenerator"] if made["name"] == name]
    return set(generator["files"])


@each_container
def test_volumes_and_mounts_are_each_others(one: Container) -> None:
    claims = [claim["metadata"]["name"] for claim in one.workload["spec"].get("volumeClaimTemplates", [])]
    volumes = [volume["name"] for volume in pod_spec(one)["volumes"]]
    mounted = [mount["name"] for mount in one.container["volumeMounts"]]

    assert sorted([*volumes, *claims]) == sorted(mounted)


@each_container
def test_it_can_do_little_to_its_node(one: Container) -> None:
    pod, own = pod_spec(one)["securityContext"], one.container["securityContext"]

    assert pod["runAsNonRoot"] is True
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert pod_spec(one)["automountServiceAccountToken"] is False
    assert "memory" in one.container["resources"]["limits"]


@each_container
def test_what_selects_its_pods_finds_them(one: Container) -> None:
    labels = one.pod["metadata"]["labels"]
    name = labels["app.kubernetes.io/name"]
    accounts = {account["metadata"]["name"] for account in of_kind("ServiceAccount")}

    assert pod_spec(one)["serviceAccountName"] in accounts
    if one.workload["kind"] == "CronJob":
        return
    assert one.workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    budgets = [budget["spec"]["selector"]["matchLabels"] for budget in of_kind("PodDisruptionBudget")]
    services = [service["spec"]["selector"] for service in of_kind("Service")]
    for found in (budgets, services):
        assert {"app.kubernetes.io/name": name} in found


@pytest.mark.parametrize("probe", ["livenessProbe", "readinessProbe"])
@each_container
def test_probes_ask_the_port_that_it_listens_on(one: Container, probe: str) -> None:
    if one.workload["kind"] == "CronJob":
        assert probe not in one.container
        return
    ports = {port["name"]: port["containerPort"] for port in one.container["ports"]}
    asked = one.container[probe]["httpGet"]

    assert ports[asked["port"]] == options(one.command)["port"]
    assert options(one.command)["host"] == "0.0.0.0"
    assert asked["path"] == {"livenessProbe": "/livez", "readinessProbe": "/readyz"}[probe]


def test_services_and_monitors_name_ports_that_are_there() -> None:
    ports = {
        one.pod["metadata"]["labels"]["app.kubernetes.io/name"]: {port["name"] for port in one.container["ports"]}
        for one in containers()
        if "ports" in one.container
    }
    services = {service["metadata"]["name"]: service for service in of_kind("Service")}

    for service in services.values():
        app = service["spec"]["selector"]["app.kubernetes.io/name"]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports[app]
    for monitor in of_kind("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        [found] = [one for one in services.values() if wanted.items() <= one["metadata"].get("labels", {}).items()]
        assert {end["port"] for end in monitor["spec"]["endpoints"]} <= {
            port["name"] for port in found["spec"]["ports"]
        }


def test_a_stopping_pod_has_more_time_than_it_takes() -> None:
    found = {one.name: one for one in containers()}
    stop_timeout_s = parse_duration_ms(options(found["compensator"].command)["stop_timeout"]) / 1000
    shutdown_s = options(found["broker"].command)["shutdown_timeout_ms"] / 1000

    assert grace_seconds(found["compensator"]) >= stop_timeout_s + ENGINE_CLOSE_SECONDS
    assert grace_seconds(found["broker"]) >= shutdown_s + ENGINE_CLOSE_SECONDS
    hand_over_s = cluster_settings(found["broker-node"]).drain_ms / 1000
    shutdown_s = options(found["broker-node"].command)["shutdown_timeout_ms"] / 1000
    assert grace_seconds(found["broker-node"]) >= hand_over_s + shutdown_s + ENGINE_CLOSE_SECONDS


def cluster_settings(one: Container) -> ClusterSettings:
    """What a node's command line and environment make of its cluster, as its first pod has them."""
    name = f"{one.workload['metadata']['name']}-0"
    given = {variable["name"]: variable.get("value", name) for variable in one.container["env"]}
    prefix = "OUTBOX_CLUSTER__"
    table = {
        key.removeprefix(prefix).lower(): value.replace("$(POD_NAME)", name)
        for key, value in given.items() if key.startswith(prefix)
    }  # fmt: skip
    return ClusterSettings(**table, store=options(one.command)["store"], name=name)


def test_the_nodes_of_one_broker_are_found_by_names_of_their_own_and_one_of_them_may_go() -> None:
    [node] = [one for one in containers() if one.name == "broker-node"]
    spec = node.workload["spec"]
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind("Service")}
    [budget] = [one for one in of_kind("PodDisruptionBudget") if one["metadata"]["name"] == "outbox-broker-node"]
    mounts = {mount["mountPath"] for mount in node.container["volumeMounts"]}
    settings = cluster_settings(node)

    assert spec["replicas"] >= 2
    assert spec["updateStrategy"] == {"type": "OnDelete"}, "one that stands by is never ready"
    assert services[spec["serviceName"]]["publishNotReadyAddresses"] is True
    port = options(node.command)["port"]
    assert settings.advertised_url == f"http://{settings.name}.{spec['serviceName']}:{port}"
    assert settings.address.root == "/outbox/broker"
    assert str(settings.ledgers_password_file) in {
        f"/run/secrets/outbox-mq/{name}" for name in files_of(node, "secrets")
    }
    assert budget["spec"]["minAvailable"] == 0
    assert "/tmp" in mounts, "an engine's lock"
    assert node.container["startupProbe"]["httpGet"]["path"] == "/livez"


def test_one_broker_has_one_data_folder_and_reconciliation_reads_it_where_it_is() -> None:
    [stateful] = [one for one in of_kind("StatefulSet") if one["metadata"]["name"] == "outbox-broker"]
    found = {one.name: one for one in containers()}
    data = options(found["broker"].command)["data"]
    reads = {mount["mountPath"]: mount for mount in found["reconcile"].container["volumeMounts"]}[str(data)]
    [volume] = [one for one in pod_spec(found["reconcile"])["volumes"] if one["name"] == reads["name"]]
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind("Service")}

    assert stateful["spec"]["replicas"] == 1
    assert reads["readOnly"] is True
    assert volume["persistentVolumeClaim"]["claimName"] == f"data-{stateful['metadata']['name']}-0"
    assert services[stateful["spec"]["serviceName"]]["clusterIP"] == "None"


def test_only_a_source_that_was_away_is_reconciled_again() -> None:
    [job] = of_kind("CronJob")
    [rule] = job["spec"]["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]

    assert (rule["action"], rule["onExitCodes"]["operator"], rule["onExitCodes"]["values"]) == ("FailJob", "In", [1, 2])
    assert rule["onExitCodes"]["containerName"] == "reconcile"
    assert job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert job["spec"]["concurrencyPolicy"] == "Forbid"


def test_the_compensator_takes_the_configuration_and_finds_the_broker_by_its_service() -> None:
    config = load({}, file=KUBERNETES / "outbox.toml")
    [service] = [one for one in of_kind("Service") if one["metadata"]["name"] == "outbox-broker"]

    assert config.compensator.leases is True
    assert config.broker.url == f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"


def test_reconciliation_takes_its_configuration_and_the_url_of_the_secret() -> None:
    tables = read_config(KUBERNETES / "reconcile.toml")

    with pytest.raises(ConfigurationError, match="needs url"):
        settings_of(tables)
    tables["database"] = {**tables["database"], "url": "mysql+pymysql://reader:secret@mysql/shop"}
    settings = settings_of(tables)
    mounts = [mount["mountPath"] for one in containers() if one.name == "reconcile"
              for mount in one.container["volumeMounts"]]  # fmt: skip
    assert {str(settings.broker_data), str(settings.output)} <= set(mounts)


def test_every_key_of_the_secret_that_is_used_is_named_for_whoever_makes_it() -> None:
    used = {item["key"] for one in containers() for volume in pod_spec(one)["volumes"]
            for item in volume.get("secret", {}).get("items", [])}  # fmt: skip
    used |= {
        variable["valueFrom"]["secretKeyRef"]["key"]
        for one in containers() for variable in one.container.get("env", [])
        if "secretKeyRef" in variable.get("valueFrom", {})
    }  # fmt: skip
    used |= {
        end["authorization"]["credentials"]["key"]
        for monitor in of_kind("ServiceMonitor") for end in monitor["spec"]["endpoints"] if "authorization" in end
    }  # fmt: skip
    text = "".join(path.read_text() for path in KUSTOMIZATIONS)

    assert used == {
        "database-password", "reconcile-database-url", "tokens.toml", "broker-token", "metrics-token",
        "ledgers-password",
    }  # fmt: skip
    assert all(f"#   {key} " in text for key in used)
