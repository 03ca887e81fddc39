"""The footer of a sealed segment of messages: where its messages are, by topic, and their ids. Derived data.

It is a block of the message log, the first one of the next segment, so that it is found without a search: its frames
have the kind FOOTER, and the number at which the segment begins. The first frame is the directory; the others have
blocks of runs, and ids, at positions that count from the second frame on. One that is missing or damaged is made anew
from the segment, and appended where the log ends; the directory of the segment in which it stands names it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple

import google_crc32c
import msgspec

from outbox_broker.journal.journal import Journal
from outbox_broker.log.disk_reserve import cure_for, may_pass
from outbox_broker.log.topic_index import RUN_BYTES, BlockPlace, Runs, TopicIndex, blocks_of
from outbox_broker.segments.port import SegmentInfo
from outbox_core.common.errors import DECODE_ERRORS, StorageFailed
from outbox_core.journal.block import (
    BLOCK_HEAD_BYTES,
    FRAME_HEAD_BYTES,
    Block,
    Framed,
    FrameDamaged,
    FrameKind,
    block_head_at,
    frame_bytes_at,
    framed,
    read_run,
)
from outbox_core.journal.journal import SegmentDamaged

BLOCK_RUNS_MAX: Final = 1_024
CACHED_BLOCKS_MAX: Final = 256
"""About 7 MiB at the most."""
_PIECE_BYTES: Final = 1024 * 1024
"""After which a frame is followed by another one."""
_IDS_A_PIECE: Final = 10_000
_TopicIds = tuple[str, list[str]]
"""A topic, and ids that came of it one behind the other."""


class BlockEntry(msgspec.Struct, array_like=True, frozen=True):
    """A directory entry for one block of runs."""

    first: int
    end: int
    first_time_ms: int
    position: int
    runs: int
    crc: int


class IdsEntry(msgspec.Struct, array_like=True, frozen=True):
    """A directory entry for some of the ids, in MessagePack."""

    position: int
    size_bytes: int
    crc: int


class Directory(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What a footer has. `special`: offsets of records that are not plain messages (scheduled ones...); `remade`: where
    the footers begin that were made anew in this segment, by the first offset of theirs.
    """

    segment_end: int
    topics: dict[str, list[BlockEntry]]
    ids: list[IdsEntry]
    ids_count: int
    special: list[int]
    remade: dict[int, int]


class Footer(NamedTuple):
    """A footer to be appended as a block."""

    frames: Framed
    directory: Directory

    def at(self, offset: int) -> FoundFooter:
        """Returns the same, whose block begins at this offset of the log."""
        return FoundFooter(self.directory, offset, len(self.frames.payloads[0]))

    def ending_at(self, end: int) -> FoundFooter:
        """Returns the same, whose block ends at this offset of the log."""
        return self.at(end - self.frames.size_bytes - BLOCK_HEAD_BYTES)


class FoundFooter(NamedTuple):
    """A footer in the log: the offset at which its block begins, and how long its directory is."""

    directory: Directory
    offset: int
    directory_bytes: int

    @property
    def base(self) -> int:
        """The offset from which its positions count."""
        return self.offset + BLOCK_HEAD_BYTES + FRAME_HEAD_BYTES + self.directory_bytes


class FooterDamaged(StorageFailed):
    """A segment's footer is not readable as written; it can be made anew from the segment.

    `mended`: the number of footers made anew up to then.
    """

    def __init__(self, message: str, *, segment: int, mended: int) -> None:
        super().__init__(message)
        self.segment = segment
        self.mended = mended


_encode = msgspec.msgpack.Encoder().encode
_decode_directory = msgspec.msgpack.Decoder(Directory).decode
_decode_ids = msgspec.msgpack.Decoder(list[_TopicIds]).decode


def footer_of(
    segment: int, segment_end: int, *, topics: Iterable[TopicIndex], ids: Sequence[_TopicIds], special: list[int],
    remade: Mapping[int, int],
) -> Footer:  # fmt: skip
    """Returns the footer of the segment that begins at this offset, from the topics' runs in memory. Pure."""
    pieces = _Pieces()
    entries = {}
    for topic in topics:
        found = []
        for first, end, runs in blocks_of(topic.tail, topic.end, runs_max=BLOCK_RUNS_MAX):
            position, crc = pieces.add(runs.to_bytes())
            found.append(BlockEntry(first, end, runs.row(0)[-1], position, len(runs), crc))
        entries[topic.name] = found
    id_entries = []
    for some in _parted(ids):
        packed = _encode(some)
        position, crc = pieces.add(packed)
        id_entries.append(IdsEntry(position, len(packed), crc))
    directory = Directory(
        segment_end=segment_end, topics=entries, ids=id_entries, ids_count=sum(len(some) for _, some in ids),
        special=special, remade=dict(remade),
    )  # fmt: skip
    frames = Framed(FrameKind.FOOTER)
    for payload in (_encode(directory), *map(bytes, pieces.frames)):
        frames.extend(framed(FrameKind.FOOTER, range(segment, segment + 1), [payload]))
    return Footer(frames, directory)


class _Pieces:
    """The payloads of a footer's frames behind the directory."""

    def __init__(self) -> None:
        self.frames: list[bytearray] = []
        self._end = 0  # of the last one, in positions

    def add(self, data: bytes) -> tuple[int, int]:
        """Add data, which is not parted; returns its position, and its CRC-32C."""
        if not self.frames or len(self.frames[-1]) >= _PIECE_BYTES:
            self.frames.append(bytearray())
            self._end += FRAME_HEAD_BYTES
        position = self._end
        self.frames[-1] += data
        self._end += len(data)
        return position, google_crc32c.value(data)


def _parted(ids: Sequence[_TopicIds]) -> Iterator[list[_TopicIds]]:
    """Yields ids, some at a time."""
    some: list[_TopicIds] = []
    count = 0
    for topic, of_topic in ids:
        left = iter(of_topic)
        while taken := list(islice(left, _IDS_A_PIECE - count)):
            some.append((topic, taken))
            count += len(taken)
            if count == _IDS_A_PIECE:
                yield some
                some, count = [], 0
    if some:
        yield some


def find_footer(log: Journal, offset: int, *, segment: int, segment_end: int) -> FoundFooter | None:
    """Returns the footer of a segment whose block begins at this offset of the log; None if none does, or its directory
    is damaged or cannot be read. Raises StorageFailed for lack of descriptors.
    """
    head_bytes = BLOCK_HEAD_BYTES + FRAME_HEAD_BYTES
    data = _read(log, offset, head_bytes)
    head = block_head_at(data, 0, first=offset)
    if head is None or len(data) < head_bytes:
        return None
    size_bytes = min(frame_bytes_at(data, BLOCK_HEAD_BYTES), head.end - head.start)  # the length may be damaged
    data = _read(log, offset + BLOCK_HEAD_BYTES, size_bytes)
    try:
        [packed] = read_run(data, 0, kind=FrameKind.FOOTER, numbers=range(segment, segment + 1))
        directory = _decode_directory(packed)
    except (FrameDamaged, *DECODE_ERRORS):
        return None
    return FoundFooter(directory, offset, len(packed)) if directory.segment_end == segment_end else None


def read_ids(log: Journal, footer: FoundFooter) -> list[_TopicIds] | None:
    """Returns the ids of a segment's messages, in order: each topic, and the ids that came of it one behind the other.
    None where they are damaged, or cannot be read. Raises StorageFailed for lack of descriptors.
    """
    ids: list[_TopicIds] = []
    for entry in footer.directory.ids:
        data = _read(log, footer.base + entry.position, entry.size_bytes)
        try:
            if google_crc32c.value(data) != entry.crc:
                return None
            ids += _decode_ids(data)
        except DECODE_ERRORS:
            return None
    return ids


def _read(log: Journal, offset: int, size_bytes: int) -> bytes:
    """Returns nothing of what cannot be read: a footer can be made anew."""
    try:
        return log.read(offset, size_bytes)
    except StorageFailed as error:
        if may_pass(error):
            raise
        return b""


def footers_in(log: Journal, segment: SegmentInfo) -> dict[int, int]:
    """Returns where footers begin that stand in a segment, by the first offset of theirs; of several the last one.
    Raises StorageFailed.
    """
    found: dict[int, int] = {}
    with suppress(SegmentDamaged):  # it ends too early
        for block in log.blocks_of(segment, {FrameKind.FOOTER}):
            note_footer(found, block)
    return found


def note_footer(found: dict[int, int], block: Block) -> None:
    """Note where a footer begins, by the first offset of its segment, which is the number of its frames; of several of
    one segment the last counts. None of a block that is damaged.
    """
    found.update((frame.number, block.position) for frame in block.frames[:1])


class FooterBlocks:
    """Loads blocks of runs from footers, with an LRU cache. Thread-safe only under the engine's lock."""

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        """`read` returns bytes of the message log, by offset and size, as Journal.read() does."""
        self._read_log = read
        self._cached: OrderedDict[int, Runs] = OrderedDict()
        self.mended = 0
        """The number of footers made anew since startup."""

    def load(self, place: BlockPlace) -> Runs:
        """Returns the runs of a block. Raises FooterDamaged if they cannot be read back intact."""
        found = self._cached.get(place.offset)
        if found is None:
            found = self._cached[place.offset] = self._read(place)
            if len(self._cached) > CACHED_BLOCKS_MAX:
                self._cached.popitem(last=False)
        else:
            self._cached.move_to_end(place.offset)
        return found

    def _read(self, place: BlockPlace) -> Runs:
        try:
            data = self._read_log(place.offset, place.runs * RUN_BYTES)
        except StorageFailed as error:
            if may_pass(error) and isinstance(error.__cause__, OSError):
                raise StorageFailed(f"{error}; {cure_for(error.__cause__)}") from error.__cause__
            raise self._damaged(place.segment, f"cannot be read ({error})") from error
        if google_crc32c.value(data) != place.crc:
            raise self._damaged(place.segment, "is damaged")
        return Runs.of_bytes(data)

    def _damaged(self, segment: int, what: str) -> FooterDamaged:
        return FooterDamaged(
            f"the footer of the segment at offset {segment} {what}; restart the broker", segment=segment,
            mended=self.mended,
        )  # fmt: skip
