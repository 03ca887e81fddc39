"""Finds settings of a namespace and its topics that would let Pulsar lose a confirmed message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import requests

from broker_adapter.publishing.admin_http import description_of
from broker_adapter.pulsar.admin_api import AdminApi
from outbox_core.common.clock import Clock
from outbox_core.common.errors import NotAuthenticated
from outbox_core.messages.durability_inspection import Inspection, Weakness

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
