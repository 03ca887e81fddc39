"""What is applied to a cluster before the operator runs: the definition, an account and its rights, a Deployment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from outbox_operator.resource import GROUP, MANAGER, PLURAL, definition

_RBAC = "rbac.authorization.k8s.io/v1"
_ROLE_GROUP = "rbac.authorization.k8s.io"
_PORT = 9100


def manifests_text(*, lease_namespace: str, namespaces: Sequence[str] = (), image: str | None = None) -> str:
    """Returns the objects as YAML; the same ones each time.

    `lease_namespace`: where the operator runs, too. `namespaces`: those whose resources it looks after; all where none
    is named, for which it needs rights in the whole cluster.
    """
    objects = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": lease_namespace}},
        definition(),
        _named("v1", "ServiceAccount", namespace=lease_namespace),
        *_rights(lease_namespace, namespaces),
    ]
    if image is not None:
        objects.append(_deployment(lease_namespace, namespaces, image))
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=True)


class _Dumper(yaml.SafeDumper):
    """Writes what stands at two places twice: people read it."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never an alias."""
        del data
        return True


def _named(api_version: str, kind: str, *, namespace: str | None = None) -> dict[str, Any]:
    place = {} if namespace is None else {"namespace": namespace}
    metadata = {"name": MANAGER, **place, "labels": {"app.kubernetes.io/name": MANAGER}}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def _rights(lease_namespace: str, namespaces: Sequence[str]) -> list[dict[str, Any]]:
    """The operator's rights, each with what binds it to the account."""
    # A namespace has one Role of this name: where the lease is in one that is looked after, it holds both.
    rules_by_namespace = {namespace: _rules() for namespace in namespaces}
    rules_by_namespace[lease_namespace] = rules_by_namespace.get(lease_namespace, []) + _lease_rules()
    rights: list[dict[str, Any]] = []
    if not namespaces:
        rights += [_named(_RBAC, "ClusterRole") | {"rules": _rules()}, _binding("ClusterRole", account=lease_namespace)]
    for namespace, rules in rules_by_namespace.items():
        rights.append(_named(_RBAC, "Role", namespace=namespace) | {"rules": rules})
        rights.append(_binding("Role", account=lease_namespace, namespace=namespace))
    return rights


def _rules() -> list[dict[str, Any]]:
    """What the operator does to each kind of object, and no more: a test has it run with these rights alone, and
    another one finds each of them used.
    """
    return [
        _rule(GROUP, [PLURAL], "get", "list", "watch", "patch"),
        _rule(GROUP, [f"{PLURAL}/status"], "patch"),
        _rule(GROUP, [f"{PLURAL}/finalizers"], "update"),  # where owners may be named only by who may free them
        _rule("apps", ["statefulsets"], "get", "create", "patch", "delete"),
        _rule("policy", ["poddisruptionbudgets"], "create", "patch"),
        _rule("", ["services", "serviceaccounts"], "create", "patch"),
        _rule("", ["configmaps"], "list", "create", "patch", "delete"),
        _rule("", ["persistentvolumeclaims"], "get", "patch", "delete"),
        _rule("", ["pods", "secrets"], "get"),
        _rule("", ["events"], "create"),
    ]


def _lease_rules() -> list[dict[str, Any]]:
    """Rights to the one lease. That which creates cannot name it: an object has no name before it is there."""
    group, resources = "coordination.k8s.io", ["leases"]
    return [_rule(group, resources, "create"), _rule(group, resources, "get", "patch") | {"resourceNames": [MANAGER]}]


def _rule(group: str, resources: list[str], *verbs: str) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": resources, "verbs": list(verbs)}


def _binding(kind: str, *, account: str, namespace: str | None = None) -> dict[str, Any]:
    binding = _named(_RBAC, f"{kind}Binding", namespace=namespace)
    subject = {"kind": "ServiceAccount", "name": MANAGER, "namespace": account}
    return binding | {"roleRef": {"apiGroup": _ROLE_GROUP, "kind": kind, "name": MANAGER}, "subjects": [subject]}


def _deployment(lease_namespace: str, namespaces: Sequence[str], image: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": MANAGER}
    probe = {"periodSeconds": 10, "timeoutSeconds": 3}
    container = {
        "name": "operator",
        "image": image,
        "command": ["outbox"],
        "args": [
            "operator", "run", "--host=0.0.0.0", f"--port={_PORT}", f"--lease-namespace={lease_namespace}",
            *(f"--namespace={namespace}" for namespace in namespaces),
        ],
        "ports": [{"name": "status", "containerPort": _PORT}],
        "livenessProbe": {"httpGet": {"path": "/livez", "port": "status"}} | probe,
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "status"}} | probe,
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
    }  # fmt: skip
    pod = {
        "serviceAccountName": MANAGER,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10_001, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    container["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108 - certificates, for the client
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return _named("apps/v1", "Deployment", namespace=lease_namespace) | {"spec": spec}
