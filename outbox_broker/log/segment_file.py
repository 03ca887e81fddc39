"""A segment's file: begun whole or not at all. Not which segments a log has."""

from __future__ import annotations

import os
from pathlib import Path

from outbox_broker.log.storage import Storage
from outbox_core.journal.journal import HEADER_BYTES, SegmentHeader


def begin_segment(path: Path, header: SegmentHeader, data: bytes, *, is_first: bool, storage: Storage) -> int:
    """Make the file of a segment that begins with these frames; returns its descriptor. The frames are not synced yet.

    `is_first`: the log's folder is new, too. Raises OSError, with the file removed: until the folder is synced, a power
    cut may bring it back.
    """
    descriptor = storage.create(path)
    try:
        storage.write(descriptor, header.encode(), position=0)
        storage.sync(descriptor)
        storage.sync_folder(path.parent)
        if is_first:
            storage.sync_folder(path.parent.parent)
        if data:
            storage.write(descriptor, data, position=HEADER_BYTES)
    except OSError:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    return descriptor
