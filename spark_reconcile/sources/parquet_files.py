"""A leg that stands in Parquet files, each taken for what it was as long as it looks the same. Reads no rows itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

AT_REST_NS: Final = 2_000_000_000
"""A file that was changed a moment ago may change once more, and its times stay what they are: clocks have ticks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Files:
    """Rows of one leg, by file.

    `names`: as Spark names them (`input_file_name`). `read`: the rows of some of them in the leg's shape, whatever
    their times. `shown`: which of these rows are the leg's, as SQL. `about`: what else rows depend on but the file.
    """

    leg: str
    names: Sequence[str]
    read: Callable[[Sequence[str]], DataFrame]
    shown: str = "true"
    about: str = ""

    def identity(self, name: str) -> str | None:
        """What makes this file the one that it is; None where that cannot be told, or not yet."""
        looks = _looks(name)
        return None if looks is None else f"{self.leg} {self.about} {looks}"


def some_files(session: SparkSession, folder: Path | str, found: DataFrame) -> Callable[[Sequence[str]], DataFrame]:
    """How some of the files of `found`, which was read from the folder, are read alone."""

    def read(names: Sequence[str]) -> DataFrame:
        some = session.read.schema(found.schema).option("basePath", str(folder))
        return some.parquet(*(_path(name) for name in names))

    return read


def _looks(name: str) -> str | None:
    """Size, times and number of a file of this machine's that has been at rest for a while."""
    now_ns = time.time_ns()
    try:
        stat = Path(_path(name)).stat()
    except OSError:
        return None
    # Whoever sets a file's time back cannot set back the time at which that was done.
    if now_ns - max(stat.st_mtime_ns, stat.st_ctime_ns) < AT_REST_NS:
        return None
    return f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}-{stat.st_ino}"


def _path(name: str) -> str:
    """The path of a file that Spark names by its address; addresses of other places stay as they are."""
    parts = urlsplit(name)
    return unquote(parts.path) if parts.scheme in {"", "file"} else name
