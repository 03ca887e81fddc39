"""This project's broker as users run it: `outbox broker serve` over HTTP, with the client HttpBroker."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from benchmarks.broker.contestants.shape import (
    BATCH,
    BODY,
    Contestant,
    age_s,
    in_threads,
    paced_in_threads,
    stamped,
)
from broker_adapter.http import HttpBroker
from outbox.consumers.consumer_decorator import ConsumerRunner, consumer
from outbox_core import Message
from outbox_core.messages.message import Delivery, PublishResult

GROUP = "bench"
POOL = 32


class OutboxHttp:
    """One thread for each request in flight."""

    def __init__(self, address: str) -> None:
        self._broker = HttpBroker(address, pool_size=POOL)

    def begin(self, topic: str) -> None:
        """Does nothing: topic and group are created on first use."""
        self._broker.pull(topic, GROUP, max_messages=1)

    def end(self, topic: str) -> None:
        """Does nothing: the topic stays."""

    def publish(self, topic: str, *, count: int, in_flight: int) -> None:
        """One request a batch."""

        def work(first: int, mine: int) -> None:
            prefix = f"{topic}-{first}-"
            for start in range(0, mine, BATCH):
                self._broker.publish(
                    [
                        Message(id=f"{prefix}{number}", topic=topic, body=BODY)
                        for number in range(start, min(start + BATCH, mine))
                    ]
                )

        in_threads(work, count=count, workers=in_flight)

    def consume(self, topic: str, *, count: int) -> None:
        """One pull for each batch; its acknowledgement is sent during the next pull, on a connection of its own, and at
        most one is in flight, as in this project's consumers.
        """
        left, acked = count, None
        with ThreadPoolExecutor(1) as beside:
            while left > 0:
                taken = self._broker.pull(topic, GROUP, max_messages=BATCH, wait_ms=1_000)
                if acked is not None:
                    acked.result()
                acked = beside.submit(self._broker.ack, [one.receipt for one in taken])
                left -= len(taken)
            if acked is not None:
                acked.result()

    def publish_singles(self, topic: str, *, count: int, workers: int) -> None:
        """One worker: one publish, awaited. Several workers: so many are submitted and unanswered at any time; each
        result submits the next message.
        """
        if workers == 1:
            self.publish_in_threads(topic, count=count, workers=1)
            return
        numbers, told = iter(range(count)), threading.Semaphore(0)
        failures: list[BaseException] = []

        def more() -> None:
            if (number := next(numbers, None)) is None:
                return
            message = Message(id=f"{topic}-s{workers}-{number}", topic=topic, body=BODY)
            self._broker.submit(message).add_done_callback(note)

        def note(future: Future[PublishResult]) -> None:
            if (error := future.exception()) is not None:
                failures.append(error)
            told.release()
            more()

        for _ in range(workers):
            more()
        for _ in range(count):
            told.acquire()
        if failures:
            raise failures[0]

    def publish_in_threads(self, topic: str, *, count: int, workers: int) -> None:
        """One publish for each message, awaited by its thread."""

        def work(first: int, mine: int) -> None:
            for number in range(first, first + mine):
                self._broker.publish([Message(id=f"{topic}-t{workers}-{number}", topic=topic, body=BODY)])

        in_threads(work, count=count, workers=workers)

    def publish_paced(self, topic: str, *, count: int, per_second: int) -> None:
        """One request for each message."""

        def send(due_s: float) -> None:
            self._broker.publish([Message(id=uuid.uuid4().hex, topic=topic, body=stamped(due_s))])

        paced_in_threads(send, count=count, per_second=per_second)

    def receive(self, topic: str, *, count: int, on_waiting: Callable[[], None]) -> list[float]:
        """A consumer as users write it, run by `run_consumers()`."""
        ages: list[float] = []
        done = threading.Event()

        def handle(delivery: Delivery) -> None:
            ages.append(age_s(delivery.body))
            if len(ages) == count:
                done.set()

        runner = ConsumerRunner([consumer(topic, group=GROUP, prefetch=BATCH)(handle)], broker=self._broker)
        with runner:
            on_waiting()
            done.wait()
        return ages

    def close(self) -> None:
        """Close the connections."""
        self._broker.close()


def make(address: str) -> Contestant:
    """A client of the broker at a URL."""
    return OutboxHttp(address)
