"""Finds settings of a namespace and its topics that would let Pulsar lose a confirmed message."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import requests

from broker_adapter.publishing.admin_http import AdminHttp, description_of
from broker_adapter.pulsar.client_settings import ClientSettings
from outbox_core.common.clock import Clock
from outbox_core.common.errors import NotAuthenticated
from outbox_core.messages.broker_port import Inspection, Weakness

ACKNOWLEDGED_BY: Final = "bookkeeperAckQuorum"
COPIES: Final = "bookkeeperWriteQuorum"
COPIES_MIN: Final = 2
EVICTION: Final = "consumer_backlog_eviction"

NOT_CHECKED: Final = Weakness(
    subject="admin",
    problem="nobody checks whether topics have a subscription, without which a confirmed message is deleted",
    cure="add admin=http://HOST:8080 to the broker's URL",
)

NOT_ALLOWED: Final = Weakness(
    subject="admin",
    problem="this login may not ask the admin API how the namespace and its topics are set, so nobody checks them",
    cure="let its role read them (pulsar-admin tenants update --admin-roles), or leave out admin=",
)
CREATE_AGAIN_SECONDS: Final = 0.2


def inspect_topics(
    admin: AdminApi, topics: Sequence[str], *, namespace: str, product: str, clock: Clock, timeout_ms: int
) -> Inspection:
    """Ask the admin API, which may take half of the time: a publish follows, which one that hangs must leave time for.
    Raises NotAuthenticated where it refuses the login.
    """
    deadline_ms = clock.monotonic_ms() + timeout_ms // 2

    def left_s() -> float:
        return (deadline_ms - clock.monotonic_ms()) / 1000

    version = ""
    try:
        version = admin.version(timeout_s=left_s())
        weaknesses = list(namespace_weaknesses(namespace, admin.persistence(timeout_s=left_s())))
        quotas, ttl_s = admin.backlog_quotas(timeout_s=left_s()), admin.message_ttl_s(timeout_s=left_s())
        weaknesses += unread_weaknesses(namespace, quotas, ttl_s=ttl_s)
        for topic in topics:
            weaknesses += topic_weaknesses(topic, admin.subscriptions(topic, timeout_s=left_s()))
    except requests.RequestException as error:
        status = None if error.response is None else error.response.status_code
        if status == HTTPStatus.UNAUTHORIZED:
            raise NotAuthenticated(f"the admin API of Pulsar, which admin= names: {error}") from error
        weakness = NOT_ALLOWED if status == HTTPStatus.FORBIDDEN else unanswered(error)
        return Inspection(product=product, version=version, weaknesses=(weakness,))
    return Inspection(product=product, version=version, weaknesses=tuple(weaknesses))


def unanswered(error: requests.RequestException) -> Weakness:
    """Returns the weakness of a server that cannot be asked. Others may serve the topics."""
    return Weakness(
        subject="admin",
        problem=f"nobody checks whether topics have a subscription: {description_of(error)}",
        cure="start the server that admin= in the broker's URL names, or name another one",
    )


def namespace_weaknesses(namespace: str, persistence: Mapping[str, Any]) -> Iterator[Weakness]:
    """Returns the value of a policy that was set; defaults of the servers are not in it."""
    for name, problem in (
        (COPIES, "a message has one copy, and is lost with one bookie"),
        (ACKNOWLEDGED_BY, "a message is confirmed when one bookie alone has it"),
    ):
        if int(persistence.get(name, COPIES_MIN)) < COPIES_MIN:
            cure = f"set {name} to {COPIES_MIN} with pulsar-admin namespaces set-persistence"
            yield Weakness(subject=namespace, problem=problem, cure=cure)


def unread_weaknesses(namespace: str, quotas: Mapping[str, Any], *, ttl_s: int) -> Iterator[Weakness]:
    """Returns policies by which messages go that nobody has read."""
    if any(quota.get("policy") == EVICTION for quota in quotas.values()):
        problem = "when a backlog is full its oldest messages are dropped, which nobody has read"
        cure = "pulsar-admin namespaces set-backlog-quota with the policy producer_request_hold or producer_exception"
        yield Weakness(subject=namespace, problem=problem, cure=cure)
    if ttl_s > 0:
        problem = f"what nobody has read after {ttl_s:,} s counts as acknowledged, and is deleted"
        yield Weakness(subject=namespace, problem=problem, cure="pulsar-admin namespaces remove-message-ttl")


def topic_weaknesses(topic: str, subscriptions: Sequence[str] | None) -> Iterator[Weakness]:
    """`subscriptions`: None where the topic is missing."""
    cure = f"create one with pulsar-admin topics create-subscription, before the first message of {topic}"
    if subscriptions is None:
        problem = "it is missing; where the server makes it, it has no subscription, and what is confirmed is deleted"
        yield Weakness(subject=topic, topic=topic, problem=problem, cure=cure)
    elif not subscriptions:
        problem = "it has no subscription, and what is confirmed is deleted"
        yield Weakness(subject=topic, topic=topic, problem=problem, cure=cure)


class AdminApi:
    """Reads settings of topics and of their namespace, and creates topics, by Pulsar's admin REST interface. Of one
    namespace. Each call raises requests.RequestException.
    """

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
