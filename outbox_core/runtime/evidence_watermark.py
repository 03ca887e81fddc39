"""How far reconciliation has judged, in a small file that it writes for those who purge evidence. It purges nothing.

What is not judged yet is kept for longer than it would be, up to HELD_TIMES_MAX times as long: a reconciliation that
stands still delays a purge, and never fills a disk. So a file that cannot be read delays it, too.
"""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from outbox_core.common.clock import Clock

logger = logging.getLogger(__name__)

JUDGED_FILE: Final = "judged.json"
FORMAT: Final = 1
FILE_BYTES_MAX: Final = 64 * 1024
OLD_AFTER_MS: Final = 24 * 60 * 60 * 1000
HELD_TIMES_MAX: Final = 2
"""Evidence is kept so many times as long as it is told to be, and no longer, whatever was not judged."""


class Purgeable(StrEnum):
    """Evidence that is purged by age."""

    ARCHIVE = "archive"
    INBOX = "inbox"
    BROKER = "broker"


class JudgedFile(msgspec.Struct, frozen=True, kw_only=True):
    """Since when evidence is still needed (milliseconds since the epoch): of what is not named, none is waited for."""

    format: int = FORMAT
    written_at_ms: int
    needed_since_ms: dict[str, int]


class JudgedGuard:
    """Asks the file before each purge: a small one, on a disk that answers."""

    def __init__(self, path: Path, *, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._told = ""

    def age_ms(self, evidence: Purgeable, *, keep_ms: int) -> int:
        """From which age on it may go: `keep_ms`, or more where it was not judged yet."""
        now_ms, found = self._clock.now_ms(), self._read()
        self._tell(_state(found, now_ms=now_ms))
        return age_to_keep_ms(found, evidence, keep_ms=keep_ms, now_ms=now_ms)

    def _read(self) -> JudgedFile | None:
        try:
            with self._path.open("rb") as file:
                found = msgspec.json.decode(file.read(FILE_BYTES_MAX), type=JudgedFile)
        except (OSError, msgspec.MsgspecError):
            return None
        return found if found.format == FORMAT else None

    def _tell(self, state: str) -> None:
        """Once, until it changes."""
        if state != self._told and (state or self._told):
            level = logging.WARNING if state else logging.INFO
            logger.log(level, state or "judged_file_is_new_again", extra={"path": str(self._path)})
        self._told = state


def age_to_keep_ms(judged: JudgedFile | None, evidence: Purgeable, *, keep_ms: int, now_ms: int) -> int:
    """From which age on evidence may go, by what is known of how far it was judged."""
    most_ms = keep_ms * HELD_TIMES_MAX
    if judged is None:
        return most_ms
    needed_since_ms = judged.needed_since_ms.get(evidence, now_ms)
    # Of that very millisecond it is needed, too.
    return min(max(keep_ms, now_ms - needed_since_ms + 1), most_ms)


def _state(judged: JudgedFile | None, *, now_ms: int) -> str:
    if judged is None:
        return "judged_file_cannot_be_read"
    return "judged_file_is_old" if now_ms - judged.written_at_ms > OLD_AFTER_MS else ""
