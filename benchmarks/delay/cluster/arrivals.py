"""Consumes what a delay engine hands to its target, and notes when each message came."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from broker_adapter.http import HttpBroker
from outbox_core.messages.message import DUE_HEADER

GROUP: Final = "bench"
SECONDS_MAX: Final = 240
PULLED_MAX: Final = 100


class Arrival(NamedTuple):
    """A delivery: the Unix time at which it came, in seconds, and when it was due, 0 if its header does not say."""

    at: float
    id: str
    due_ms: int


@contextlib.contextmanager
def arrivals(url: str, topic: str, *, expected: int) -> Iterator[list[Arrival]]:
    """Yields a list of the deliveries, which grows; when the block has ended all messages came.

    Raises SystemExit if fewer than `expected` messages came within SECONDS_MAX of the end of the block.
    """
    came: list[Arrival] = []
    ids: set[str] = set()  # after a takeover a message may come twice
    client, is_over = HttpBroker(url), threading.Event()
    client.pull(topic, GROUP)  # makes the group

    def consume() -> None:
        while len(ids) < expected and not is_over.is_set():
            deliveries = client.pull(topic, GROUP, max_messages=PULLED_MAX, wait_ms=1_000)
            now = time.time()
            came.extend(Arrival(now, one.id, int(one.headers.get(DUE_HEADER, 0))) for one in deliveries)
            ids.update(one.id for one in deliveries)
            if deliveries:
                client.ack([one.receipt for one in deliveries])

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        yield came
        thread.join(SECONDS_MAX)
    finally:
        is_over.set()
        thread.join()
        client.close()
    if len(ids) < expected:
        raise SystemExit(f"only {len(ids)} of {expected} messages came")
