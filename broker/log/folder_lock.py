"""One writer a data folder: a lock that says who holds it, and that the kernel lets go of when the holder dies."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from messaging.errors import ConfigurationError


class FolderLock:
    """Held from acquire() to release(), or to the end of the process."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises ConfigurationError that names the holder."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise ConfigurationError(
                f"the data folder {self._path.parent} is in use by {holder}; stop it, or use another folder"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go; idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
