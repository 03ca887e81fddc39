"""Proves that the newest segment of a log is on the disk, not only in the page cache. Knows no frames.

After a failed sync the kernel marks the pages that it could not write as clean: reads return them from memory, the next
sync succeeds, and a power failure loses them (Rebello et al., "Can Applications Recover from fsync Failures?", USENIX
ATC 2020). A process that opens the file later is not informed of the error either. Writing the same bytes into the same
file proves nothing: on ext4 their blocks stay marked as unwritten. So a process that does not know how the previous one
ended copies the segment into a new file, syncs that, and renames it over the old one (decision 64).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from outbox_broker.log.disk_reserve import FULL
from outbox_broker.log.storage import Storage
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_COPIED_AT_ONCE_BYTES: Final = 4 * 1024 * 1024
_CURE: Final = "free as much as the segment has, and restart; then it is proven, also where a sync failed before"


def proven_copy(path: Path, descriptor: int, *, storage: Storage, sync: Callable[[int], None]) -> int | None:
    """Replace an open segment's file by a synced copy, durably; returns the copy's descriptor. None: there is no space.

    Raises OSError, or what `sync` raises: nothing is proven then.
    """
    aside = path.with_suffix(".new")
    aside.unlink(missing_ok=True)  # left by a process that crashed: its blocks are as unproven
    copy = storage.create(aside)
    try:
        if not _has_copied(descriptor, copy, storage):
            logger.error("segment_not_verified", extra={"segment": path.name, "cure": _CURE})
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
    """Copy all bytes; returns False if the disk is full."""
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
