"""Requests to an API server as its administrator, with objects as they are in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from outbox_operator.kubernetes_api import KubernetesApi

Object = dict[str, Any]
APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"


class Refused(Exception):
    """The server's answer, with its reason."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ApiRequests:
    """The server of a kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        self._client = KubernetesApi.connected(kubeconfig).client

    def ask(
        self, method: str, path: str, body: Object | None = None, *,
        kind: str = "application/json", accept: str = "application/json", query: Mapping[str, str] | None = None,
    ) -> Object:  # fmt: skip
        """Send a request; unknown fields are refused. Raises Refused."""
        given = {"fieldValidation": "Strict"} if body is not None and method != "DELETE" else {}
        given |= {"fieldManager": "tests", "force": "true"} if kind == APPLY else {}
        response = self._send(method, path, body, kind=kind, accept=accept, query=given | dict(query or {}))
        data = json.loads(response.data)
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise Refused(response.status, data["message"])
        found: Object = data
        return found

    def follow(self, path: str) -> Iterator[tuple[str, Object]]:
        """Yields what there is of a collection, then each event, until the server ends the watch."""
        response = self._send("GET", path, None, kind="", accept="application/json", query={"watch": "true"})
        rest = b""
        for part in response.stream(None):
            *lines, rest = (rest + part).split(b"\n")
            for event in map(json.loads, lines):
                yield event["type"], event["object"]

    def _send(
        self, method: str, path: str, body: Object | None, *, kind: str, accept: str, query: Mapping[str, str]
    ) -> Any:
        headers = {"Accept": accept} | ({"Content-Type": kind} if kind else {})
        parts = self._client.param_serialize(
            method, path, query_params=list(query.items()), header_params=headers, body=body,
            auth_settings=["BearerToken"],
        )  # fmt: skip
        return self._client.call_api(*parts).response
