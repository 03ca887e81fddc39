"""This project's broker, as its users reach it: `outbox broker serve` over HTTP, through HttpBroker."""

from __future__ import annotations

import uuid
from collections.abc import Callable

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
from messaging import Message

GROUP = "bench"
POOL = 32


class OutboxHttp:
    """A thread a request in flight."""

    def __init__(self, address: str) -> None:
        self._broker = HttpBroker(address, pool_size=POOL)

    def begin(self, topic: str) -> None:
        """Topic and group come to be by themselves."""
        self._broker.pull(topic, GROUP, max_messages=1)

    def end(self, topic: str) -> None:
        """Nothing drops a topic yet."""

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
        """One pull and one ack a batch."""
        left = count
        while left > 0:
            taken = self._broker.pull(topic, GROUP, max_messages=BATCH, wait_ms=1_000)
            self._broker.ack([one.receipt for one in taken])
            left -= len(taken)

    def publish_singles(self, topic: str, *, count: int, workers: int) -> None:
        """One request a message."""

        def work(first: int, mine: int) -> None:
            for number in range(first, first + mine):
                self._broker.publish([Message(id=f"{topic}-s{workers}-{number}", topic=topic, body=BODY)])

        in_threads(work, count=count, workers=workers)

    def publish_paced(self, topic: str, *, count: int, per_second: int) -> None:
        """One request a message."""

        def send(due_s: float) -> None:
            self._broker.publish([Message(id=uuid.uuid4().hex, topic=topic, body=stamped(due_s))])

        paced_in_threads(send, count=count, per_second=per_second)

    def receive(self, topic: str, *, count: int, on_waiting: Callable[[], None]) -> list[float]:
        """A long poll; what it brought is acknowledged before the next one."""
        ages: list[float] = []
        on_waiting()
        while len(ages) < count:
            taken = self._broker.pull(topic, GROUP, max_messages=BATCH, wait_ms=5_000)
            ages += [age_s(one.body) for one in taken]
            if taken:
                self._broker.ack([one.receipt for one in taken])
        return ages

    def close(self) -> None:
        """Close the connections."""
        self._broker.close()


def make(address: str) -> Contestant:
    """A client of the broker at a URL."""
    return OutboxHttp(address)
