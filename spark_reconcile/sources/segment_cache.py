"""Sealed segments of the broker's logs kept as Parquet beside the results: each is decoded once. It judges nothing.

A segment behind which another stands is never written again. Its rows, once read without damage, are kept in a file
named by what the segment is (log, first offset, time of its making, size, time of its last change) and by its own size:
what a power cut left of it is not taken for whole. The last segment is read in place, always.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spark_reconcile.sources.log_segments import LogSegment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEPT_BYTES_MIN: Final = 4 * 1024 * 1024
"""A smaller segment is read in less time than a file of its own takes."""
FORMAT: Final = 3
"""Raised where the rows made of a record change: what was kept before is made anew."""
_PART: Final = re.compile(r"part-(\d{5})-.*\.parquet")


def split(folder: Path, segments: Sequence[LogSegment]) -> tuple[list[Path], list[LogSegment], list[LogSegment]]:
    """The files of segments that were kept, the sealed segments that are worth keeping, and the others.

    A kept file that is not as long as it was is removed, and its segment is worth keeping again.
    """
    kept, fresh, others = [], [], []
    known = _whole(folder)
    for one in segments:
        if one.last or one.known_bytes or one.size_bytes < KEPT_BYTES_MIN:
            others.append(one)
        elif (path := known.get(_stem(one))) is not None:
            kept.append(path)
        else:
            fresh.append(one)
    return kept, fresh, others


def keep(frame: DataFrame, folder: Path, fresh: Sequence[LogSegment]) -> None:
    """Keep the rows of `fresh`, a partition a segment; each file is shown whole or not at all, and is on the disk.

    A segment without rows leaves no file, and is read again.
    """
    stage = folder / f".{uuid.uuid4().hex}"
    try:
        # A limit that a session may have would make several files of a segment.
        frame.write.option("maxRecordsPerFile", 0).parquet(str(stage))
        for path in stage.iterdir():
            if (found := _PART.fullmatch(path.name)) is not None:
                _sync(path)
                path.rename(folder / f"{_stem(fresh[int(found[1])])}-{path.stat().st_size}.parquet")
        _sync(folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def sweep(folder: Path, segments: Sequence[LogSegment]) -> None:
    """Remove what was kept of segments that the broker has dropped, and what a run that was killed had begun.

    Only the one run that writes to the folder may.
    """
    for stage in folder.glob(".*"):
        shutil.rmtree(stage, ignore_errors=True)
    known = {_stem(one) for one in segments}
    for path in folder.glob("*.parquet"):
        if path.stem.rpartition("-")[0] not in known:
            path.unlink(missing_ok=True)


def _whole(folder: Path) -> dict[str, Path]:
    """The kept files that are as long as their names say, by their segments; the others are removed."""
    whole = {}
    for path in folder.glob("*.parquet"):
        stem, _, size_bytes = path.stem.rpartition("-")
        if str(path.stat().st_size) == size_bytes:
            whole[stem] = path
        else:
            path.unlink(missing_ok=True)
    return whole


def _stem(one: LogSegment) -> str:
    return f"{one.first_offset:020d}-{one.created_at_ms}-{one.size_bytes}-{one.changed_ns}-{FORMAT}"


def _sync(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
