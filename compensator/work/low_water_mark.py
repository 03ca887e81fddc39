"""Where the looks of a source begin: at a low-water mark of each table, and seldom at the front. It decides only.

InnoDB keeps the index entries of deleted rows for as long as any transaction that was open then still is, and a walk
along the index from its front steps over all of them: 100,000 of them are a tenth of a second, for a look that finds
nothing. So a look begins where the last one has seen that nothing is left, and a batch where the last one ended.

Nothing that is due can stay hidden below a mark. A mark is never above the database's clock less a margin, and a row's
due time is written ahead of that clock: by its INSERT, a claim, a retry, a release or an operator. What lies below all
the same - a row whose transaction committed later than the row's lease and the margin, or that a step of the clock left
behind - is found by the next whole walk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

MARGIN_US: Final = 5_000_000
"""How far behind the database's clock a mark stays: so late a commit, or so small a step back, costs no time."""
WHOLE_EVERY_MS: Final = 10_000
WHOLE_SHARE: Final = 20
"""Whole walks take one part in so many of the time at most, however long one takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """What a look saw: the database's clock, and of each table that has pending rows the first one's due time.

    `took_ms`: how long it took, until `ended_ms` of the clock that only goes on.
    """

    now_us: int
    first_due_us: Mapping[str, int]
    took_ms: int
    ended_ms: int


@dataclass(frozen=True, slots=True)
class LowWater:
    """The marks of one source's tables, and from when on the next look is a whole one. A fresh one looks from 0."""

    marks_us: Mapping[str, int] = field(default_factory=dict)
    whole_from_ms: int | None = None

    def begin(self, *, now_ms: int) -> Mapping[str, int]:
        """From which due time on to look at each table; 0 where none is named. Empty: a whole walk."""
        whole = self.whole_from_ms is None or now_ms >= self.whole_from_ms
        return {} if whole else self.marks_us

    def hides(self, now_us: int) -> bool:
        """Whether the database's clock has stepped back below a mark: new rows may lie there."""
        return any(mark_us > now_us for mark_us in self.marks_us.values())

    def after(self, walked: Walked, *, tables: tuple[str, ...], whole: bool) -> LowWater:
        """The marks once a look has seen these tables."""
        least_us = walked.now_us - MARGIN_US
        marks_us = {table: min(walked.first_due_us.get(table, least_us), least_us) for table in tables}
        wait_ms = max(WHOLE_EVERY_MS, WHOLE_SHARE * walked.took_ms)
        return LowWater(marks_us, walked.ended_ms + wait_ms if whole else self.whole_from_ms)
