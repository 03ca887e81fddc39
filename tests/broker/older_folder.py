"""Unpacks the folders that older code wrote, which tests open. Not what is in them."""

from __future__ import annotations

import tarfile
from pathlib import Path


def unpack(archive: Path, folder: Path) -> Path:
    """Where the archive's folder, of the archive's name, now is."""
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "data_filter", None)  # older Pythons have no filters
        opened.extractall(folder)
    return folder / archive.name.removesuffix(".tar.xz")
