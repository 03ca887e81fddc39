"""The levels of the schedule and the arithmetic of their buckets: where a due time belongs, and when it moves on.

Pure; the clock is an argument, and a slot is an integer number of UTC: no time zone, no calendar.

    level  takes messages due after  one bucket  buckets in two years
    L1w    T + 14 days               1 week      104
    L1d    T + 2 days                1 day        14
    L1h    T + 2 hours               1 hour       48
    L0m    now                       1 minute    120

After the sliding multi-level schedule that Ctrip put on BookKeeper. The barrier of L1w, L1d and L1h is twice the
bucket's length, so that direct writes to a bucket end one length before it begins, which is when it is sealed and
re-filed into finer levels. A message is re-filed three times at the most.
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
    """A row of the table: direct writes need a due time `barrier_ms` ahead or more."""

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
"""Buckets that are open at once for due times spread over two years."""


class BucketState(StrEnum):
    """A bucket's life, as it is written down; nothing of it is inferred from the clock after a restart."""

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
        """When the bucket's time begins."""
        return self.slot * LEVELS[self.level].length_ms

    @property
    def end_ms(self) -> int:
        """When the bucket's time is over."""
        return (self.slot + 1) * LEVELS[self.level].length_ms

    @property
    def expand_at_ms(self) -> int:
        """From when on the bucket is re-filed: one length before it begins. The finest level never is."""
        return self.start_ms - LEVELS[self.level].length_ms

    def __str__(self) -> str:
        return f"{LEVELS[self.level].name}-{self.slot}"


def place(due_ms: int, *, now_ms: int, is_open: Callable[[BucketId], bool], below: int = -1) -> BucketId:
    """The bucket of a due time: the coarsest level whose barrier it clears and whose bucket takes writes still.

    `below` is the level it comes from, when it is re-filed. The finest level takes everything, the past too.
    """
    ahead_ms = due_ms - now_ms
    for number in range(below + 1, FINEST):
        level = LEVELS[number]
        if ahead_ms >= level.barrier_ms:
            found = BucketId(number, due_ms // level.length_ms)
            if is_open(found):
                return found
    return BucketId(FINEST, due_ms // MINUTE_MS)


def is_to_expand(bucket: BucketId, *, now_ms: int) -> bool:
    """Whether a bucket is to be re-filed now. Once its own time has begun it fires from where it is instead."""
    return bucket.level != FINEST and bucket.expand_at_ms <= now_ms < bucket.start_ms


def is_to_fire(bucket: BucketId, *, now_ms: int) -> bool:
    """Whether messages of a bucket may be due: its time has begun."""
    return bucket.start_ms <= now_ms


def candidates(due_ms: int) -> tuple[BucketId, ...]:
    """The buckets in which a message of this due time may stand, coarsest first."""
    return tuple(BucketId(number, due_ms // level.length_ms) for number, level in enumerate(LEVELS))
