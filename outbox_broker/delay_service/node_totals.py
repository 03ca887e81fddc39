"""Totals of a node's shards since the node's start, also of shards that it has given away: no counter goes back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final, Protocol

from outbox_broker.engine.publisher import OTHERS
from outbox_broker.schedule.lateness import Lateness

COUNTERS_MAX: Final = 40_000
"""Beyond so many, messages of further topics of shards that have left are counted together."""


class Counted(Protocol):
    """What is counted of one shard, as long as the node has it."""

    @property
    def lateness(self) -> Lateness:
        """The histogram of dispatch lateness."""

    def counters(self) -> Mapping[tuple[str, str, str], int]:
        """Returns totals since the shard was opened, by (what, topic, status)."""


class NodeTotals:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Counted] = set()
        self._counters: Counter[tuple[str, str, str]] = Counter()
        self._lateness = Lateness()

    def add(self, shard: Counted) -> None:
        """Count a shard that was opened."""
        with self._lock:
            self._open.add(shard)

    def retire(self, shard: Counted) -> None:
        """Keep the totals of a shard that is closed. Idempotent."""
        with self._lock:  # in one step: a scrape sees them once, here or there
            if shard not in self._open:
                return
            self._open.remove(shard)
            self._lateness = Lateness.merged([self._lateness, shard.lateness])
            for (what, topic, status), total in shard.counters().items():
                place = (what, topic, status)
                is_full = place not in self._counters and len(self._counters) >= COUNTERS_MAX
                self._counters[(what, OTHERS, status) if is_full else place] += total

    def counters(self) -> Mapping[tuple[str, str, str], int]:
        """Returns totals since the node's start, by (what, topic, status)."""
        with self._lock:
            total = Counter(self._counters)
            for shard in self._open:
                total.update(shard.counters())
        return dict(total)

    def lateness(self) -> Lateness:
        """Returns the histogram of how late messages reached the target, since the node's start."""
        with self._lock:
            return Lateness.merged([self._lateness, *(shard.lateness for shard in self._open)])
