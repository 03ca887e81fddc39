"""Room on the disk that is kept for what was stored to be consumed: a file, of which halves are let go when the disk is
full.

Publishes are taken while both halves are held, so that they don't take that room. What is due goes into the message log
while one is: a million messages that fall due must leave room for their acknowledgements. Those, and all else that is
small and lets something go in the end, may have both. They are taken again as soon as there is room.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from outbox_core.common.errors import StorageFailed

logger = logging.getLogger(__name__)
T = TypeVar("T")

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What the system says where there is no room."""
TOO_MANY_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""What the system says where this process, or all of them, have too many files open."""
_BOTH: Final = 2
_ROOM_PART: Final = 16
"""Where less than such a part of the reserve is free beside it, the disk is taken for full."""


class Reserve:
    """One file in the data folder. Safe in any thread."""

    def __init__(self, path: Path, *, size_bytes: int) -> None:
        """`size_bytes` 0: no room is kept."""
        self._path = path
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        self._halves = 0

    @property
    def held_bytes(self) -> int:
        """How much is held now."""
        return self.size_bytes * self._halves // _BOTH

    def release(self) -> None:
        """Let go of what an earlier process held, so that a full disk can be opened on; idempotent."""
        with self._lock:
            self._halves = 0
            self._path.unlink(missing_ok=True)

    def take(self) -> None:
        """Take as much as there is room for: once all is opened, and then whenever it is asked for."""
        if not self.is_whole():
            with suppress(StorageFailed):
                self.require(1)

    def is_whole(self) -> bool:
        """Whether both halves are held, or can be taken now."""
        return not _is_refused(self.require)

    def has_room_beside(self) -> bool:
        """Whether publishes find room beside what is held."""
        return not _is_refused(self.check_room)

    def check_room(self) -> None:
        """Raise StorageFailed where publishes are refused, or find next to no room beside what is held."""
        self.require()
        if self.size_bytes and self._free_bytes() < self.size_bytes // _ROOM_PART:
            raise _refused(_no_space())

    def require(self, halves: int = _BOTH) -> None:
        """Take so many halves, where they are not held. Raises StorageFailed with what the system says.

        Nothing is taken of a disk that has less room than that, so nobody else finds it full for a moment.
        """
        with self._lock:
            if self._halves >= halves or not self.size_bytes:
                return
            try:
                self._take(halves)
            except OSError as error:
                raise _refused(error) from error

    def spend(self, write: Callable[[], T], *, keep_half: bool = False) -> T:
        """Do a write that needs a little room; where the disk is full, in what is let go for it.

        Raises StorageFailed.
        """
        if keep_half:
            self.require(1)
        while True:
            try:
                return write()
            except StorageFailed as error:
                if not is_disk_full(error) or not self._let_half_go(keep=1 if keep_half else 0):
                    raise

    def _take(self, halves: int) -> None:
        wanted_bytes = self.size_bytes * halves // _BOTH
        if self._free_bytes() < wanted_bytes - self.held_bytes:
            raise _no_space()
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, wanted_bytes)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, self.held_bytes)
            raise
        finally:
            os.close(descriptor)
        self._halves = halves

    def _free_bytes(self) -> int:
        """What this process may fill of the disk: root may take what is kept for root."""
        system = os.statvfs(self._path.parent)
        return system.f_frsize * (system.f_bavail if os.geteuid() else system.f_bfree)

    def _let_half_go(self, *, keep: int) -> bool:
        """Whether there was a half to let go of beyond what is to be kept."""
        with self._lock:
            if self._halves <= keep or not self.size_bytes:
                return False
            self._halves -= 1
            if self._halves:
                os.truncate(self._path, self.held_bytes)
            else:
                self._path.unlink(missing_ok=True)
            logger.error("disk_full_reserve_used", extra={"bytes": self.size_bytes, "left_bytes": self.held_bytes})
            return True


def _no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _refused(error: OSError) -> StorageFailed:
    return StorageFailed(
        f"{error.strerror}: the room that is left is for what is stored to be consumed; {cure_for(error)}, and "
        "publishes are taken again"
    )


def _is_refused(check: Callable[[], None]) -> bool:
    try:
        check()
    except StorageFailed:
        return True
    return False


def cure_for(error: OSError) -> str:
    """What an operator can do about a write that failed."""
    if error.errno in FULL:
        return "free some disk space"
    if error.errno in TOO_MANY_FILES:
        return "allow the process more open files (ulimit -n)"
    return "look after the disk and the folder's permissions"


def is_disk_full(error: StorageFailed) -> bool:
    """Whether a write failed because there is no room."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL


def may_pass(error: StorageFailed) -> bool:
    """Whether a write failed for want of room, or of a free descriptor: nothing of it was done."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in FULL | TOO_MANY_FILES
