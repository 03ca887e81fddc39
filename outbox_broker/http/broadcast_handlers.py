"""Handlers of broadcast: reads of a topic from an offset. They run in worker threads, and never wait."""

from __future__ import annotations

from outbox_broker.http import content_negotiation
from outbox_broker.http.delivery_handlers import ANSWER_COPIES
from outbox_broker.http.long_poll import PolledMessages
from outbox_broker.http.request_context import Call
from outbox_core.messages.broadcast_port import TopicRead
from outbox_core.protocol.wire_broadcast import ReadAnswer, ReadRequest, read_message


def place_of(call: Call, request: ReadRequest) -> int:
    """Returns the reader's offset."""
    if request.offset is not None:
        return request.offset
    return call.broker.reader.place_to_read(call.topic, start=request.start)


def take(call: Call, request: ReadRequest, offset: int) -> PolledMessages | None:
    """Read once; None if there is nothing new."""
    read = call.broker.reader.read_on(
        call.topic, offset, max_messages=request.max_messages, bytes_max=call.services.settings.pull_bytes_max
    )
    if read.next_offset == offset:
        return None
    call.lease.resize(ANSWER_COPIES * sum(len(delivery.body) for delivery in read.deliveries))
    return PolledMessages(_answer(call, read), [])


def nothing(call: Call, offset: int) -> bytes | bytearray:
    """Returns the response without messages."""
    return _answer(call, TopicRead(deliveries=[], offset=offset, next_offset=offset))


def _answer(call: Call, read: TopicRead) -> bytes | bytearray:
    messages = (read_message(delivery, packed=call.is_packed) for delivery in read.deliveries)
    if sum([len(delivery.body) for delivery in read.deliveries]) > content_negotiation.LONG_BYTES:
        return content_negotiation.encode_list(
            "messages", messages, call.answer_codec, count=len(read.deliveries), offset=read.offset,
            next_offset=read.next_offset,
        )  # fmt: skip
    answer = ReadAnswer(messages=list(messages), offset=read.offset, next_offset=read.next_offset)
    return content_negotiation.encode(answer, call.answer_codec)
