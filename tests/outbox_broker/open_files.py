"""Which files of a folder this process has open, whatever other threads open and close meanwhile."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def open_files(folder: Path) -> list[Path]:
    """The files at any depth, once a descriptor; the name of one that was removed ends with " (deleted)"."""
    found: list[Path] = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            target = descriptor.readlink()
            if target.is_relative_to(folder.resolve()):
                found.append(target)
    return sorted(found)
