"""Publishes batches of messages by requests to a proxy, those of a group in order."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from broker_adapter.publishing.client_pool import ClientPool
from broker_adapter.publishing.message_headers import CLOUDEVENTS_HEADER_PREFIX, headers_with_type
from broker_adapter.publishing.treatment import Treatment, refused_result
from broker_adapter.rocketmq.durability_inspection import BrokerSettings
from broker_adapter.rocketmq.errors import Refusal, exception_for, treatment_of
from broker_adapter.rocketmq.protocol import definition_pb2 as definition
from broker_adapter.rocketmq.proxy_connection import ProxyConnection, TopicRoute, route_weaknesses
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError, BrokerRefused
from outbox_core.messages.broker_port import Capability, Inspection
from outbox_core.messages.message import CONTENT_TYPE, Message, PublishResult, PublishStatus

_EMPTY: Final = Refusal("MESSAGE_BODY_EMPTY", "RocketMQ stores no message with an empty body: give it one")
_BEHIND: Final = Refusal("BEHIND", "an earlier message of its key was put off")
ATTRIBUTE_PREFIX: Final = "CE_"
EVENT_CONTENT_TYPE: Final = "CE_contenttype"
TOPIC_HEADER: Final = "outbox-topic"
EMPTY_HEADER: Final = "outbox-empty-headers"
GROUP_BYTES_MAX: Final = 64
REQUEST_BYTES_MAX: Final = 1 << 20
REQUEST_MESSAGES_MAX: Final = 1_000
TOPICS_MAX: Final = 1_000
ASKED_MAX: Final = 8
MISSING: Final = "TOPIC_NOT_FOUND"


class RocketMqPublisher:
    """A Publisher. A message is stored when its broker has answered, which with SYNC_FLUSH is after the sync.

    A proxy that gets several messages in a request ignores their groups when it chooses queues: on topics that keep
    order, each message has a request of its own.
    """

    product = "Apache RocketMQ"
    capabilities: frozenset[Capability] = frozenset()

    def __init__(
        self, pool: ClientPool[ProxyConnection], settings: BrokerSettings, *, addresses: str, clock: Clock
    ) -> None:
        """`addresses`: the proxies'."""
        self._pool = pool
        self._known = OutageDetector(addresses=addresses)
        self._settings = settings
        self._clock = clock

    def publish(self, batch: Sequence[Message], *, timeout_ms: int) -> list[PublishResult]:
        """Store a batch; one result a message, in order."""
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        answers: dict[int, Refusal | None] = {}
        try:
            with self._pool.client() as connection:
                routes = self._routes(connection, [message.topic for message in batch], deadline_ms)
                sending = _PendingBatch(connection, batch, routes, answers, deadline_ms=deadline_ms)
                sending.run()
                if sending.shared_refusal is None and None not in answers.values():
                    self._check_outage(connection, answers.values(), deadline_ms)
            if sending.shared_refusal is not None:
                raise BrokerRefused(str(sending.shared_refusal))
        except BrokerError as error:
            error.with_answered({index: _result(batch[index], answer) for index, answer in answers.items()})
            raise
        return [_result(message, answers[index]) for index, message in enumerate(batch)]

    def inspect(self, topics: Sequence[str], *, timeout_ms: int) -> Inspection:
        """Ask a proxy about topics, and the brokers how they are set."""
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        with self._pool.client() as connection:
            connection.connect(deadline_ms=deadline_ms)
            routes = self._routes(connection, topics, deadline_ms)
            self._check_outage(connection, routes.values(), deadline_ms)
        left_s = max(1, deadline_ms - self._clock.monotonic_ms()) / 1000
        # A publish follows, which servers that hang must leave time for.
        version, weaknesses = self._settings.inspect(timeout_s=left_s / 2)
        return Inspection(product=self.product, version=version, weaknesses=(*route_weaknesses(routes), *weaknesses))

    def close(self) -> None:
        """End the connections. Idempotent."""
        self._pool.close()

    def _routes(
        self, connection: ProxyConnection, topics: Iterable[str], deadline_ms: int
    ) -> dict[str, TopicRoute | Refusal]:
        routes = {
            topic: connection.route(topic_name(topic), deadline_ms=deadline_ms) for topic in dict.fromkeys(topics)
        }
        self._known.add(topic_name(topic) for topic, route in routes.items() if isinstance(route, TopicRoute))
        return routes

    def _check_outage(
        self, connection: ProxyConnection, answers: Iterable[TopicRoute | Refusal | None], deadline_ms: int
    ) -> None:
        for answer in answers:
            if isinstance(answer, Refusal) and answer.code == MISSING:
                self._known.check_outage(answer, connection, deadline_ms=deadline_ms)
                return


class _PendingBatch:
    """A batch in flight, its messages by index."""

    def __init__(
        self,
        connection: ProxyConnection,
        batch: Sequence[Message],
        routes: dict[str, TopicRoute | Refusal],
        answers: dict[int, Refusal | None],
        *,
        deadline_ms: int,
    ) -> None:
        """`answers` gets, by index, why each message was refused; None if it is durable."""
        self.shared_refusal: Refusal | None = None
        """Of a request of many messages, for any one of them: then these have no answer, and none is stored."""
        self._answers = answers
        self._connection = connection
        self._deadline_ms = deadline_ms
        self._messages: dict[int, definition.Message] = {}
        self._unordered: defaultdict[str, list[int]] = defaultdict(list)
        self._ordered: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for index, message in enumerate(batch):
            route = routes[message.topic]
            refusal = _refusal(message, route)
            if refusal is not None:
                answers[index] = refusal
            elif isinstance(route, TopicRoute):
                group = message_group(message, route)
                self._messages[index] = engine_message(message, group=group)
                if group is None:
                    self._unordered[message.topic].append(index)
                else:
                    self._ordered[message.topic, group].append(index)

    def run(self) -> None:
        """Send all. What has no group goes in requests of many. What has one goes alone, since a proxy chooses a queue
        by the group of a single message only, and after the answer for the message of its group before it.
        """
        sizes = {index: message.ByteSize() for index, message in self._messages.items()}
        many = [request for indexes in self._unordered.values() for request in requests_of(indexes, sizes)]
        if many:
            self._send(many)
        key_queues = list(self._ordered.values())
        for position in range(max(map(len, key_queues), default=0)):
            key_queues = [
                key_queue
                for key_queue in key_queues
                if position < len(key_queue) and not self._is_put_off(key_queue, position)
            ]
            if key_queues:
                self._send([[key_queue[position]] for key_queue in key_queues])

    def _send(self, requests: Sequence[Sequence[int]]) -> None:
        """Send requests beside each other."""
        messages = [[self._messages[index] for index in request] for request in requests]
        outcomes = self._connection.send(messages, deadline_ms=self._deadline_ms)
        for request, refusal in zip(requests, outcomes, strict=True):
            if refusal is not None and len(request) > 1 and treatment_of(refusal) is Treatment.REJECTED:
                self.shared_refusal = refusal
            else:
                self._answers.update(dict.fromkeys(request, refusal))

    def _is_put_off(self, key_queue: Sequence[int], position: int) -> bool:
        """Whether the message before was deferred: then none of its group overtakes it."""
        before = self._answers[key_queue[position - 1]] if position else None
        if before is None or treatment_of(before) is Treatment.REJECTED:
            return False
        self._answers.update(dict.fromkeys(key_queue[position:], _BEHIND))
        return True


def _refusal(message: Message, route: TopicRoute | Refusal) -> Refusal | None:
    """Why a message is not sent at all."""
    refusal = route if isinstance(route, Refusal) else route.refusal
    return refusal if refusal is not None or message.body else _EMPTY


def _result(message: Message, refusal: Refusal | None) -> PublishResult:
    if refusal is None:
        return PublishResult(message.id, PublishStatus.STORED)
    return refused_result(message, treatment_of(refusal), str(refusal))


def topic_name(topic: str) -> str:
    """The topic's name on RocketMQ, which knows no dots: each is an underscore."""
    return topic.replace(".", "_")


def message_group(message: Message, route: TopicRoute) -> str | None:
    """The group of a message on a topic that keeps order; None where the message needs none.

    It is the key; a hash of one that RocketMQ would refuse as a group. On a topic that takes nothing without a group a
    message without a key is a group of its own.
    """
    if not route.takes_fifo:
        return None
    if message.key is None:
        return None if route.takes_normal else message.id
    key = message.key.encode()
    if len(key) <= GROUP_BYTES_MAX and message.key.isprintable() and not message.key.isspace():
        return message.key
    return hashlib.sha256(key).hexdigest()


def engine_message(message: Message, *, group: str | None) -> definition.Message:
    """The message as RocketMQ takes it, under our id, which is its key for searches, too."""
    # What is given to it by name is copied, which takes twice as long.
    converted = definition.Message(body=message.body)
    converted.topic.name = topic_name(message.topic)
    converted.user_properties.update(_properties(message))
    system = converted.system_properties
    system.message_id = message.id
    system.keys.append(message.id)
    system.body_encoding = definition.IDENTITY
    system.message_type = definition.NORMAL if group is None else definition.FIFO
    if group is not None:
        system.message_group = group
    system.born_host = "outbox-mq"
    if message.created_at_ms:
        system.born_timestamp.FromMilliseconds(message.created_at_ms)
    return converted


def requests_of(indexes: Iterable[int], sizes: Mapping[int, int]) -> Iterator[list[int]]:
    """Messages of one topic, by their indexes in the batch, in as few requests as their bytes allow."""
    request: list[int] = []
    total = 0
    for index in indexes:
        if request and (total + sizes[index] > REQUEST_BYTES_MAX or len(request) == REQUEST_MESSAGES_MAX):
            yield request
            request, total = [], 0
        request.append(index)
        total += sizes[index]
    if request:
        yield request


def _properties(message: Message) -> dict[str, str]:
    """RocketMQ drops a property without a value: the names of such headers stand in one of their own."""
    properties = headers_with_type(message, attribute_prefix=ATTRIBUTE_PREFIX)
    kind = properties.get(CONTENT_TYPE)
    if kind is not None and any(name.lower().startswith(CLOUDEVENTS_HEADER_PREFIX) for name in message.headers):
        properties[EVENT_CONTENT_TYPE] = kind
    if topic_name(message.topic) != message.topic:
        properties[TOPIC_HEADER] = message.topic
    empty = [name for name, value in properties.items() if not value]
    if empty:
        properties = {name: value for name, value in properties.items() if value} | {EMPTY_HEADER: ",".join(empty)}
    return properties


class OutageDetector:
    """Remembers existing topics, to distinguish an outage of all brokers from a topic that never existed: seconds after
    the last broker died a name server says of each topic that it is not there. Thread-safe.
    """

    def __init__(self, *, addresses: str) -> None:
        """`addresses`: the proxies'."""
        self._addresses = addresses
        self._names: dict[str, None] = {}

    def add(self, topics: Iterable[str]) -> None:
        """These are there now."""
        self._names = dict.fromkeys([*self._names, *topics][-TOPICS_MAX:])

    def check_outage(self, missing: Refusal, router: ProxyConnection, *, deadline_ms: int) -> None:
        """Raise BrokerUnavailable where a topic is missing, and so are all that were there: that is the brokers' fault.

        Not where none was ever there. A few are asked: the brokers that are alive serve most topics.
        """
        router.forget_routes()
        asked_topics = list(self._names)[-ASKED_MAX:]
        answers = [router.route(topic, deadline_ms=deadline_ms) for topic in asked_topics]
        if answers and all(isinstance(answer, Refusal) and answer.code == MISSING for answer in answers):
            text = f"no broker serves a topic that was there before: {missing.words}"
            raise exception_for(Refusal("NO_BROKER", text), addresses=self._addresses)
