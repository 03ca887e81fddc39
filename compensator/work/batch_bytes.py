"""Decides how many rows of unknown size to read at once, so that their bodies stay within a limit. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outbox.store.row import OutboxRow

BATCH_BYTES_MAX: Final = 32 * 1024 * 1024
"""Limit of the bodies of one batch; a single row's body may have half of that."""
FIRST_ROWS: Final = 32
"""Rows that are read first, before their size is known."""


class BatchBytes:
    """Estimates the size of a source's bodies from the rows that were read."""

    def __init__(self, *, bytes_max: int = BATCH_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._row_bytes: float | None = None

    def rows(self, so_far: Sequence[OutboxRow], *, rows_max: int) -> int:
        """How many more rows to read into a batch that has `so_far`; 0: it is full."""
        room = rows_max - len(so_far)
        if not so_far:
            known = self._row_bytes
            return min(room, FIRST_ROWS) if known is None else self._fitting(room, known, self._bytes_max)
        bytes_so_far = sum(len(row.body) for row in so_far)
        mean = max(bytes_so_far / len(so_far), self._row_bytes or 0)
        return self._fitting(room, mean, self._bytes_max - bytes_so_far, least=0)

    def learn(self, rows: Sequence[OutboxRow]) -> None:
        """Update the estimate from rows that were read: at once if they are larger, gradually if they are smaller."""
        if rows:
            mean = sum(len(row.body) for row in rows) / len(rows)
            self._row_bytes = max(mean, 0.75 * (self._row_bytes or 0))

    @staticmethod
    def _fitting(room: int, row_bytes: float, bytes_max: float, *, least: int = 1) -> int:
        return room if row_bytes <= 0 else max(least if room else 0, min(room, int(bytes_max / row_bytes)))
