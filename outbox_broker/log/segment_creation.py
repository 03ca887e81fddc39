"""Creates a segment file atomically: header and first frames, or no file. Does not choose segments."""

from __future__ import annotations

import os
from pathlib import Path

from outbox_broker.log.storage import Storage
from outbox_core.journal.journal import HEADER_BYTES, SegmentHeader


def begin_segment(path: Path, header: SegmentHeader, data: bytes, *, is_first: bool, storage: Storage) -> int:
    """Create a segment file that begins with these frames; returns its descriptor. The frames are not synced yet.

    `is_first`: the log's folder is new, too. Raises OSError after removing the file; until the folder is synced, a
    power failure may bring it back.
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
