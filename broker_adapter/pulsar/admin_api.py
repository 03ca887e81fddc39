"""Reads settings of topics and of their namespace, and creates topics, by Pulsar's admin REST interface."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import requests

from broker_adapter.pulsar.client_settings import ClientSettings

CREATE_AGAIN_SECONDS: Final = 0.2


class AdminApi:
    """Client of the admin API for one namespace. Each call raises requests.RequestException."""

    def __init__(self, settings: ClientSettings) -> None:
        """Does no I/O."""
        self._url = f"{settings.admin_url}/admin/v2"
        self._namespace = "/".join(quote(part, safe="") for part in settings.namespace.split("/"))
        self._headers = {} if settings.token is None else {"Authorization": f"Bearer {settings.token}"}
        self._login = (
            None
            if settings.user is None
            else (settings.user.encode().decode("latin-1"), str(settings.password).encode().decode("latin-1"))
        )
        self._ca_file = settings.ca_file
        self._certificate = (
            None if settings.cert_file is None or settings.key_file is None else (settings.cert_file, settings.key_file)
        )

    def version(self, *, timeout_s: float) -> str:
        """Returns the version of the server that answers."""
        return str(self._get("brokers/version", timeout_s=timeout_s).text).strip()

    def persistence(self, *, timeout_s: float) -> Mapping[str, Any]:
        """The namespace's policy, by Pulsar's names of its parts; empty where the servers' defaults hold."""
        answer = self._get(f"namespaces/{self._namespace}/persistence", timeout_s=timeout_s)
        found: Mapping[str, Any] = (answer.json() if answer.content else None) or {}
        return found

    def subscriptions(self, topic: str, *, timeout_s: float) -> Sequence[str] | None:
        """The names of a topic's subscriptions; None where the topic is missing."""
        path = f"{self.topic_path(topic)}/subscriptions"
        try:
            found: Sequence[str] = self._get(path, timeout_s=timeout_s).json()
        except requests.HTTPError as error:
            if error.response is not None and error.response.status_code == HTTPStatus.NOT_FOUND:
                return None
            raise
        return found

    def topic_path(self, topic: str) -> str:
        """The path that all requests about a topic begin with."""
        return f"persistent/{self._namespace}/{quote(topic, safe='')}"

    def create_topic(self, topic: str, *, timeout_s: float) -> None:
        """Create a topic that does not exist; waits while the server has no bookie to write to."""
        self._create(self.topic_path(topic), timeout_s=timeout_s)

    def create_subscription(self, topic: str, subscription: str, *, timeout_s: float) -> None:
        """Create a subscription that does not exist; waits as create_topic() does."""
        self._create(f"{self.topic_path(topic)}/subscription/{quote(subscription, safe='')}", timeout_s=timeout_s)

    def ask(self, method: str, path: str, *, timeout_s: float) -> requests.Response:
        """Any request. Raises requests.HTTPError, too, where the server refuses it."""
        answer = requests.request(
            method,
            f"{self._url}/{path}",
            headers=self._headers,
            auth=self._login,
            cert=self._certificate,
            verify=self._ca_file or True,
            timeout=max(timeout_s, 0.001),
        )
        answer.raise_for_status()
        return answer

    def _get(self, path: str, *, timeout_s: float) -> requests.Response:
        return self.ask("GET", path, timeout_s=timeout_s)

    def _create(self, path: str, *, timeout_s: float) -> None:
        # For moments after its start the server may be without a bookie, and answers 500.
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
