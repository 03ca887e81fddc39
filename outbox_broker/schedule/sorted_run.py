"""A run: up to a thousand scheduled messages in order of due time, then arrival, in a segment of a bucket.

Three records: the columns (due times, arrival numbers, topics), which suffice for listing, search and dispatch order;
the messages themselves; and the spare, for recovery if one of these is damaged: a copy of the columns, and the location
and checksum of each message in the messages record. Without it a flipped bit costs the 1,000 messages of a run; with it
at most one, for 32 bytes a message. It is read only if one of the other two does not match its checksum.
A run is immutable: dispatched or moved messages are a count of its first entries, canceled ones a bit each, and both
are in the log. No I/O.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate
from operator import attrgetter
from typing import Final, NamedTuple

import google_crc32c
import msgspec

from outbox_broker.common.integer_array_encoding import from_bytes, to_bytes
from outbox_broker.segments.port import FramePlace

RUN_MESSAGES_MAX: Final = 1_000
RECORDS: Final = 3
"""Of a run: columns, messages, spare."""
RUN_BYTES_MAX: Final = 256 * 1024
"""A run ends after the message that reaches this size, so one message may exceed it."""


class TimedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message as scheduled by a caller. `payload` is opaque, and returned unchanged."""

    due_ms: int
    id: str
    topic: str
    payload: bytes


class Entry(msgspec.Struct, array_like=True, frozen=True, order=True, gc=False):
    """A message in memory: sorts by due time, then arrival number, which is unique. Not garbage-collected."""

    due_ms: int
    seq: int
    id: str
    topic: str
    payload: bytes

    @property
    def key(self) -> tuple[int, int]:
        """The sort key."""
        return self.due_ms, self.seq


DUE: Final = attrgetter("due_ms")
SEQ: Final = attrgetter("seq")
ID: Final = attrgetter("id")
TOPIC: Final = attrgetter("topic")
PAYLOAD: Final = attrgetter("payload")


def id_hashes(ids: Iterable[str]) -> list[int]:
    """Returns 64 bits of each id: two checksums combined. Fast, not unique: verify a match by the id itself."""
    data = list(map(str.encode, ids))
    return [high << 32 | low for high, low in zip(map(zlib.crc32, data), map(google_crc32c.value, data), strict=True)]


@lru_cache(maxsize=65_536)
def topic_hash(topic: str) -> int:
    """Returns 64 bits of a topic's name. Unlike the id's hash it is collision-resistant: so no id can be crafted for
    one topic that passes for a message of another.
    """
    return int.from_bytes(sha256(topic.encode()).digest()[:8])


class SortedRun(msgspec.Struct, array_like=True, eq=False):
    """The metadata of a run, in memory and in the log's checkpoint.

    Its records are frames of `segment`, numbered by numbers_of(). `taken` entries from its start were dispatched or
    moved on; `gone` has a bit for each canceled one, if any, and for those dispatched while the run was written, which
    `fired` marks, and for damaged ones, which `lost` marks.
    """

    id: int
    position: int
    columns_bytes: int
    messages_position: int
    messages_bytes: int
    count: int
    first_due_ms: int
    first_seq: int
    last_due_ms: int
    last_seq: int
    taken: int = 0
    gone: bytearray | None = None
    topic: str | None = None  # set if all of it is of one topic, which has very many messages
    fired: bytearray | None = None  # bits, since due times cannot tell: the clock may have been set back
    lost: bytearray | None = None
    spare_position: int = 0
    spare_bytes: int = 0
    is_unreadable: bool = False  # nothing of it can be verified
    segment: str = ""

    def columns_place(self) -> FramePlace:
        """Where the columns are."""
        return self._place(self.position, self.columns_bytes, number=0)

    def messages_place(self) -> FramePlace:
        """Where the messages are."""
        return self._place(self.messages_position, self.messages_bytes, number=1)

    def spare_place(self) -> FramePlace:
        """Where the spare is."""
        return self._place(self.spare_position, self.spare_bytes, number=2)

    def _place(self, position: int, size_bytes: int, *, number: int) -> FramePlace:
        return FramePlace(
            segment=self.segment, position=position, size_bytes=size_bytes, number=numbers_of(self.id)[number]
        )

    def may_hold(self, key: tuple[int, int]) -> bool:
        """Returns whether a (due, seq) is within the run's bounds."""
        return (self.first_due_ms, self.first_seq) <= key <= (self.last_due_ms, self.last_seq)

    def waiting(self) -> int:
        """Returns how many entries are neither taken nor gone."""
        gone = int.from_bytes(self.gone or b"", "little") >> self.taken
        return self.count - self.taken - gone.bit_count()

    def is_gone(self, index: int) -> bool:
        """Returns whether an entry was canceled, or dispatched before it was written here."""
        return is_marked(self.gone, index)

    def has_fired(self, index: int) -> bool:
        """Returns whether an entry was dispatched before it was written here."""
        return is_marked(self.fired, index)

    def is_lost(self, index: int) -> bool:
        """Returns whether an entry is damaged, and so never dispatched."""
        return is_marked(self.lost, index)

    def mark_lost(self, index: int) -> None:
        """Exclude an entry because it cannot be verified."""
        self.gone = _marked(self.gone, index, count=self.count)
        self.lost = _marked(self.lost, index, count=self.count)

    def lost_count(self) -> int:
        """Returns how many entries are lost."""
        return 0 if self.lost is None else int.from_bytes(self.lost).bit_count()

    def mark_gone(self, index: int) -> None:
        """Exclude an entry."""
        self.gone = _marked(self.gone, index, count=self.count)

    def mark_fired(self, index: int) -> None:
        """Mark an entry that is gone as dispatched; the others that are gone were canceled."""
        self.fired = _marked(self.fired, index, count=self.count)


def numbers_of(run_id: int) -> range:
    """Returns the numbers of the frames of a run's three records: those of consecutive runs follow each other."""
    return range(RECORDS * run_id, RECORDS * (run_id + 1))


def is_marked(marks: bytes | bytearray | None, index: int) -> bool:
    """Returns whether an entry's bit is set."""
    return marks is not None and bool(marks[index >> 3] & 1 << (index & 7))


def _marked(marks: bytearray | None, index: int, *, count: int) -> bytearray:
    marks = bytearray((count + 7) // 8) if marks is None else marks
    marks[index >> 3] |= 1 << (index & 7)
    return marks


class Columns(NamedTuple):
    """A run without its messages: parallel arrays, sorted by (due, seq). `topic` has indexes into `topics`."""

    due: array[int]
    seq: array[int]
    topic: array[int]
    topics: list[str]

    def index_of(self, due_ms: int, seq: int) -> int | None:
        """Returns the index of an entry; None if it is not in this run."""
        index = self.first_not_before((due_ms, seq), start=0)
        found = index < len(self.due) and self.due[index] == due_ms and self.seq[index] == seq
        return index if found else None

    def first_not_before(self, key: tuple[int, int], *, start: int) -> int:
        """Returns the first index from `start` on whose (due, seq) is not below the key."""
        due_ms, seq = key
        low = bisect_left(self.due, due_ms, start)
        high = bisect_left(self.due, due_ms + 1, low)
        return bisect_left(self.seq, seq, low, high)


def topic_number(columns: Columns, topic: str) -> int | None:
    """Returns the number of a topic's name in a run; None if the run has none of its messages."""
    return columns.topics.index(topic) if topic in columns.topics else None


class StoredColumns(msgspec.Struct, array_like=True, frozen=True):
    """Columns as bytes, little-endian."""

    due: bytes
    seq: bytes
    topic: bytes
    topics: list[str]


class StoredRun(msgspec.Struct, array_like=True, frozen=True):
    """The messages of a run in stored form: parallel lists."""

    ids: list[str]
    payloads: list[bytes]


_encode = msgspec.msgpack.Encoder().encode
_decode_columns = msgspec.msgpack.Decoder(StoredColumns).decode
decode_messages = msgspec.msgpack.Decoder(StoredRun).decode


def cut(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Cuts sorted entries into pieces of a run's size."""
    ends = list(accumulate(len(payload) + 64 for payload in map(PAYLOAD, entries)))
    start = before = 0
    while start < len(entries):
        full = bisect_left(ends, before + RUN_BYTES_MAX, start) + 1  # after the one that reaches the limit
        stop = min(full, start + RUN_MESSAGES_MAX, len(entries))
        yield entries[start:stop]
        start, before = stop, ends[stop - 1]


def encode_run(entries: Sequence[Entry], columns: StoredColumns) -> tuple[bytes, bytes]:
    """Encode the first two records of a run; `entries` are sorted, and have these columns."""
    return _encode(columns), _encode(StoredRun(list(map(ID, entries)), list(map(PAYLOAD, entries))))


def stored_columns(entries: Sequence[Entry]) -> StoredColumns:
    """Returns the columns of entries in stored form."""
    topics = list(map(TOPIC, entries))
    numbers = {topic: topic_number for topic_number, topic in enumerate(dict.fromkeys(topics))}
    return StoredColumns(
        due=to_bytes(array("Q", map(DUE, entries))),
        seq=to_bytes(array("Q", map(SEQ, entries))),
        topic=to_bytes(array("I", map(numbers.__getitem__, topics))),
        topics=list(numbers),
    )


def decode_columns(data: bytes) -> Columns:
    """Decode the columns of a run from their record."""
    stored = _decode_columns(data)
    return Columns(
        from_bytes("Q", stored.due), from_bytes("Q", stored.seq), from_bytes("I", stored.topic), stored.topics
    )


def new_entries(batch: Sequence[TimedMessage], *, first_seq: int) -> list[Entry]:
    """Returns arriving messages as entries, numbered in order of arrival. A due time before 1970 becomes 1970."""
    return [
        Entry(max(0, message.due_ms), seq, message.id, message.topic, message.payload)
        for seq, message in enumerate(batch, first_seq)
    ]  # fmt: skip


# -- the spare ---------------------------------------------------------------------------------------------------------

_LOST: Final = b""
_FIXED_MAX: Final = 15
_STR_HEADS: Final = ((31, 1), (0xFF, 2), (0xFFFF, 3))
_BYTES_HEADS: Final = ((0xFF, 2), (0xFFFF, 3))
_LONGEST_HEAD: Final = 5
"""Size of the MessagePack header before a text or bytes, by their maximum length."""


class _Spare(msgspec.Struct, array_like=True, frozen=True):
    due: bytes
    seq: bytes
    topic: bytes
    topics: list[str]
    id_bytes: bytes
    payload_bytes: bytes
    checks: bytes


_decode_spare = msgspec.msgpack.Decoder(_Spare).decode


def encode_spare(entries: Sequence[Entry], columns: StoredColumns) -> bytes:
    """Encode the spare of a run; `entries` are sorted, and match these columns."""
    ids, payloads = list(map(str.encode, map(ID, entries))), list(map(PAYLOAD, entries))
    return _encode(
        _Spare(
            columns.due, columns.seq, columns.topic, columns.topics,
            to_bytes(array("I", map(len, ids))), to_bytes(array("I", map(len, payloads))),
            to_bytes(array("I", _checks(ids, payloads))),
        )
    )  # fmt: skip


class Spare:
    """The decoded spare of a run."""

    def __init__(self, data: bytes) -> None:
        self._stored = _decode_spare(data)

    def columns(self) -> Columns:
        """Returns the columns of the run, as in its first record."""
        stored = self._stored
        return Columns(
            from_bytes("Q", stored.due), from_bytes("Q", stored.seq), from_bytes("I", stored.topic), stored.topics
        )

    def salvage(self, data: bytes) -> tuple[StoredRun, list[int]]:
        """Returns the messages of a damaged record, and the indexes of the lost ones, which are empty in it."""
        # Positions come from sizes, not from decoding: flipped bytes may have changed the record's structure.
        id_sizes, sizes = from_bytes("I", self._stored.id_bytes), from_bytes("I", self._stored.payload_bytes)
        start = 1 + _array_head(len(sizes))
        ids = list(_cut(data, id_sizes, _STR_HEADS, start=start))
        start += sum(id_sizes) + sum(_head(size, _STR_HEADS) for size in id_sizes) + _array_head(len(sizes))
        payloads = list(_cut(data, sizes, _BYTES_HEADS, start=start))
        checks = from_bytes("I", self._stored.checks)
        lost = [at for at, check in enumerate(_checks(ids, payloads)) if check != checks[at]]
        for at in lost:
            ids[at] = payloads[at] = _LOST
        return StoredRun(list(map(bytes.decode, ids)), payloads), lost


def _checks(ids: Sequence[bytes], payloads: Sequence[bytes]) -> Iterator[int]:
    return map(google_crc32c.extend, map(google_crc32c.value, payloads), ids)


def _cut(data: bytes, sizes: Sequence[int], heads: Sequence[tuple[int, int]], *, start: int) -> Iterator[bytes]:
    """Yields consecutive values, skipping the header of each."""
    ends = accumulate((_head(size, heads) + size for size in sizes), initial=start)
    next(ends)
    for end, size in zip(ends, sizes, strict=True):
        yield data[end - size : end]


def _head(size: int, heads: Sequence[tuple[int, int]]) -> int:
    return next((head for size_max, head in heads if size <= size_max), _LONGEST_HEAD)


def _array_head(count: int) -> int:
    return 1 if count <= _FIXED_MAX else 3  # a run has at most 65,535 messages
