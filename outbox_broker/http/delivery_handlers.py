"""Handlers of deliveries: pull, ack, nack, extend; and of broadcast: reads of a topic from an offset.

A pull and a read wait on the event loop (LongPolls) until there are messages, which they take in worker threads, or at
once where nothing may have to wait; the other handlers run in worker threads, and never wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Final, Literal, TypeVar

import msgspec

from outbox_broker.engine.puller import AT_HAND_BYTES_MAX, PulledMessages, deliveries_of
from outbox_broker.engine.topic_reader import READERS
from outbox_broker.http import content_negotiation
from outbox_broker.http.content_negotiation import encode_uniform_results
from outbox_broker.http.long_poll import PolledMessages
from outbox_broker.http.request_context import Call
from outbox_broker.http.responses import Problem
from outbox_broker.http.worker_threads import in_thread
from outbox_core.common.errors import BrokerUnavailable, StorageFailed
from outbox_core.messages.broadcast_port import TopicRead
from outbox_core.messages.message import AckStatus, Delivery, ExtendStatus, NackStatus
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
    PullRequest,
    ReadAnswer,
    ReadRequest,
)
from outbox_core.protocol.wire_conversion import json_delivery, json_record

ANSWER_COPIES: Final = 3
"""How often delivered bytes are counted: as records, as entries to encode, and as the encoded response."""
LEASED_BYTES_MIN: Final = ANSWER_COPIES * AT_HAND_BYTES_MAX
"""The lease of a pull before its size is known; nothing is delivered if the budget is exhausted."""
Status = TypeVar("Status", AckStatus, NackStatus, ExtendStatus)


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
    try:
        # The last thing before it leaves: an owner that was paused meanwhile must not hand out what another one has.
        call.ports.check_owner()
    except BrokerUnavailable:
        receipts = taken.receipts
        await in_thread(services.threads.pull, lambda: _give_back_deposed(call, receipts))
        raise
    return taken.answer


def _take_at_hand(call: Call, request: PullRequest, since: int) -> PolledMessages | Literal["nothing"] | None:
    """Like _take(), on the event loop: "nothing" if nothing is ready; None if it might have to wait for something."""
    if call.services.settings.pull_bytes_max < AT_HAND_BYTES_MAX:
        return None  # giving back what does not fit needs a sync
    call.lease.resize(LEASED_BYTES_MIN)
    pulled_runs = call.broker.puller.take_at_hand(
        call.topic, call.group, max_messages=request.max_messages, invisible_ms=request.invisible_ms,
        consumer=request.consumer, dispatches=not request.wait_ms, since=since, begins=request.begins,
    )  # fmt: skip
    if pulled_runs:
        return _taken(call, pulled_runs)
    call.lease.release()
    return None if pulled_runs is None else "nothing"


def _take(call: Call, request: PullRequest, since: int) -> PolledMessages | None:
    """Pull once, without waiting; None if nothing is ready. `since`: the engine's deletions when the call began."""
    call.lease.resize(LEASED_BYTES_MIN)
    pulled_runs = call.broker.puller.take(
        call.topic, call.group, max_messages=request.max_messages, invisible_ms=request.invisible_ms,
        consumer=request.consumer, dispatches=not request.wait_ms, since=since, quota=call.principal.quota,
        begins=request.begins,
    )  # fmt: skip
    if not pulled_runs:
        call.lease.release()
        return None
    return _taken(call, pulled_runs)


def _taken(call: Call, pulled_runs: list[PulledMessages]) -> PolledMessages:
    """Returns the response with the deliveries. Raises Problem, and gives them back, if the byte budget is exhausted:
    not for immediate pulls, which fit into the existing lease, so that the event loop waits for no disk.
    """
    deliveries = [delivery for run in pulled_runs for delivery in deliveries_of(call.topic, call.group, run)]
    sizes = [len(delivery.body) for delivery in deliveries]
    size_bytes, bytes_max = sum(sizes), call.services.settings.pull_bytes_max
    try:
        call.lease.resize(max(LEASED_BYTES_MIN, ANSWER_COPIES * size_bytes))
    except Problem:
        receipts = [delivery.receipt for delivery in deliveries]
        pulled_runs.clear()  # the problem has this frame in its traceback
        deliveries.clear()
        _give_back(call, receipts)
        raise
    if size_bytes > bytes_max:
        count = max(1, sum(total <= bytes_max for total in accumulate(sizes)))
        _give_back(call, [delivery.receipt for delivery in deliveries[count:]])
        del deliveries[count:]
    call.services.metrics.count_delivered(call.topic, call.group, pulled_runs, now_ms=call.services.clock.now_ms())
    is_long = size_bytes > content_negotiation.LONG_BYTES
    return PolledMessages(_answer(call, deliveries, is_long=is_long), [delivery.receipt for delivery in deliveries])


def _give_back(call: Call, receipts: Sequence[str]) -> None:
    """Undo a delivery that its client cannot receive any more: ready again at once, no attempt used."""
    if receipts:
        call.broker.settler.nack(receipts, delay_ms=0, counts=False)


def _give_back_deposed(call: Call, receipts: Sequence[str]) -> None:
    """As _give_back(), of an owner that may not act any more. What it writes is safe: it is there before another one
    takes over, who finds it then, or is fenced. In that case the attempt was used if the delivery had been sent.
    """
    with suppress(StorageFailed):
        call.ports.needed(call.ports.broker).settler.nack(receipts, delay_ms=0, counts=False)


def _no_deliveries(call: Call) -> bytes | bytearray:
    """Returns the response of an empty pull."""
    return _answer(call, [], is_long=False)


def _answer(call: Call, deliveries: Sequence[Delivery], *, is_long: bool) -> bytes | bytearray:
    if is_long:
        entries = deliveries if call.is_packed else map(json_delivery, deliveries)
        return content_negotiation.encode_list("deliveries", entries, call.answer_codec, count=len(deliveries))
    if call.is_packed:
        return content_negotiation.encode(deliveries, call.answer_codec)
    return content_negotiation.encode(PullAnswer(deliveries=list(map(json_delivery, deliveries))), call.answer_codec)


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
    call.ports.check_owner()
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
    size_bytes = sum(len(message.body) for message in read.messages)
    call.lease.resize(ANSWER_COPIES * size_bytes)
    return PolledMessages(_read_answer(call, read, is_long=size_bytes > content_negotiation.LONG_BYTES), [])


def _nothing_read(call: Call, offset: int) -> bytes | bytearray:
    """Returns the response without messages."""
    return _read_answer(call, TopicRead(messages=[], offset=offset, next_offset=offset), is_long=False)


def _read_answer(call: Call, read: TopicRead, *, is_long: bool) -> bytes | bytearray:
    if is_long:
        entries = read.messages if call.is_packed else map(json_record, read.messages)
        return content_negotiation.encode_list(
            "messages", entries, call.answer_codec, count=len(read.messages), offset=read.offset,
            next_offset=read.next_offset,
        )  # fmt: skip
    if call.is_packed:
        return content_negotiation.encode(read, call.answer_codec)
    answer = ReadAnswer(
        messages=list(map(json_record, read.messages)), offset=read.offset, next_offset=read.next_offset
    )
    return content_negotiation.encode(answer, call.answer_codec)
