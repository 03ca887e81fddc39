"""The id index: from a message id's hash to its due times, arrivals and topics, on disk, in sorted pieces. Hints, no
proof.

It says where to look and not what is there: a due time names the buckets that may hold a message on whatever level it
stands by now, so nothing here changes when a message is re-filed. In memory is one fence for every 128 ids, so ten
million ids cost 1.3 MB. A piece is written with each flush; when there are many, the smallest are merged, and what has
fired long ago is left out. A look-up reads one block of four kilobytes a piece.
"""

from __future__ import annotations

import logging
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Final, NamedTuple

import msgspec

from outbox_broker.schedule.schedule_records import StoredIndex
from outbox_broker.schedule.segment_store import SegmentStore
from outbox_broker.schedule.sorted_run import topic_hash
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import SegmentDamaged

logger = logging.getLogger(__name__)

ENTRY_BYTES: Final = 32
"""Hash of the id, due time, arrival, hash of the topic. Pieces of before have entries without the last."""
_NO_TOPIC: Final = bytes(8)
BLOCK_IDS: Final = 128
_SLICE_IDS: Final = 32_768
_KEYS: Final = 1 << 64
_ENTRY: Final = struct.Struct(">QQQQ")
_pack: Final = _ENTRY.pack


class _Fences(msgspec.Struct, array_like=True, frozen=True):
    """The first hash and the position of every block."""

    hashes: list[int]
    positions: list[int]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Fences).decode


class Found(NamedTuple):
    """Where a message may stand; `topic` is its topic's hash, 0 where it is not known."""

    due_ms: int
    seq: int
    topic: int


def index_entries(
    hashes: Iterable[int], dues: Iterable[int], seqs: Iterable[int], topics: Iterable[str]
) -> list[bytes]:  # fmt: skip
    """Entries, in order of their hashes."""
    names = list(topics)
    topic_hashes = {name: topic_hash(name) for name in set(names)}
    return sorted(map(_pack, hashes, dues, seqs, map(topic_hashes.__getitem__, names)))


def unpacked(entry: bytes) -> tuple[int, Found]:
    """The hash of an entry, and what it says."""
    hash_, *found = _ENTRY.unpack(entry)
    return hash_, Found(*found)


@dataclass(slots=True, eq=False)
class IndexPiece:
    """A piece with its fences in memory."""

    stored: StoredIndex
    hashes: array[int]
    positions: array[int]

    def block_bytes(self, block: int) -> int:
        """The size of a block; the last one is shorter."""
        last = len(self.hashes) - 1
        return (BLOCK_IDS if block < last else self.stored.count - last * BLOCK_IDS) * self.stored.entry_bytes


class IdIndex:
    """Look-ups in all pieces. The list of pieces is its owner's; add() and remove() follow it."""

    def __init__(self, store: SegmentStore, *, pieces_max: int, merged_pieces_max: int) -> None:
        """Where there are more than `pieces_max`, up to `merged_pieces_max` of them become one."""
        self._store = store
        self._pieces_max = pieces_max
        self._merged_pieces_max = merged_pieces_max
        self._pieces: list[IndexPiece] = []  # in order of arrival, but for what is merged, which is old
        self._damaged: set[str] = set()

    def load(self, stored: StoredIndex) -> IndexPiece:
        """Read a piece's fences; to be added then. One that is damaged or gone is empty, and among the damaged()."""
        try:
            fences = _decode(self._store.read(stored.segment, stored.fences_position, stored.fences_bytes))
        except (SegmentDamaged, StorageFailed) as damage:
            if isinstance(damage, StorageFailed) and stored.segment in self._store.list():
                raise
            self._note_damage(stored.segment, damage)
            fences = _Fences([], [])
        return IndexPiece(stored, array("Q", fences.hashes), array("Q", fences.positions))

    def damaged(self) -> list[StoredIndex]:
        """The pieces that cannot be read whole: to be made anew."""
        return [one.stored for one in self._pieces if one.stored.segment in self._damaged]

    def add(self, piece: IndexPiece) -> None:
        """Look in this piece too."""
        self._pieces = [*self._pieces, piece]  # who merges goes through them without a lock

    def replace(self, merged: Iterable[StoredIndex], pieces: Sequence[IndexPiece]) -> list[StoredIndex]:
        """Look in other pieces instead of these, at the place of the first of them; returns all there are now."""
        gone = {one.segment for one in merged}
        at = next(number for number, one in enumerate(self._pieces) if one.stored.segment in gone)
        later = [one for one in self._pieces[at:] if one.stored.segment not in gone]
        self._pieces = [*self._pieces[:at], *pieces, *later]
        self._damaged -= gone
        return [one.stored for one in self._pieces]

    def find(self, hash_: int) -> list[Found]:
        """Every message whose id has this hash, newest piece first, each once.

        Raises StorageFailed while a piece is damaged: what it is silent about may be in there.
        """
        try:
            found = chain.from_iterable(self._look_up(piece, hash_) for piece in reversed(self._pieces))
            once: dict[tuple[int, int], Found] = {}
            for one in found:  # the same may stand in two pieces, in one of them without its topic
                once[one[:2]] = max(one, once.get(one[:2], one))
            return list(once.values())
        except SegmentDamaged as damage:
            raise StorageFailed(f"{damage}; the id index is being made anew, try again in a minute") from damage

    def newest_hashes(self, count_min: int, *, count_max: int) -> Iterator[tuple[int, int]]:
        """Hashes of the topics and ids of the newest: `count_min` of them and up to a piece more, where there are so
        many.

        Raises SegmentDamaged; that piece is among the damaged() then.
        """
        for piece in reversed(self._pieces):
            if count_min <= 0:
                return
            if piece.stored.count > count_max:  # merged long ago, and put last by an earlier version
                continue
            count_min -= piece.stored.count
            for block in range(len(piece.hashes)):
                for hash_, found in map(unpacked, self._entries(piece, block)):
                    yield found.topic, hash_

    def write(self, segment: str, entries: Sequence[bytes]) -> StoredIndex:
        """A new piece of sorted entries; the caller syncs it, and adds it where it counts."""
        writer = _Writer(self._store, segment)
        writer.add(entries)
        return writer.finish()

    def to_merge(self, *, newest: int) -> list[StoredIndex]:
        """The pieces that are to become one, when there are too many: the smallest of those that are old.

        The `newest` ids stay apart from what is older, for newest_hashes(): where they are in most of the pieces, the
        first of these are merged.
        """
        pieces = self._pieces
        if len(pieces) <= self._pieces_max:
            return []
        totals = accumulate(one.stored.count for one in reversed(pieces))
        young = sum(total <= newest for total in totals)
        old = pieces[: len(pieces) - young - 1]  # the one between has some of the newest too
        some = sorted(old, key=lambda one: one.stored.count) if len(old) > young else pieces[len(pieces) - young :]
        if len(some) <= 1:
            return []  # one alone would never end
        return [one.stored for one in some[: self._merged_pieces_max]]

    def merge(self, merged: Iterable[StoredIndex], segment: str, *, due_min_ms: int) -> Iterator[StoredIndex | None]:
        """Write one piece of many, in small steps: yields None after each, and the new piece last.

        What was due before `due_min_ms` is left out. Raises SegmentDamaged; that piece is among the damaged() then.
        """
        names = {one.segment for one in merged}
        pieces = [one for one in self._pieces if one.stored.segment in names]
        total = sum(one.stored.count for one in pieces)
        writer = _Writer(self._store, segment)
        slices = total // _SLICE_IDS + 1
        due_min = due_min_ms.to_bytes(8, "big")
        for number in range(slices):
            low, high = _KEYS * number // slices, _KEYS * (number + 1) // slices
            entries = sorted(chain.from_iterable(self._between(piece, low, high) for piece in pieces))
            writer.add([entry for entry in entries if entry[8:16] >= due_min])
            yield None
        yield writer.finish()

    def _between(self, piece: IndexPiece, low: int, high: int) -> list[bytes]:
        first = max(0, bisect_left(piece.hashes, low) - 1)
        entries: list[bytes] = []
        for block in range(first, bisect_left(piece.hashes, high)):
            entries += self._entries(piece, block)
        start = bisect_left(entries, low.to_bytes(8, "big"))
        stop = len(entries) if high == _KEYS else bisect_left(entries, high.to_bytes(8, "big"))
        return entries[start:stop]

    def _look_up(self, piece: IndexPiece, hash_: int) -> Iterator[Found]:
        if piece.stored.segment in self._damaged:
            raise SegmentDamaged(f"{piece.stored.segment} is damaged")
        first = max(0, bisect_left(piece.hashes, hash_) - 1)
        for block in range(first, bisect_right(piece.hashes, hash_)):
            yield from _found_in(self._read(piece, block), hash_.to_bytes(8, "big"), size=piece.stored.entry_bytes)

    def _entries(self, piece: IndexPiece, block: int) -> list[bytes]:
        """The entries of a block, as they are written today."""
        data, size = self._read(piece, block), piece.stored.entry_bytes
        entries = [data[at : at + size] for at in range(0, len(data), size)]
        return entries if size == ENTRY_BYTES else [one + _NO_TOPIC for one in entries]

    def _read(self, piece: IndexPiece, block: int) -> bytes:
        segment = piece.stored.segment
        try:
            return self._store.read(segment, piece.positions[block], piece.block_bytes(block))
        except SegmentDamaged as damage:
            self._note_damage(segment, damage)
            raise

    def _note_damage(self, segment: str, damage: Exception) -> None:
        if segment not in self._damaged:
            logger.critical("id_index_damaged", extra={"segment": segment, "error": str(damage)})
            self._damaged.add(segment)


class IndexMerge:
    """The merge that is under way, if any. Used under the owner's `keeping` lock."""

    def __init__(self) -> None:
        self.merged: list[StoredIndex] = []
        self._steps: Iterator[StoredIndex | None] | None = None

    @property
    def is_begun(self) -> bool:
        """Whether there are steps to do."""
        return self._steps is not None

    def begin(self, merged: list[StoredIndex], steps: Iterator[StoredIndex | None]) -> None:
        """Merge these pieces in the steps of IdIndex.merge()."""
        self.merged, self._steps = merged, steps

    def step(self) -> StoredIndex | None:
        """Do a step; the new piece with the last one. Raises as IdIndex.merge() does."""
        return None if self._steps is None else next(self._steps)

    def abandon(self) -> None:
        """Do no more of it: what it has written is the caller's to delete, or to add."""
        self.merged, self._steps = [], None


class _Writer:
    """Writes a piece block by block, in appends of bounded size."""

    _BLOCKS_APPENDED: Final = 256

    def __init__(self, store: SegmentStore, segment: str) -> None:
        self._store = store
        self._segment = segment
        self._rest: list[bytes] = []
        self._hashes: list[int] = []
        self._positions: list[int] = []
        self._end = 0
        self._count = 0

    def add(self, entries: Sequence[bytes]) -> None:
        """Entries behind all earlier ones."""
        self._count += len(entries)
        self._rest += entries
        whole = len(self._rest) // BLOCK_IDS * BLOCK_IDS
        self._append(self._rest[:whole])
        self._rest = self._rest[whole:]

    def finish(self) -> StoredIndex:
        """The last block and the fences."""
        self._append(self._rest)
        fences = _encode(_Fences(self._hashes, self._positions))
        position, _ = self._store.append(self._segment, [fences], position=self._end)
        return StoredIndex(self._segment, self._count, position, len(fences), ENTRY_BYTES)

    def _append(self, entries: list[bytes]) -> None:
        blocks = [b"".join(entries[at : at + BLOCK_IDS]) for at in range(0, len(entries), BLOCK_IDS)]
        for at in range(0, len(blocks), self._BLOCKS_APPENDED):
            some = blocks[at : at + self._BLOCKS_APPENDED]
            *positions, self._end = self._store.append(self._segment, some, position=self._end)
            self._positions += positions
            self._hashes += [int.from_bytes(block[:8], "big") for block in some]


def _found_in(data: bytes, key: bytes, *, size: int) -> Iterator[Found]:
    at = data.find(key)
    while at >= 0:
        if at % size == 0:
            yield unpacked(data[at : at + size].ljust(ENTRY_BYTES, b"\0"))[1]
        at = data.find(key, at + 1)
