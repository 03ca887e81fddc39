"""The id index: maps a message id's hash to its due times, arrival numbers and topics, on disk, in sorted pieces.

Its entries are hints, which say where to look and not what is there: a due time determines the buckets that may hold a
message on any level, so nothing changes here when a message is re-filed. Memory holds one fence per 128 ids, so ten
million ids cost 1.3 MB; a dictionary of them is a gigabyte, and a filter in memory would be updated message by message,
by every publish, also where nobody ever cancels. A piece is written with each flush; if there are many, the smallest
are merged, and messages dispatched long ago are dropped. A lookup reads one block of four kilobytes per piece.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress
from typing import Final, NamedTuple, Self

import msgspec

from outbox_broker.schedule.schedule_records import StoredIndex
from outbox_broker.schedule.sorted_run import topic_hash
from outbox_broker.segments.port import FramePlace, Segments, read_record
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import BLOCK_HEAD_BYTES, FRAME_HEAD_BYTES, FrameKind, SegmentKind, block, framed
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

ENTRY_BYTES: Final = 32
"""Hash of the id, due time, arrival, hash of the topic."""
BLOCK_IDS: Final = 128
_SLICE_IDS: Final = 32_768
_KEYS: Final = 1 << 64
_ENTRY: Final = struct.Struct(">QQQQ")
_FIELDS: Final = ENTRY_BYTES // 8
_pack: Final = _ENTRY.pack


class _Fences(msgspec.Struct, array_like=True, frozen=True):
    """The first hash and the position of every block."""

    hashes: list[int]
    positions: list[int]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Fences).decode


class IdLocation(NamedTuple):
    """Where a message may be; `topic` is its topic's hash."""

    due_ms: int
    seq: int
    topic: int


def index_entries(
    hashes: Iterable[int], dues: Iterable[int], seqs: Iterable[int], topics: Iterable[str]
) -> list[bytes]:  # fmt: skip
    """Returns entries, ordered by their hashes."""
    names = list(topics)
    topic_hashes = {name: topic_hash(name) for name in set(names)}
    return sorted(map(_pack, hashes, dues, seqs, map(topic_hashes.__getitem__, names)))


def unpacked(entry: bytes) -> tuple[int, IdLocation]:
    """Returns the hash of an entry, and its content."""
    hash_, *found = _ENTRY.unpack(entry)
    return hash_, IdLocation(*found)


@dataclass(frozen=True, slots=True)
class PieceFences:
    """The first hash and the position of every block of a piece."""

    hashes: array[int]
    positions: array[int]


@dataclass(slots=True, eq=False)
class IndexPiece:
    """A piece; its fences are None until they are read. Read twice at the same time, they are the same."""

    stored: StoredIndex
    fences: PieceFences | None = None


class IdIndex:
    """Lookups in all pieces. The owner's list of pieces is authoritative; add() and remove() follow it."""

    def __init__(self, segments: Segments, *, pieces_max: int, merged_pieces_max: int) -> None:
        """If there are more than `pieces_max` pieces, up to `merged_pieces_max` of them are merged into one."""
        self._segments = segments
        self._pieces_max = pieces_max
        self._merged_pieces_max = merged_pieces_max
        self._pieces: list[IndexPiece] = []  # in order of arrival, except for merged pieces, which are old
        self._damaged: set[str] = set()

    def load(self, stored: StoredIndex) -> IndexPiece:
        """Read a piece's fences; the caller adds it. A damaged or missing piece is empty, and listed by damaged().

        Raises StorageFailed.
        """
        piece = IndexPiece(stored)
        self._fences(piece)
        return piece

    def load_next(self) -> bool:
        """Read the fences of one piece that was added without; False if there is none. Raises StorageFailed."""
        unread = next((piece for piece in self._pieces if piece.fences is None), None)
        if unread is None:
            return False
        self._fences(unread)
        return True

    def count(self) -> int:
        """Returns how many entries all pieces have."""
        return sum(piece.stored.count for piece in self._pieces)

    def damaged(self) -> list[StoredIndex]:
        """Returns the pieces that cannot be read completely, as far as is known, and must be rebuilt."""
        return [piece.stored for piece in self._pieces if piece.stored.segment in self._damaged]

    def add(self, piece: IndexPiece) -> None:
        """Include this piece in lookups."""
        self._pieces = [*self._pieces, piece]  # a merge iterates over it without a lock

    def replace(self, merged: Iterable[StoredIndex], pieces: Sequence[IndexPiece]) -> list[StoredIndex]:
        """Replace pieces by others, at the position of the first of them; returns all that remain."""
        gone = {stored_piece.segment for stored_piece in merged}
        at = next(index for index, piece in enumerate(self._pieces) if piece.stored.segment in gone)
        later = [piece for piece in self._pieces[at:] if piece.stored.segment not in gone]
        self._pieces = [*self._pieces[:at], *pieces, *later]
        self._damaged -= gone
        return [piece.stored for piece in self._pieces]

    def find(self, hash_: int) -> list[IdLocation]:
        """Returns every message whose id has this hash, newest piece first, each once.

        Raises StorageFailed while a piece is damaged: it may contain more matches.
        """
        try:
            found = chain.from_iterable(self._look_up(piece, hash_) for piece in reversed(self._pieces))
            return list(dict.fromkeys(found))  # the same message may be in two pieces
        except SegmentDamaged as damage:  # a search of all buckets instead would answer after minutes
            raise StorageFailed(f"{damage}; the id index is being made anew, try again in a minute") from damage

    def newest_hashes(self, count_min: int, *, count_max: int) -> Iterator[tuple[int, array[int]]]:
        """Yields the hash of a topic, and hashes of ids of it, for the newest: `count_min` of them and up to a piece
        more, where there are so many.

        Raises SegmentDamaged; that piece is among the damaged() then.
        """
        for piece in reversed(self._pieces):
            if count_min <= 0:
                return
            if piece.stored.count > count_max:  # made of many by a merge
                continue
            count_min -= piece.stored.count
            for ids in self._blocks(piece):
                yield from _hashes_by_topic(ids)

    def write(self, segment: str, entries: Sequence[bytes]) -> StoredIndex:
        """Write a new piece of sorted entries, durably; the caller adds it when it is applied. Raises StorageFailed."""
        with _Writer(self._segments, segment) as writer:
            writer.add(entries)
            return writer.finish()

    def to_merge(self, *, newest: int) -> list[StoredIndex]:
        """Returns the pieces to merge if there are too many: the smallest of the old ones.

        The `newest` ids stay in separate pieces, for newest_hashes(): if most of the pieces hold them, the first of
        these are merged instead.
        """
        pieces = self._pieces
        if len(pieces) <= self._pieces_max:
            return []
        totals = accumulate(piece.stored.count for piece in reversed(pieces))
        young = sum(total <= newest for total in totals)
        old = pieces[: len(pieces) - young - 1]  # the piece in between has some of the newest too
        some = sorted(old, key=lambda one: one.stored.count) if len(old) > young else pieces[len(pieces) - young :]
        if len(some) <= 1:
            return []  # merging a single piece would never end
        return [piece.stored for piece in some[: self._merged_pieces_max]]

    def merge(self, merged: Iterable[StoredIndex], segment: str, *, due_min_ms: int) -> Iterator[StoredIndex | None]:
        """Write one piece from many, in small steps: yields None after each, and the new piece, durable, last.

        Entries due before `due_min_ms` are dropped. Raises SegmentDamaged; that piece is then listed by damaged().
        """
        names = {stored_piece.segment for stored_piece in merged}
        pieces = [piece for piece in self._pieces if piece.stored.segment in names]
        total = sum(piece.stored.count for piece in pieces)
        slices = total // _SLICE_IDS + 1
        due_min = due_min_ms.to_bytes(8, "big")
        with _Writer(self._segments, segment) as writer:
            for slice_number in range(slices):
                low, high = _KEYS * slice_number // slices, _KEYS * (slice_number + 1) // slices
                entries = sorted(chain.from_iterable(self._between(piece, low, high) for piece in pieces))
                writer.add([entry for entry in entries if entry[8:16] >= due_min])
                yield None
            yield writer.finish()

    def _between(self, piece: IndexPiece, low: int, high: int) -> list[bytes]:
        hashes = self._whole_fences(piece).hashes
        first = max(0, bisect_left(hashes, low) - 1)
        entries: list[bytes] = []
        for block_number in range(first, bisect_left(hashes, high)):
            entries += self._entries(piece, block_number)
        start = bisect_left(entries, low.to_bytes(8, "big"))
        stop = len(entries) if high == _KEYS else bisect_left(entries, high.to_bytes(8, "big"))
        return entries[start:stop]

    def _look_up(self, piece: IndexPiece, hash_: int) -> Iterator[IdLocation]:
        hashes = self._whole_fences(piece).hashes
        first = max(0, bisect_left(hashes, hash_) - 1)
        for block_number in range(first, bisect_right(hashes, hash_)):
            yield from _found_in(self._read(piece, block_number), hash_.to_bytes(8, "big"))

    def _entries(self, piece: IndexPiece, block: int) -> list[bytes]:
        """The entries of a block."""
        data = self._read(piece, block)
        return [data[at : at + ENTRY_BYTES] for at in range(0, len(data), ENTRY_BYTES)]

    def _read(self, piece: IndexPiece, block: int) -> bytes:
        segment, positions = piece.stored.segment, self._fences(piece).positions
        last = len(positions) - 1
        count = BLOCK_IDS if block < last else piece.stored.count - last * BLOCK_IDS
        try:
            return read_record(
                self._segments,
                FramePlace(segment=segment, position=positions[block], size_bytes=count * ENTRY_BYTES, number=block),
            )
        except SegmentDamaged as damage:
            self._note_damage(segment, damage)
            raise

    def _blocks(self, piece: IndexPiece) -> Iterator[bytes]:
        """Yields all blocks of a piece, in their order, by one scan; the fences are read only to know of damage."""
        self._whole_fences(piece)
        stored, left = piece.stored, piece.stored.count
        try:
            # All of it was durable before the log named it.
            for block in self._segments.blocks(stored.segment, proven=stored.fences_position + stored.fences_bytes):
                if block.end > stored.fences_position:
                    break
                for frame in block.frames:
                    left -= len(frame.payload) // ENTRY_BYTES
                    yield frame.payload
        except (SegmentDamaged, StorageFailed) as error:
            self._require_damage(stored, error)
            self._note_damage(stored.segment, error)
            raise SegmentDamaged(f"{stored.segment} cannot be read: {error}") from error
        if left:
            damage = SegmentDamaged(f"{stored.segment} misses {left} entries")
            self._note_damage(stored.segment, damage)
            raise damage

    def _whole_fences(self, piece: IndexPiece) -> PieceFences:
        """Like _fences(); raises SegmentDamaged if the piece is known to be damaged."""
        fences = self._fences(piece)
        if piece.stored.segment in self._damaged:
            raise SegmentDamaged(f"{piece.stored.segment} is damaged")
        return fences

    def _fences(self, piece: IndexPiece) -> PieceFences:
        """Returns the fences of a piece, which are read when they are first needed; none if they are damaged."""
        if piece.fences is None:
            stored = piece.stored
            try:
                found = _decode(read_record(self._segments, _fences_place(stored)))
            except (SegmentDamaged, StorageFailed) as damage:
                self._require_damage(stored, damage)
                self._note_damage(stored.segment, damage)
                found = _Fences([], [])
            piece.fences = PieceFences(array("Q", found.hashes), array("Q", found.positions))
        return piece.fences

    def _require_damage(self, stored: StoredIndex, error: SegmentDamaged | StorageFailed) -> None:
        """Raise a failure of the storage, unless it is that the segment is missing."""
        if isinstance(error, StorageFailed) and stored.segment in {segment.name for segment in self._segments.list()}:
            raise error

    def _note_damage(self, segment: str, damage: Exception) -> None:
        if segment not in self._damaged:
            logger.critical("id_index_damaged", extra={"segment": segment, "error": str(damage)})
            self._damaged.add(segment)


class IndexMerge:
    """The merge in progress, if any. Used under the owner's `keeping` lock."""

    def __init__(self) -> None:
        self.merged: list[StoredIndex] = []
        self._steps: Iterator[StoredIndex | None] | None = None

    @property
    def is_begun(self) -> bool:
        """Returns whether a merge is in progress."""
        return self._steps is not None

    def begin(self, merged: list[StoredIndex], steps: Iterator[StoredIndex | None]) -> None:
        """Start merging these pieces by the steps of IdIndex.merge()."""
        self.merged, self._steps = merged, steps

    def step(self) -> StoredIndex | None:
        """Do one step; returns the new piece with the last one. Raises as IdIndex.merge() does."""
        return None if self._steps is None else next(self._steps)

    def abandon(self) -> None:
        """Stop the merge: the caller deletes, or adds, what it has written."""
        self.merged, self._steps = [], None


def _fences_place(stored: StoredIndex) -> FramePlace:
    """Where a piece's fences are: behind its blocks, which are numbered through."""
    return FramePlace(
        segment=stored.segment, position=stored.fences_position, size_bytes=stored.fences_bytes,
        number=-(-stored.count // BLOCK_IDS),
    )  # fmt: skip


class _Writer:
    """Writes a piece block by block, in appends of bounded size."""

    _BLOCKS_APPENDED: Final = 256

    def __init__(self, segments: Segments, segment: str) -> None:
        self._writer = segments.create(segment, kind=SegmentKind.ID_INDEX)
        self._rest: list[bytes] = []
        self._hashes: list[int] = []
        self._positions: list[int] = []
        self._count = 0
        self._frames = 0  # of the last append

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of a piece that was not finished; the caller deletes its segment."""
        self._writer.abandon()

    def add(self, entries: Sequence[bytes]) -> None:
        """Append entries, which must follow all earlier ones."""
        self._count += len(entries)
        self._rest += entries
        whole = len(self._rest) // BLOCK_IDS * BLOCK_IDS
        self._append(self._rest[:whole])
        self._rest = self._rest[whole:]

    def finish(self) -> StoredIndex:
        """Write the last block and the fences; returns once all of it is durable."""
        self._append(self._rest)
        fences = _encode(_Fences(self._hashes, self._positions))
        [position] = self._write([fences], first_number=len(self._positions))
        self._writer.seal()
        return StoredIndex(self._writer.name, self._count, position, len(fences))

    def _append(self, entries: list[bytes]) -> None:
        blocks = [b"".join(entries[at : at + BLOCK_IDS]) for at in range(0, len(entries), BLOCK_IDS)]
        for at in range(0, len(blocks), self._BLOCKS_APPENDED):
            some = blocks[at : at + self._BLOCKS_APPENDED]
            self._positions += self._write(some, first_number=len(self._positions))
            self._hashes += [int.from_bytes(ids[:8], "big") for ids in some]

    def _write(self, payloads: Sequence[bytes], *, first_number: int) -> list[int]:
        """Append frames; returns where each of them is."""
        frames = framed(FrameKind.RECORD, range(first_number, first_number + len(payloads)), payloads)
        data = block(frames, offset=self._writer.end, durable=0, at_ms=0, frames_before=self._frames)
        start = self._writer.append(data) - len(data) + BLOCK_HEAD_BYTES
        self._frames = len(frames)
        return list(accumulate((FRAME_HEAD_BYTES + len(payload) for payload in payloads[:-1]), initial=start))


def _hashes_by_topic(block: bytes) -> Iterator[tuple[int, array[int]]]:
    """Yields each topic's hash, and the hashes of its ids in a block, by whole columns."""
    fields = array("Q", block)
    if sys.byteorder == "little":
        fields.byteswap()
    hashes, topics = fields[::_FIELDS], fields[_FIELDS - 1 :: _FIELDS]
    if topics.count(topics[0]) == len(topics):
        yield topics[0], hashes
        return
    for topic in set(topics):
        yield topic, array("Q", compress(hashes, map(topic.__eq__, topics)))


def _found_in(data: bytes, key: bytes) -> Iterator[IdLocation]:
    at = data.find(key)
    while at >= 0:
        if at % ENTRY_BYTES == 0:
            yield unpacked(data[at : at + ENTRY_BYTES])[1]
        at = data.find(key, at + 1)
