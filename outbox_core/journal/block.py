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
_FRAME: Final = struct.Struct("<IIQ")
_CRC: Final = struct.Struct("<I")
SEGMENT_HEAD_BYTES: Final = _SEGMENT.size + _CRC.size
BLOCK_HEAD_BYTES: Final = _BLOCK.size + _CRC.size
FRAME_HEAD_BYTES: Final = _FRAME.size
_LOWER_HALF: Final = 0xFFFF_FFFF
_KIND_SHIFT: Final = 56
_NUMBER: Final = (1 << _KIND_SHIFT) - 1
SEARCHED_BYTES_MAX: Final = 256 * 1024 * 1024
"""So many bytes are checked in a search for whole frames behind a damaged one, about a second; no limit would let a
block of 4 MiB that looks like frames at each byte take minutes.
"""
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
    TIMED = 0x44
    """A message with a due time, in its topic; its sequence there."""
    CHANGE = 0x55
    """A change of state, in two frames; its number in the block, and the same plus SECOND_COPY."""
    CANCELED = 0x66
    """A message that was canceled before it came; 0."""
    RECORD = 0x77
    """A part of a bucket, or of the id index, that a record of the log names; a number that it names, too."""
    CHECKPOINT = 0x99
    """A part of a checkpoint; the number of the part, and that of the last one plus LAST_PART."""


_KINDS: Final = frozenset(FrameKind)
_SEGMENT_KINDS: Final = frozenset(SegmentKind)
_FRAME_MAY_BEGIN: Final = re.compile(rb"(?s)(?=...[\x00-\x08].{11}[\x11\x22\x33\x44\x55\x66\x77\x99])")
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

    def extend(self, other: Framed) -> None:
        """Append frames of any kind; the block's kind stays that of its first frame."""
        self.heads += other.heads
        self.payloads += other.payloads
        self.size_bytes += other.size_bytes


def framed(kind: FrameKind, numbers: range, payloads: Sequence[bytes]) -> Framed:
    """Returns frames of one kind, with the number of each of the payloads."""
    lengths = list(map(len, payloads))
    marks = range((kind << _KIND_SHIFT) + numbers.start, (kind << _KIND_SHIFT) + numbers.stop)
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


def read_run(data: bytes, position: int, *, kind: FrameKind, numbers: range) -> list[bytes]:
    """Returns the payloads of frames that stand one behind the other, each of this kind and its number.

    Raises FrameDamaged at the first one that is not whole, or is another one: an index that is wrong hands out nothing.
    """
    unpack, extend = _FRAME.unpack_from, google_crc32c.extend
    payloads: list[bytes] = []
    for expected in range((kind << _KIND_SHIFT) + numbers.start, (kind << _KIND_SHIFT) + numbers.stop):
        if position + FRAME_HEAD_BYTES > len(data):
            raise FrameDamaged(f"the bytes end at {len(data)}, before frame {expected & _NUMBER}")
        length, check, mark = unpack(data, position)
        start = position + FRAME_HEAD_BYTES
        position = start + length
        payload = data[start:position]
        if mark != expected or len(payload) != length or extend(mark >> 32, payload) ^ check != mark & _LOWER_HALF:
            raise FrameDamaged(f"frame {expected & _NUMBER} of kind {kind:#x} is damaged, or another one")
        payloads.append(payload)
    return payloads


def _frame_at(data: bytes, position: int, end: int) -> tuple[Frame, int] | None:
    """Returns the whole frame at a position, and where it ends."""
    start = position + FRAME_HEAD_BYTES
    if start > end:
        return None
    length, check, mark = _FRAME.unpack_from(data, position)
    behind = start + length
    if not 0 < length <= PAYLOAD_BYTES_MAX or behind > end or mark >> _KIND_SHIFT not in _KINDS:
        return None
    payload = data[start:behind]
    if _check(mark, payload) != check:
        return None
    return Frame(mark >> _KIND_SHIFT, mark & _NUMBER, payload), behind


# -- reading behind damage ---------------------------------------------------------------------------------------------


class Frames(NamedTuple):
    """The whole frames of a block, and how many others it has."""

    whole: list[Frame]
    damaged: int


def frames_in(data: bytes, start: int, end: int, *, count: int) -> Frames:
    """Returns the whole frames of a block that has `count` of them.

    Behind a damaged one it goes on at the first byte from which whole frames, all that are left, lead to the block's
    end. Where there is none, several are damaged: it goes on by the damaged frame's own length, or else from where the
    most frames lead to the end.
    """
    whole: list[Frame] = []
    position, passed = start, 0  # frames that were passed, whole or damaged
    while passed < count and position < end:
        found = _frame_at(data, position, end)
        passed += 1
        if found is not None:
            whole.append(found[0])
            position = found[1]
            continue
        if position + FRAME_HEAD_BYTES > end:
            break
        rest = _frames_behind(data, position, end, most=count - passed)
        behind = position + FRAME_HEAD_BYTES + int(_FRAME.unpack_from(data, position)[0])
        if len(rest) == count - passed or _frame_at(data, behind, end) is None:
            whole += rest
            break
        position = behind
    return Frames(whole, count - len(whole))


def _frames_behind(data: bytes, position: int, end: int, *, most: int) -> list[Frame]:
    """Returns the frames behind a damaged one that lead to the block's end: all that are left, or the most of them.

    At each byte, not first by the damaged frame's own length: a damaged length can pass over the head of the next frame
    to a copy of a frame in its body, and the count would not tell. Of those that lead to the end with all that are left
    the first is the block's own: what begins in the damaged frame's body has more, and what begins in a later one's has
    passed over that.
    """
    longest: list[Frame] = []
    searched_bytes = 0
    for candidate in _FRAME_MAY_BEGIN.finditer(data, position + FRAME_HEAD_BYTES + 1, end):
        frames = _frames_to(data, candidate.start(), end, most=most)
        if len(frames) > len(longest):
            longest = frames
        length = int(_FRAME.unpack_from(data, candidate.start())[0])
        searched_bytes += length if candidate.start() + FRAME_HEAD_BYTES + length <= end else 0
        if len(longest) == most or searched_bytes > SEARCHED_BYTES_MAX:
            break
    return longest


def _frames_to(data: bytes, position: int, end: int, *, most: int) -> list[Frame]:
    """Returns the whole frames from a position on, if they lead to the end and are not too many; else none."""
    frames: list[Frame] = []
    while position < end:
        if len(frames) == most or (found := _frame_at(data, position, end)) is None:
            return []
        frames.append(found[0])
        position = found[1]
    return frames if position == end else []


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
    is damaged, too. `at_ms` is None without a head. `frames` are empty where they were not wanted.
    """

    kind: int | None
    at_ms: int | None
    frames: list[Frame]
    damaged: int | None
    position: int
    end: int


def scan(
    data: bytes, *, first: int, proven: int, same_boot: bool, wanted: Container[int] | None = None
) -> Iterator[Block]:
    """Yields the blocks of a segment that begins at the offset `first`, without its head; what follows the last one
    that is yielded is a torn tail, of which nothing was acknowledged, and is to be cut.

    `proven`: an offset up to which all is known to be durable (of a sealed segment, its end). `same_boot`: whether the
    machine has not been started anew since the segment was written: no page can be missing then, and only the last
    append can be cut short. Else pages of whatever no later head vouches for may be missing.
    `wanted`: the kinds of blocks whose frames are read; None for all. Those for which nothing vouches are read anyway.

    A body can hold a head for the very offset at which it stands, by one who knows that offset before. If such a body
    is in a torn tail, that head vouches for it: the tail is told as damage instead of being cut. Nothing else follows.

    Raises SegmentRefused, naming the cure, at a block that a newer version wrote: where a block is due, and not where
    one is searched, since a body may hold a head of any version.
    """
    vouched_to = max(proven, _last_durable(data, first=first)) - first
    position = 0
    while position < len(data):
        is_vouched = position < vouched_to
        head = block_head_at(data, position, first=first)
        if head is not None and head.version != VERSION:
            raise _newer(f"a block of format {head.version} at offset {head.offset}")
        if head is not None and head.end <= len(data):
            frames = Frames([], 0)
            if wanted is None or head.kind in wanted or not is_vouched:
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
        yield headless
        position = headless.end


def _headless(data: bytes, position: int, *, first: int, is_vouched: bool) -> Block | None:
    """Returns a block whose head is damaged, or that the file cuts though it was durable; None for the last append,
    which was cut short. Its frames lead to the next head, which counts them, or to the end of the file.
    """
    frames: list[Frame] = []
    start = behind = position + BLOCK_HEAD_BYTES
    while (found := _frame_at(data, behind, len(data))) is not None:
        frames.append(found[0])
        behind = found[1]
    if frames and (behind == len(data) or block_head_at(data, behind, first=first) is not None):
        return Block(frames[0].kind, None, frames, 0, position=position, end=behind)
    following = _next_head(data, max(behind, position + 1), first=first)
    if following is not None:
        end = following.start - BLOCK_HEAD_BYTES
        found_frames = frames_in(data, start, end, count=following.frames_before)
        kind = found_frames.whole[0].kind if found_frames.whole else None
        return Block(kind, None, *found_frames, position=position, end=end)
    if not is_vouched:
        return None
    return Block(frames[0].kind if frames else None, None, frames, None, position=position, end=len(data))


def _next_head(data: bytes, position: int, *, first: int) -> BlockHead | None:
    """Returns the first whole head at or behind a position."""
    while (position := data.find(BLOCK_MAGIC, position)) >= 0:
        if (head := block_head_at(data, position, first=first)) is not None:
            return head
        position += 1
    return None


def _last_durable(data: bytes, *, first: int) -> int:
    """Returns the offset up to which the last whole head says that the log is durable; they only grow."""
    position = len(data)
    while (position := data.rfind(BLOCK_MAGIC, 0, position)) >= 0:
        if (head := block_head_at(data, position, first=first)) is not None:
            return head.durable
    return 0
