"""Recovers the intact messages of a damaged run, each verified by its own checksum. No I/O.

A run has a third record, the spare: a copy of its columns, and the location and checksum of each message in the
messages record. It is read only if one of the other two does not match its checksum. Without it a flipped bit costs the
1,000 messages of a run; with it at most one, for 32 bytes a message.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

import google_crc32c
import msgspec

from outbox_broker.common.integer_array_encoding import from_bytes, to_bytes
from outbox_broker.schedule.sorted_run import ID, PAYLOAD, Columns, Entry, StoredColumns, StoredRun

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


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Spare).decode


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
        self._stored = _decode(data)

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
