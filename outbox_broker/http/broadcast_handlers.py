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


def take(call: Call, request: ReadRequest, place: int) -> PolledMessages | None:
    """Read once; None if there is nothing new."""
    found = call.broker.reader.read_on(
        call.topic, place, max_messages=request.max_messages, bytes_max=call.services.settings.pull_bytes_max
    )
    if found.next_offset == place:
        return None
    call.lease.resize(ANSWER_COPIES * sum(len(one.body) for one in found.deliveries))
    return PolledMessages(_answer(call, found), [])


def nothing(call: Call, place: int) -> bytes | bytearray:
    """Returns the response without messages."""
    return _answer(call, TopicRead(deliveries=[], offset=place, next_offset=place))


def _answer(call: Call, found: TopicRead) -> bytes | bytearray:
    messages = (read_message(one, packed=call.is_packed) for one in found.deliveries)
    if sum([len(one.body) for one in found.deliveries]) > content_negotiation.LONG_BYTES:
        return content_negotiation.encode_list(
            "messages", messages, call.answer_codec, count=len(found.deliveries), offset=found.offset,
            next_offset=found.next_offset,
        )  # fmt: skip
    answer = ReadAnswer(messages=list(messages), offset=found.offset, next_offset=found.next_offset)
    return content_negotiation.encode(answer, call.answer_codec)
