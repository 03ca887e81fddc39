"""NATS JetStream through nats-py: asynchronous publishes with their acknowledgements awaited; a pull consumer.

Acknowledgements of consumed messages are sent without a response, the default of nats-py, and flushed: the server does
not confirm that they are durable, which is an advantage of this contestant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import nats
from nats.js.api import ConsumerConfig, StorageType, StreamConfig

from benchmarks.broker.contestants.shape import BATCH, BODY, Contestant, age_s, stamped

GROUP = "bench"
WAIT_S = 30.0


class NatsJetStream:
    """One connection on an event loop of its own."""

    def __init__(self, address: str) -> None:
        self._runner = asyncio.Runner()
        self._nats: Any = self._runner.run(nats.connect(address))
        self._js: Any = self._nats.jetstream(publish_async_max_pending=16 * BATCH)

    def begin(self, topic: str) -> None:
        """A stream in files, and a durable consumer with explicit acknowledgements."""
        self._runner.run(self._begin(topic))

    def end(self, topic: str) -> None:
        """Drop the stream."""
        self._runner.run(self._js.delete_stream(topic))

    def publish(self, topic: str, *, count: int, in_flight: int) -> None:
        """So many batches are on their way; a batch's acknowledgements are awaited together."""
        self._runner.run(self._publish(topic, count=count, in_flight=in_flight))

    def consume(self, topic: str, *, count: int) -> None:
        """fetch, then an acknowledgement each."""
        self._runner.run(self._consume(topic, count=count))

    def publish_singles(self, topic: str, *, count: int, workers: int) -> None:
        """A task a worker, each awaiting its own."""

        async def work(mine: int) -> None:
            for _ in range(mine):
                await self._js.publish(topic, BODY)

        async def all_of_them() -> None:
            await asyncio.gather(*(work(count // workers) for _ in range(workers)))

        self._runner.run(all_of_them())

    def publish_in_threads(self, topic: str, *, count: int, workers: int) -> None:
        """A connection of nats-py's is for one thread."""
        self.publish_singles(topic, count=count, workers=workers)

    def publish_paced(self, topic: str, *, count: int, per_second: int) -> None:
        """Sent when due, awaited together in the end."""

        async def paced() -> None:
            start, sent = time.monotonic() + 0.05, []
            for number in range(count):
                due_s = start + number / per_second
                if (left := due_s - time.monotonic()) > 0:
                    await asyncio.sleep(left)
                sent.append(await self._js.publish_async(topic, stamped(due_s)))
            await asyncio.gather(*sent)

        self._runner.run(paced())

    def receive(self, topic: str, *, count: int, on_waiting: Callable[[], None]) -> list[float]:
        """A push consumer, which is what NATS has for it: messages come as they are stored."""
        return self._runner.run(self._receive(topic, count=count, on_waiting=on_waiting))

    def close(self) -> None:
        """Close connection and loop."""
        self._runner.run(self._nats.close())
        self._runner.close()

    async def _begin(self, topic: str) -> None:
        await self._js.add_stream(StreamConfig(name=topic, subjects=[topic], storage=StorageType.FILE))
        await self._js.add_consumer(topic, ConsumerConfig(durable_name=GROUP, max_ack_pending=100_000))

    async def _publish(self, topic: str, *, count: int, in_flight: int) -> None:
        async def work(mine: int) -> None:
            for start in range(0, mine, BATCH):
                sent = [await self._js.publish_async(topic, BODY) for _ in range(min(BATCH, mine - start))]
                await asyncio.gather(*sent)

        await asyncio.gather(*(work(count // in_flight) for _ in range(in_flight)))

    async def _consume(self, topic: str, *, count: int) -> None:
        subscription = await self._js.pull_subscribe_bind(GROUP, stream=topic)
        left = count
        while left > 0:
            taken = await subscription.fetch(BATCH, timeout=WAIT_S)
            for one in taken:
                await one.ack()
            await self._nats.flush()
            left -= len(taken)
        await subscription.unsubscribe()

    async def _receive(self, topic: str, *, count: int, on_waiting: Callable[[], None]) -> list[float]:
        ages: list[float] = []
        done = asyncio.Event()

        async def handle(message: Any) -> None:
            ages.append(age_s(message.data))
            await message.ack()
            if len(ages) >= count:
                done.set()

        subscription = await self._js.subscribe(topic, stream=topic, cb=handle, manual_ack=True)
        on_waiting()
        await done.wait()
        await subscription.unsubscribe()
        return ages


def make(address: str) -> Contestant:
    """A client of the NATS at a URL."""
    return NatsJetStream(address)
