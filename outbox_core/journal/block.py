"""The bytes of a log: segments of blocks, blocks of frames; and what of them counts after a crash or a flipped bit.

Pure: bytes in, values out. An offset counts the bytes of all segments of a log, without their heads of 40 bytes.

    segment  magic "OMQSEGM1" 8s | version u16 | kind u16 | epoch u64 | first offset u64 | created_at_ms u64
             | crc32c of these 36 bytes u32
    block    magic "OMQB" 4s | kind u8 | version u8 | frames of the block before u16 | frames u32
             | bytes of the frames u32 | offset u64 | durable u64 | at_ms u64 | crc32c of these 40 bytes u32
    frame    length u32 | check u32 | kind u8 << 56 and number (56 bits) u64 | payload

All integers are little-endian. A block is one append: what is in it was written together, and is recovered together. A
frame's check is the payload's CRC-32C, begun with the upper half of kind and number, xor the lower half: so a frame
whose kind or number has changed is damaged, and frames can be made before their offset is known, outside any lock.

Nothing but a block's head tells a frame apart from a copy of one inside a message's body: it counts the block's frames,
and one inside a body would be one too many. A block's head is one only at the offset that it names.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, repeat
from operator import xor
from typing import Final, NamedTuple

import google_crc32c

from outbox_core.common.errors import OutboxError

SEGMENT_MAGIC: Final = b"OMQSEGM1"
BLOCK_MAGIC: Final = b"OMQB"
VERSION: Final = 1
PAYLOAD_BYTES_MAX: Final = 128 * 1024 * 1024
"""A greater length is damage, and no memory is allocated for it. A block's magic, read as a length, is greater."""
FRAMES_MAX: Final = 65_535
"""Frames of one block, which the next one counts in 16 bits."""
_SEGMENT: Final = struct.Struct("<8sHHQQQ")
_BLOCK: Final = struct.Struct("<4sBBHIIQQQ")
_WHOLE_BLOCK: Final = struct.Struct(_BLOCK.format + "I")
_FRAME: Final = struct.Struct("<IIQ")
_CRC: Final = struct.Struct("<I")
SEGMENT_HEAD_BYTES: Final = _SEGMENT.size + _CRC.size
BLOCK_HEAD_BYTES: Final = _WHOLE_BLOCK.size
FRAME_HEAD_BYTES: Final = _FRAME.size
_LOWER_HALF: Final = 0xFFFF_FFFF
KIND_SHIFT: Final = 56
NUMBER_MAX: Final = (1 << KIND_SHIFT) - 1
SEARCHED_BYTES_MAX: Final = 256 * 1024 * 1024
"""So many bytes are checked in a search for whole frames behind a damaged one, about a second; no limit would let a
block of 4 MiB that looks like frames at each byte take minutes.
"""
_FRAME_COST_BYTES: Final = 256
"""What a frame costs a search, beside its payload."""
SECOND_COPY: Final = 1 << 55
"""Added to the number of a change's second frame."""
LAST_PART: Final = 1 << 54
"""Added to the number of a checkpoint's last part."""


class SegmentKind(IntEnum):
    """What a segment is part of."""

    MESSAGES = 1
    ACTIONS = 2
    BUCKET = 3
    ID_INDEX = 4


class FrameKind(IntEnum):
    """What a frame holds, and what its number counts."""

    MESSAGE = 0x11
    """A message; its sequence in its topic."""
    FOOTER = 0x22
    """The consume log and the newest ids of a sealed segment; the first offset of that segment."""
    SCHEDULED = 0x33
    """A message that waits for its due time; its arrival."""
    DISPATCHED = 0x44
    """A message that was scheduled, in its topic since it fell due; its sequence there."""
    CHANGE = 0x55
    """A change of state, in two frames; its number in the block, and the same plus SECOND_COPY."""
    CANCELED = 0x66
    """A message that was canceled before it came; 0."""
    RECORD = 0x77
    """A part of a bucket, or of the id index, that a record of the log names; a number that it names, too."""
    ASIDE = 0x88
    """A message aside from its topic, for groups that an action names: what an operator made of one, or one that
    retention moved out of an old segment; its sequence there.
    """
    CHECKPOINT = 0x99
    """A part of a checkpoint; the number of the part, and that of the last one plus LAST_PART."""


_KINDS: Final = frozenset(FrameKind)
_SEGMENT_KINDS: Final = frozenset(SegmentKind)
_FRAME_MAY_BEGIN: Final = re.compile(rb"(?s)(?=...[\x00-\x08].{11}[\x11\x22\x33\x44\x55\x66\x77\x88\x99])")
"""A length up to PAYLOAD_BYTES_MAX, and a kind: avoids a checksum at every byte."""


class SegmentRefused(OutboxError):
    """These bytes are no segment that this version reads; says why, and the cure. Nothing may be written to their
    file.
    """


class SegmentHeadDamaged(SegmentRefused):
    """The head of a segment does not match its checksum; its blocks have their own."""


class FrameDamaged(OutboxError):
    """A frame that a caller has the position of is not whole, or is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHead:
    """The first 40 bytes of a segment. `first` is the offset at which it begins."""

    kind: SegmentKind
    epoch: int
    first: int
    created_at_ms: int

    def encode(self) -> bytes:
        """Returns its bytes."""
        head = _SEGMENT.pack(SEGMENT_MAGIC, VERSION, self.kind, self.epoch, self.first, self.created_at_ms)
        return head + _CRC.pack(google_crc32c.value(head))


def decode_segment_head(data: bytes) -> SegmentHead:
    """Returns the head that a file begins with. Raises SegmentRefused, naming the cure; SegmentHeadDamaged."""
    head = data[: _SEGMENT.size]
    if not head.startswith(SEGMENT_MAGIC):
        raise SegmentRefused("no segment of this format (an earlier one, or no log): use an empty folder")
    if len(data) < SEGMENT_HEAD_BYTES or _CRC.unpack_from(data, _SEGMENT.size)[0] != google_crc32c.value(head):
        raise SegmentHeadDamaged("the head of the segment is damaged: restore the file from a copy")
    _, version, kind, epoch, first, created_at_ms = _SEGMENT.unpack(head)
    if version != VERSION or kind not in _SEGMENT_KINDS:
        raise _newer(f"a segment of format {version} and kind {kind}")
    return SegmentHead(kind=SegmentKind(kind), epoch=epoch, first=first, created_at_ms=created_at_ms)


def _newer(what: str) -> SegmentRefused:
    return SegmentRefused(f"{what}, and this version reads format {VERSION}: upgrade before you open it")


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Framed:
    """Frames on their way into a block. They depend on nothing but kinds, numbers and payloads, so they are made
    outside the lock under which the block gets its offset.
    """

    kind: FrameKind
    heads: list[bytes] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    size_bytes: int = 0

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def sizes(self) -> list[int]:
        """The bytes of each frame, with its head."""
        return [FRAME_HEAD_BYTES + len(payload) for payload in self.payloads]

    def extend(self, other: Framed) -> None:
        """Append frames of any kind; the block's kind stays that of its first frame."""
        self.heads += other.heads
        self.payloads += other.payloads
        self.size_bytes += other.size_bytes


def framed(kind: FrameKind, numbers: range, payloads: Sequence[bytes]) -> Framed:
    """Returns frames of one kind, with the number of each of the payloads."""
    lengths = list(map(len, payloads))
    marks = range((kind << KIND_SHIFT) + numbers.start, (kind << KIND_SHIFT) + numbers.stop)
    upper, lower = marks.start >> 32, marks.start & _LOWER_HALF
    if (marks.stop - 1) >> 32 == upper:
        crcs = map(google_crc32c.extend, repeat(upper), payloads)
        checks = map(xor, crcs, range(lower, lower + len(lengths)))
    else:
        checks = map(_check, marks, payloads)
    heads = list(map(_FRAME.pack, lengths, checks, marks))
    return Framed(kind, heads, list(payloads), sum(lengths) + FRAME_HEAD_BYTES * len(lengths))


def framed_changes(payloads: Sequence[bytes]) -> tuple[Framed, Framed]:
    """Returns changes of state, and their second copies: these go last into the block, so that no two neighbouring
    sectors hold both.
    """
    numbers = range(len(payloads))
    return (
        framed(FrameKind.CHANGE, numbers, payloads),
        framed(FrameKind.CHANGE, range(SECOND_COPY, SECOND_COPY + len(payloads)), payloads),
    )


def block(frames: Framed, *, offset: int, durable: int, at_ms: int, frames_before: int) -> bytes:
    """Returns a block's bytes. `durable`: the offset up to which the writer knows the log to be durable;
    `frames_before`: how many frames the block before has, 0 at a segment's beginning.
    """
    head = _BLOCK.pack(
        BLOCK_MAGIC, frames.kind, VERSION, frames_before, len(frames), frames.size_bytes, offset, durable, at_ms
    )
    crc = _CRC.pack(google_crc32c.value(head))
    return b"".join(chain((head, crc), chain.from_iterable(zip(frames.heads, frames.payloads, strict=True))))


def _check(mark: int, payload: bytes) -> int:
    return int(google_crc32c.extend(mark >> 32, payload)) ^ (mark & _LOWER_HALF)


# -- reading what is whole ---------------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """A whole frame of a block."""

    kind: int
    number: int
    payload: bytes


class BlockHead(NamedTuple):
    """A block's head, and where it stands in its segment's bytes: frames are at `start` to `end`."""

    version: int
    kind: int
    frames: int
    frames_before: int
    offset: int
    durable: int
    at_ms: int
    start: int
    end: int

    @property
    def first(self) -> int:
        """The offset at which the segment begins."""
        return self.offset - (self.start - BLOCK_HEAD_BYTES)


def block_head_at(data: bytes, position: int, *, first: int) -> BlockHead | None:
    """Returns the head at a position of a segment's bytes, which begin at the offset `first`; None if there is none.

    A copy of a log inside a body names another offset.
    """
    start = position + BLOCK_HEAD_BYTES
    if start > len(data) or data[position : position + 4] != BLOCK_MAGIC:
        return None
    if _CRC.unpack_from(data, start - _CRC.size)[0] != google_crc32c.value(data[position : start - _CRC.size]):
        return None
    _, kind, version, before, frames, size_bytes, offset, durable, at_ms = _BLOCK.unpack_from(data, position)
    if offset != first + position or durable > offset:
        return None
    return BlockHead(version, kind, frames, before, offset, durable, at_ms, start, start + size_bytes)


def last_head_in(data: bytes) -> BlockHead | None:
    """Returns the head of a segment's last block that has one, from the bytes behind the segment's head, whatever the
    offset is at which it says that the segment begins.

    From each head it goes on behind that block: so a copy of a log inside a body is passed over, and counts only where
    the body's own block, and all behind it, have lost their heads.
    """
    found: BlockHead | None = None
    position = 0
    while (position := data.find(BLOCK_MAGIC, position)) >= 0 and position + BLOCK_HEAD_BYTES <= len(data):
        head = block_head_at(data, position, first=int(_BLOCK.unpack_from(data, position)[6]) - position)
        found = found if head is None else head
        position = position + 1 if head is None else head.end
    return found


def read_run(data: bytes, position: int, *, kind: int, numbers: range) -> list[bytes]:
    """Returns the payloads of frames that stand one behind the other, each of this kind and its number.

    Raises FrameDamaged at the first one that is not whole, or is another one: an index that is wrong hands out nothing.
    """
    unpack, extend = _FRAME.unpack_from, google_crc32c.extend
    payloads: list[bytes] = []
    for expected in range((kind << KIND_SHIFT) + numbers.start, (kind << KIND_SHIFT) + numbers.stop):
        if position + FRAME_HEAD_BYTES > len(data):
            raise FrameDamaged(f"the bytes end at {len(data)}, before frame {expected & NUMBER_MAX}")
        length, check, mark = unpack(data, position)
        start = position + FRAME_HEAD_BYTES
        position = start + length
        payload = data[start:position]
        if mark != expected or len(payload) != length or extend(mark >> 32, payload) ^ check != mark & _LOWER_HALF:
            raise FrameDamaged(f"frame {expected & NUMBER_MAX} of kind {kind:#x} is damaged, or another one")
        payloads.append(payload)
    return payloads


def kind_at(data: bytes, position: int = 0) -> int:
    """Returns the kind that the frame at a position says, whole or not."""
    return data[position + FRAME_HEAD_BYTES - 1]


def number_at(data: bytes, position: int = 0) -> int:
    """Returns the number that the frame at a position says, whole or not."""
    return int(_FRAME.unpack_from(data, position)[2]) & NUMBER_MAX


def frame_bytes_at(data: bytes, position: int = 0) -> int:
    """Returns how long the frame at a position says that it is, with its head, whole or not."""
    return FRAME_HEAD_BYTES + int(_FRAME.unpack_from(data, position)[0])


def _frame_at(data: bytes, position: int, end: int) -> tuple[Frame, int] | None:
    """Returns the whole frame at a position, and where it ends."""
    start = position + FRAME_HEAD_BYTES
    if start > end:
        return None
    length, check, mark = _FRAME.unpack_from(data, position)
    behind = start + length
    if not 0 < length <= PAYLOAD_BYTES_MAX or behind > end or mark >> KIND_SHIFT not in _KINDS:
        return None
    payload = data[start:behind]
    if _check(mark, payload) != check:
        return None
    return Frame(mark >> KIND_SHIFT, mark & NUMBER_MAX, payload), behind


class Payloads(NamedTuple):
    """Payloads of whole blocks: where each begins and ends, and the mark of its frame: the number, and from the bit
    KIND_SHIFT on the kind; how many of them each block has, and when that was stored; where the last block ends.
    """

    begins: list[int]
    ends: list[int]
    marks: list[int]
    counts: list[int]
    times_ms: list[int]
    end: int

    def frames(self, data: bytes) -> Iterator[tuple[Frame, int]]:
        """Yields their frames, from the bytes in which they were found, and when each was stored."""
        times = chain.from_iterable(map(repeat, self.times_ms, self.counts))
        for begin, end, mark, at_ms in zip(self.begins, self.ends, self.marks, times, strict=True):
            yield Frame(mark >> KIND_SHIFT, mark & NUMBER_MAX, data[begin:end]), at_ms


def payloads_in(
    data: bytes, position: int, *, first: int, wanted: Container[int], frames_max: int, known: int = 0
) -> Payloads:
    """Returns the payloads of the wanted kinds in whole blocks, from the block at a position on: no object is made of a
    block or frame, for readers of millions.

    It stops before the first block that is not whole, and is told by scan() from there on; or behind the block that
    has the payload number `frames_max`. Blocks that end at or before the position `known` are passed over unread.
    """
    unpack, crc = _WHOLE_BLOCK.unpack_from, google_crc32c.value
    found = Payloads([], [], [], [], [], position)
    begins = found.begins
    while len(begins) < frames_max and position + BLOCK_HEAD_BYTES <= len(data):
        magic, _, version, _, frames, size_bytes, offset, durable, at_ms, check = unpack(data, position)
        start = position + BLOCK_HEAD_BYTES
        end = start + size_bytes
        is_head = magic == BLOCK_MAGIC and version == VERSION and durable <= offset == first + position
        if not is_head or end > len(data) or crc(data[position : start - _CRC.size]) != check:
            break
        before = len(begins)
        if end > known and not _take_payloads(data, start, end, frames, wanted, found):
            break
        found.counts.append(len(begins) - before)
        found.times_ms.append(at_ms)
        position = end
    return found._replace(end=position)


def _take_payloads(data: bytes, start: int, end: int, count: int, wanted: Container[int], found: Payloads) -> bool:
    """Add the payloads of a block that has `count` frames; returns False, with nothing added, if it is not whole."""
    unpack, extend = _FRAME.unpack_from, google_crc32c.extend
    begins, ends, marks = found.begins, found.ends, found.marks
    before, left = len(begins), count
    while start + FRAME_HEAD_BYTES <= end:
        length, check, mark = unpack(data, start)
        begin = start + FRAME_HEAD_BYTES
        start = begin + length
        if extend(mark >> 32, data[begin:start]) ^ check != mark & _LOWER_HALF or not length:
            break
        kind = mark >> KIND_SHIFT
        if kind in wanted:
            begins.append(begin)
            ends.append(start)
            marks.append(mark)
        elif kind not in _KINDS:
            break
        left -= 1
    if start == end and not left:
        return True
    del begins[before:], ends[before:], marks[before:]
    return False


# -- reading behind damage ---------------------------------------------------------------------------------------------


class Frames(NamedTuple):
    """The whole frames of a block, how many others it has, and where in the bytes each of the whole ones begins."""

    whole: list[Frame]
    damaged: int
    starts: list[int]


def frames_in(data: bytes, start: int, end: int, *, count: int) -> Frames:
    """Returns the whole frames of a block that has `count` of them.

    Behind a damaged one it goes on at the first byte from which whole frames, all that are left, lead to the block's
    end. Where there is none, several are damaged: it goes on by the damaged frame's own length, or else from where the
    most frames lead to the end.
    """
    whole: list[Frame] = []
    starts: list[int] = []
    position, passed = start, 0  # frames that were passed, whole or damaged
    while passed < count and position < end:
        found = _frame_at(data, position, end)
        passed += 1
        if found is not None:
            whole.append(found[0])
            starts.append(position)
            position = found[1]
            continue
        if position + FRAME_HEAD_BYTES > end:
            break
        rest = _frames_behind(data, position, end, most=count - passed)
        behind = position + FRAME_HEAD_BYTES + int(_FRAME.unpack_from(data, position)[0])
        if len(rest) == count - passed or _frame_at(data, behind, end) is None:
            whole += [frame for frame, _ in rest]
            starts += [begin for _, begin in rest]
            break
        position = behind
    return Frames(whole, count - len(whole), starts)


_Placed = tuple[Frame, int]
"""A frame, and where it begins."""


def _frames_behind(data: bytes, position: int, end: int, *, most: int) -> list[_Placed]:
    """Returns the frames behind a damaged one that lead to the block's end: all that are left, or the most of them.

    At each byte, not first by the damaged frame's own length: a damaged length can pass over the head of the next frame
    to a copy of a frame in its body, and the count would not tell. Of those that lead to the end with all that are left
    the first is the block's own: what begins in the damaged frame's body has more, and what begins in a later one's has
    passed over that.
    """
    counts = {end: 0}
    """From where whole frames lead to the end, how many; -1 where they do not. Each is walked once: else two damaged
    frames in a block of thousands, or one with a copy of a log in its body, would take minutes.
    """
    begin, longest, searched_bytes = end, 0, 0
    for candidate in _FRAME_MAY_BEGIN.finditer(data, position + FRAME_HEAD_BYTES + 1, end):
        searched_bytes += _count_frames(data, candidate.start(), end, counts)
        count = counts.get(candidate.start(), -1)
        if longest < count <= most:
            begin, longest = candidate.start(), count
        if longest == most or searched_bytes > SEARCHED_BYTES_MAX:
            break
    frames: list[_Placed] = []
    while begin < end and (found := _frame_at(data, begin, end)) is not None:
        frames.append((found[0], begin))
        begin = found[1]
    return frames


def _count_frames(data: bytes, position: int, end: int, counts: dict[int, int]) -> int:
    """Note how many whole frames lead from a position to the end. Returns what was spent on it, in bytes: a frame costs
    as much as _FRAME_COST_BYTES of its payload.
    """
    walked: list[int] = []
    begin = position
    while position not in counts:
        found = _frame_at(data, position, end)
        if found is None:
            break
        walked.append(position)
        position = found[1]
    count = counts.get(position, -1)
    for at in reversed(walked):
        count += count >= 0
        counts[at] = count
    length = int(_FRAME.unpack_from(data, position)[0]) if position + FRAME_HEAD_BYTES <= end else 0
    is_checked = position not in counts and position + FRAME_HEAD_BYTES + length <= end
    return position - begin + (length if is_checked else 0) + _FRAME_COST_BYTES * (len(walked) + 1)


def changes_of(frames: Iterable[Frame]) -> dict[int, bytes]:
    """Returns the changes of state in a block by number, each from whichever of its two copies is whole."""
    changes: dict[int, bytes] = {}
    for frame in frames:
        if frame.kind == FrameKind.CHANGE:
            changes.setdefault(frame.number & ~SECOND_COPY, frame.payload)
    return changes


# -- a segment as it was left ------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A block as it was found. `damaged`: how many of its frames are not whole; None if that is not known, as its head
    is damaged, too. `at_ms` is None without a head. `frames` are empty where they were not wanted; `starts`: where each
    of them begins.
    """

    kind: int | None
    at_ms: int | None
    frames: list[Frame]
    damaged: int | None
    starts: list[int]
    position: int
    end: int

    def moved(self, by: int) -> Block:
        """Returns the same, with places that count from elsewhere."""
        starts = [start + by for start in self.starts]
        return self._replace(position=self.position + by, end=self.end + by, starts=starts)


def scan(
    data: bytes, *, first: int, proven: int, same_boot: bool, wanted: Container[int] | None = None
) -> Iterator[Block]:
    """Yields the blocks of a segment that begins at the offset `first`, without its head; what follows the last one
    that is yielded is a torn tail, of which nothing was acknowledged, and is to be cut.

    `proven`: an offset up to which all is known to be durable (of a sealed segment, its end). `same_boot`: whether the
    machine has not been started anew since the segment was written: no page can be missing then, and only the last
    append can be cut short. Else pages of whatever no later head vouches for may be missing.
    `wanted`: the kinds of blocks whose frames are read; None for all. Those of which a page may be missing are read
    anyway.

    A body can hold a head for the very offset at which it stands, by one who knows that offset before. If such a body
    is in a torn tail, that head vouches for it: the tail is told as damage instead of being cut. Where the head of the
    block is damaged that holds the body, and the frame's as well, it is taken for a block.

    Raises SegmentRefused, naming the cure, at a block that a newer version wrote: where a block is due, and not where
    one is searched, since a body may hold a head of any version.
    """
    vouched_to = proven - first
    if vouched_to < len(data):  # a walk over all heads, which a segment that is proven as a whole does not need
        vouched_to = max(vouched_to, _last_durable(data, first=first) - first)
    position = 0
    while position < len(data):
        is_vouched = position < vouched_to
        head = block_head_at(data, position, first=first)
        if head is not None and head.version != VERSION:
            raise _newer(f"a block of format {head.version} at offset {head.offset}")
        if head is not None and head.end <= len(data):
            frames = Frames([], 0, [])
            if wanted is None or head.kind in wanted or not (is_vouched or same_boot):
                frames = frames_in(data, head.start, head.end, count=head.frames)
            if frames.damaged and not is_vouched and not same_boot:
                return  # a page is missing
            yield Block(head.kind, head.at_ms, *frames, position=position, end=head.end)
            position = head.end
            continue
        if not is_vouched and (head is not None or not same_boot):
            return  # the last append was cut short, or a page is missing
        headless = _headless(data, position, first=first, is_vouched=is_vouched)
        if headless is None:
            return
        if head is not None and headless.end == len(data):
            # It was durable as a whole, and the file ends before: what comes is behind where it ended, or the next who
            # reads it would take the beginning of the next block for a part of this one.
            headless = headless._replace(end=head.end)
        yield headless
        position = headless.end


def _headless(data: bytes, position: int, *, first: int, is_vouched: bool) -> Block | None:
    """Returns a block whose head is damaged, or that the file cuts though it was durable; None for the last append,
    which was cut short. Its frames lead to the next head, which counts them, or to the end of the file.
    """
    frames: list[Frame] = []
    starts: list[int] = []
    start = behind = position + BLOCK_HEAD_BYTES
    while (found := _frame_at(data, behind, len(data))) is not None:
        frames.append(found[0])
        starts.append(behind)
        behind = found[1]
    if frames and (behind == len(data) or block_head_at(data, behind, first=first) is not None):
        return Block(frames[0].kind, None, frames, 0, starts, position=position, end=behind)
    following = _next_head(data, max(behind, position + 1), first=first)
    if following is not None:
        end = following.start - BLOCK_HEAD_BYTES
        found_frames = frames_in(data, start, end, count=following.frames_before)
        kind = found_frames.whole[0].kind if found_frames.whole else None
        return Block(kind, None, *found_frames, position=position, end=end)
    if not is_vouched:
        return None
    return Block(frames[0].kind if frames else None, None, frames, None, starts, position=position, end=len(data))


def _next_head(data: bytes, position: int, *, first: int) -> BlockHead | None:
    """Returns the first whole head at or behind a position."""
    while (position := data.find(BLOCK_MAGIC, position)) >= 0:
        if (head := block_head_at(data, position, first=first)) is not None:
            return head
        position += 1
    return None


def _last_durable(data: bytes, *, first: int) -> int:
    """Returns the offset up to which a whole head says that the log is durable.

    From block to block, so that a head inside a body is passed over: one that says less than the block before would
    make what was acknowledged a torn tail.
    """
    durable = position = 0
    while (head := _next_head(data, position, first=first)) is not None:
        durable = max(durable, head.durable)
        position = head.end
    return durable
