"""Reads archive rows that were moved to Parquet files: every file of the folder, every row of a file, or none.

Spark passes over files by their names (`_...`, `....`, `._COPYING_`), over empty ones, and over what stands beside the
folders of partitions; it takes the columns of one file for those of all. A message in what it passes over would be
missing in silence. So the folder is listed here, each file's footer is read, what is not understood is refused, and
what was found is compared with what Spark read.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.core.dataframes import union
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.core.plausible_times import EARLIEST_MS, LATEST_MS
from spark_reconcile.core.time_buckets import Span, within
from spark_reconcile.sources.parquet_file_identity import Files, local_folder, path_of
from spark_reconcile.sources.sql_statements import ARCHIVE_COLUMNS, CANCELS, InputKind, archive_note

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

MISREAD: Final = "!"
"""The input of a row that is not understood; its topic says the file, the column and what is wrong with it."""
NAMED_MAX: Final = 3
FILES_MAX: Final = 100_000
EXACT_MAX: Final = 1 << 53
"""A double has every whole number up to this one, and not every one beyond."""
_MAGIC: Final = b"PAR1"
_TAIL_BYTES: Final = 8
_FOOTER_BYTES: Final = 64 * 1024
_HIDDEN: Final = ("_", ".")
_MARKERS: Final = frozenset({"_SUCCESS", ".DS_Store", ".gitkeep", ".keep"})
_MARKERS_BEGIN: Final = ("_committed_", "_started_", ".nfs")
"""Of Databricks' commits, and of files that were deleted while they were open on NFS."""
_SUMMARIES: Final = frozenset({"_metadata", "_common_metadata"})
"""Footers of other files, without rows of their own."""
_UNSIGNED_DIGITS: Final = 20
_BIGINT_MAX: Final = (1 << 63) - 1
_KEY: Final = "message_key"
_NULLABLE: Final = frozenset({_KEY, "deliver_at_ms"})
_NUMBERS: Final = frozenset({"deliver_at_ms", "created_at_us", "sent_at_us", "attempts"})
_MAY_BE_DOUBLE: Final = frozenset({"deliver_at_ms"})
"""pandas writes numbers as doubles where one of them is null. The columns that are never null stay whole."""


class FileRole(StrEnum):
    """What becomes of a file in an archive's folder."""

    ROWS = "rows"
    MARKER = "marker"
    REFUSED = "refused"


class ColumnType(StrEnum):
    """How a column is read; the values are Spark's types, but for a column that holds nothing but null."""

    TEXT = "string"
    INTEGER = "bigint"
    UNSIGNED = "decimal(20,0)"
    DOUBLE = "double"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file at or below the folder. `name`: its path from there; `uri`: the name by which Spark opens it."""

    name: str
    uri: str
    size_bytes: int
    open: Callable[[], BinaryIO]

    @property
    def partitions(self) -> dict[str, str]:
        """Returns the values in the names of the folders above it, by column."""
        return dict(folder.split("=", 1) for folder in self.name.split("/")[:-1] if "=" in folder)


@dataclass(frozen=True, slots=True)
class ArchiveSurvey:
    """The files of an archive that have rows, by the types of their columns, and the number of these rows."""

    groups: Mapping[tuple[tuple[str, str], ...], Sequence[StoredFile]]
    rows: int

    @property
    def files(self) -> list[StoredFile]:
        """All files that have rows."""
        return [file for group in self.groups.values() for file in group]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetArchive:
    """One archive: `frame` has the rows, in the columns of all inputs, of the time range; what is not understood is on
    the input MISREAD. Where refuse_misread() refused nothing, `understood` has the same rows, and `files` by file.
    """

    folder: Path | str
    frame: DataFrame
    understood: DataFrame
    files: Files
    rows: int
    """How many rows the files have, of all times."""


def read_archive(
    session: SparkSession, folder: Path | str, *, span: Span | None = None, latest_ms: int = LATEST_MS
) -> ParquetArchive:
    """Lists the files of an archive, and returns their rows; lazy. Rows before 2000 or later than `latest_ms` are of
    every span. Raises NotComparable and ConfigurationError with the
    files and columns that cannot be read, or that Spark would pass over.
    """
    survey = survey_archive(_listed(session, folder), folder=folder)
    checked = partial(_frame, session, folder, survey, latest_ms=latest_ms, inputs=_checked_inputs)
    read = partial(_frame, session, folder, survey, latest_ms=latest_ms, inputs=_inputs)
    names = _compared(read(None).inputFiles(), survey, folder=folder)
    shown = "true" if span is None else _of(span, latest_ms)
    return ParquetArchive(
        folder=folder, frame=checked(None, span=span).where(f"input_kind = '{MISREAD}' or {shown}"),
        understood=read(None, span=span).where(shown),
        files=Files(input_kind=InputKind.ARCHIVE, names=names, read=read, shown=shown), rows=survey.rows,
    )  # fmt: skip


def check_archive(folder: Path | str) -> None:
    """Raises as read_archive() does, for a folder of this machine; other URLs are opened only by Spark."""
    local = local_folder(folder)
    if local is not None:
        survey_archive(_listed_here(local), folder=folder)


def refuse_misread(archive: ParquetArchive, misread: Mapping[str, int], *, rows: int, is_whole: bool) -> None:
    """Raises NotComparable for rows that are not understood, counted by what is wrong with them, and, where rows of
    all times were read (`is_whole`), if Spark returned another number of rows than the footers say.
    """
    if misread:
        descriptions = [f"{count:,} rows of {what}" for what, count in sorted(misread.items())]
        raise NotComparable(
            f"the archive {archive.folder} has rows that are not understood, so nothing is judged: "
            f"{_few(descriptions)}. Write these rows as the archive's table has them, or move their files elsewhere"
        )
    if is_whole and rows != archive.rows:
        raise NotComparable(
            f"the archive {archive.folder} has {archive.rows:,} rows, and Spark read {rows:,} of them, so nothing is "
            "judged: let the files be while a run reads them, and start it again"
        )


def role_of(file: StoredFile) -> tuple[FileRole, str]:
    """Decides what becomes of a file by its name, its size and its first bytes; if it is refused, with the reason."""
    *folders, name = file.name.split("/")
    if any("=" not in folder.strip("=") for folder in folders):
        above = file.name.rpartition("/")[0]
        if any(folder.startswith(_HIDDEN) for folder in folders):
            return FileRole.REFUSED, f"{above}/ is of a write that did not end, or of a table format: remove it"
        return FileRole.REFUSED, f"{above}/ is no partition (name=value): name it as an archive of its own"
    if name.endswith("._COPYING_"):
        return FileRole.REFUSED, f"{file.name} is still being copied: start again when it is there"
    if name.startswith(_HIDDEN):
        return _role_of_hidden(file, name)
    if not file.size_bytes:
        return FileRole.REFUSED, f"{file.name} has no byte: remove it, or restore it from a copy"
    return FileRole.ROWS, ""


def _role_of_hidden(file: StoredFile, name: str) -> tuple[FileRole, str]:
    if name in _SUMMARIES and _is_summary(file):
        return FileRole.MARKER, ""
    is_marker = name in _MARKERS or name.startswith(_MARKERS_BEGIN) or name.endswith(".crc")
    if is_marker and not name.endswith(".parquet") and _head(file) != _MAGIC:
        return FileRole.MARKER, ""
    return FileRole.REFUSED, f"Spark passes over {file.name} for its name: rename it if it has rows, else remove it"


def survey_archive(stored_files: Iterable[StoredFile], *, folder: Path | str) -> ArchiveSurvey:
    """Reads the footer of every file. Raises NotComparable for files that are refused, or stand where Spark does not
    look, and ConfigurationError for columns that are missing or of a type that cannot be compared.
    """
    roles = [(file, *role_of(file)) for file in stored_files]
    refused = [reason for _, role, reason in roles if role is FileRole.REFUSED]
    files = [file for file, role, _ in roles if role is FileRole.ROWS]
    levels = Counter(tuple(file.partitions) for file in files)
    if len(levels) > 1:
        usual = levels.most_common(1)[0][0]
        refused += [
            f"{file.name} is not in folders of {', '.join(f'{name}=...' for name in usual) or 'no partition'}, as "
            "others are, and Spark would pass over some: give it a folder of its own"
            for file in files
            if tuple(file.partitions) != usual
        ]  # fmt: skip
    groups: dict[tuple[tuple[str, str], ...], list[StoredFile]] = {}
    rows = 0
    for file in files if not refused else ():
        try:
            schema, count = _footer(file)
        except (OSError, ValueError) as error:
            refused.append(f"{file.name} is no whole Parquet file ({_line(error)}): restore it, or remove it")
            continue
        groups.setdefault(column_types(schema, file, folder=folder), []).append(file)
        rows += count
    if refused:
        raise NotComparable(f"the archive {folder} cannot be read as a whole, so nothing is judged: {_few(refused)}")
    if not files:
        raise ConfigurationError(f"[archive]: the folder {folder} holds no Parquet file; leave it out until it does")
    return ArchiveSurvey(groups=groups, rows=rows)


def column_types(schema: pa.Schema, file: StoredFile, *, folder: Path | str) -> tuple[tuple[str, str], ...]:
    """Returns how each needed column of a file is read, sorted by name. Raises ConfigurationError."""
    partitions = file.partitions
    types = []
    for name in sorted(ARCHIVE_COLUMNS):
        if name in partitions and name in schema.names:
            raise ConfigurationError(
                f"the archive {folder}: {file.name} has the column {name} in it, and in the names of its folders; "
                "Spark would read the latter alone: leave one of them out"
            )
        if name in partitions:
            types.append((name, ColumnType.TEXT))
        elif name not in schema.names:
            raise ConfigurationError(
                f"the archive {folder} has no column {name} in {file.name}; it needs the columns of the archive table"
            )
        else:
            types.append((name, _column_type(schema.field(name), file, folder=folder)))
    return tuple(types)


def _column_type(field: pa.Field, file: StoredFile, *, folder: Path | str) -> ColumnType:
    import pyarrow.types as of

    kind = field.type.value_type if of.is_dictionary(field.type) else field.type
    is_number = field.name in _NUMBERS
    if of.is_null(kind) and field.name in _NULLABLE:
        return ColumnType.NOTHING
    if not is_number and (of.is_string(kind) or of.is_large_string(kind)):
        return ColumnType.TEXT
    if is_number or field.name == _KEY:
        if of.is_uint64(kind) or (of.is_decimal(kind) and kind.precision <= _UNSIGNED_DIGITS and kind.scale == 0):
            return ColumnType.UNSIGNED
        if of.is_integer(kind):
            return ColumnType.INTEGER
    if field.name in _MAY_BE_DOUBLE and of.is_float64(kind):
        return ColumnType.DOUBLE
    expected = "a whole number" if is_number else "text"
    raise ConfigurationError(
        f"the archive {folder}: column {field.name} is of type {field.type} in {file.name}, and must be {expected}; "
        "write it as the archive's table has it"
    )


def _frame(
    session: SparkSession, folder: Path | str, survey: ArchiveSurvey, names: Sequence[str] | None, *,
    span: Span | None = None, latest_ms: int, inputs: Callable[[DataFrame, Mapping[str, str]], DataFrame],
) -> DataFrame:  # fmt: skip
    """Returns the rows of some files, by Spark's names, or of all; of a span at least its rows, and all misread ones.

    Each group is read by its own columns: by those of one file Spark would return null for what others lack.
    """
    wanted_paths = None if names is None else {path_of(name) for name in names}
    frames = []
    for types, group in survey.groups.items():
        paths = [file.uri for file in group if wanted_paths is None or file.uri in wanted_paths]
        if not paths:
            continue
        if wanted_paths is None and len(survey.groups) == 1:
            # The files of a folder are listed by one request, and named ones by one each.
            paths = [str(folder)]
        columns = dict(types)
        schema = ", ".join(f"{name} {kind}" for name, kind in types if kind != ColumnType.NOTHING)
        frame = session.read.schema(schema).option("basePath", str(folder)).parquet(*paths)
        if span is not None and columns["created_at_us"] == ColumnType.INTEGER:
            # A condition on the file's own column, too: computed ones cannot prune row groups.
            frame = frame.where(
                f"created_at_us is null or created_at_us < {EARLIEST_MS * 1000}L or created_at_us > {latest_ms * 1000}L"
                f" or (created_at_us >= {span.since_ms * 1000}L and created_at_us < {span.until_ms * 1000}L)"
            )
        frames.append(inputs(frame, columns))
    return union(*frames)


def _of(span: Span, latest_ms: int) -> str:
    return f"({within(span)} or created_ms < {EARLIEST_MS}L or created_ms > {latest_ms}L)"


def _checked_inputs(frame: DataFrame, types: Mapping[str, str]) -> DataFrame:
    """Converts the archive's columns to those of all inputs; a row that is not understood says why.

    Each row is looked at in all of its columns, and nothing is pruned: for the one scan that counts the rows.
    """
    file_and_reason = f"concat_ws('', input_file_name(), {_misread(types)}) as file_and_reason"
    return _inputs(frame, types, file_and_reason, f"{_misread(types)} is not null as misread")


def _inputs(frame: DataFrame, types: Mapping[str, str], *checks: str) -> DataFrame:
    """Converts the archive's columns to those of all inputs, of rows that are understood, or with `checks`, a
    `file_and_reason` and whether a row is `misread`.
    """
    plain = frame.selectExpr(*(f"{_value(name, kind)} as {name}" for name, kind in types.items()), *checks)
    topic = f"if(kind = 'cancel', '{CANCELS}', topic)"
    return plain.selectExpr(
        f"if(misread, '{MISREAD}', '{InputKind.ARCHIVE}') as input_kind" if checks
        else f"'{InputKind.ARCHIVE}' as input_kind", "id",
        f"if(misread, file_and_reason, {topic}) as topic" if checks else f"{topic} as topic", "message_key",
        "cast(null as string) as consumer_group", "body_sha256",
        "deliver_at_ms", "created_at_us div 1000 as created_ms", "sent_at_us div 1000 as at_ms",
        "attempts", f"{archive_note()} as note", "cast(null as bigint) as due_unit_ms",
    )  # fmt: skip


def _value(name: str, kind: str) -> str:
    sql_type = "bigint" if name in _NUMBERS else "string"
    match kind:
        case ColumnType.NOTHING:
            return f"cast(null as {sql_type})"
        case ColumnType.UNSIGNED if name in _NUMBERS:
            # A sentinel beyond 64 bits, 2^64-1, is one row's verdict: its time cannot be true.
            bounded = f"cast(greatest(least(`{name}`, {_BIGINT_MAX}), -{_BIGINT_MAX}) as bigint)"
            return f"if(`{name}` is null, null, {bounded})"  # both functions pass over null
        case ColumnType.DOUBLE:
            return f"if(isnan(`{name}`), null, try_cast(`{name}` as {sql_type}))"
        case _:
            return f"try_cast(`{name}` as {sql_type})"


def _misread(types: Mapping[str, str]) -> str:
    """Returns what is wrong with a row, in SQL; null if it is understood."""
    arms = [f"when kind not in ('publish', 'cancel') then ': kind ({types['kind']}) is neither publish nor cancel'"]
    for name, kind in types.items():
        value = _value(name, kind)
        if name not in _NULLABLE:
            arms.append(f"when `{name}` is null then ': {name} ({kind}) is null'")
        if kind == ColumnType.DOUBLE:
            wrong = f"not isnan(`{name}`) and (`{name}` != rint(`{name}`) or abs(`{name}`) > {EXACT_MAX}L)"
            arms.append(f"when {wrong} then ': {name} ({kind}) is not whole, or beyond 2^53'")
        elif kind != ColumnType.NOTHING:
            arms.append(f"when `{name}` is not null and {value} is null then ': {name} ({kind}) is no whole number'")
    return f"case {' '.join(arms)} end"


def _compared(read: Sequence[str], survey: ArchiveSurvey, *, folder: Path | str) -> list[str]:
    """Returns Spark's names of the files. Raises NotComparable if they are not those that were found."""
    listed_paths, read_paths = {file.uri for file in survey.files}, {path_of(name) for name in read}
    if listed_paths != read_paths:
        some = [
            f"{path} ({'not read' if path in listed_paths else 'came just now'})"
            for path in sorted(listed_paths ^ read_paths)
        ]
        raise NotComparable(
            f"Spark reads other files of the archive {folder} than stand there, so nothing is judged: {_few(some)}. "
            "Let the files be while a run reads them, without [, ], {, }, * and ? in their names, and start it again"
        )
    return list(read)


def _listed(session: SparkSession, folder: Path | str) -> list[StoredFile]:
    local = local_folder(folder)
    return _listed_here(local) if local is not None else list(_listed_by_spark(session, str(folder)))


def _listed_here(folder: Path) -> list[StoredFile]:
    def refuse(error: OSError) -> None:
        raise NotComparable(f"cannot list the archive's folder {error.filename}: {error.strerror}")

    stored_files = []
    for parent, _, names in os.walk(folder, followlinks=True, onerror=refuse):
        for name in sorted(names):
            path = Path(parent) / name
            try:
                size_bytes = path.stat().st_size
            except OSError as error:
                raise NotComparable(f"cannot read {path} of the archive: {error.strerror}") from error
            stored_files.append(
                StoredFile(
                    name=path.relative_to(folder).as_posix(), uri=str(path), size_bytes=size_bytes,
                    open=partial(_open_here, path),
                )
            )  # fmt: skip
            if len(stored_files) > FILES_MAX:
                raise NotComparable(f"the archive {folder} has more than {FILES_MAX:,} files: compact them")
    return stored_files


def _open_here(path: Path) -> BinaryIO:
    return path.open("rb")


def _listed_by_spark(session: SparkSession, url: str) -> Iterator[StoredFile]:
    """Lists a URL by Spark's own connector and credentials, without the filter that its reader applies to names."""
    from pyspark.sql import SparkSession as ClassicSession

    if not isinstance(session, ClassicSession):
        raise ConfigurationError(
            f"the archive {url} cannot be listed through Spark Connect, which shows only the files that Spark reads: "
            "mount it and name the folder, or use another --master"
        )
    java: Any = session._jvm  # noqa: SLF001 - PySpark has no public way to Hadoop's file systems
    path = java.org.apache.hadoop.fs.Path(url)
    configured = session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001 - see above
    system = path.getFileSystem(configured)
    root = system.makeQualified(path).toString().rstrip("/") + "/"
    java_files = system.listFiles(path, True)  # noqa: FBT003 - Java's
    while java_files.hasNext():
        status = java_files.next()
        file_url = status.getPath().toString()
        size_bytes = int(status.getLen())
        opened = partial(_open_by_spark, java, system, status.getPath(), size_bytes)
        yield StoredFile(name=file_url.removeprefix(root), uri=file_url, size_bytes=size_bytes, open=opened)


def _open_by_spark(java: Any, system: Any, path: Any, size_bytes: int) -> BinaryIO:
    stream = system.open(path)
    raw = _JavaFile(stream, size_bytes, read=java.org.apache.commons.io.IOUtils.toByteArray)
    return io.BufferedReader(raw, _FOOTER_BYTES)


class _JavaFile(io.RawIOBase):
    """A file of Hadoop's, read at any place."""

    def __init__(self, stream: Any, size_bytes: int, *, read: Callable[[Any, int], bytes]) -> None:
        self._stream = stream
        self._size_bytes = size_bytes
        self._read = read
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._size_bytes - self._at)
        if size <= 0:
            return 0
        self._stream.seek(self._at)
        buffer[:size] = self._read(self._stream, size)
        self._at += size
        return size

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def _footer(file: StoredFile) -> tuple[pa.Schema, int]:
    """Returns the columns and the number of rows of a file. Raises OSError or ValueError if it is no Parquet file."""
    import pyarrow.parquet as pq

    with file.open() as opened:
        footer = pq.read_metadata(opened)
    return footer.schema.to_arrow_schema(), footer.num_rows


def _head(file: StoredFile) -> bytes:
    with file.open() as opened:
        return opened.read(len(_MAGIC))


def _is_summary(file: StoredFile) -> bool:
    """Whether a file is nothing but a footer."""
    if file.size_bytes < len(_MAGIC) + _TAIL_BYTES or _head(file) != _MAGIC:
        return False
    with file.open() as opened:
        opened.seek(file.size_bytes - _TAIL_BYTES)
        tail = opened.read(_TAIL_BYTES)
    footer_bytes = int.from_bytes(tail[:4], "little")
    return tail[4:] == _MAGIC and len(_MAGIC) + footer_bytes + _TAIL_BYTES == file.size_bytes


def _few(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - NAMED_MAX:,} more" if len(texts) > NAMED_MAX else ""
    return "; ".join(texts[:NAMED_MAX]) + more


def _line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")
