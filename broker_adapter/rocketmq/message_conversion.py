"""Converts messages to RocketMQ's (names, types, groups, properties), and divides them among requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from broker_adapter.publishing.message_headers import CLOUDEVENTS_HEADER_PREFIX, headers_with_type
from broker_adapter.rocketmq.protocol import definition_pb2 as definition
from broker_adapter.rocketmq.topic_route import TopicRoute
from outbox_core.messages.message import CONTENT_TYPE, Message

ATTRIBUTE_PREFIX: Final = "CE_"
EVENT_CONTENT_TYPE: Final = "CE_contenttype"
TOPIC_HEADER: Final = "outbox-topic"
EMPTY_HEADER: Final = "outbox-empty-headers"
GROUP_BYTES_MAX: Final = 64
REQUEST_BYTES_MAX: Final = 1 << 20
REQUEST_MESSAGES_MAX: Final = 1_000


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
