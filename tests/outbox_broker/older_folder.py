"""Unpacks the folders that older code wrote, which tests open. Not what is in them."""

from __future__ import annotations

import tarfile
from pathlib import Path

from outbox_broker.schedule.local_segments import HEADER_BYTES, LocalSegmentStore
from outbox_core.journal.journal import read_frames


def unpack(archive: Path, folder: Path) -> Path:
    """Where the archive's folder, of the archive's name, now is; its schedule in the frames of this version."""
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "data_filter", None)  # older Pythons have no filters
        opened.extractall(folder)
    unpacked = folder / archive.name.removesuffix(".tar.xz")
    _reframe(unpacked / "schedule")
    return unpacked


def _reframe(schedule: Path) -> None:
    """Write the records of a schedule that has nothing but its log again: no reader of its old frames is left."""
    for path in schedule.glob("*.delay"):
        records = [one.payload for one in read_frames(path.read_bytes()[HEADER_BYTES:], first_offset=0)]
        path.unlink()
        store = LocalSegmentStore.open(schedule)
        store.append(path.name.removesuffix(".delay"), records, position=0)
        store.close()
