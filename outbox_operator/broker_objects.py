"""The objects that make up one broker, as they are applied: settings, names in the network, a budget, a set. Pure.

The same pod as in deploy/kubernetes, with the settings of a resource.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outbox_operator.broker import BrokerSpec, PodSettings, SecretKey
from outbox_operator.resource import (
    API_VERSION,
    DATA_FOLDER,
    KIND,
    MANAGER,
    PORT,
    REVISION_LABEL,
    SETTINGS_ANNOTATION,
)

_SHUTDOWN_MS = 25_000
_GRACE_SECONDS = 45
"""The pause before the signal, the time to finish requests, and ten seconds to close the logs."""
_PAUSE_SECONDS = 5
_CREDENTIALS_INTERVAL_MS = 1_000
"""A look is one small file. The kubelet replaces that of a Secret whole, a minute or so after the Secret changed."""
_TOKENS_FOLDER = "/run/secrets/outbox-mq"
_USER = 10_001


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The resource that owns the objects, and the names of these."""

    namespace: str
    name: str
    uid: str

    @property
    def pod(self) -> str:
        """The one pod of the set."""
        return f"{self.name}-0"

    @property
    def claim(self) -> str:
        """The claim of the pod's volume."""
        return f"data-{self.pod}"

    def settings(self, revision: str) -> str:
        """The ConfigMap of a revision."""
        return f"{self.name}-{revision}"

    @property
    def labels(self) -> dict[str, str]:
        """Of all objects; by the first two the pod is selected."""
        return {
            "app.kubernetes.io/name": "outbox-broker",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": "broker",
            "app.kubernetes.io/managed-by": MANAGER,
        }

    @property
    def selector(self) -> dict[str, str]:
        """By which services, the budget and the set find the pod."""
        return {name: self.labels[name] for name in ("app.kubernetes.io/name", "app.kubernetes.io/instance")}


def objects_of(names: Names, spec: BrokerSpec, pod: PodSettings, *, claimed: str | None) -> list[dict[str, Any]]:
    """Returns the objects in the order in which they are applied.

    `claimed`: the size in the set's own template, which cannot change: what grows is the claim.
    """
    service = {"ports": [{"name": "http", "port": PORT, "targetPort": "http"}], "selector": names.selector}
    return [
        _object(names, "v1", "ConfigMap", names.settings(pod.revision), {
            "immutable": True, "data": {_variable(name): value for name, value in pod.config.items()},
        }, annotations={SETTINGS_ANNOTATION: pod.as_json()}),
        _object(names, "v1", "ServiceAccount", names.name, {"automountServiceAccountToken": False}),
        _object(names, "v1", "Service", f"{names.name}-pods", {
            "spec": service | {"clusterIP": "None", "publishNotReadyAddresses": True},
        }),
        _object(names, "v1", "Service", names.name, {"spec": service}),
        # Of one pod: an eviction is never refused, and the broker is away until its pod runs elsewhere on the same
        # volume. For a budget that asks for one of one, `kubectl drain` would wait for ever.
        _object(names, "policy/v1", "PodDisruptionBudget", names.name, {
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": names.selector}},
        }),
        _object(names, "apps/v1", "StatefulSet", names.name, {"spec": _set(names, spec, pod, claimed=claimed)}),
    ]  # fmt: skip


def _object(
    names: Names, api_version: str, kind: str, name: str, parts: dict[str, Any], *,
    annotations: dict[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": names.name, "uid": names.uid, "controller": True}
    metadata = {"name": name, "namespace": names.namespace, "labels": names.labels, "ownerReferences": [owner]}
    if annotations:
        metadata["annotations"] = annotations
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **parts}


def _set(names: Names, spec: BrokerSpec, pod: PodSettings, *, claimed: str | None) -> dict[str, Any]:
    claim: dict[str, Any] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": claimed or spec.volume_size}},
    }
    if spec.storage_class is not None:
        claim["storageClassName"] = spec.storage_class
    return {
        "replicas": 1,
        "serviceName": f"{names.name}-pods",
        # Else a pod that never became ready would not be replaced by the one that is taken back.
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": names.selector},
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
        "template": {
            "metadata": {"labels": names.labels | {REVISION_LABEL: pod.revision}},
            "spec": _pod(names, pod),
        },
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
    }


def _pod(names: Names, pod: PodSettings) -> dict[str, Any]:
    secrets = [] if pod.tokens is None else [_tokens_volume(pod.tokens)]
    return {
        "serviceAccountName": names.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(names, pod)],
        "volumes": secrets,
    }  # fmt: skip


def _container(names: Names, pod: PodSettings) -> dict[str, Any]:
    mounts = [{"name": "data", "mountPath": DATA_FOLDER}]
    if pod.tokens is not None:
        mounts.append({"name": "tokens", "mountPath": _TOKENS_FOLDER, "readOnly": True})  # type: ignore[dict-item]
    return {
        "name": "broker",
        "image": pod.image,
        "command": ["outbox"],
        "args": [
            "broker", "serve", f"--data={DATA_FOLDER}", "--host=0.0.0.0", f"--port={PORT}", "--durability=fsync",
            "--insecure-no-auth" if pod.tokens is None else f"--tokens={_TOKENS_FOLDER}/tokens.toml",
            f"--credentials-interval-ms={_CREDENTIALS_INTERVAL_MS}", f"--shutdown-timeout-ms={_SHUTDOWN_MS}",
        ],
        "envFrom": [{"configMapRef": {"name": names.settings(pod.revision)}}],
        "ports": [{"name": "http", "containerPort": PORT}],
        # Reading the logs back may take minutes after a kill.
        "startupProbe": _probe("/readyz", period_s=5, failures=120),
        "livenessProbe": _probe("/livez", period_s=10, failures=6),
        "readinessProbe": _probe("/readyz", period_s=5),
        # The Service forgets a pod a moment after the pod gets the signal to stop.
        "lifecycle": {"preStop": {"sleep": {"seconds": _PAUSE_SECONDS}}},
        "resources": pod.resources,
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }  # fmt: skip


def _probe(path: str, *, period_s: int, failures: int | None = None) -> dict[str, Any]:
    probe = {"httpGet": {"path": path, "port": "http"}, "periodSeconds": period_s, "timeoutSeconds": 3}
    return probe if failures is None else probe | {"failureThreshold": failures}


def _tokens_volume(tokens: SecretKey) -> dict[str, Any]:
    items = [{"key": tokens.key, "path": "tokens.toml"}]
    return {"name": "tokens", "secret": {"secretName": tokens.name, "defaultMode": 0o440, "items": items}}


def _variable(name: str) -> str:
    return f"OUTBOX_BROKER__{name.upper()}"
