"""Clients that put a load on a broker, and what must be true of it when it was killed meanwhile. Not a test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from broker_adapter.http.admin_client import AdminClient
from outbox_core import Broker, Message, connect
from outbox_core.common.errors import BrokerError
from tests.broker_adapter.servers import DEADLINE_S

TOPIC, GROUP = "orders", "billing"
HOUR_MS = 3_600_000
SOON_MS = 300


class Load:
    """Clients that publish, schedule, cancel, pull and acknowledge, and know what they asked and what was answered."""

    def __init__(self, url: str, *, goes_on: bool = False) -> None:
        """`goes_on`: when the broker is out, too, which another process then serves."""
        self.changed = threading.Condition()
        self.asked: dict[str, int] = {}
        """Ids of messages that were published, or may be, and when they are due."""
        self.stored: set[str] = set()
        self.settling: set[str] = set()
        """Asked to be acknowledged or canceled, or pulled."""
        self.acked: set[str] = set()
        self.canceled: set[str] = set()
        self._url = url
        self._goes_on = goes_on
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in (self._produce, self._consume)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Until the block is left, or the broker died."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(DEADLINE_S)

    def wait_for(self, count: int) -> None:
        """Wait until so many were stored, acknowledged and canceled, each."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: min(len(self.stored) // 10, len(self.acked), len(self.canceled)) >= count, DEADLINE_S
            )

    def _run(self, work: Callable[[Broker, int], None]) -> None:
        broker = connect(self._url, timeout_ms=2_000 if self._goes_on else DEADLINE_S * 1_000)
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                work(broker, number)
            except BrokerError:  # it was killed
                if not self._goes_on:
                    break
        broker.close()

    def _produce(self, broker: Broker, number: int) -> None:
        now_ms = time.time_ns() // 1_000_000
        dues = {f"now-{number}-{index}": 0 for index in range(8)}
        dues |= {f"soon-{number}": now_ms + SOON_MS, f"far-{number}": now_ms + HOUR_MS}
        dues |= {f"gone-{number}": now_ms + HOUR_MS}
        with self.changed:
            self.asked |= dues
        batch = [
            Message(id=one, topic=TOPIC, body=one.encode() * 50, deliver_at_ms=due_ms or None)
            for one, due_ms in dues.items()
        ]
        results = broker.publish(batch)
        with self.changed:
            self.stored |= {result.id for result in results if result.status == "stored"}
            self.settling.add(f"gone-{number}")
        statuses = broker.cancel([f"gone-{number}"])
        with self.changed:
            self.canceled |= {f"gone-{number}"} if statuses == ["canceled"] else set()
            self.changed.notify_all()

    def _consume(self, broker: Broker, _number: int) -> None:
        deliveries = broker.pull(TOPIC, GROUP, max_messages=20, wait_ms=100, invisible_ms=1_000)
        with self.changed:
            self.settling |= {delivery.id for delivery in deliveries}
        statuses = broker.ack([delivery.receipt for delivery in deliveries]) if deliveries else []
        with self.changed:
            acked = {one.id for one, status in zip(deliveries, statuses, strict=True) if status == "acked"}
            self.acked |= acked
            self.changed.notify_all()


class Known:
    """What was answered by a moment."""

    def __init__(self, load: Load) -> None:
        with load.changed:
            self.stored, self.acked, self.canceled = set(load.stored), set(load.acked), set(load.canceled)

    @property
    def settled_each(self) -> int:
        """What wait_for() has waited for by then."""
        return min(len(self.stored) // 10, len(self.acked), len(self.canceled))


def check_restored(url: str, load: Load, known: Known) -> None:
    """Consume all of the restored broker: nothing that was known at the backup is missing, or comes again."""
    far = {one for one in known.stored if one.startswith("far-")}
    wanted = {one for one in known.stored if not one.startswith(("far-", "gone-"))} - load.settling
    got: set[str] = set()
    broker = connect(url, timeout_ms=DEADLINE_S * 1_000)
    deadline = time.monotonic() + DEADLINE_S
    while not wanted <= got:
        assert time.monotonic() < deadline, sorted(wanted - got)[:10]
        for delivery in broker.pull(TOPIC, GROUP, max_messages=500, wait_ms=1_000):
            assert load.asked[delivery.id] <= time.time_ns() // 1_000_000, "early"
            got.add(delivery.id)
            assert broker.ack([delivery.receipt]) == ["acked"]
    broker.close()
    client = AdminClient(url)
    assert got <= load.asked.keys()
    assert not got & (known.acked | known.canceled)
    assert [one for one in far if client.scheduled_message(one) is None] == []
    assert [one for one in known.canceled if client.scheduled_message(one) is not None] == []
