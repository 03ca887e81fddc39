"""Files that only their owner may read: URLs with passwords, or what stands in messages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def write_private(path: Path, data: bytes) -> None:
    """Write a file whose mode is 0600 before anything is in it, whatever the umask, and of one that was there, too."""
    with open_private(path) as file:
        file.write(data)


def open_private(path: Path) -> BinaryIO:
    """Returns an empty file to write, whose mode is 0600; see write_private()."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "wb")
