"""Redis Streams through redis-py and hiredis: pipelines of XADD; XREADGROUP, and XACK in the same round trip."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import redis

from benchmarks.broker.contestants.shape import (
    BATCH,
    BODY,
    Contestant,
    age_s,
    in_threads,
    paced_in_threads,
    stamped,
)

GROUP = "bench"
CONSUMER = "one"


class RedisStreams:
    """A connection a thread."""

    def __init__(self, address: str) -> None:
        self._redis: Any = redis.Redis.from_url(address, max_connections=64)
        self._local = threading.local()

    def begin(self, topic: str) -> None:
        """The stream and its group."""
        self._redis.xgroup_create(topic, GROUP, id="0", mkstream=True)

    def end(self, topic: str) -> None:
        """Free the memory: it would slow the next rounds' rewrites."""
        self._redis.delete(topic)

    def publish(self, topic: str, *, count: int, in_flight: int) -> None:
        """One pipeline a batch; with appendfsync always Redis syncs once for all of it, before it answers."""

        def work(_first: int, mine: int) -> None:
            for start in range(0, mine, BATCH):
                pipeline = self._redis.pipeline(transaction=False)
                for _ in range(min(BATCH, mine - start)):
                    pipeline.xadd(topic, {"b": BODY})
                pipeline.execute()

        in_threads(work, count=count, workers=in_flight)

    def consume(self, topic: str, *, count: int) -> None:
        """The acknowledgement of a batch goes with the request for the next one."""
        left, ids = count, []
        while left > 0 or ids:
            pipeline = self._redis.pipeline(transaction=False)
            if ids:
                pipeline.xack(topic, GROUP, *ids)
            if left > 0:
                pipeline.xreadgroup(GROUP, CONSUMER, {topic: ">"}, count=BATCH)
            answers = pipeline.execute()
            entries = _entries(answers[-1]) if left > 0 else []
            ids = [entry_id for entry_id, _ in entries]
            left -= len(ids)

    def publish_singles(self, topic: str, *, count: int, workers: int) -> None:
        """One XADD, awaited."""

        def work(_first: int, mine: int) -> None:
            for _ in range(mine):
                self._redis.xadd(topic, {"b": BODY})

        in_threads(work, count=count, workers=workers)

    def publish_in_threads(self, topic: str, *, count: int, workers: int) -> None:
        """One XADD, awaited, which is how redis-py publishes anyway."""
        self.publish_singles(topic, count=count, workers=workers)

    def publish_paced(self, topic: str, *, count: int, per_second: int) -> None:
        """One XADD a message."""
        paced_in_threads(
            lambda due_s: self._redis.xadd(topic, {"b": stamped(due_s)}), count=count, per_second=per_second
        )

    def receive(self, topic: str, *, count: int, on_waiting: Callable[[], None]) -> list[float]:
        """A blocking XREADGROUP; what it brought is acknowledged before the next one."""
        ages: list[float] = []
        on_waiting()
        while len(ages) < count:
            found = _entries(self._redis.xreadgroup(GROUP, CONSUMER, {topic: ">"}, count=BATCH, block=5_000))
            ages += [age_s(_body(fields)) for _, fields in found]
            if found:
                self._redis.xack(topic, GROUP, *[entry_id for entry_id, _ in found])
        return ages

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


def _entries(answer: Any) -> list[tuple[bytes, Any]]:
    """What one stream gave: RESP2 answers with pairs, RESP3 with a map whose values are wrapped once more."""
    if not answer:
        return []
    if isinstance(answer, dict):
        (value,) = answer.values()
        return list(value[0]) if value and isinstance(value[0], list) else list(value)
    return list(answer[0][1])


def _body(fields: Any) -> bytes:
    found: bytes = fields[b"b"]
    return found


def make(address: str) -> Contestant:
    """A client of the Redis at a URL."""
    return RedisStreams(address)
