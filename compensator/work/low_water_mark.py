"""Decides where the polls of a source begin: usually at a low-water mark of each table, seldom at the front. No I/O.

InnoDB keeps the index entries of deleted rows as long as any transaction that was open at the delete, and a scan of the
index from its front steps over all of them: 100,000 of them cost a tenth of a second, for a poll that finds nothing.
So a poll begins at the due time before which the last one saw no rows, and a batch where the last one ended.

No due row stays hidden below a mark. A mark is never above the database's clock less a margin, and a row's due time is
written ahead of that clock: by its INSERT, a claim, a retry, a release or an operator. A row can still be below a mark
if its transaction committed later than the row's lease and the margin, or after a step of the clock: the next full
scan finds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

MARGIN_US: Final = 5_000_000
"""How far behind the database's clock a mark stays: a commit so late, or a step back so small, hides no row."""
WHOLE_EVERY_MS: Final = 10_000
WHOLE_SHARE: Final = 20
"""Full scans take at most 1/20 of the time, however long one takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PollResult:
    """Result of a poll: the database's clock, and for each table that has pending rows the first one's due time.

    `took_ms`: how long it took; `ended_ms`: its end, by the monotonic clock.
    """

    now_us: int
    first_due_us: Mapping[str, int]
    took_ms: int
    ended_ms: int


@dataclass(frozen=True, slots=True)
class LowWaterMarks:
    """The marks of one source's tables, and the time of the next full scan. Without marks, a poll begins at 0."""

    marks_us: Mapping[str, int] = field(default_factory=dict)
    whole_from_ms: int | None = None

    def begin(self, *, now_ms: int) -> Mapping[str, int]:
        """The due time from which to scan each table; 0 for tables without one. Empty: a full scan."""
        whole = self.whole_from_ms is None or now_ms >= self.whole_from_ms
        return {} if whole else self.marks_us

    def hides(self, now_us: int) -> bool:
        """Whether the database's clock was stepped back below a mark: new rows may be below it."""
        return any(mark_us > now_us for mark_us in self.marks_us.values())

    def after(self, polled: PollResult, *, tables: tuple[str, ...], whole: bool) -> LowWaterMarks:
        """Returns the marks after a poll of these tables."""
        least_us = polled.now_us - MARGIN_US
        marks_us = {table: min(polled.first_due_us.get(table, least_us), least_us) for table in tables}
        wait_ms = max(WHOLE_EVERY_MS, WHOLE_SHARE * polled.took_ms)
        return LowWaterMarks(marks_us, polled.ended_ms + wait_ms if whole else self.whole_from_ms)
