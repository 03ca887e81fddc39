"""What a log's newest segment holds, proven to be on the disk and not only in memory. It knows no frames.

After a sync that failed the kernel takes the pages that it could not write for written: they are read from memory, the
next sync says "well", and a power cut takes them (Rebello et al., "Can Applications Recover from fsync Failures?",
USENIX ATC 2020). Nor is it told to whoever opens the file after a process that saw it. Writing the same bytes into the
same file proves nothing: on ext4 their blocks stay marked as never written. So a process that does not know how the one
before it ended copies the segment into a new file, syncs that, and puts it in the old one's place.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outbox_broker.log.disk_reserve import FULL
from outbox_broker.log.storage import Storage

logger = logging.getLogger(__name__)

NOTE: Final = "proven"
_COPIED_AT_ONCE_BYTES: Final = 4 * 1024 * 1024
_CURE: Final = "free as much as the segment has, and restart; then it is proven, also where a sync failed before"


@dataclass(frozen=True, slots=True)
class Proven:
    """Up to which offset the newest segment was synced by a process that saw no sync fail. A note: never ahead."""

    segment: str
    end: int

    def covers(self, path: Path, end: int) -> bool:
        """Whether all of a segment up to an offset is proven."""
        return path.name == self.segment and end <= self.end


NOTHING: Final = Proven("", 0)


def read_proven(folder: Path) -> Proven:
    """What the log's note says; NOTHING where there is none that can be read."""
    try:
        segment, end = (folder / NOTE).read_text(encoding="ascii").split()
        return Proven(segment, int(end))
    except (OSError, ValueError):
        return NOTHING


def note_proven(folder: Path, proven: Proven, storage: Storage) -> None:
    """Leave the note. It need not be durable: an older one says less, and a power cut leaves only what is on the disk.

    Where it cannot be written, the next process copies once more than it must.
    """
    aside = folder / f"{NOTE}.new"
    with suppress(OSError):
        descriptor = storage.create(aside)
        try:
            storage.truncate(descriptor, 0)
            storage.write(descriptor, f"{proven.segment} {proven.end}\n".encode("ascii"), position=0)
        finally:
            os.close(descriptor)
        aside.replace(folder / NOTE)


def proven_copy(path: Path, descriptor: int, *, storage: Storage, sync: Callable[[int], None]) -> int | None:
    """Put a copy of an open segment in its place, durably; returns the copy's descriptor. None: there is no room.

    Raises OSError, or what `sync` does: nothing is proven then.
    """
    aside = path.with_suffix(".new")
    aside.unlink(missing_ok=True)  # of a process that ended meanwhile: its blocks prove as little
    copy = storage.create(aside)
    try:
        if not _has_copied(descriptor, copy, storage):
            logger.error("segment_not_proven", extra={"segment": path.name, "cure": _CURE})
            aside.unlink()
            os.close(copy)
            return None
        sync(copy)
        aside.replace(path)
        storage.sync_folder(path.parent)
    except BaseException:
        os.close(copy)
        raise
    return copy


def _has_copied(descriptor: int, copy: int, storage: Storage) -> bool:
    """Copy all bytes; False where the disk is full."""
    position = 0
    try:
        while data := os.pread(descriptor, _COPIED_AT_ONCE_BYTES, position):
            storage.write(copy, data, position=position)
            position += len(data)
    except OSError as error:
        if error.errno not in FULL:
            raise
        return False
    return True
