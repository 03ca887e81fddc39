"""Requests that wait for messages: pulls, and broadcast reads. The handlers produce the deliveries."""

from __future__ import annotations

import asyncio

from outbox_broker.engine.topic_reader import READERS
from outbox_broker.http import broadcast_handlers, delivery_handlers
from outbox_broker.http.long_poll import PolledMessages
from outbox_broker.http.request_context import Call
from outbox_broker.http.worker_threads import in_thread
from outbox_core.protocol.wire import PullRequest
from outbox_core.protocol.wire_broadcast import ReadRequest


async def pull(call: Call, gone: asyncio.Future[None]) -> bytes | bytearray:
    """Pull at once, then wait in line; if there is a line, wait in it from the start: it knows whether anything may
    have come. Nothing is delivered to a client that is gone, as far as can be known.
    """
    services, request = call.services, call.read(PullRequest)
    loop, since = asyncio.get_running_loop(), call.broker.deletions

    async def take() -> PolledMessages | None:
        at_hand = delivery_handlers.take_at_hand(call, request, since)
        if at_hand is not None:
            return None if at_hand == "nothing" else at_hand
        return await in_thread(services.threads.pull, lambda: delivery_handlers.take(call, request, since))

    deadline = loop.time() + request.wait_ms / 1000
    waits = request.wait_ms > 0 and services.polls.has_line(call.topic, call.group)
    taken = None if waits else await take()
    if taken is None and request.wait_ms and not gone.done():
        with services.metrics.waiting.track_inprogress():
            taken = await services.polls.wait(
                call.topic, call.group, take=take, timeout_s=max(0.0, deadline - loop.time()), gone=gone
            )
    if taken is None:
        return delivery_handlers.no_deliveries(call)
    if gone.done():
        receipts = taken.receipts
        await in_thread(services.threads.pull, lambda: delivery_handlers.give_back(call, receipts))
        return delivery_handlers.no_deliveries(call)
    return taken.answer


async def read_on(call: Call, gone: asyncio.Future[None]) -> bytes | bytearray:
    """Read a topic from an offset, waiting in its readers' line for the first message."""
    services, request = call.services, call.read(ReadRequest)
    offset = await in_thread(services.threads.pull, lambda: broadcast_handlers.place_of(call, request))

    async def take() -> PolledMessages | None:
        return await in_thread(services.threads.pull, lambda: broadcast_handlers.take(call, request, offset))

    taken = None
    if not request.wait_ms:
        taken = await take()
    elif not gone.done():
        with services.metrics.waiting.track_inprogress():
            taken = await services.polls.wait(
                call.topic, READERS, take=take, timeout_s=request.wait_ms / 1000, gone=gone
            )  # fmt: skip
    return broadcast_handlers.nothing(call, offset) if taken is None else taken.answer
