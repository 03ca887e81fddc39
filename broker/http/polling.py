"""Requests that wait for messages: pulls, and readers of a topic. What they take is handed out by the handlers."""

from __future__ import annotations

import asyncio

from broker.broadcasting import READERS
from broker.http import broadcasts, deliveries
from broker.http.call import Call
from broker.http.long_poll import Taken
from broker.http.worker_threads import in_thread
from messaging.wire import PullRequest
from messaging.wire_broadcast import ReadRequest


async def pull(call: Call, gone: asyncio.Future[None]) -> bytes | bytearray:
    """Pull at once, then wait in line; where there is a line, wait in it from the start: it knows whether anything may
    have come. To a client that has gone nothing is handed out, as far as can be known.
    """
    services, wanted = call.services, call.read(PullRequest)
    loop, since = asyncio.get_running_loop(), call.engine.deletions

    async def take() -> Taken | None:
        at_hand = deliveries.take_at_hand(call, wanted, since)
        if at_hand is not None:
            return None if at_hand == "nothing" else at_hand
        return await in_thread(services.threads.pull, lambda: deliveries.take(call, wanted, since))

    deadline = loop.time() + wanted.wait_ms / 1000
    waits = wanted.wait_ms > 0 and services.polls.has_line(call.topic, call.group)
    taken = None if waits else await take()
    if taken is None and wanted.wait_ms and not gone.done():
        with services.metrics.waiting.track_inprogress():
            taken = await services.polls.wait(
                call.topic, call.group, take=take, timeout_s=max(0.0, deadline - loop.time()), gone=gone
            )
    if taken is None:
        return deliveries.no_deliveries(call)
    if gone.done():
        receipts = taken.receipts
        await in_thread(services.threads.pull, lambda: deliveries.give_back(call, receipts))
        return deliveries.no_deliveries(call)
    return taken.answer


async def read_on(call: Call, gone: asyncio.Future[None]) -> bytes | bytearray:
    """Read a topic on, waiting in its readers' line for the first message."""
    services, wanted = call.services, call.read(ReadRequest)
    place = await in_thread(services.threads.pull, lambda: broadcasts.place_of(call, wanted))

    async def take() -> Taken | None:
        return await in_thread(services.threads.pull, lambda: broadcasts.take(call, wanted, place))

    taken = None
    if not wanted.wait_ms:
        taken = await take()
    elif not gone.done():
        with services.metrics.waiting.track_inprogress():
            taken = await services.polls.wait(
                call.topic, READERS, take=take, timeout_s=wanted.wait_ms / 1000, gone=gone
            )  # fmt: skip
    return broadcasts.nothing(call, place) if taken is None else taken.answer
