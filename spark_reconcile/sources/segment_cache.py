"""Caches sealed segments of the broker's logs as Parquet in the output folder: each is decoded once.

A segment that has a successor is never written again. Its rows, once read without damage, are stored in a file whose
name has the segment's identity (log, first offset, creation time, size, modification time) and the file's own size: a
file truncated by a power cut is not used. The last segment is always read in place. `watch` looks back two days every
hour, so it would decode each record 48 times. A file a segment, since the broker drops them one by one. A bit that
flips in a segment later is seen by the broker, and by runs with another output folder, not by this one.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spark_reconcile.core.synced_files import sync_path
from spark_reconcile.sources.broker_logs import LogSegment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FORMAT: Final = 6
"""Incremented when the rows of a record change: earlier files are written again."""
_PART: Final = re.compile(r"part-(\d{5})-.*\.parquet")


def split(
    folder: Path, segments: Sequence[LogSegment], *, bytes_min: int
) -> tuple[list[Path], list[LogSegment], list[LogSegment]]:
    """Returns the files of cached segments, the sealed segments of `bytes_min` and more to cache, and the other
    segments.

    A file whose size differs from its name is removed, and its segment is cached again.
    """
    kept, fresh, others = [], [], []
    cached = _whole(folder)
    for segment in segments:
        if segment.last or segment.known_bytes or segment.size_bytes < bytes_min:
            others.append(segment)
        elif (path := cached.get(_stem(segment))) is not None:
            kept.append(path)
        else:
            fresh.append(segment)
    return kept, fresh, others


def keep(frame: DataFrame, folder: Path, fresh: Sequence[LogSegment]) -> None:
    """Cache the rows of `fresh`, one partition a segment; each file is synced, and appears complete or not at all.

    A segment without rows leaves no file, and is read again.
    """
    stage = folder / f".{uuid.uuid4().hex}"
    try:
        # A limit set in the session would split a segment into several files.
        frame.write.option("maxRecordsPerFile", 0).parquet(str(stage))
        for path in stage.iterdir():
            if (part_match := _PART.fullmatch(path.name)) is not None:
                sync_path(path)
                path.rename(folder / f"{_stem(fresh[int(part_match[1])])}-{path.stat().st_size}.parquet")
        sync_path(folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def sweep(folder: Path, segments: Sequence[LogSegment]) -> None:
    """Remove files of segments that the broker has dropped, and unfinished files of killed runs.

    Only the single run that writes to the folder may call this.
    """
    for stage in folder.glob(".*"):
        shutil.rmtree(stage, ignore_errors=True)
    stems = {_stem(segment) for segment in segments}
    for path in folder.glob("*.parquet"):
        if path.stem.rpartition("-")[0] not in stems:
            path.unlink(missing_ok=True)


def remove_damaged(folder: Path, *, error: str) -> bool:
    """Remove the Parquet files of a cache that the error names, or that cannot be read to the last page; returns
    whether there are any.

    Reads every byte of the cache: for a run that failed. Spark checks more of a file than is read here.
    """
    damaged = [path for path in folder.rglob("*.parquet") if path.name in error or not _is_readable(path)]
    for path in damaged:
        path.unlink(missing_ok=True)
    return bool(damaged)


def _is_readable(path: Path) -> bool:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for _ in file.iter_batches():
                pass
    except (OSError, ValueError):
        return False
    return True


def _whole(folder: Path) -> dict[str, Path]:
    """Returns the files whose size is that in their names, by their segments; removes the others."""
    whole = {}
    for path in folder.glob("*.parquet"):
        stem, _, size_bytes = path.stem.rpartition("-")
        if str(path.stat().st_size) == size_bytes:
            whole[stem] = path
        else:
            path.unlink(missing_ok=True)
    return whole


def _stem(segment: LogSegment) -> str:
    return f"{segment.first_offset:020d}-{segment.created_at_ms}-{segment.size_bytes}-{segment.changed_ns}-{FORMAT}"
