"""A run: up to a thousand scheduled messages in order of due time, then arrival, as one piece of a bucket's segment.

Two records: the columns (due times, arrivals, id hashes, topics), which are all that listing, search and firing order
need; then the messages themselves. A run is never changed: what was fired or moved on is a count of its first entries,
what was canceled a bit each, and both stand in the log.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import google_crc32c
import msgspec

RUN_MESSAGES_MAX: Final = 1_000
RUN_BYTES_MAX: Final = 256 * 1024
"""A run ends behind the message that reaches this size, so one message may exceed it."""


class Timed(NamedTuple):
    """A message as the schedule takes it. `payload` is its caller's, and comes back as it was."""

    due_ms: int
    id: str
    topic: str
    payload: bytes


class Entry(NamedTuple):
    """A message in memory: sorts by due time, then arrival, which no two share."""

    due_ms: int
    seq: int
    id: str
    topic: str
    payload: bytes


def id_hash(message_id: str) -> int:
    """64 bits of an id: two checksums side by side. Made for speed, so whoever finds one verifies the id itself."""
    data = message_id.encode()
    return zlib.crc32(data) << 32 | int(google_crc32c.value(data))


class Run(msgspec.Struct, array_like=True, eq=False):
    """What memory and the log's checkpoint know of a run.

    `taken` entries from its start are fired or moved on; `gone` has a bit for each canceled one, where there is any.
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

    def may_hold(self, key: tuple[int, int]) -> bool:
        """Whether a (due, seq) lies within the run's bounds."""
        return (self.first_due_ms, self.first_seq) <= key <= (self.last_due_ms, self.last_seq)

    def is_gone(self, index: int) -> bool:
        """Whether an entry was canceled."""
        return self.gone is not None and bool(self.gone[index >> 3] & 1 << (index & 7))

    def mark_gone(self, index: int) -> None:
        """Cancel an entry."""
        if self.gone is None:
            self.gone = bytearray((self.count + 7) // 8)
        self.gone[index >> 3] |= 1 << (index & 7)


class Columns(NamedTuple):
    """A run without its messages: parallel arrays, sorted by (due, seq). `topic` numbers the names in `topics`."""

    due: array[int]
    seq: array[int]
    hash: array[int]
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


class _StoredColumns(msgspec.Struct, array_like=True, frozen=True):
    due: bytes
    seq: bytes
    hash: bytes
    topic: bytes
    topics: list[str]


Stored = tuple[str, str, bytes]
"""A message of a run as it is stored: id, topic, payload."""
_encode = msgspec.msgpack.Encoder().encode
_decode_columns = msgspec.msgpack.Decoder(_StoredColumns).decode
_decode_messages = msgspec.msgpack.Decoder(list[Stored]).decode


def cut(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Sorted entries in pieces of a run's size."""
    start, size = 0, 0
    for index, entry in enumerate(entries):
        size += len(entry[4]) + 64
        if size >= RUN_BYTES_MAX or index - start + 1 >= RUN_MESSAGES_MAX:
            yield entries[start : index + 1]
            start, size = index + 1, 0
    if start < len(entries):
        yield entries[start:]


def encode_run(entries: Sequence[Entry], *, hash_of: Callable[[str], int] = id_hash) -> tuple[bytes, bytes]:
    """The two records of a run; `entries` are sorted."""
    numbers: dict[str, int] = {}
    topic = array("I", [numbers.setdefault(entry[3], len(numbers)) for entry in entries])
    columns = _StoredColumns(
        due=_to_bytes(array("Q", [entry[0] for entry in entries])),
        seq=_to_bytes(array("Q", [entry[1] for entry in entries])),
        hash=_to_bytes(array("Q", [hash_of(entry[2]) for entry in entries])),
        topic=_to_bytes(topic),
        topics=list(numbers),
    )
    return _encode(columns), _encode([entry[2:] for entry in entries])


def decode_columns(data: bytes) -> Columns:
    """The columns of a run from their record."""
    stored = _decode_columns(data)
    return Columns(
        _from_bytes("Q", stored.due), _from_bytes("Q", stored.seq), _from_bytes("Q", stored.hash),
        _from_bytes("I", stored.topic), stored.topics,
    )  # fmt: skip


def decode_messages(data: bytes) -> list[Stored]:
    """The messages of a run from their record."""
    return _decode_messages(data)


def entries_of(
    columns: Columns, messages: Sequence[Stored], *, start: int, stop: int, is_gone: Callable[[int], bool]
) -> list[Entry]:
    """Messages of a run, from `start` up to `stop`, but for those that are gone."""
    part = slice(start, stop)
    rows = zip(columns.due[part], columns.seq[part], messages[part], strict=True)
    return [
        Entry(due_ms, seq, *message)
        for index, (due_ms, seq, message) in enumerate(rows, start)
        if not is_gone(index)
    ]  # fmt: skip


def _to_bytes(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _from_bytes(typecode: str, data: bytes) -> array[int]:
    numbers: array[int] = array(typecode, data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
