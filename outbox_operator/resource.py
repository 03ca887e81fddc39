"""The names that the operator and its users share: group, kind, labels; and the definition of the resource.

The definition refuses what can be refused before anything runs: a contradiction, an immutable field that changes, a
volume that shrinks, a setting that is the operator's own.
"""

from __future__ import annotations

from typing import Any, Final

GROUP: Final = "outbox-mq.dev"
"""A group must have the form of a domain. Nobody looks it up, and no request goes there."""
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
PLURAL: Final = "outboxbrokers"
KIND: Final = "OutboxBroker"
MANAGER: Final = "outbox-operator"
"""The name of the operator: as field manager, in labels, of its ServiceAccount and its lease."""
REVISION_LABEL: Final = f"{GROUP}/revision"
SETTINGS_ANNOTATION: Final = f"{GROUP}/settings"
PORT: Final = 7788
DATA_FOLDER: Final = "/var/lib/outbox-broker"
NAME_CHARS_MAX: Final = 40
"""So that the names of pods and revisions, which are longer, still fit a label."""

OWN_SETTINGS: Final = (
    "credentials_interval_ms",
    "data",
    "durability",
    "host",
    "insecure_no_auth",
    "port",
    "ready_file",
    "tls_cert",
    "tls_key",
    "tokens",
)
"""Settings of [broker] that the operator gives."""


def definition() -> dict[str, Any]:
    """Returns the CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND, "listKind": f"{KIND}List", "plural": PLURAL, "singular": "outboxbroker",
                "shortNames": ["obroker"],
            },
            "versions": [
                {
                    "name": VERSION, "served": True, "storage": True, "subresources": {"status": {}},
                    "additionalPrinterColumns": _columns(), "schema": {"openAPIV3Schema": _schema()},
                }
            ],
        },
    }  # fmt: skip


def _columns() -> list[dict[str, Any]]:
    condition = ".status.conditions[?(@.type=='%s')].%s"
    return [
        {"name": "Ready", "type": "string", "jsonPath": condition % ("Ready", "status")},
        {"name": "Version", "type": "string", "jsonPath": ".status.version"},
        {"name": "Backlog", "type": "integer", "jsonPath": ".status.backlog"},
        {"name": "Oldest", "type": "date", "jsonPath": ".status.oldestMessageTime"},
        {"name": "Scheduled", "type": "integer", "jsonPath": ".status.scheduled"},
        {"name": "Dead", "type": "integer", "jsonPath": ".status.deadLetters"},
        {"name": "Degraded", "type": "string", "jsonPath": condition % ("Degraded", "reason"), "priority": 1},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]


def _schema() -> dict[str, Any]:
    return {
        "type": "object",
        "description": "A broker of Outbox MQ: one pod on one volume, which syncs what it has before it answers.",
        "required": ["spec"],
        "x-kubernetes-validations": [
            {
                "rule": f"size(self.metadata.name) <= {NAME_CHARS_MAX}",
                "message": f"a broker's name has at most {NAME_CHARS_MAX} characters: those of its pods are longer",
            }
        ],
        "properties": {"spec": _spec(), "status": _status()},
    }


def _spec() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["image", "volume", "auth"],
        "properties": {
            "image": {"type": "string", "minLength": 1, "maxLength": 500, "description": "With its tag."},
            "storage": {
                "type": "string", "enum": ["volume"], "default": "volume",
                "description": "Where messages are kept. Immutable.",
                "x-kubernetes-validations": [_immutable("storage")],
            },
            "volume": _volume(),
            "auth": _auth(),
            "config": _config(),
            "resources": {
                "type": "object", "description": "Requests and limits of the container.",
                "properties": {name: _quantities() for name in ("limits", "requests")},
            },
            "rolloutDeadlineSeconds": {
                "type": "integer", "minimum": 1, "maximum": 86_400, "default": 600,
                "description": "A changed pod that is not ready by then is taken back.",
            },
            "deletionPolicy": {
                "type": "string", "enum": ["Drain", "Retain", "Discard"], "default": "Drain",
                "description": "Drain: go when nothing is left to deliver. Retain: go now. Both keep the volume. "
                "Discard: go now, and the volume with it.",
            },
        },
    }  # fmt: skip


def _volume() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["size"],
        "properties": {
            "size": {
                "type": "string", "maxLength": 30, "description": "Such as 20Gi. It may grow, and not shrink.",
                "x-kubernetes-validations": [
                    {"rule": "isQuantity(self)", "message": "size is a quantity, such as 20Gi"},
                    {
                        "rule": "!isQuantity(self) || !isQuantity(oldSelf) || "
                        "quantity(self).compareTo(quantity(oldSelf)) >= 0",
                        "message": "a volume does not shrink: drain the broker into a new one",
                    },
                ],
            },
            "storageClassName": {"type": "string", "maxLength": 253, "description": "Immutable."},
        },
        "x-kubernetes-validations": [
            {
                "rule": "has(self.storageClassName) == has(oldSelf.storageClassName) && "
                "(!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
                "message": "storageClassName is immutable: a volume does not change its class",
            }
        ],
    }  # fmt: skip


def _auth() -> dict[str, Any]:
    return {
        "type": "object",
        "description": "Who may come. Secrets are named, and stay where they are.",
        "properties": {
            "tokens": _secret_key("The file of tokens that `outbox broker token` makes."),
            "operatorToken": _secret_key("The operator's own token, with the roles admin and read on all topics."),
            "insecureNoAuth": {
                "type": "boolean", "default": False,
                "description": "Serve everybody who reaches it, where the network itself is guarded.",
            },
        },
        "x-kubernetes-validations": [
            {
                "rule": "self.insecureNoAuth != has(self.tokens)",
                "message": "give tokens, or, where the network itself is guarded, insecureNoAuth: true",
            },
            {
                "rule": "has(self.tokens) == has(self.operatorToken)",
                "message": "tokens and operatorToken go together: without a token the operator cannot drain the broker",
            },
        ],
    }  # fmt: skip


def _config() -> dict[str, Any]:
    names = ", ".join(f"'{name}'" for name in OWN_SETTINGS)
    return {
        "type": "object",
        "maxProperties": 100,
        "default": {},
        "description": "Settings of [broker] by name, as `outbox config show` has them; a list in JSON.",
        "additionalProperties": {"type": "string", "maxLength": 4096},
        "x-kubernetes-validations": [
            {
                "rule": "self.all(name, name.matches('^[a-z][a-z0-9_]{0,60}$'))",
                "message": "names of settings are like retention_ms",
            },
            {
                "rule": f"self.all(name, !(name in [{names}]))",
                "message": f"the operator itself gives {', '.join(OWN_SETTINGS)}",
            },
        ],
    }


def _status() -> dict[str, Any]:
    integer, text = {"type": "integer", "format": "int64"}, {"type": "string"}
    return {
        "type": "object",
        "properties": {
            "observedGeneration": integer,
            "revision": text | {"description": "Of the pod's settings, which is rolled out."},
            "revisionTime": text | {"format": "date-time", "description": "When that began."},
            "readyRevision": text | {"description": "The last one that became ready."},
            "refusedRevision": text | {"description": "It did not become ready in time, and was taken back."},
            "drained": {"type": "boolean", "description": "Nothing was left to deliver, and nothing new is taken."},
            "version": text,
            "backlog": integer | {"description": "Messages that are ready or in flight, of all groups."},
            "inFlight": integer,
            "scheduled": integer,
            "deadLetters": integer,
            "oldestMessageTime": text | {"format": "date-time", "description": "Of the backlog."},
            "conditions": {
                "type": "array", "maxItems": 16, "items": _condition(), "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
        },
    }  # fmt: skip


def _condition() -> dict[str, Any]:
    text = {"type": "string", "maxLength": 1024}
    return {
        "type": "object",
        "required": ["type", "status", "reason", "message", "lastTransitionTime"],
        "properties": {
            "type": text,
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "reason": text,
            "message": {"type": "string", "maxLength": 32_768},
            "lastTransitionTime": {"type": "string", "format": "date-time"},
            "observedGeneration": {"type": "integer", "format": "int64"},
        },
    }


def _secret_key(description: str) -> dict[str, Any]:
    name = {"type": "string", "minLength": 1, "maxLength": 253}
    return {
        "type": "object", "description": description, "required": ["name", "key"],
        "properties": {"name": name, "key": name},
    }  # fmt: skip


def _quantities() -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
        },
    }


def _immutable(name: str) -> dict[str, str]:
    return {"rule": "self == oldSelf", "message": f"{name} is immutable: make a new resource, and drain this one"}
