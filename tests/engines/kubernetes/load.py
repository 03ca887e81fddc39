"""A publisher and a consumer of a kept broker, which run beside what a story does to it. Not fixtures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from outbox_core import Broker, Message
from outbox_core.common.errors import BrokerCordoned, BrokerError
from tests.engines.kubernetes.cluster import DEADLINE_S, KeptBroker, eventually

TOPIC, GROUP = "orders", "billing"
SOON_MS = 500
INVISIBLE_MS = 5_000
"""What was handed to a consumer that got no answer comes again soon."""


class Load:
    """A publisher, some of whose messages are due a moment later, and a consumer that can be paused."""

    def __init__(self, broker: KeptBroker) -> None:
        self._broker = broker
        self.stored: set[str] = set()
        self.delivered: list[str] = []
        self.failures: list[BrokerError] = []
        self.unanswered: set[str] = set()
        """Published or acknowledged, and nobody knows whether that was done."""
        self.refused = threading.Event()
        self.renewed = threading.Semaphore(0)
        """One more for each of its two threads that has another token."""
        self._consumes = threading.Event()
        self._consumes.set()
        self._pulls = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in (self._publish, self._consume)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Until the block is left."""
        self._broker.client().pull(TOPIC, GROUP)
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._consumes.set()
            for thread in self._threads:
                thread.join(DEADLINE_S)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is consumed within the block."""
        self._consumes.clear()
        with self._pulls:  # what was pulled is acknowledged
            yield
        self._consumes.set()

    def wait_for(self, count: int) -> None:
        """Wait until so many were delivered and acknowledged."""
        eventually(lambda: len(self.delivered) >= count, what=f"{count} deliveries")

    def assert_nothing_is_lost(self) -> None:
        """Of a broker that has ended when nothing was left: what it stored was delivered, and nothing else."""
        stored, delivered = set(self.stored), set(self.delivered)
        assert stored - delivered <= self.unanswered
        assert delivered - stored <= self.unanswered

    def _run(self, work: Callable[[Broker, int], None]) -> None:
        token, client, number = self._broker.token, self._broker.client(), 0
        while not self._stop.is_set():
            if token != self._broker.token:
                client.close()
                token, client = self._broker.token, self._broker.client()
                self.renewed.release()
            number += 1
            try:
                work(client, number)
            except BrokerCordoned:
                self.refused.set()
                return
            except BrokerError as error:  # it has ended, and another pod has another address
                self.failures.append(error)
                self._stop.wait(0.1)
                if url := self._broker.url:
                    client.close()
                    client = self._broker.client(url)
        client.close()

    def _publish(self, client: Broker, number: int) -> None:
        soon_ms = time.time_ns() // 1_000_000 + SOON_MS
        dues = {f"now-{number}-{index}": None for index in range(8)} | {f"soon-{number}": soon_ms}
        batch = [Message(id=one, topic=TOPIC, body=b"x" * 100, deliver_at_ms=due) for one, due in dues.items()]
        with self._answered(dues.keys()):
            self.stored |= {result.id for result in client.publish(batch) if result.status == "stored"}
        self._stop.wait(0.01)

    def _consume(self, client: Broker, _number: int) -> None:
        self._consumes.wait(DEADLINE_S)
        with self._pulls:
            deliveries = client.pull(TOPIC, GROUP, max_messages=50, wait_ms=100, invisible_ms=INVISIBLE_MS)
            if not deliveries:
                return
            with self._answered(delivery.id for delivery in deliveries):
                statuses = client.ack([delivery.receipt for delivery in deliveries])
            self.delivered += [one.id for one, status in zip(deliveries, statuses, strict=True) if status == "acked"]

    @contextmanager
    def _answered(self, ids: Iterable[str]) -> Iterator[None]:
        try:
            yield
        except BrokerCordoned:
            raise
        except BrokerError:
            self.unanswered |= set(ids)
            raise
