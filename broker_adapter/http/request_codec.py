"""Makes requests of publishes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from broker_adapter.http.http_transport import RequestSender
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages import limits
from outbox_core.messages.message import Message, PublishResult
from outbox_core.messages.publish_guard import Guard, allow
from outbox_core.protocol import wire, wire_conversion, wire_multi_topic_publish

REQUEST_BYTES_MAX: Final = 8 * 1024 * 1024
"""A publish is split into requests of about this size; one message may be larger."""
_MESSAGE_OVERHEAD_BYTES: Final = 256


class _ReadAnswer(msgspec.Struct, frozen=True):
    """wire.PublishAnswer, decoded directly into the results that callers get."""

    results: list[PublishResult]


def publish_request(
    connection: RequestSender, messages: Sequence[Message], guard: Guard = allow
) -> list[PublishResult]:
    """Publish one request's worth. `guard` is called right before it is sent. What is refused is refused as a whole."""
    is_of_many = len({message.topic for message in messages}) > 1
    path = "/v1/publish" if is_of_many else f"/v1/topics/{messages[0].topic}/messages"
    body = _request(messages, packed=connection.packed, is_of_many=is_of_many)
    results = connection.send("POST", path, _ReadAnswer, body=body, repeatable=True, guard=guard).results
    if [result.id for result in results] != [message.id for message in messages]:
        raise BrokerUnavailable(
            f"POST {path} at {connection.address}: the answer is about other messages than those published"
        )
    return results


def _request(messages: Sequence[Message], *, packed: bool, is_of_many: bool) -> msgspec.Struct:
    match packed, is_of_many:
        case True, False:
            return wire.PackedPublishRequest(messages=[wire_conversion.packed_message(message) for message in messages])
        case True, True:
            entries = [wire_conversion.packed_multi_topic_message(message) for message in messages]
            return wire_multi_topic_publish.PackedMultiTopicPublishRequest(messages=entries)
        case False, False:
            return wire.PublishRequest(messages=[wire_conversion.text_message(message) for message in messages])
        case _:
            text = [wire_conversion.text_multi_topic_message(message) for message in messages]
            return wire_multi_topic_publish.MultiTopicPublishRequest(messages=text)


def requests_of(batch: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """A batch, cut where a request would carry too many messages or bytes."""
    size_bytes = sum([len(message.body) for message in batch]) + _MESSAGE_OVERHEAD_BYTES * len(batch)
    if 0 < len(batch) <= limits.BATCH_MESSAGES_MAX and size_bytes <= REQUEST_BYTES_MAX:  # mostly
        yield batch
        return
    start = size_bytes = 0
    for index, message in enumerate(batch):
        more_bytes = len(message.body) + _MESSAGE_OVERHEAD_BYTES
        is_full = index - start >= limits.BATCH_MESSAGES_MAX or size_bytes + more_bytes > REQUEST_BYTES_MAX
        if is_full and index > start:
            yield batch[start:index]
            start, size_bytes = index, 0
        size_bytes += more_bytes
    if start < len(batch):
        yield batch[start:]
