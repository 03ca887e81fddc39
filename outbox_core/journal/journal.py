"""The file format of the broker's logs: segments, frames, and the records of messages and actions.

The broker writes these files and the reconciliation reads them in place, so both import their shapes from here.

A segment is a file `<first offset, 20 digits>.log`: a 32-byte header, then frames. An offset is a byte position in
the log as if headers did not exist and all segments were one file.

    header   magic 8s "OUTBOXMQ" | version u16 | kind u16 | first offset u64 | created_at_ms u64 | crc32c u32
    frame    payload length u32 | crc32c of the payload u32 | payload (MessagePack)

All integers are little-endian. CRC-32C is what other systems' tools expect, by a C library with wheels for every Python
that is supported. A payload is one record of this module, written as an array, not a batch: that would save 0.26 us a
message written and 0.35 us read, but a flipped bit would cost the batch, and a pull of one message would read all of
it. The first element of an action is its tag. Records are only ever added to: a new field goes last and has a default.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import Final, Literal

import google_crc32c
import msgspec

from outbox_core.common.errors import OutboxError
from outbox_core.journal import frame_search
from outbox_core.journal.dead_letter_records import Discarded
from outbox_core.journal.deletion_records import DeletedGroup, DeletedTopic, PurgedTopic
from outbox_core.journal.order_records import Filed

MAGIC: Final = b"OUTBOXMQ"
VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sHHQQ")
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size
FRAME_BYTES: Final = frame_search.FRAME_BYTES
RECORD_BYTES_MAX: Final = frame_search.RECORD_BYTES_MAX
"""The limit of a frame's payload: a greater length is damage, not a record, and no memory is allocated for it."""


class SegmentKind(IntEnum):
    """Whether a segment holds message records or action records."""

    MESSAGES = 1
    ACTIONS = 2


Copy = Literal[0, 1, 2, 3]
"""The kind of a message record: 0 a message as published; 1 a scheduled message, written with its sequence when it
fell due; 2 a message that was canceled before it was published, so that it is neither scheduled nor given a sequence;
3 a schedule marker: its body is the SHA-256 of the message's and its headers are left out, since both are in the
schedule until the message is due.
"""
PUBLISHED: Final = 0
FIRED_COPY: Final = 1
DEAD_ON_ARRIVAL: Final = 2
SCHEDULED: Final = 3


class MessageRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False):
    """A stored message. `sequence` is its number in its topic, from 0; None while it is scheduled (see Fired)."""

    sequence: int | None
    id: str
    topic: str
    key: str | None
    headers: dict[str, str]
    body: bytes
    created_at_ms: int
    stored_at_ms: int
    deliver_at_ms: int | None = None
    copy: Copy = 0


class Fired(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="fired"):
    """Scheduled messages fell due and got their sequences in the topic: entries are (sequence, message id)."""

    topic: str
    at_ms: int
    entries: list[tuple[int, str]]


class Canceled(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="canceled"):
    """Scheduled messages were canceled. `topics` has the topic of each.

    A topic is empty if its id is still unknown: a later publish of it to a topic of `scope` (patterns; None: all) is
    canceled on arrival.
    """

    at_ms: int
    ids: list[str]
    messages_end: int | None = None
    """The end of the message log at that time: a message published after it under the same id is another one."""
    topics: list[str]
    scope: tuple[str, ...] | None = None


class Declared(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="declared"):
    """A consumer group was created (`position`: the first sequence it will receive) or its settings were changed."""

    topic: str
    group: str
    at_ms: int
    position: int
    settings: dict[str, str | int | float | bool | None]
    is_new: bool = False  # created: no state of an earlier group of this name applies


class Requeued(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="requeued"):
    """Deliveries were nacked: they become visible again at their `visible_at_ms`; entries are (first sequence, count,
    visible_at_ms, attempts used). `expired`: their invisible time ran out, and the next delivery is put off.
    """

    topic: str
    group: str
    at_ms: int
    entries: list[tuple[int, int, int, int]]
    reason: str | None = None
    expired: bool = False


class Extended(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="extended"):
    """Invisible times were extended: entries are (first sequence, count)."""

    topic: str
    group: str
    at_ms: int
    visible_at_ms: int
    entries: list[tuple[int, int]]
    begun: bool = False
    """Whether their consumer said that it begins to handle them."""


class Died(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="died"):
    """Messages became dead letters of a group: entries are (first sequence, count, attempts).

    `expired`: because their last invisible time expired; `reason` may be that of an earlier attempt.
    """

    topic: str
    group: str
    at_ms: int
    entries: list[tuple[int, int, int]]
    reason: str
    expired: bool = False


class Redriven(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="redriven"):
    """Dead letters were redriven, `per_second` a second (None: at once); entries are (first sequence, count)."""

    topic: str
    group: str
    at_ms: int
    entries: list[tuple[int, int]]
    per_second: int | None = None
    pace: tuple[int, int] = (0, 0)  # the state of the group's rate limit before this redrive, see RateLimit


class Sought(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="sought"):
    """A group was moved to a sequence; receipts of earlier generations are stale."""

    topic: str
    group: str
    at_ms: int
    position: int
    generation: int


class Paused(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="paused"):
    """Deliveries to a group were paused or resumed."""

    topic: str
    group: str
    at_ms: int
    paused: bool


class HandedRun(msgspec.Struct, array_like=True, frozen=True):
    """`count` messages with consecutive sequences from `first` on, delivered with equal attributes.

    Their ids are in the message log. Here they took 33 bytes a message in each record: 100 groups made a topic's folder
    6.5 times as large, not 1.05 times.
    """

    first: int
    count: int
    delivery: int
    attempt: int


class Handed(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="handed"):
    """Messages were delivered to a consumer, by runs."""

    topic: str
    group: str
    at_ms: int
    visible_at_ms: int
    runs: list[HandedRun]
    consumer: str | None = None
    begins: bool = False
    """Whether the consumer says, of messages that it gets again, when it begins to handle them."""


class Settled(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="settled"):
    """Deliveries were settled, by runs of (first sequence, count)."""

    topic: str
    group: str
    at_ms: int
    runs: list[tuple[int, int]]


class Opened(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="opened"):
    """The broker opened its folder for the `number`-th time: earlier delivery numbers are never used again."""

    at_ms: int
    number: int


class Dropped(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="dropped"):
    """Retention was configured to drop messages that a group had not settled: all below `position` are dropped."""

    topic: str
    group: str
    at_ms: int
    position: int


Action = (
    Fired | Canceled | Declared | Requeued | Extended | Died | Redriven | Sought | Paused
    | Opened | Dropped | Filed | Handed | Settled | DeletedGroup | DeletedTopic | PurgedTopic
    | Discarded
)  # fmt: skip

encode_record = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(MessageRecord).decode
decode_action = msgspec.msgpack.Decoder(Action).decode


class SegmentDamaged(OutboxError):
    """A frame in a segment's middle, or its header, does not match its checksum: a flipped bit, not a torn tail.

    A retry cannot help: the file must be restored from a copy.
    """


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first 32 bytes of a segment."""

    kind: SegmentKind
    first_offset: int
    created_at_ms: int

    def encode(self) -> bytes:
        head = _HEADER.pack(MAGIC, VERSION, self.kind, self.first_offset, self.created_at_ms)
        return head + _CRC.pack(google_crc32c.value(head))

    @staticmethod
    def decode(data: bytes) -> SegmentHeader:
        """Raises SegmentDamaged if these are not the first bytes of a segment that this version can read."""
        if len(data) < HEADER_BYTES:
            raise SegmentDamaged("the file is shorter than a segment's header")
        magic, version, kind, first_offset, created_at_ms = _HEADER.unpack_from(data)
        (crc,) = _CRC.unpack_from(data, _HEADER.size)
        if magic != MAGIC or crc != google_crc32c.value(data[: _HEADER.size]):
            raise SegmentDamaged("the segment's header does not match its checksum")
        if version != VERSION:
            raise SegmentDamaged(
                f"the segment has version {version}; this code reads version {VERSION}: drain it with the version that "
                "wrote it, and begin with a new data folder"
            )
        return SegmentHeader(kind=SegmentKind(kind), first_offset=first_offset, created_at_ms=created_at_ms)


def frame(payload: bytes) -> bytes:
    """Returns a payload with its frame header, as a segment holds it."""
    return frame_search.FRAME.pack(len(payload), google_crc32c.value(payload)) + payload


def frames(payloads: Sequence[bytes]) -> tuple[bytes, list[int]]:
    """Returns payloads with their frame headers, concatenated, and the length of each frame."""
    sizes = list(map(len, payloads))
    heads = map(frame_search.FRAME.pack, sizes, map(google_crc32c.value, payloads))
    return b"".join(chain.from_iterable(zip(heads, payloads, strict=True))), [FRAME_BYTES + size for size in sizes]


@dataclass(frozen=True, slots=True)
class Frame:
    """A payload read from a segment, and the log offset of its frame."""

    offset: int
    payload: bytes

    @property
    def end(self) -> int:
        """Returns the offset of this frame's end."""
        return self.offset + FRAME_BYTES + len(self.payload)


def read_frames(data: bytes | memoryview, *, first_offset: int) -> Iterator[Frame]:
    """Yield the frames of a segment's bytes after its header, up to a torn tail.

    A tail is torn if the last frame is cut short or fails its checksum, and no whole frame follows it.
    Raises SegmentDamaged if a frame that others follow fails its checksum.
    """
    view = memoryview(data)
    position = 0
    while len(view) - position >= FRAME_BYTES:
        length, crc = frame_search.FRAME.unpack_from(view, position)
        start = position + FRAME_BYTES
        if length == 0 or length > RECORD_BYTES_MAX or start + length > len(view):
            if frame_search.next_frame_behind(view, position) is not None:
                raise SegmentDamaged(f"damaged frame length at offset {first_offset + position}")
            return
        payload = bytes(view[start : start + length])
        if google_crc32c.value(payload) != crc:
            if frame_search.next_frame_behind(view, position) is not None:
                raise SegmentDamaged(f"damaged record at offset {first_offset + position}")
            return
        yield Frame(first_offset + position, payload)
        position = start + length


def segment_path(folder: Path, first_offset: int) -> Path:
    """Returns the path of the segment that begins at this offset."""
    return folder / f"{first_offset:020d}.log"


def segment_paths(folder: Path) -> list[Path]:
    """Returns the paths of all segments of a log, in order of their first offsets."""
    return sorted(path for path in folder.glob("*.log") if path.stem.isdigit() and len(path.stem) == 20)


def read_segment(path: Path) -> tuple[SegmentHeader, Iterator[Frame]]:
    """Returns a segment's header and its frames. Raises SegmentDamaged (also while the frames are read)."""
    data = path.read_bytes()
    header = SegmentHeader.decode(data[:HEADER_BYTES])
    return header, read_frames(memoryview(data)[HEADER_BYTES:], first_offset=header.first_offset)
