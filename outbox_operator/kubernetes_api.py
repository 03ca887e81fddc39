"""Requests to the API server, with objects as they are in JSON. The one place that knows the official client.

The client finds the server and logs in (in a pod, by a kubeconfig, with tokens that are renewed). Its typed models are
not used, since what is applied is a part of an object, and they would fill in the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, cast

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from outbox_core.common.errors import ConfigurationError, OutboxError
from outbox_operator.resource import API_VERSION, KIND, MANAGER, PLURAL

Object = dict[str, Any]
TIMEOUT_SECONDS: Final = 30
_PLURALS: Final = {
    ("v1", "ConfigMap"): "configmaps",
    ("v1", "PersistentVolumeClaim"): "persistentvolumeclaims",
    ("v1", "Pod"): "pods",
    ("v1", "Secret"): "secrets",
    ("v1", "Service"): "services",
    ("v1", "ServiceAccount"): "serviceaccounts",
    ("apps/v1", "StatefulSet"): "statefulsets",
    ("coordination.k8s.io/v1", "Lease"): "leases",
    ("policy/v1", "PodDisruptionBudget"): "poddisruptionbudgets",
    (API_VERSION, KIND): PLURAL,
}


class KubernetesRefused(OutboxError):
    """The API server refuses a request, or does not answer. It is tried again by the next round."""

    def __init__(self, text: str, *, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class KubernetesApi:
    """The API server. Thread-safe; every method may raise KubernetesRefused, and may then have been done."""

    def __init__(self, api_client: client.ApiClient, *, timeout_s: float = TIMEOUT_SECONDS) -> None:
        self.client = api_client
        self._timeout_s = timeout_s

    @classmethod
    def connected(cls, kubeconfig: Path | None) -> KubernetesApi:
        """The server of a kubeconfig; None: that of the cluster that this process runs in, else of ~/.kube/config.

        Raises ConfigurationError.
        """
        settings = client.Configuration()
        try:
            if kubeconfig is not None:
                config.load_kube_config(str(kubeconfig), client_configuration=settings)
            elif config.incluster_config.SERVICE_HOST_ENV_NAME in os.environ:
                config.load_incluster_config(client_configuration=settings)
            else:
                config.load_kube_config(client_configuration=settings)
        except (config.ConfigException, OSError) as error:
            raise ConfigurationError(f"no cluster is known: {error}; give --kubeconfig FILE") from error
        settings.retries = urllib3.Retry(0)  # the next round is the retry
        return cls(client.ApiClient(settings))

    def check_definition(self) -> None:
        """Raise ConfigurationError if the cluster does not know the resource."""
        try:
            self._ask("GET", f"/apis/{API_VERSION}")
        except KubernetesRefused as error:
            if error.status == HTTPStatus.NOT_FOUND:
                raise ConfigurationError(
                    f"the cluster knows no {API_VERSION}: apply what `outbox operator manifests` prints"
                ) from error
            raise

    def get(self, api_version: str, kind: str, namespace: str, name: str) -> Object | None:
        """Returns an object; None if it is not there."""
        try:
            return self._ask("GET", _path(api_version, kind, namespace, name))
        except KubernetesRefused as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    def items(self, api_version: str, kind: str, namespace: str, labels: Mapping[str, str]) -> list[Object]:
        """Returns the objects with these labels."""
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        answer = self._ask("GET", _path(api_version, kind, namespace), query={"labelSelector": selector})
        return cast("list[Object]", answer["items"])

    def apply(self, wanted: Object, *, force: bool) -> None:
        """Have an object be so, by server-side apply; make it if it is not there. Unless forced, what another manager
        says of it is not overruled, and the request is refused.
        """
        metadata = wanted["metadata"]
        path = _path(wanted["apiVersion"], wanted["kind"], metadata["namespace"], metadata["name"])
        query = {"fieldManager": MANAGER, "force": "true" if force else "false"}
        self._ask("PATCH", path, body=wanted, query=query, content_type="application/apply-patch+yaml")

    def create(self, wanted: Object) -> None:
        """Make an object. Refused with 409 if it is there."""
        path = _path(wanted["apiVersion"], wanted["kind"], wanted["metadata"]["namespace"])
        self._ask("POST", path, body=wanted)

    def merge(self, of: Object, changes: Object, *, subresource: str = "") -> None:
        """Change fields of an object, if it is still the one that was read."""
        metadata = of["metadata"]
        path = _path(of["apiVersion"], of["kind"], metadata["namespace"], metadata["name"]) + subresource
        guarded = {"metadata": {"uid": metadata["uid"]}} | changes
        self._ask("PATCH", path, body=guarded, content_type="application/merge-patch+json")

    def delete(self, found: Object) -> None:
        """Delete an object, if it is still the one that was read; what it owns follows."""
        metadata = found["metadata"]
        options = {"preconditions": {"uid": metadata["uid"]}, "propagationPolicy": "Background"}
        path = _path(found["apiVersion"], found["kind"], metadata["namespace"], metadata["name"])
        try:
            self._ask("DELETE", path, body=options)
        except KubernetesRefused as error:
            if error.status not in {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT}:  # gone, or another one of its name
                raise

    def _ask(
        self, method: str, path: str, *,
        body: Object | None = None, query: Mapping[str, str] | None = None, content_type: str = "application/json",
    ) -> Object:  # fmt: skip
        headers = {"Accept": "application/json", "Content-Type": content_type}
        parts = self.client.param_serialize(
            method, path, query_params=list((query or {}).items()), header_params=headers, body=body,
            auth_settings=["BearerToken"],
        )  # fmt: skip
        try:
            response = self.client.call_api(*parts, _request_timeout=self._timeout_s)
            data = response.read()
        except ApiException as error:
            raise KubernetesRefused(_message(error), status=error.status) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise KubernetesRefused(f"the API server does not answer: {type(error).__name__}") from error
        if not HTTPStatus.OK <= response.status < HTTPStatus.MULTIPLE_CHOICES:
            raise KubernetesRefused(_said(data, response.status), status=response.status)
        return cast("Object", json.loads(data))


def _path(api_version: str, kind: str, namespace: str, name: str = "") -> str:
    root = "/api/v1" if api_version == "v1" else f"/apis/{api_version}"
    return f"{root}/namespaces/{namespace}/{_PLURALS[api_version, kind]}" + (f"/{name}" if name else "")


def _message(error: ApiException) -> str:
    return _said(error.body, error.status) if error.body else f"{error.status} {error.reason}"


def _said(data: str | bytes, status: int | None) -> str:
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return f"the API server answered {status}"
