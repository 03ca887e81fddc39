"""Reads and writes the index file of a sealed message segment: message locations by topic, and ids. Derived data.

`<first offset>.index` beside the segment: blocks of runs, the ids in order, then a directory and its location.
Everything is covered by checksums; a missing, torn, stale or damaged file is rebuilt from its segment.

    file       blocks | ids (MessagePack) | directory (MessagePack) | footer
    footer     directory position u64 | its bytes u32 | its crc32c u32 | magic 8s "OUTBOXIX"
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import google_crc32c
import msgspec

from outbox_broker.log.disk_reserve import TOO_MANY_FILES, cure_for
from outbox_broker.log.topic_index import BlockPlace, Runs, TopicIndex, blocks_of
from outbox_core.common.errors import StorageFailed
from outbox_core.common.private_files import write_private

BLOCK_RUNS_MAX: Final = 1_024
CACHED_BLOCKS_MAX: Final = 256
"""About 7 MiB at the most."""
_FOOTER: Final = struct.Struct("<QII8s")
_MAGIC: Final = b"OUTBOXIX"


class BlockEntry(msgspec.Struct, array_like=True, frozen=True):
    """A directory entry for one block of runs."""

    first: int
    end: int
    first_time_ms: int
    position: int
    runs: int
    crc: int


class Directory(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The directory of an index file. `special`: offsets of records that are not plain messages (scheduled ones...)."""

    segment_end: int
    topics: dict[str, list[BlockEntry]]
    ids_position: int
    ids_bytes: int
    ids_crc: int
    ids_count: int
    special: list[int]
    damaged_bytes: int = 0


class IndexDamaged(StorageFailed):
    """A segment's index file is not readable as written; it can be rebuilt from the segment.

    `mended`: the number of index files rebuilt up to then.
    """

    def __init__(self, message: str, *, segment: int, mended: int) -> None:
        super().__init__(message)
        self.segment = segment
        self.mended = mended


_encode = msgspec.msgpack.Encoder().encode
_decode_directory = msgspec.msgpack.Decoder(Directory).decode
_decode_ids = msgspec.msgpack.Decoder(list[tuple[str, list[str]]]).decode


def index_path(folder: Path, segment: int) -> Path:
    """Returns the path of the index file of the segment that begins at this offset."""
    return folder / f"{segment:020d}.index"


def write_index(
    folder: Path, segment: int, segment_end: int, *, topics: Iterable[TopicIndex], ids: list[tuple[str, list[str]]],
    special: list[int], damaged_bytes: int = 0,
) -> Directory:  # fmt: skip
    """Write the topics' in-memory runs as a segment's index file, atomically. Raises OSError."""
    pieces: list[bytes] = []
    position, entries = 0, {}
    for topic in topics:
        found = []
        for first, end, runs in blocks_of(topic.tail, topic.end, runs_max=BLOCK_RUNS_MAX):
            data = runs.to_bytes()
            crc = google_crc32c.value(data)
            found.append(BlockEntry(first, end, runs.row(0)[-1], position, len(runs), crc))
            pieces.append(data)
            position += len(data)
        entries[topic.name] = found
    packed = _encode(ids)
    directory = Directory(
        segment_end=segment_end, topics=entries, ids_position=position, ids_bytes=len(packed),
        ids_crc=google_crc32c.value(packed), ids_count=sum(len(some) for _, some in ids), special=special,
        damaged_bytes=damaged_bytes,
    )  # fmt: skip
    body = _encode(directory)
    footer = _FOOTER.pack(position + len(packed), len(body), google_crc32c.value(body), _MAGIC)
    _write_whole(index_path(folder, segment), b"".join([*pieces, packed, body, footer]))
    return directory


def read_directory(folder: Path, segment: int, segment_end: int) -> Directory | None:
    """Returns the directory of a segment's index file; None if there is none that matches and is intact."""
    try:
        with index_path(folder, segment).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _FOOTER.size))
            position, length, crc, magic = _FOOTER.unpack(file.read(_FOOTER.size))
            if magic != _MAGIC or position + length + _FOOTER.size != size:
                return None
            file.seek(position)
            body = file.read(length)
        directory = _decode_directory(body) if google_crc32c.value(body) == crc else None
    except (OSError, struct.error, msgspec.MsgspecError):
        return None
    return directory if directory is not None and directory.segment_end == segment_end else None


def read_ids(folder: Path, segment: int, directory: Directory) -> list[tuple[str, list[str]]] | None:
    """The ids of a segment's messages, in order: each topic, and the ids that came of it one behind the other. None
    where they are damaged.
    """
    try:
        data = _read(index_path(folder, segment), directory.ids_position, directory.ids_bytes)
        return _decode_ids(data) if google_crc32c.value(data) == directory.ids_crc else None
    except (OSError, msgspec.MsgspecError):
        return None


class IndexFiles:
    """Loads blocks from the index files of one folder, with an LRU cache. Thread-safe only under the engine's lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cached: OrderedDict[tuple[int, int], Runs] = OrderedDict()
        self.mended = 0
        """The number of index files rebuilt since startup."""

    def load(self, place: BlockPlace) -> Runs:
        """Returns the runs of a block. Raises IndexDamaged if they cannot be read back intact."""
        key = (place.segment, place.position)
        found = self._cached.get(key)
        if found is None:
            found = self._cached[key] = self._read(place)
            if len(self._cached) > CACHED_BLOCKS_MAX:
                self._cached.popitem(last=False)
        else:
            self._cached.move_to_end(key)
        return found

    def remove(self, segment: int) -> None:
        """Remove the index file of a segment that was dropped."""
        index_path(self._folder, segment).unlink(missing_ok=True)
        self._forget(segment)

    def made_anew(self, segment: int) -> None:
        """Invalidate the cache of a segment whose index file was rebuilt: its blocks have moved."""
        self.mended += 1
        self._forget(segment)

    def _forget(self, segment: int) -> None:
        for key in [one for one in self._cached if one[0] == segment]:
            del self._cached[key]

    def _read(self, place: BlockPlace) -> Runs:
        path = index_path(self._folder, place.segment)
        try:
            data = _read(path, place.position, place.runs * 28)
        except OSError as error:
            if error.errno in TOO_MANY_FILES:
                raise StorageFailed(f"{path.name} cannot be read: {error.strerror}; {cure_for(error)}") from error
            raise self._damaged(place.segment, f"cannot be read ({error.strerror})") from error
        if google_crc32c.value(data) != place.crc:
            path.unlink(missing_ok=True)  # at the next start it would pass as intact
            raise self._damaged(place.segment, "is damaged")
        return Runs.of_bytes(data)

    def _damaged(self, segment: int, what: str) -> IndexDamaged:
        name = index_path(self._folder, segment).name
        return IndexDamaged(f"{name} {what}; restart the broker", segment=segment, mended=self.mended)


def _read(path: Path, position: int, size_bytes: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), size_bytes, position)


def _write_whole(path: Path, data: bytes) -> None:
    """Write atomically, without a sync: a torn file is rebuilt, which costs no more than a missing one."""
    unfinished = path.with_suffix(".unfinished")
    try:
        write_private(unfinished, data)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
