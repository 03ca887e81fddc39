"""Writes files and names of folders through to the disk, before something that survives a power failure names them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

Sync = Callable[[int], None]
"""Writes an open file, or the names of an open folder, to the disk."""


def sync_path(path: Path, *, sync: Sync | None = None) -> None:
    """Sync a file's bytes, or a folder's names; by os.fsync() unless told otherwise."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        (sync or os.fsync)(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path, *, sync: Sync | None = None) -> None:
    """Sync a folder with all that is in it."""
    for path in sorted(folder.rglob("*")):
        sync_path(path, sync=sync)
    sync_path(folder, sync=sync)
