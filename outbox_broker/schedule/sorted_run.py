"""A run: up to a thousand scheduled messages in order of due time, then arrival, as one piece of a bucket's segment.

Three records: the columns (due times, arrivals, topics), which are all that listing, search and firing order need; then
the messages themselves; then the spare (salvage), for when one of these is damaged. A run is never changed: what was
fired or moved on is a count of its first entries, what was canceled a bit each, and both stand in the log.
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

from outbox_broker.common.integer_columns import from_bytes, to_bytes

RUN_MESSAGES_MAX: Final = 1_000
RUN_BYTES_MAX: Final = 256 * 1024
"""A run ends behind the message that reaches this size, so one message may exceed it."""


class Timed(msgspec.Struct, frozen=True, gc=False):
    """A message as the schedule takes it. `payload` is its caller's, and comes back as it was."""

    due_ms: int
    id: str
    topic: str
    payload: bytes


class Entry(msgspec.Struct, array_like=True, frozen=True, order=True, gc=False):
    """A message in memory: sorts by due time, then arrival, which no two share. The garbage collector passes it by."""

    due_ms: int
    seq: int
    id: str
    topic: str
    payload: bytes

    @property
    def key(self) -> tuple[int, int]:
        """What it sorts by."""
        return self.due_ms, self.seq


DUE: Final = attrgetter("due_ms")
SEQ: Final = attrgetter("seq")
ID: Final = attrgetter("id")
TOPIC: Final = attrgetter("topic")
PAYLOAD: Final = attrgetter("payload")


def id_hashes(ids: Iterable[str]) -> list[int]:
    """64 bits of each id: two checksums side by side. Made for speed, so whoever finds one verifies the id itself."""
    data = list(map(str.encode, ids))
    return [high << 32 | low for high, low in zip(map(zlib.crc32, data), map(google_crc32c.value, data), strict=True)]


UNKNOWN_TOPIC: Final = 0
"""In place of the hash of a topic that an earlier version did not note: it may be any."""


@lru_cache(maxsize=65_536)
def topic_hash(topic: str) -> int:
    """64 bits of a topic's name, never 0. Unlike an id's, nobody can make a name that has those of another: so no id
    can be made for one topic that is taken for a message of another.
    """
    return int.from_bytes(sha256(topic.encode()).digest()[:8]) or 1


class SortedRun(msgspec.Struct, array_like=True, eq=False):
    """What memory and the log's checkpoint know of a run.

    `taken` entries from its start are fired or moved on; `gone` has a bit for each canceled one, where there is any,
    and for those that fired while they were written here, which `fired` tells apart, and for those that are damaged,
    which are `lost`.
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
    topic: str | None = None  # where all of it is of one topic, which has very many messages
    fired: bytearray | None = None
    lost: bytearray | None = None
    spare_position: int = 0
    spare_bytes: int = 0  # 0 where an earlier version wrote it, without a spare
    is_unreadable: bool = False  # nothing of it can be proven

    def may_hold(self, key: tuple[int, int]) -> bool:
        """Whether a (due, seq) lies within the run's bounds."""
        return (self.first_due_ms, self.first_seq) <= key <= (self.last_due_ms, self.last_seq)

    def waiting(self) -> int:
        """How many entries have not been taken, and are not gone."""
        gone = int.from_bytes(self.gone or b"", "little") >> self.taken
        return self.count - self.taken - gone.bit_count()

    def is_gone(self, index: int) -> bool:
        """Whether an entry was canceled, or fired before it stood here."""
        return is_marked(self.gone, index)

    def has_fired(self, index: int) -> bool:
        """Whether an entry fired before it stood here."""
        return is_marked(self.fired, index)

    def is_lost(self, index: int) -> bool:
        """Whether an entry is damaged, and so never served."""
        return is_marked(self.lost, index)

    def mark_lost(self, index: int) -> None:
        """Let an entry be passed over, because nothing of it can be proven."""
        self.gone = _marked(self.gone, index, count=self.count)
        self.lost = _marked(self.lost, index, count=self.count)

    def lost_count(self) -> int:
        """How many are lost."""
        return 0 if self.lost is None else int.from_bytes(self.lost).bit_count()

    def mark_gone(self, index: int) -> None:
        """Let an entry be passed over."""
        self.gone = _marked(self.gone, index, count=self.count)

    def mark_fired(self, index: int) -> None:
        """An entry that is gone has fired; any other was canceled."""
        self.fired = _marked(self.fired, index, count=self.count)


def is_marked(marks: bytes | bytearray | None, index: int) -> bool:
    """Whether an entry has its bit."""
    return marks is not None and bool(marks[index >> 3] & 1 << (index & 7))


def _marked(marks: bytearray | None, index: int, *, count: int) -> bytearray:
    marks = bytearray((count + 7) // 8) if marks is None else marks
    marks[index >> 3] |= 1 << (index & 7)
    return marks


class Columns(NamedTuple):
    """A run without its messages: parallel arrays, sorted by (due, seq). `topic` numbers the names in `topics`."""

    due: array[int]
    seq: array[int]
    topic: array[int]
    topics: list[str]

    def index_of(self, due_ms: int, seq: int) -> int | None:
        """Where an entry stands; None where it is not in this run."""
        index = self.first_not_before((due_ms, seq), start=0)
        found = index < len(self.due) and self.due[index] == due_ms and self.seq[index] == seq
        return index if found else None

    def first_not_before(self, key: tuple[int, int], *, start: int) -> int:
        """The first index from `start` on whose (due, seq) is not below the key."""
        due_ms, seq = key
        low = bisect_left(self.due, due_ms, start)
        high = bisect_left(self.due, due_ms + 1, low)
        return bisect_left(self.seq, seq, low, high)


def topic_number(columns: Columns, topic: str) -> int | None:
    """The number of a topic's name in a run; None where the run has none of its messages."""
    return columns.topics.index(topic) if topic in columns.topics else None


class StoredColumns(msgspec.Struct, array_like=True, frozen=True):
    """Columns as bytes, little-endian."""

    due: bytes
    seq: bytes
    topic: bytes
    topics: list[str]


class StoredRun(msgspec.Struct, array_like=True, frozen=True):
    """The messages of a run, as they are stored: parallel lists."""

    ids: list[str]
    payloads: list[bytes]


_encode = msgspec.msgpack.Encoder().encode
_decode_columns = msgspec.msgpack.Decoder(StoredColumns).decode
decode_messages = msgspec.msgpack.Decoder(StoredRun).decode


def cut(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Sorted entries in pieces of a run's size."""
    ends = list(accumulate(len(payload) + 64 for payload in map(PAYLOAD, entries)))
    start = before = 0
    while start < len(entries):
        full = bisect_left(ends, before + RUN_BYTES_MAX, start) + 1  # behind the one that reaches the bound
        stop = min(full, start + RUN_MESSAGES_MAX, len(entries))
        yield entries[start:stop]
        start, before = stop, ends[stop - 1]


def encode_run(entries: Sequence[Entry], columns: StoredColumns) -> tuple[bytes, bytes]:
    """The first two records of a run; `entries` are sorted, and have these columns."""
    return _encode(columns), _encode(StoredRun(list(map(ID, entries)), list(map(PAYLOAD, entries))))


def stored_columns(entries: Sequence[Entry]) -> StoredColumns:
    """Columns as they are stored."""
    topics = list(map(TOPIC, entries))
    numbers = {topic: number for number, topic in enumerate(dict.fromkeys(topics))}
    return StoredColumns(
        due=to_bytes(array("Q", map(DUE, entries))),
        seq=to_bytes(array("Q", map(SEQ, entries))),
        topic=to_bytes(array("I", map(numbers.__getitem__, topics))),
        topics=list(numbers),
    )


def decode_columns(data: bytes) -> Columns:
    """The columns of a run from their record."""
    stored = _decode_columns(data)
    return Columns(
        from_bytes("Q", stored.due), from_bytes("Q", stored.seq), from_bytes("I", stored.topic), stored.topics
    )


def new_entries(batch: Sequence[Timed], *, first_seq: int) -> list[Entry]:
    """Messages that come, in order of arrival. One that was due before 1970 is due in 1970."""
    return [
        Entry(max(0, one.due_ms), seq, one.id, one.topic, one.payload)
        for seq, one in enumerate(batch, first_seq)
    ]  # fmt: skip
