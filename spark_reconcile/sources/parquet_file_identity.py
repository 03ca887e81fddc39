"""Inputs in Parquet files, with an identity for each file: equal identities mean equal content. Reads no rows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Files:
    """Rows of one input, by file.

    `names`: Spark's names (`input_file_name`). `read`: reads the rows of some of them in the input's columns, whatever
    their times. `shown`: SQL condition for the input's rows among these. `about`: other values on which rows depend.
    """

    input_kind: str
    names: Sequence[str]
    read: Callable[[Sequence[str]], DataFrame]
    shown: str = "true"
    about: str = ""

    def identity(self, name: str, *, rest_ms: int) -> str | None:
        """Returns the identity of a file; None if it cannot be determined, or changed within the last `rest_ms`."""
        version = _version(name, rest_ms=rest_ms)
        return None if version is None else f"{self.input_kind} {self.about} {version}"


def some_files(session: SparkSession, folder: Path | str, frame: DataFrame) -> Callable[[Sequence[str]], DataFrame]:
    """Returns a function that reads only some files of `frame`, which was read from the folder."""

    def read(names: Sequence[str]) -> DataFrame:
        some = session.read.schema(frame.schema).option("basePath", str(folder))
        return some.parquet(*(path_of(name) for name in names))

    return read


def _version(name: str, *, rest_ms: int) -> str | None:
    """Returns size, times and inode of a local file that did not change for a while."""
    now_ns = time.time_ns()
    try:
        stat = Path(path_of(name)).stat()
    except OSError:
        return None
    # A further change within the clock's resolution may leave size, times and inode as they are: such a file is scanned
    # and not cached. The modification time can be set back, but not the change time, which records that.
    if now_ns - max(stat.st_mtime_ns, stat.st_ctime_ns) < rest_ms * 1_000_000:
        return None
    return f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}-{stat.st_ino}"


def path_of(name: str) -> str:
    """Returns the name by which Spark opens a file, from the URL by which it lists it: a path, if the file is local."""
    parts = urlsplit(name)
    path = unquote(parts.path)
    return path if parts.scheme in {"", "file"} else f"{parts.scheme}://{parts.netloc}{path}"


def local_folder(folder: Path | str) -> Path | None:
    """Returns the folder of a path or a `file:` URL; None for another URL, which only Spark can open."""
    if isinstance(folder, Path):
        # As Hadoop does: without looking at links.
        return Path(os.path.normpath(folder.absolute()))
    parts = urlsplit(folder)
    return Path(os.path.normpath(unquote(parts.path))) if parts.scheme == "file" else None
