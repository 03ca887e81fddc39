"""Handlers of deliveries: pull, ack, nack, extend; and of broadcast: reads of a topic from an offset.

A pull and a read wait on the event loop (LongPolls) until there are messages, which they take in worker threads, or at
once where nothing may have to wait; the other handlers run in worker threads, and never wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Final, Literal, TypeVar

import msgspec

from outbox_broker.engine.puller import AT_HAND_BYTES_MAX, PulledMessages
from outbox_broker.engine.topic_reader import READERS
from outbox_broker.group.consumer_group import DeliveryRun
from outbox_broker.http import content_negotiation
from outbox_broker.http.content_negotiation import encode_uniform_results
from outbox_broker.http.long_poll import PolledMessages
from outbox_broker.http.request_context import Call
from outbox_broker.http.responses import Problem
from outbox_broker.http.worker_threads import in_thread
from outbox_core.journal.journal import MessageRecord
from outbox_core.messages.broadcast_port import TopicRead
from outbox_core.messages.message import AckStatus, ExtendStatus, NackStatus
from outbox_core.protocol.wire import (
    AckAnswer,
    AckOutcome,
    AckRequest,
    ExtendAnswer,
    ExtendOutcome,
    ExtendRequest,
    NackAnswer,
    NackOutcome,
    NackRequest,
    PullAnswer,
    PulledMessage,
    PullRequest,
)
from outbox_core.protocol.wire_broadcast import ReadAnswer, ReadRequest, read_message
from outbox_core.protocol.wire_conversion import text_body

ANSWER_COPIES: Final = 3
"""How often delivered bytes are counted: as records, as entries to encode, and as the encoded response."""
LEASED_BYTES_MIN: Final = ANSWER_COPIES * AT_HAND_BYTES_MAX
"""The lease of a pull before its size is known; nothing is delivered if the budget is exhausted."""
Status = TypeVar("Status", AckStatus, NackStatus, ExtendStatus)


class _PulledMessage(msgspec.Struct, gc=False, omit_defaults=True, tag_field="encoding", tag="binary"):
    """wire.PackedPulledMessage, built in half the time: by position, in the order in which clients read it."""

    receipt: str
    id: str
    topic: str
    body: bytes
    key: str | None
    headers: dict[str, str]
    attempt: int
    created_at_ms: int
    deliver_at_ms: int | None
    expired: bool = False


class _PulledAnswer(msgspec.Struct):
    """wire.PackedPullAnswer."""

    deliveries: list[_PulledMessage]


async def pull(call: Call, gone: asyncio.Future[None]) -> bytes | bytearray:
    """Pull at once, then wait in line; if there is a line, wait in it from the start: it knows whether anything may
    have come. Nothing is delivered to a client that is gone, as far as can be known.
    """
    services, request = call.services, call.read(PullRequest)
    loop, since = asyncio.get_running_loop(), call.broker.deletions

    async def take() -> PolledMessages | None:
        at_hand = _take_at_hand(call, request, since)
        if at_hand is not None:
            return None if at_hand == "nothing" else at_hand
        return await in_thread(services.threads.pull, lambda: _take(call, request, since))

    deadline = loop.time() + request.wait_ms / 1000
    waits = request.wait_ms > 0 and services.polls.has_line(call.topic, call.group)
    taken = None if waits else await take()
    if taken is None and request.wait_ms and not gone.done():
        with services.metrics.waiting.track_inprogress():
            taken = await services.polls.wait(
                call.topic, call.group, take=take, timeout_s=max(0.0, deadline - loop.time()), gone=gone
            )
    if taken is None:
        return _no_deliveries(call)
    if gone.done():
        receipts = taken.receipts
        await in_thread(services.threads.pull, lambda: _give_back(call, receipts))
        return _no_deliveries(call)
    return taken.answer


def _take_at_hand(call: Call, request: PullRequest, since: int) -> PolledMessages | Literal["nothing"] | None:
    """Like _take(), on the event loop: "nothing" if nothing is ready; None if it might have to wait for something."""
    if call.services.settings.pull_bytes_max < AT_HAND_BYTES_MAX:
        return None  # giving back what does not fit needs a sync
    call.lease.resize(LEASED_BYTES_MIN)
    handed = call.broker.puller.take_at_hand(
        call.topic, call.group, max_messages=request.max_messages, invisible_ms=request.invisible_ms,
        consumer=request.consumer, fires=not request.wait_ms, since=since, begins=request.begins,
    )  # fmt: skip
    if handed:
        return _taken(call, handed)
    call.lease.release()
    return None if handed is None else "nothing"


def _take(call: Call, request: PullRequest, since: int) -> PolledMessages | None:
    """Pull once, without waiting; None if nothing is ready. `since`: the engine's deletions when the call began."""
    call.lease.resize(LEASED_BYTES_MIN)
    handed = call.broker.puller.take(
        call.topic, call.group, max_messages=request.max_messages, invisible_ms=request.invisible_ms,
        consumer=request.consumer, fires=not request.wait_ms, since=since, quota=call.principal.quota,
        begins=request.begins,
    )  # fmt: skip
    if not handed:
        call.lease.release()
        return None
    return _taken(call, handed)


def _taken(call: Call, handed: list[PulledMessages]) -> PolledMessages:
    """Returns the response with the deliveries. Raises Problem, and gives them back, if the byte budget is exhausted:
    not for immediate pulls, which fit into the existing lease, so that the event loop waits for no disk.
    """
    receipts = [receipt for run in handed for receipt in run.receipts(call.topic, call.group)]
    sizes = [len(record.body) for run in handed for record in run.records]
    size_bytes, bytes_max = sum(sizes), call.services.settings.pull_bytes_max
    try:
        call.lease.resize(max(LEASED_BYTES_MIN, ANSWER_COPIES * size_bytes))
    except Problem:
        handed.clear()  # the problem has this frame in its traceback
        _give_back(call, receipts)
        raise
    if size_bytes > bytes_max:
        count = max(1, sum(total <= bytes_max for total in accumulate(sizes)))
        _give_back(call, receipts[count:])
        del receipts[count:]
    call.services.metrics.count_handed_out(call.topic, call.group, handed, now_ms=call.services.clock.now_ms())
    return PolledMessages(
        _answer(call, handed, receipts, is_long=size_bytes > content_negotiation.LONG_BYTES), receipts
    )


def _give_back(call: Call, receipts: Sequence[str]) -> None:
    """Undo a delivery that its client cannot receive any more: ready again at once, no attempt used."""
    if receipts:
        call.broker.settler.nack(receipts, delay_ms=0, counts=False)


def _no_deliveries(call: Call) -> bytes:
    """Returns the response of an empty pull."""
    return content_negotiation.encode(PullAnswer(deliveries=[]), call.answer_codec)


def _answer(
    call: Call, handed: Sequence[PulledMessages], receipts: Sequence[str], *, is_long: bool
) -> bytes | bytearray:
    """Encode the response from the records of the log."""
    records = [(record, run.out) for run in handed for record in run.records]
    pulled = _packed(call.topic, receipts, records) if call.is_packed else _text(call.topic, receipts, records)
    if is_long:
        return content_negotiation.encode_list("deliveries", pulled, call.answer_codec, count=len(receipts))
    answer = _PulledAnswer(list(pulled)) if call.is_packed else PullAnswer(deliveries=list(pulled))  # type: ignore[arg-type]
    return content_negotiation.encode(answer, call.answer_codec)


def _packed(
    topic: str, receipts: Sequence[str], records: Sequence[tuple[MessageRecord, DeliveryRun]]
) -> Iterator[_PulledMessage | PulledMessage]:
    return (
        _PulledMessage(
            receipt,
            record.id,
            topic,
            record.body,
            record.key,
            record.headers,
            out.attempt,
            record.created_at_ms,
            record.deliver_at_ms,
            out.expired,
        )
        for receipt, (record, out) in zip(receipts, records, strict=False)
    )


def _text(
    topic: str, receipts: Sequence[str], records: Sequence[tuple[MessageRecord, DeliveryRun]]
) -> Iterator[_PulledMessage | PulledMessage]:
    for receipt, (record, out) in zip(receipts, records, strict=False):
        body, encoding = text_body(record.body)
        yield PulledMessage(
            receipt=receipt, id=record.id, topic=topic, key=record.key, headers=record.headers, body=body,
            encoding=encoding, attempt=out.attempt, created_at_ms=record.created_at_ms,
            deliver_at_ms=record.deliver_at_ms, expired=out.expired,
        )  # fmt: skip


def ack(call: Call) -> AckAnswer | msgspec.Raw:
    """Acknowledge deliveries."""
    receipts = call.read(AckRequest).receipts
    statuses = _settle(call, receipts, settle=call.broker.settler.ack, foreign=AckStatus.UNKNOWN)
    if call.is_packed and statuses.count(AckStatus.ACKED) == len(statuses):
        packed = encode_uniform_results("receipt", receipts, {"status": AckStatus.ACKED})
        if packed is not None:
            return packed
    return AckAnswer(
        results=[AckOutcome(receipt=receipt, status=status) for receipt, status in zip(receipts, statuses, strict=True)]
    )


def nack(call: Call) -> NackAnswer:
    """Return deliveries."""
    request = call.read(NackRequest)

    def settle(receipts: Sequence[str]) -> list[NackStatus]:
        return call.broker.settler.nack(
            receipts, delay_ms=request.delay_ms, reason=request.reason, counts=request.counts
        )

    statuses = _settle(call, request.receipts, settle=settle, foreign=NackStatus.STALE)
    outcomes = zip(request.receipts, statuses, strict=True)
    return NackAnswer(results=[NackOutcome(receipt=receipt, status=status) for receipt, status in outcomes])


def extend(call: Call) -> ExtendAnswer:
    """Extend the invisible time of deliveries."""
    request = call.read(ExtendRequest)

    def settle(receipts: Sequence[str]) -> list[ExtendStatus]:
        return call.broker.settler.extend(receipts, invisible_ms=request.invisible_ms, begun=request.begun)

    statuses = _settle(call, request.receipts, settle=settle, foreign=ExtendStatus.STALE)
    outcomes = zip(request.receipts, statuses, strict=True)
    return ExtendAnswer(results=[ExtendOutcome(receipt=receipt, status=status) for receipt, status in outcomes])


def _settle(
    call: Call, receipts: Sequence[str], *, settle: Callable[[Sequence[str]], list[Status]], foreign: Status
) -> list[Status]:
    """Returns one status per receipt. Those of groups other than the authorised one never reach the engine."""
    call.check_batch(receipts, where="$.receipts")
    prefix = f"{call.topic}/{call.group}/"
    if receipts and all(receipt.startswith(prefix) for receipt in receipts):
        return settle(receipts)
    own = [receipt for receipt in receipts if receipt.startswith(prefix)]
    statuses = iter(settle(own) if own else [])
    return [next(statuses) if receipt.startswith(prefix) else foreign for receipt in receipts]


async def read_on(call: Call, gone: asyncio.Future[None]) -> bytes | bytearray:
    """Read a topic from an offset, waiting in its readers' line for the first message."""
    services, request = call.services, call.read(ReadRequest)
    offset = await in_thread(services.threads.pull, lambda: _start_of(call, request))

    async def take() -> PolledMessages | None:
        return await in_thread(services.threads.pull, lambda: _take_read(call, request, offset))

    taken = None
    if not request.wait_ms:
        taken = await take()
    elif not gone.done():
        with services.metrics.waiting.track_inprogress():
            taken = await services.polls.wait(
                call.topic, READERS, take=take, timeout_s=request.wait_ms / 1000, gone=gone
            )  # fmt: skip
    return _nothing_read(call, offset) if taken is None else taken.answer


def _start_of(call: Call, request: ReadRequest) -> int:
    """Returns the reader's offset."""
    if request.offset is not None:
        return request.offset
    return call.broker.reader.place_to_read(call.topic, start=request.start)


def _take_read(call: Call, request: ReadRequest, offset: int) -> PolledMessages | None:
    """Read once; None if there is nothing new."""
    read = call.broker.reader.read_on(
        call.topic, offset, max_messages=request.max_messages, bytes_max=call.services.settings.pull_bytes_max
    )
    if read.next_offset == offset:
        return None
    call.lease.resize(ANSWER_COPIES * sum(len(delivery.body) for delivery in read.deliveries))
    return PolledMessages(_read_answer(call, read), [])


def _nothing_read(call: Call, offset: int) -> bytes | bytearray:
    """Returns the response without messages."""
    return _read_answer(call, TopicRead(deliveries=[], offset=offset, next_offset=offset))


def _read_answer(call: Call, read: TopicRead) -> bytes | bytearray:
    messages = (read_message(delivery, packed=call.is_packed) for delivery in read.deliveries)
    if sum([len(delivery.body) for delivery in read.deliveries]) > content_negotiation.LONG_BYTES:
        return content_negotiation.encode_list(
            "messages", messages, call.answer_codec, count=len(read.deliveries), offset=read.offset,
            next_offset=read.next_offset,
        )  # fmt: skip
    answer = ReadAnswer(messages=list(messages), offset=read.offset, next_offset=read.next_offset)
    return content_negotiation.encode(answer, call.answer_codec)
