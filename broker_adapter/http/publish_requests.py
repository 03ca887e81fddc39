"""Makes requests of publishes: one for messages of many topics, or several to a broker that knows no such request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from broker_adapter.http.error_mapping import NoSuchRoute
from broker_adapter.http.request_sender import RequestSender
from outbox_core.common.errors import BrokerError, BrokerUnavailable
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


class PublishRequests:
    """Makes the publish requests of one client."""

    def __init__(self, connection: RequestSender) -> None:
        self._connection = connection
        self._takes_many_topics = True
        """Until the broker has said that it knows no requests of many topics: it is older than this client."""

    def publish(self, messages: Sequence[Message], guard: Guard = allow) -> list[PublishResult]:
        """Publish one request's worth, by one request, or one a topic to a broker that knows no others. `guard` is
        called right before each request. What is refused is refused as a whole.
        """
        is_of_many = len({one.topic for one in messages}) > 1
        if is_of_many and not self._takes_many_topics:
            return self._publish_by_topic(messages, guard)
        try:
            return self._post(messages, guard, is_of_many=is_of_many)
        except NoSuchRoute:
            if not is_of_many:
                raise
            self._takes_many_topics = False
            return self._publish_by_topic(messages, guard)

    def _publish_by_topic(self, messages: Sequence[Message], guard: Guard) -> list[PublishResult]:
        places: defaultdict[str, list[int]] = defaultdict(list)
        for place, one in enumerate(messages):
            places[one.topic].append(place)
        results: dict[int, PublishResult] = {}
        for mine in places.values():
            try:
                stored = self._post([messages[place] for place in mine], guard, is_of_many=False)
            except BrokerError as error:
                error.with_answered(results)
                raise
            results.update(zip(mine, stored, strict=True))
        return [results[place] for place in range(len(messages))]

    def _post(self, messages: Sequence[Message], guard: Guard, *, is_of_many: bool) -> list[PublishResult]:
        path = "/v1/publish" if is_of_many else f"/v1/topics/{messages[0].topic}/messages"
        body = self._request(messages, is_of_many=is_of_many)
        results = self._connection.send("POST", path, _ReadAnswer, body=body, repeatable=True, guard=guard).results
        if [one.id for one in results] != [one.id for one in messages]:
            raise BrokerUnavailable(
                f"POST {path} at {self._connection.place}: the answer is about other messages than those published"
            )
        return results

    def _request(self, messages: Sequence[Message], *, is_of_many: bool) -> msgspec.Struct:
        match self._connection.packed, is_of_many:
            case True, False:
                return wire.PackedPublishRequest(messages=[wire_conversion.packed_message(one) for one in messages])
            case True, True:
                packed = [wire_conversion.packed_multi_topic_message(one) for one in messages]
                return wire_multi_topic_publish.PackedMultiTopicPublishRequest(messages=packed)
            case False, False:
                return wire.PublishRequest(messages=[wire_conversion.text_message(one) for one in messages])
            case _:
                text = [wire_conversion.text_multi_topic_message(one) for one in messages]
                return wire_multi_topic_publish.MultiTopicPublishRequest(messages=text)


def requests_of(batch: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """A batch, cut where a request would carry too many messages or bytes."""
    size_bytes = sum([len(one.body) for one in batch]) + _MESSAGE_OVERHEAD_BYTES * len(batch)
    if 0 < len(batch) <= limits.BATCH_MESSAGES_MAX and size_bytes <= REQUEST_BYTES_MAX:  # mostly
        yield batch
        return
    start = size_bytes = 0
    for place, message in enumerate(batch):
        more_bytes = len(message.body) + _MESSAGE_OVERHEAD_BYTES
        is_full = place - start >= limits.BATCH_MESSAGES_MAX or size_bytes + more_bytes > REQUEST_BYTES_MAX
        if is_full and place > start:
            yield batch[start:place]
            start, size_bytes = place, 0
        size_bytes += more_bytes
    if start < len(batch):
        yield batch[start:]
