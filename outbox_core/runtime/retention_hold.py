"""The retention hold: a file in which the reconciliation records what it has evaluated, read before each purge.

Evidence that is not evaluated yet is retained for up to RETENTION_FACTOR_MAX times its normal age: a stopped
reconciliation delays a purge, but never fills a disk. A file that cannot be read delays it likewise. Purges nothing.
"""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from outbox_core.common.clock import Clock
from outbox_core.common.errors import DECODE_ERRORS
from outbox_core.runtime.event_logger import EventLogger

logger = EventLogger(__name__)

JUDGED_FILE: Final = "judged.json"
FORMAT: Final = 1
FILE_BYTES_MAX: Final = 64 * 1024
OLD_AFTER_MS: Final = 24 * 60 * 60 * 1000
RETENTION_FACTOR_MAX: Final = 2
"""The limit of retention, as a multiple of the configured age, for evidence that was not evaluated."""


class Purgeable(StrEnum):
    """Evidence that is purged by age."""

    ARCHIVE = "archive"
    INBOX = "inbox"
    BROKER = "broker"


class RetentionHold(msgspec.Struct, frozen=True, kw_only=True):
    """Since when evidence is still needed (milliseconds since the epoch); no purge waits for kinds that are absent."""

    format: int = FORMAT
    written_at_ms: int
    needed_since_ms: dict[str, int]


class EvidenceRetention:
    """Reads the file before each purge, so it must be on a disk that responds."""

    def __init__(self, path: Path, *, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._logged_state = ""

    def age_ms(self, evidence: Purgeable, *, keep_ms: int) -> int:
        """Returns the age from which evidence may be purged: `keep_ms`, or more if it was not evaluated yet."""
        now_ms, hold = self._clock.now_ms(), self._read()
        self._log_change(_state(hold, now_ms=now_ms))
        return retention_age_ms(hold, evidence, keep_ms=keep_ms, now_ms=now_ms)

    def _read(self) -> RetentionHold | None:
        try:
            with self._path.open("rb") as file:
                hold = msgspec.json.decode(file.read(FILE_BYTES_MAX), type=RetentionHold)
        except (OSError, *DECODE_ERRORS):
            return None
        return hold if hold.format == FORMAT else None

    def _log_change(self, state: str) -> None:
        """Logs the state if it has changed."""
        if state != self._logged_state and (state or self._logged_state):
            level = logging.WARNING if state else logging.INFO
            logger.log(level, state or "judged_file_is_new_again", extra={"path": str(self._path)})
        self._logged_state = state


def retention_age_ms(hold: RetentionHold | None, evidence: Purgeable, *, keep_ms: int, now_ms: int) -> int:
    """Returns the age from which evidence may be purged, given the hold."""
    most_ms = keep_ms * RETENTION_FACTOR_MAX
    if hold is None:
        # A disk that is not mounted for a minute proves no evaluation, and a purge cannot be undone.
        return most_ms
    needed_since_ms = hold.needed_since_ms.get(evidence, now_ms)
    # Evidence of the hold's own millisecond is still needed.
    return min(max(keep_ms, now_ms - needed_since_ms + 1), most_ms)


def _state(hold: RetentionHold | None, *, now_ms: int) -> str:
    if hold is None:
        return "judged_file_cannot_be_read"
    return "judged_file_is_old" if now_ms - hold.written_at_ms > OLD_AFTER_MS else ""
