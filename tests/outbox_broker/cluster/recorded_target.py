"""The target broker of a delay cluster, with a record of what each node sent to it, and a gate in front of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from outbox_broker.engine.engine import Engine
from outbox_broker.state.client_topic_quota import ClientTopicQuota
from outbox_core.messages.message import CancelStatus, Message, PublishResult, PublishStatus
from tests.outbox_broker.cluster.delay_history import Arrival

SECONDS_MAX = 300


class RecordedTarget:
    """ForProducers of one node's connection to an engine. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._arrivals: list[Arrival] = []
        self._held = 0
        self.rejects: set[str] = set()
        """Ids of messages that are refused for good."""
        self._may_go = threading.Event()
        self._may_go.set()

    @property
    def arrivals(self) -> list[Arrival]:
        """All messages that arrived, also those that are held, and those that the broker drops as repetitions."""
        with self._lock:
            return list(self._arrivals)

    @property
    def sent(self) -> set[str]:
        """Their ids."""
        return {arrival.id for arrival in self.arrivals}

    @property
    def held(self) -> int:
        """How many batches arrived and are held."""
        with self._lock:
            return self._held

    def hold(self) -> None:
        """Keep batches that arrive from now on from the engine, and unanswered."""
        self._may_go.clear()

    def release(self) -> None:
        """Pass on what is held."""
        self._may_go.set()

    def publish(self, batch: Sequence[Message], *, quota: ClientTopicQuota | None) -> list[PublishResult]:
        at_ms = time.time_ns() // 1_000_000
        with self._lock:
            self._arrivals += [Arrival(message.id, at_ms) for message in batch]
            self._held += 1
        assert self._may_go.wait(SECONDS_MAX)
        with self._lock:
            self._held -= 1
        taken = iter(self._engine.publisher.publish([one for one in batch if one.id not in self.rejects], quota=quota))
        return [
            PublishResult(one.id, PublishStatus.REJECTED, "never") if one.id in self.rejects else next(taken)
            for one in batch
        ]

    def cancel(self, message_ids: Sequence[str], *, topics: Sequence[str] | None) -> list[CancelStatus]:
        return self._engine.publisher.cancel(message_ids, topics=topics)

    def scheduled(
        self, topic: str | None, *, from_ms: int | None, to_ms: int | None, bucket: str
    ) -> list[tuple[int, int]]:
        return self._engine.publisher.scheduled(topic, from_ms=from_ms, to_ms=to_ms, bucket=bucket)

    def scheduled_message(
        self, message_id: str, *, topics: Sequence[str] | None
    ) -> Mapping[str, object] | None:  # fmt: skip
        return self._engine.publisher.scheduled_message(message_id, topics=topics)
