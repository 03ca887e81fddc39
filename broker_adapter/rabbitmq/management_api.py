"""Reads exchanges and queues from RabbitMQ's management plugin. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import requests


class ManagementApi:
    """Client of the management API for one virtual host. Each call raises requests.RequestException."""

    def __init__(self, url: str, *, vhost: str, login: tuple[str, str], ca_file: str | None) -> None:
        """`login`: of a user who has the tag `monitoring`."""
        self.url = url
        self._vhost = quote(vhost, safe="")
        # requests sends Latin-1, and the server reads UTF-8.
        user, password = (part.encode().decode("latin-1") for part in login)
        self._login = user, password
        self._ca_file = ca_file

    def exchange_type(self, name: str, *, timeout_s: float) -> str:
        """Such as `topic`."""
        return str(self._get(f"exchanges/{self._vhost}/{quote(name, safe='')}", timeout_s=timeout_s)["type"])

    def bindings(self, exchange: str, *, timeout_s: float) -> Sequence[Mapping[str, Any]]:
        """All that an exchange routes to."""
        path = f"exchanges/{self._vhost}/{quote(exchange, safe='')}/bindings/source"
        found: Sequence[Mapping[str, Any]] = self._get(path, timeout_s=timeout_s)
        return found

    def queue(self, name: str, *, timeout_s: float) -> Mapping[str, Any]:
        """A queue with the policy that is in effect."""
        found: Mapping[str, Any] = self._get(f"queues/{self._vhost}/{quote(name, safe='')}", timeout_s=timeout_s)
        return found

    def node_count(self, *, timeout_s: float) -> int:
        """Returns the number of the cluster's nodes, including those that are down."""
        return len(self._get("nodes", timeout_s=timeout_s))

    def _get(self, path: str, *, timeout_s: float) -> Any:
        answer = requests.get(
            f"{self.url}/api/{path}", auth=self._login, timeout=max(timeout_s, 0.001), verify=self._ca_file or True
        )
        answer.raise_for_status()
        return answer.json()
