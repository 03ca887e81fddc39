"""Broadcast over the HTTP protocol: a topic read on from a place of the caller's."""

from __future__ import annotations

from broker_adapter.http.request_sender import RequestSender
from outbox_core.common.errors import InvalidMessage
from outbox_core.messages import limits
from outbox_core.messages.broadcast_port import Start, TopicRead, check_start
from outbox_core.messages.message import check_topic
from outbox_core.protocol.wire_broadcast import PackedReadAnswer, ReadAnswer, ReadRequest, delivery_read


def read_topic(
    connection: RequestSender, topic: str, *, offset: int | None, start: Start, max_messages: int, wait_ms: int
) -> TopicRead:
    """One read. It is repeated where no answer came: the broker keeps nothing of it."""
    check_start(start)
    if max_messages < 1 or wait_ms < 0 or (offset is not None and offset < 0):
        raise InvalidMessage("max_messages is at least 1, wait_ms and offset at least 0")
    request = ReadRequest(
        offset=offset, start=start, max_messages=min(max_messages, limits.PULL_MESSAGES_MAX),
        wait_ms=min(wait_ms, limits.PULL_WAIT_MS_MAX),
    )  # fmt: skip
    kind: type[PackedReadAnswer | ReadAnswer] = PackedReadAnswer if connection.packed else ReadAnswer
    answer = connection.send(
        "POST", f"/v1/topics/{check_topic(topic)}/read", kind, body=request, wait_ms=request.wait_ms, repeatable=True
    )
    return TopicRead(
        deliveries=[delivery_read(message) for message in answer.messages],
        offset=answer.offset,
        next_offset=answer.next_offset,
    )
