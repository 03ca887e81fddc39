"""Reads exchanges and queues from RabbitMQ's management plugin. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from broker_adapter.publishing.admin_http import AdminHttp


class ManagementApi:
    """Client of the management API for one virtual host. Each call raises requests.RequestException."""

    def __init__(
        self, url: str, *, vhost: str, login: tuple[str, str], ca_file: str | None, needs_tls: bool = False
    ) -> None:
        """`login`: of a user who has the tag `monitoring`. `needs_tls`: see AdminHttp."""
        self._vhost = quote(vhost, safe="")
        self._http = AdminHttp(f"{url}/api", login=login, ca_file=ca_file, needs_tls=needs_tls)

    def exchange_type(self, name: str, *, timeout_s: float) -> str:
        """Such as `topic`."""
        return str(self._get(f"exchanges/{self._vhost}/{quote(name, safe='')}", timeout_s=timeout_s)["type"])

    def bindings(self, exchange: str, *, timeout_s: float) -> Sequence[Mapping[str, Any]]:
        """All that an exchange routes to."""
        path = f"exchanges/{self._vhost}/{quote(exchange, safe='')}/bindings/source"
        bindings: Sequence[Mapping[str, Any]] = self._get(path, timeout_s=timeout_s)
        return bindings

    def queue(self, name: str, *, timeout_s: float) -> Mapping[str, Any]:
        """A queue with the policy that is in effect."""
        queue: Mapping[str, Any] = self._get(f"queues/{self._vhost}/{quote(name, safe='')}", timeout_s=timeout_s)
        return queue

    def node_count(self, *, timeout_s: float) -> int:
        """Returns the number of the cluster's nodes, including those that are down."""
        return len(self._get("nodes", timeout_s=timeout_s))

    def _get(self, path: str, *, timeout_s: float) -> Any:
        return self._http.get(path, timeout_s=timeout_s).json()
