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


def write_whole(
    path: Path, data: bytes, *, sync: Sync | None = None, before_shown: Callable[[], None] = lambda: None,
    is_last: bool = False,
) -> None:  # fmt: skip
    """Replace a file atomically: readers see the old or the new content, also after a power failure. Raises OSError.

    `before_shown` is called when the new content is on the disk, and readers still see the old one. `is_last`: nothing
    relies on it, and its folder may be one that cannot be synced: which of both is seen after a power failure is open.
    """
    fresh = path.with_name(f".{path.name}.fresh")
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        (sync or os.fsync)(file.fileno())
    before_shown()
    fresh.replace(path)
    if not is_last:
        sync_path(path.parent, sync=sync)
