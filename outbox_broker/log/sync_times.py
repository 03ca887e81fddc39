"""Measures how long disk syncs take, as a histogram. Wraps any storage and changes nothing."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from outbox_broker.log.storage import Storage

BOUNDS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class TimedStorage:
    """Wraps a storage and records its sync times. Failed syncs count too: a disk may be slow to fail."""

    def __init__(self, storage: Storage, *, clock_s: Callable[[], float]) -> None:
        """`clock_s`: monotonic seconds."""
        self._storage = storage
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0
        self.create, self.write = storage.create, storage.write
        self.truncate, self.remove = storage.truncate, storage.remove
        self.sync_folder = storage.sync_folder

    def sync(self, descriptor: int) -> None:
        """Return once the file's data is on disk."""
        start = self._clock_s()
        try:
            self._storage.sync(descriptor)
        finally:
            took_s = self._clock_s() - start
            with self._lock:
                self._counts[bisect_left(BOUNDS_S, took_s)] += 1
                self.sum_s += took_s

    def counts(self) -> list[tuple[float | None, int]]:
        """Returns (upper bound, syncs above the previous bound and up to this one); the last bound is None."""
        with self._lock:
            return list(zip((*BOUNDS_S, None), self._counts, strict=True))
