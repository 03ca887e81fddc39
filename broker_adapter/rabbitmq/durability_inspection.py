"""Finds settings of the queues behind a topic that would let RabbitMQ lose a confirmed message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import requests

from broker_adapter.publishing.admin_http import AdminHttp, description_of
from broker_adapter.rabbitmq.connection import RabbitMqConnection
from outbox_core.messages.broker_port import Weakness

LeftS = Callable[[], float]
"""How many seconds are left for a call."""

_LENGTH_LIMITS: Final = ("max-length", "max-length-bytes")
_QUORUM_CURE: Final = "declare it as a durable quorum queue (x-queue-type=quorum)"


class Inspector:
    """Checks by AMQP that queues exist, and by the management API how durable they are."""

    def __init__(self, *, exchange: str, api: ManagementApi | None) -> None:
        """`exchange` is empty for the default one."""
        self._exchange = exchange
        self._api = api

    def weaknesses(self, topics: Sequence[str], *, connection: RabbitMqConnection, left_s: LeftS) -> Iterator[Weakness]:
        """Raises exceptions of the client, and TimeoutError."""
        missing = [] if self._exchange else list(_missing_queues(topics, connection, left_s))
        yield from missing
        if self._api is None:
            cure = "name the management API in the broker's URL: ?management=http://HOST:15672"
            yield _unknown("the queues' durability is unknown, since AMQP does not show it", cure)
            return
        lacking = {weakness.topic for weakness in missing}

        def half_s() -> float:
            return left_s() / 2  # a publish follows, which an API that hangs must leave time for

        try:
            yield from self._of_topics(self._api, [topic for topic in topics if topic not in lacking], half_s)
        except requests.RequestException as error:
            cure = "check management= in the broker's URL, and rabbitmqctl set_user_tags USER monitoring"
            yield _unknown(f"the queues' durability is unknown: {description_of(error)}", cure)

    def _of_topics(self, api: ManagementApi, topics: Sequence[str], left_s: LeftS) -> Iterator[Weakness]:
        if not topics:
            return
        nodes = api.node_count(timeout_s=left_s())
        if not self._exchange:
            for topic in topics:
                yield from queue_weaknesses(topic, api.queue(topic, timeout_s=left_s()), node_count=nodes)
            return
        kind = api.exchange_type(self._exchange, timeout_s=left_s())
        bindings = api.bindings(self._exchange, timeout_s=left_s())
        for topic in topics:
            bound = [binding for binding in bindings if takes(kind, str(binding["routing_key"]), topic)]
            if not bound:
                problem = f"exchange {self._exchange} routes it to no queue that is seen, and its messages may wait"
                yield Weakness(subject=f"topic {topic}", problem=problem, cure="bind a queue", topic=topic)
            for queue in sorted(
                {str(binding["destination"]) for binding in bound if binding["destination_type"] == "queue"}
            ):
                yield from queue_weaknesses(topic, api.queue(queue, timeout_s=left_s()), node_count=nodes)


def queue_weaknesses(topic: str, queue: Mapping[str, Any], *, node_count: int) -> Iterator[Weakness]:
    """Returns how a queue may lose messages of the topic, by what the management API shows."""
    subject = f"queue {queue['name']}"
    limits = {**(queue.get("effective_policy_definition") or {})}
    limits |= {name.removeprefix("x-"): argument for name, argument in queue["arguments"].items()}
    if not queue["durable"]:
        problem = "it is not durable, and lost with all its messages when the server restarts"
        yield Weakness(subject=subject, problem=problem, cure=_QUORUM_CURE, topic=topic)
    if queue["auto_delete"]:
        problem = "it is deleted with its last consumer, and its messages with it"
        yield Weakness(subject=subject, problem=problem, cure="declare it without auto-delete", topic=topic)
    if "expires" in limits:
        problem = "it is deleted with its messages when nobody has consumed from it for that time"
        yield Weakness(subject=subject, problem=problem, cure="declare it without x-expires", topic=topic)
    if "message-ttl" in limits and "dead-letter-exchange" not in limits:
        problem = "it drops messages that nobody has read in time"
        yield Weakness(subject=subject, problem=problem, cure="declare it without x-message-ttl", topic=topic)
    if node_count > 1 and len(queue.get("members") or ()) < 2:
        problem = f"one of {node_count} nodes has it, and it is lost with that node's disk"
        yield Weakness(subject=subject, problem=problem, cure=_QUORUM_CURE, topic=topic)
    is_limited = any(name in limits for name in _LENGTH_LIMITS)
    if is_limited and not str(limits.get("overflow")).startswith("reject-publish"):
        problem = "when it is full it drops its oldest messages, which nobody has read"
        yield Weakness(subject=subject, problem=problem, cure="set overflow to reject-publish", topic=topic)


def takes(exchange_type: str, binding_key: str, topic: str) -> bool:
    """Whether an exchange of this type routes a topic by a binding. One of any other type (headers, plugins) may."""
    match exchange_type:
        case "direct":
            return binding_key == topic
        case "topic":
            return _is_matched(binding_key.split("."), topic.split("."))
        case _:
            return True


def _is_matched(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """`*` stands for one word, `#` for any number of them."""
    if not pattern:
        return not words
    if pattern[0] == "#":
        return _is_matched(pattern[1:], words) or (bool(words) and _is_matched(pattern, words[1:]))
    return bool(words) and pattern[0] in {"*", words[0]} and _is_matched(pattern[1:], words[1:])


def _missing_queues(topics: Sequence[str], connection: RabbitMqConnection, left_s: LeftS) -> Iterator[Weakness]:
    """On the default exchange a topic is the name of a queue."""
    for topic in topics:
        refusal = connection.why_no_queue(topic, timeout_s=left_s())
        if refusal is not None:
            problem = f"its messages wait: {refusal.reply_text} ({refusal.reply_code})"
            yield Weakness(subject=f"topic {topic}", problem=problem, cure=_QUORUM_CURE, topic=topic)


def _unknown(problem: str, cure: str) -> Weakness:
    return Weakness(subject="RabbitMQ", problem=problem, cure=cure)


class ManagementApi:
    """Reads exchanges and queues of one virtual host from RabbitMQ's management plugin. Changes nothing. Each call
    raises requests.RequestException.
    """

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
