"""Room on the disk that is kept for what was stored to be consumed: a file that is let go of when the disk is full.

Publishes are refused from then on, so that they don't take it; pulls and acknowledgements go on in it. It is taken
again as soon as there is room.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Final

from messaging.errors import StorageFailed

logger = logging.getLogger(__name__)

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What the system says where there is no room."""


class Reserve:
    """One file in the data folder. Used under the engine's lock."""

    def __init__(self, path: Path, *, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self.held = False

    def take(self) -> bool:
        """Take the room, where it is not held; whether it is now."""
        if self.held or not self._size_bytes:
            return True
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self._size_bytes)
            finally:
                os.close(descriptor)
        except OSError:
            self._path.unlink(missing_ok=True)
            return False
        self.held = True
        return True

    def let_go(self) -> bool:
        """Give the room up; whether there was any."""
        held, self.held = self.held, False
        if held:
            self._path.unlink(missing_ok=True)
            logger.error("disk_full_reserve_used", extra={"bytes": self._size_bytes})
        return held


def is_disk_full(error: StorageFailed) -> bool:
    """Whether a write failed because there is no room."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL
