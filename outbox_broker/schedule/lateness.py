"""Measures how late messages were dispatched, as a histogram. Changes nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Final

BOUNDS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 250, 500, 1_000, 5_000, 30_000, 300_000, 3_600_000)


class Lateness:
    """Message counts by delivery delay after the due time, in milliseconds. One thread writes."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_MS) + 1)
        self.worst_ms = 0
        self.sum_ms = 0

    @classmethod
    def merged(cls, parts: Iterable[Lateness]) -> Lateness:
        """Returns the sum of several histograms."""
        total = cls()
        for part in parts:
            counts = [count for _, count in part.counts()]
            total._counts = [a + b for a, b in zip(total._counts, counts, strict=True)]
            total.worst_ms = max(total.worst_ms, part.worst_ms)
            total.sum_ms += part.sum_ms
        return total

    def add(self, late_ms: int, *, messages: int = 1) -> None:
        """Count a message, or several with the same lateness."""
        self._counts[bisect_left(BOUNDS_MS, late_ms)] += messages
        self.worst_ms = max(self.worst_ms, late_ms)
        self.sum_ms += late_ms * messages

    def add_due(self, due_ms: Iterable[int], *, now_ms: int) -> None:
        """Count messages with these due times that are delivered now."""
        for due, messages in Counter(due_ms).items():
            self.add(max(0, now_ms - due), messages=messages)

    def counts(self) -> list[tuple[int | None, int]]:
        """Returns (upper bound, messages later than the previous bound and up to this one); the last bound is None."""
        return list(zip((*BOUNDS_MS, None), self._counts, strict=True))

    def quantile_ms(self, share: float) -> int:
        """Returns the smallest bound that covers this share of the messages; the maximum if no bound does."""
        left = share * sum(self._counts)
        for bound, count in self.counts():
            left -= count
            if left <= 0 and bound is not None:
                return min(bound, self.worst_ms)
        return self.worst_ms
