"""The protocol of a contestant, the bodies that it sends, and helpers of several contestants. Standard library only."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

BATCH: Final = 500
BODY_BYTES: Final = 512
_STAMP: Final = struct.Struct(">d")
_PADDING: Final = b"x" * (BODY_BYTES - _STAMP.size)
BODY: Final = b"x" * BODY_BYTES
PACED_WORKERS: Final = 8


class Contestant(Protocol):
    """A client, as returned by a module's `make(address)`. Calls return when all messages are durable, or settled.

    `topic` names a queue, stream or topic that begin() has made and nobody else uses.
    """

    def begin(self, topic: str) -> None:
        """Create the topic, and the one group that will consume it."""

    def end(self, topic: str) -> None:
        """Drop it."""

    def publish(self, topic: str, *, count: int, in_flight: int) -> None:
        """`count` messages in batches of BATCH, so many batches in flight at once."""

    def consume(self, topic: str, *, count: int) -> None:
        """Take and acknowledge `count` messages in batches of BATCH, as one consumer."""

    def publish_singles(self, topic: str, *, count: int, workers: int) -> None:
        """Publish `count` messages, `workers` of them unanswered at any time: each answer sends the next message."""

    def publish_in_threads(self, topic: str, *, count: int, workers: int) -> None:
        """The same from threads that await each message; like publish_singles() if a client is not thread-safe."""

    def publish_paced(self, topic: str, *, count: int, per_second: int) -> None:
        """Publish `count` messages, each with the time at which it was due to be sent."""

    def receive(self, topic: str, *, count: int, on_waiting: Callable[[], None]) -> list[float]:
        """Wait for `count` stamped messages as a consumer does; seconds from stamp to handler of each.

        `on_waiting` is called once, as soon as the consumer waits.
        """

    def close(self) -> None:
        """Close the connections."""


def stamped(due_s: float) -> bytes:
    """Returns a body with the time at which it was due to be sent, by the clock that all local processes share."""
    return _STAMP.pack(due_s) + _PADDING


def age_s(body: bytes) -> float:
    """Returns how long ago a body was due to be sent."""
    found: float = _STAMP.unpack_from(body)[0]
    return time.monotonic() - found


def in_threads(work: Callable[[int, int], None], *, count: int, workers: int) -> None:
    """`work(first, count)` in each of `workers` threads, the count shared out."""
    failures: list[BaseException] = []
    each = count // workers

    def run(place: int) -> None:
        try:
            work(place * each, each if place < workers - 1 else count - each * (workers - 1))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=(place,)) for place in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def paced_in_threads(send: Callable[[float], None], *, count: int, per_second: int) -> None:
    """`send(due_s)` for each of `count` moments, by as many threads as keep up with them at a few milliseconds each."""
    start = time.monotonic() + 0.05

    def work(first: int, _count: int) -> None:
        for number in range(first, count, PACED_WORKERS):
            due_s = start + number / per_second
            if (left := due_s - time.monotonic()) > 0:
                time.sleep(left)
            send(due_s)

    threads = [threading.Thread(target=work, args=(place, count)) for place in range(PACED_WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
