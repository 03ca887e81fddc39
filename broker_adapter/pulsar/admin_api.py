"""Reads settings of topics and of their namespace, and creates topics, by Pulsar's admin REST interface."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import requests

from broker_adapter.publishing.admin_http import AdminHttp
from broker_adapter.pulsar.client_settings import ClientSettings

CREATE_AGAIN_SECONDS: Final = 0.2


class AdminApi:
    """Client of the admin API for one namespace. Each call raises requests.RequestException."""

    def __init__(self, settings: ClientSettings) -> None:
        """Does no I/O."""
        self._namespace = "/".join(quote(part, safe="") for part in settings.namespace.split("/"))
        self._http = AdminHttp(
            f"{settings.admin_url}/admin/v2",
            login=None if settings.user is None else (settings.user, str(settings.password)),
            token=settings.token,
            ca_file=settings.ca_file,
            certificate=None if settings.cert_file is None else (settings.cert_file, str(settings.key_file)),
            needs_tls=settings.has_tls,
        )

    def version(self, *, timeout_s: float) -> str:
        """Returns the version of the server that answers."""
        return str(self._http.get("brokers/version", timeout_s=timeout_s).text).strip()

    def persistence(self, *, timeout_s: float) -> Mapping[str, Any]:
        """The namespace's policy, by Pulsar's names of its parts; empty where the servers' defaults hold."""
        policy: Mapping[str, Any] = self._policy("persistence", timeout_s=timeout_s) or {}
        return policy

    def backlog_quotas(self, *, timeout_s: float) -> Mapping[str, Any]:
        """The namespace's limits of what is not acknowledged, each with the policy for what is beyond it."""
        quotas: Mapping[str, Any] = self._policy("backlogQuotaMap", timeout_s=timeout_s) or {}
        return quotas

    def message_ttl_s(self, *, timeout_s: float) -> int:
        """After so many seconds a message of the namespace counts as acknowledged; 0: never."""
        return int(self._policy("messageTTL", timeout_s=timeout_s) or 0)

    def subscriptions(self, topic: str, *, timeout_s: float) -> Sequence[str] | None:
        """The names of a topic's subscriptions; None where the topic is missing."""
        path = f"{self.topic_path(topic)}/subscriptions"
        try:
            names: Sequence[str] = self._http.get(path, timeout_s=timeout_s).json()
        except requests.HTTPError as error:
            if error.response is not None and error.response.status_code == HTTPStatus.NOT_FOUND:
                return None
            raise
        return names

    def topic_path(self, topic: str) -> str:
        """The path that all requests about a topic begin with."""
        return f"persistent/{self._namespace}/{quote(topic, safe='')}"

    def create_topic(self, topic: str, *, timeout_s: float) -> None:
        """Create a topic that does not exist; waits while the server has no bookie to write to."""
        self._create(self.topic_path(topic), timeout_s=timeout_s)

    def create_subscription(self, topic: str, subscription: str, *, timeout_s: float) -> None:
        """Create a subscription that does not exist; waits as create_topic() does."""
        self._create(f"{self.topic_path(topic)}/subscription/{quote(subscription, safe='')}", timeout_s=timeout_s)

    def _policy(self, name: str, *, timeout_s: float) -> Any:
        """What the namespace says; None where the servers' defaults hold."""
        answer = self._http.get(f"namespaces/{self._namespace}/{name}", timeout_s=timeout_s)
        return answer.json() if answer.content else None

    def ask(self, method: str, path: str, *, timeout_s: float) -> requests.Response:
        """Any request. Raises requests.HTTPError, too, where the server refuses it."""
        return self._http.ask(method, path, timeout_s=timeout_s)

    def _create(self, path: str, *, timeout_s: float) -> None:
        # A standalone server that was killed may lose its only bookie again and again, and answers 500 meanwhile.
        deadline, pause, is_again = time.monotonic() + timeout_s, threading.Event(), False
        while True:
            try:
                self.ask("PUT", path, timeout_s=deadline - time.monotonic())
            except requests.HTTPError as error:
                status = None if error.response is None else error.response.status_code
                if is_again and status == HTTPStatus.CONFLICT:  # made by a refused request, but for its ledger
                    return
                if status != HTTPStatus.INTERNAL_SERVER_ERROR or time.monotonic() > deadline:
                    raise
                is_again = True
                pause.wait(CREATE_AGAIN_SECONDS)
            else:
                return
