"""Handlers of messages on their way out: pull, ack, nack, extend. They run in worker threads; none of them waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from broker.http import codec
from broker.http.call import Call
from broker.http.long_poll import Taken
from messaging.message import AckStatus, Delivery, ExtendStatus, NackStatus
from messaging.wire import (
    AckAnswer,
    AckOutcome,
    AckRequest,
    ExtendAnswer,
    ExtendOutcome,
    ExtendRequest,
    NackAnswer,
    NackOutcome,
    NackRequest,
    PackedPullAnswer,
    PullAnswer,
    PullRequest,
)
from messaging.wire_messages import packed_pulled_message, pulled_message

Status = TypeVar("Status", AckStatus, NackStatus, ExtendStatus)


def take(call: Call, request: PullRequest) -> Taken | None:
    """Pull once, without waiting; None where nothing is ready."""
    found = call.engine.pull(
        call.topic,
        call.group,
        max_messages=request.max_messages,
        invisible_ms=request.invisible_ms,
        consumer=request.consumer,
    )
    if not found:
        return None
    kept = found[: _count_within(found, bytes_max=call.services.settings.pull_bytes_max)]
    give_back(call, [delivery.receipt for delivery in found[len(kept) :]])
    call.services.metrics.count_handed_out(call.topic, call.group, kept, now_ms=call.services.clock.now_ms())
    return Taken(codec.encode(_answer(call, kept), call.answer_codec), [delivery.receipt for delivery in kept])


def give_back(call: Call, receipts: Sequence[str]) -> None:
    """Undo a hand-out that its client cannot get any more: ready again at once, no attempt used."""
    if receipts:
        call.engine.nack(receipts, delay_ms=0, counts=False)


def no_deliveries(call: Call) -> bytes:
    """The answer to a pull that found nothing."""
    return codec.encode(PullAnswer(deliveries=[]), call.answer_codec)


def ack(call: Call) -> AckAnswer:
    """Settle deliveries."""
    receipts = call.read(AckRequest).receipts
    statuses = _settle(call, receipts, settle=call.engine.ack, foreign=AckStatus.UNKNOWN)
    return AckAnswer(results=[AckOutcome(receipt=one, status=status) for one, status in statuses])


def nack(call: Call) -> NackAnswer:
    """Give deliveries back."""
    request = call.read(NackRequest)

    def settle(receipts: Sequence[str]) -> list[NackStatus]:
        return call.engine.nack(receipts, delay_ms=request.delay_ms, reason=request.reason, counts=request.counts)

    statuses = _settle(call, request.receipts, settle=settle, foreign=NackStatus.STALE)
    return NackAnswer(results=[NackOutcome(receipt=one, status=status) for one, status in statuses])


def extend(call: Call) -> ExtendAnswer:
    """Keep deliveries invisible for longer."""
    request = call.read(ExtendRequest)

    def settle(receipts: Sequence[str]) -> list[ExtendStatus]:
        return call.engine.extend(receipts, invisible_ms=request.invisible_ms)

    statuses = _settle(call, request.receipts, settle=settle, foreign=ExtendStatus.STALE)
    return ExtendAnswer(results=[ExtendOutcome(receipt=one, status=status) for one, status in statuses])


def _settle(
    call: Call, receipts: Sequence[str], *, settle: Callable[[Sequence[str]], list[Status]], foreign: Status
) -> list[tuple[str, Status]]:
    """One status a receipt. Those of other groups never reach the engine: the path's group is what was allowed."""
    call.check_batch(receipts, where="$.receipts")
    prefix = f"{call.topic}/{call.group}/"
    own = [receipt for receipt in receipts if receipt.startswith(prefix)]
    statuses = iter(settle(own) if own else [])
    return [(receipt, next(statuses) if receipt.startswith(prefix) else foreign) for receipt in receipts]


def _count_within(deliveries: Sequence[Delivery], *, bytes_max: int) -> int:
    """How many of the first deliveries fit into an answer; one always does."""
    total = 0
    for count, delivery in enumerate(deliveries):
        total += len(delivery.body)
        if total > bytes_max and count:
            return count
    return len(deliveries)


def _answer(call: Call, deliveries: Sequence[Delivery]) -> PullAnswer | PackedPullAnswer:
    if call.is_packed:
        return PackedPullAnswer(deliveries=[packed_pulled_message(delivery) for delivery in deliveries])
    return PullAnswer(deliveries=[pulled_message(delivery) for delivery in deliveries])
