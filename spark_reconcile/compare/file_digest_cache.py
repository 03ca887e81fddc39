"""Caches digests of scanned files in the output folder: files that did not change are not scanned again.

Digests are partial sums, so each file has its own. A file is identified by its input, name, size, times and number; if
any of them changed, it is scanned again. Rows are Parquet, those of several files as one generation, which is written
to a temporary name, synced, renamed, and only then named by an index that is replaced atomically. A killed process
leaves only files that no index names. Digests are compared elsewhere.

Only digests by key are cached. Actions name messages by position, so a digest by id depends on the message log, too.
An unchanged file vouches for nothing: an hour's fingerprint is of the same sums, cached or not, so rows that move to
another file or table open no hour.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from outbox_core.common.errors import DECODE_ERRORS
from spark_reconcile.compare.key_digests import DIGESTS, PARTED, SUMS_SCHEMA, digest
from spark_reconcile.core.dataframes import listed, union
from spark_reconcile.core.settings import RunLimits
from spark_reconcile.core.synced_files import sync_path, write_whole
from spark_reconcile.core.time_buckets import HOUR_MS, NO_PERIOD, PERIOD_MS
from spark_reconcile.sources.parquet_file_identity import Files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOLDER: Final = "digests"
INDEX: Final = "digests.json"
FORMAT: Final = 4
"""Incremented when other rows of a file are summed, or more is stored about it."""


class _Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A file whose digest is cached: its identity, generation, number, and the hours of its rows.

    If it has rows without a time, NO_PERIOD is among the hours.
    """

    identity: str
    generation: str
    number: int
    hours: list[int]


class _Index(msgspec.Struct, kw_only=True):
    about: str = ""
    pieces: dict[str, _Piece] = {}
    sizes: dict[str, dict[str, int]] = {}
    """The files of each generation and their sizes: a file truncated by a power cut is not used."""


@dataclass(frozen=True, slots=True)
class CachedDigests:
    """Cached digests of files, SUMS_SCHEMA; and by input the files without one, which must be scanned."""

    sums: DataFrame | None
    names: Mapping[int, str]
    """The name of each file, by its number."""
    hours: Mapping[str, Collection[int]]
    """The hours of each file's rows; NO_PERIOD for rows without a time."""


class FileDigestCache:
    """The digest cache of one output folder. One process at a time may write it."""

    def __init__(self, output: Path, limits: RunLimits, *, checkpoint: Callable[[str], None] = lambda _: None) -> None:
        self._rest_ms = limits.file_rest_ms
        self._generations_max = limits.digest_generations_max
        self._folder = output / FOLDER
        self._checkpoint = checkpoint
        self._index = self._read()

    def known(self, session: SparkSession, inputs: Sequence[Files]) -> CachedDigests:
        """Scan new and changed files, store their digests, drop those of deleted files."""
        files = {
            name: (input_kind, input_kind.identity(name, rest_ms=self._rest_ms))
            for input_kind in inputs
            for name in input_kind.names
        }
        kept = {
            name: piece
            for name, piece in self._index.pieces.items()
            if name in files and files[name][1] == piece.identity
        }
        fresh = {
            name: input_kind
            for name, (input_kind, identity) in files.items()
            if identity is not None and name not in kept
        }
        if fresh or len(kept) < len(self._index.pieces):
            kept |= self._keep(session, fresh, {name: str(files[name][1]) for name in fresh}, kept)
        names_by_number = {piece.number: name for name, piece in kept.items()}
        return CachedDigests(
            sums=self._rows(session, kept) if kept else None,
            names=names_by_number,
            hours={name: piece.hours for name, piece in kept.items()},
        )

    def _keep(
        self, session: SparkSession, fresh: Mapping[str, Files], identities: Mapping[str, str],
        kept: Mapping[str, _Piece],
    ) -> dict[str, _Piece]:  # fmt: skip
        """Scan files into a new generation; returns its pieces. If there are too many generations, it merges all."""
        generation = uuid.uuid4().hex
        frames = [
            digest(
                input_kind.read([name for name in fresh if fresh[name] is input_kind]),
                input_kind.input_kind,
                piece=_number(generation),
            )
            for input_kind in dict.fromkeys(fresh.values())
        ]
        # Rows of removed or replaced files remain; if more than half of the pieces are dead, a merge drops them.
        crowded = len(self._index.sizes) >= self._generations_max or 2 * len(kept) < len(self._index.pieces)
        if crowded and kept:
            frames.append(self._rows(session, kept))
        written = self._write(union(*frames), generation) if frames else {}
        unchanged = {
            name: identity
            for name, identity in identities.items()
            if fresh[name].identity(name, rest_ms=self._rest_ms) == identity
        }
        numbers = _numbers(session, sorted(unchanged), generation)
        hours = _hours(self._folder / generation) if numbers else {}
        pieces = {
            name: _Piece(
                identity=unchanged[name],
                generation=generation,
                number=piece_number,
                hours=sorted(hours.get(piece_number, ())),
            )
            for name, piece_number in numbers.items()
        }
        if crowded:
            moved = {name: msgspec.structs.replace(piece, generation=generation) for name, piece in kept.items()}
        else:
            moved = dict(kept)
        self._show(moved | pieces, generation, written)
        return moved | pieces

    def _rows(self, session: SparkSession, kept: Mapping[str, _Piece]) -> DataFrame:
        """Returns the digests of these pieces."""
        from pyspark.sql.functions import broadcast

        folders = sorted({str(self._folder / piece.generation) for piece in kept.values()})
        alive = listed(session, [(piece.number,) for piece in kept.values()], "piece bigint")
        return session.read.schema(SUMS_SCHEMA).parquet(*folders).join(broadcast(alive), "piece", "left_semi")

    def _write(self, frame: DataFrame, generation: str) -> dict[str, int]:
        """Write the generation's files under its name, synced; returns their sizes."""
        stage = self._folder / f".{generation}"
        self._checkpoint("write digests")
        frame.write.parquet(str(stage))
        sizes = {path.name: path.stat().st_size for path in stage.glob("*.parquet")}
        for name in sizes:
            sync_path(stage / name)
        self._checkpoint("place digests")
        stage.rename(self._folder / generation)
        sync_path(self._folder)
        return sizes

    def _show(self, pieces: Mapping[str, _Piece], generation: str, written: Mapping[str, int]) -> None:
        """Replace the index with these pieces, and remove generations that they do not use."""
        sizes = {**self._index.sizes, **({generation: dict(written)} if written else {})}
        followed = {piece.generation for piece in pieces.values()}
        self._index = _Index(
            about=_about(), pieces=dict(pieces), sizes={name: sizes[name] for name in followed & sizes.keys()}
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(
            self._folder / INDEX, msgspec.json.encode(self._index),
            before_shown=lambda: self._checkpoint("show digests"),
        )  # fmt: skip
        for path in self._folder.iterdir():
            if path.is_dir() and path.name not in followed:
                shutil.rmtree(path, ignore_errors=True)

    def _read(self) -> _Index:
        """Read the index; empty if it is of another definition of the digests, or a file is not complete."""
        try:
            index = msgspec.json.decode((self._folder / INDEX).read_bytes(), type=_Index)
        except (OSError, *DECODE_ERRORS):
            return _Index()
        if index.about != _about():
            return _Index()
        whole = {name for name, sizes in index.sizes.items() if self._is_whole(name, sizes)}
        index.pieces = {name: piece for name, piece in index.pieces.items() if piece.generation in whole}
        index.sizes = {name: sizes for name, sizes in index.sizes.items() if name in whole}
        return index

    def _is_whole(self, generation: str, sizes: Mapping[str, int]) -> bool:
        folder = self._folder / generation
        return {path.name: path.stat().st_size for path in folder.glob("*.parquet")} == sizes


def _number(generation: str) -> str:
    """SQL expression for the number, in a generation, of the file being scanned."""
    return f"xxhash64(input_file_name(), '{generation}')"


def _numbers(session: SparkSession, names: Sequence[str], generation: str) -> dict[str, int]:
    """Returns the files' numbers; empty if two files have the same."""
    if not names:
        return {}
    names_frame = listed(session, [(name,) for name in names], "name string")
    rows = names_frame.selectExpr("name", f"xxhash64(name, '{generation}') as number").collect()
    numbers = {row["name"]: row["number"] for row in rows}
    return numbers if len(set(numbers.values())) == len(numbers) else {}


def _hours(generation: Path) -> dict[int, set[int]]:
    """Returns the hours of each number of a generation that was just written."""
    import pyarrow.parquet as pq

    placed = pq.read_table(generation, columns=["piece", "period"]).group_by(["piece", "period"]).aggregate([])
    hours_by_number: dict[int, set[int]] = {}
    for piece_number, period in zip(*(column.to_pylist() for column in placed.columns), strict=True):
        hour_ms = NO_PERIOD if period < 0 else period * PERIOD_MS // HOUR_MS * HOUR_MS
        hours_by_number.setdefault(piece_number, set()).add(hour_ms)
    return hours_by_number


def _about() -> str:
    """Returns a hash of the definition of the digests: cached ones of another definition are not used."""
    return hashlib.sha256(repr((FORMAT, SUMS_SCHEMA, PARTED, DIGESTS)).encode()).hexdigest()
