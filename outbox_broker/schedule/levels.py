"""Levels of the schedule and the arithmetic of their buckets: the bucket of a due time, and when it is expanded.

Pure; the clock is an argument, and a slot is an integer division of UTC milliseconds: no time zone, no calendar.

    level  takes messages due after  one bucket  buckets in two years
    L1w    T + 14 days               1 week      104
    L1d    T + 2 days                1 day        14
    L1h    T + 2 hours               1 hour       48
    L0m    now                       1 minute    120

After the sliding multi-level schedule that Ctrip built on BookKeeper. The barrier of L1w, L1d and L1h is twice the
bucket's length, so that direct writes to a bucket end one length before it begins, which is when it is sealed and
re-filed into finer levels. A message is re-filed at most three times; a bucket of few messages is not, but dispatched
from where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS
WEEK_MS: Final = 7 * DAY_MS


@dataclass(frozen=True, slots=True)
class Level:
    """One level: direct writes need a due time at least `barrier_ms` ahead."""

    name: str
    length_ms: int
    barrier_ms: int


LEVELS: Final = (
    Level("L1w", WEEK_MS, 2 * WEEK_MS),
    Level("L1d", DAY_MS, 2 * DAY_MS),
    Level("L1h", HOUR_MS, 2 * HOUR_MS),
    Level("L0m", MINUTE_MS, 0),
)
FINEST: Final = len(LEVELS) - 1
BUCKETS_MAX: Final = 286
"""The maximum number of open buckets for due times spread over two years."""


class BucketState(StrEnum):
    """The persistent state of a bucket; nothing of it is inferred from the clock after a restart."""

    OPEN = "open"
    SEALED = "sealed"
    EXPANDING = "expanding"
    DONE = "done"


class BucketId(NamedTuple):
    """A level's number, coarsest first, and the slot: due time divided by the level's length."""

    level: int
    slot: int

    @property
    def start_ms(self) -> int:
        """The start of the bucket's time."""
        return self.slot * LEVELS[self.level].length_ms

    @property
    def end_ms(self) -> int:
        """The end of the bucket's time (exclusive)."""
        return (self.slot + 1) * LEVELS[self.level].length_ms

    @property
    def expand_at_ms(self) -> int:
        """When the bucket is to be re-filed: one length before it begins. The finest level never is."""
        return self.start_ms - LEVELS[self.level].length_ms

    def __str__(self) -> str:
        return f"{LEVELS[self.level].name}-{self.slot}"


def place(due_ms: int, *, now_ms: int, is_open: Callable[[BucketId], bool], below: int = -1) -> BucketId:
    """Returns the bucket of a due time: on the coarsest level whose barrier it clears and whose bucket still accepts
    writes.

    `below` is the level from which the message is re-filed. The finest level accepts everything, including the past.
    """
    ahead_ms = due_ms - now_ms
    for level_number in range(below + 1, FINEST):
        level = LEVELS[level_number]
        if ahead_ms >= level.barrier_ms:
            found = BucketId(level_number, due_ms // level.length_ms)
            if is_open(found):
                return found
    return BucketId(FINEST, due_ms // MINUTE_MS)


def is_to_expand(bucket: BucketId, *, now_ms: int) -> bool:
    """Returns whether to re-file a bucket now. Once its time has begun, it is dispatched from where it is."""
    return bucket.level != FINEST and bucket.expand_at_ms <= now_ms < bucket.start_ms


def is_to_fire(bucket: BucketId, *, now_ms: int) -> bool:
    """Returns whether messages of a bucket may be due: its time has begun."""
    return bucket.start_ms <= now_ms


def candidates(due_ms: int) -> tuple[BucketId, ...]:
    """Returns the buckets that may contain a message of this due time, coarsest first."""
    return tuple(BucketId(level_number, due_ms // level.length_ms) for level_number, level in enumerate(LEVELS))
