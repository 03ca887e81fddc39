"""Message records as Arrow columns, a batch at once: MessagePack read by numpy, field by field over all records.

A record is ten fields in a row, so a cursor for each record steps from field to field. It reads what the broker writes
(see outbox_core.journal) and nothing else: for any other record it says so, and its caller decodes them one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from outbox_core.journal import journal

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

WIDEST_BYTES: Final = 8
"""So much is read behind a tag: batches need as many bytes behind their last record."""
FIELDS: Final = len(journal.MessageRecord.__struct_fields__)
HEADERS_MAX: Final = 64
SHA256_BYTES: Final = 32
_NIL: Final = 0xC0
_ARRAY: Final = 0x90
_MAP: Final = 0x80
_HEX: Final = np.frombuffer(b"0123456789abcdef", np.uint8)


class Unusual(Exception):
    """A record is written in another way than the broker does."""


def _table(fixed: range, tags: dict[int, int]) -> Bytes:
    """For each tag, 1 + how many bytes of number follow it; 0: not such a tag. `fixed`: the number is in the tag."""
    table = np.zeros(256, np.uint8)
    table[list(fixed)] = 1
    for tag, width in tags.items():
        table[tag] = 1 + width
    return table


_INTEGER: Final = _table(range(0x80), {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, _NIL: 0})
_TEXT: Final = _table(range(0xA0, 0xC0), {0xD9: 1, 0xDA: 2, 0xDB: 4, _NIL: 0})
_BINARY: Final = _table(range(0), {0xC4: 1, 0xC5: 2, 0xC6: 4})


def message_columns(data: bytes, starts: Places, ends: Places, wanted: Sequence[str]) -> pa.RecordBatch:
    """The columns `wanted` of HEADER_SCHEMA, of the records between `starts` and `ends`. Raises Unusual.

    The copy of a scheduled message that fell due has no `stored_ms`. Behind the last record `data` has WIDEST_BYTES to
    spare.
    """
    fields = _Fields(data, starts)
    sequence = fields.integers()
    texts = {"id": fields.texts(), "topic": fields.texts(), "message_key": fields.texts()}
    headers = fields.headers()
    body = fields.places(_BINARY, 0)
    numbers = {"sequence": sequence}
    numbers |= {name: fields.integers() for name in ("created_ms", "stored_ms", "deliver_at_ms")}
    copies, _ = fields.integers()
    if copies.max(initial=0) > journal.SCHEDULED or any(texts[name][2].any() for name in ("id", "topic")):
        raise Unusual
    if not fields.end_at(ends):
        raise Unusual
    notes, (stored_ms, unknown) = copies == journal.SCHEDULED, numbers["stored_ms"]
    numbers["stored_ms"] = stored_ms, unknown | (copies == journal.FIRED_COPY)
    if (body[1][notes] != SHA256_BYTES).any():
        raise Unusual
    arrays = []
    for name in wanted:
        if name in texts:
            begin, length, none = texts[name]
            arrays.append(_texts(fields.data, begin, length, none))
        elif name in numbers:
            value, none = numbers[name]
            arrays.append(pa.array(value, mask=none))
        elif name == "body_sha256":
            arrays.append(_hashes(data, *body[:2], notes))
        elif name == "headers":
            arrays.append(_pieces(data, *headers))
        else:
            arrays.append(pa.nulls(len(starts), pa.string()))
    return pa.RecordBatch.from_arrays(arrays, names=list(wanted))


class _Fields:
    """A cursor for each record; each call reads the next field of all of them."""

    def __init__(self, data: bytes, starts: Places) -> None:
        self.data: Bytes = np.frombuffer(data, np.uint8)
        self._wide = np.lib.stride_tricks.sliding_window_view(self.data, WIDEST_BYTES)
        if (self.data[starts] != _ARRAY + FIELDS).any():
            raise Unusual
        self._at = starts + 1

    def end_at(self, ends: Places) -> bool:
        """Whether every record ends where its frame does."""
        return bool((self._at == ends).all())

    def integers(self) -> tuple[Places, Mask]:
        """Whole numbers from 0, and where there is none."""
        return self._numbers(_INTEGER, 0)[:2]

    def texts(self) -> tuple[Places, Places, Mask]:
        """Where each text begins, its length, and where there is none."""
        return self.places(_TEXT, 0xA0)

    def places(self, table: Bytes, low: int) -> tuple[Places, Places, Mask]:
        """Where each run of bytes begins, its length, and where there is none; the cursors step over it."""
        length, none, begin = self._numbers(table, low)
        self._at = begin + length
        if self._at.max(initial=0) > len(self.data):
            raise Unusual
        return begin, length, none

    def headers(self) -> tuple[Places, Places]:
        """Where each map of texts begins, its tag included, and its length; the cursors step over it."""
        begin = self._at
        tags = self.data[self._at]
        count = tags.astype(np.int64) - _MAP
        if ((count < 0) | (count > 15)).any():
            raise Unusual
        self._at = self._at + 1
        every = self._at
        for number in range(2 * int(count.max(initial=0))):
            rest = np.flatnonzero(count * 2 > number)
            self._at = every[rest]
            self.texts()
            every[rest] = self._at
        self._at = every
        return begin, every - begin

    def _numbers(self, table: Bytes, low: int) -> tuple[Places, Mask, Places]:
        """The number in or behind each tag, where it is nil, and where the next thing begins."""
        tags = self.data[self._at]
        widths = table[tags].astype(np.int64) - 1
        if widths.min(initial=0) < 0 or self._at.max(initial=0) + 1 + WIDEST_BYTES > len(self.data):
            raise Unusual
        none = tags == _NIL
        value = tags.astype(np.int64) - low
        behind = np.flatnonzero(widths > 0)
        if len(behind):
            whole = self._wide[self._at[behind] + 1].view(">i8").ravel().astype(np.int64)
            if (whole[widths[behind] == WIDEST_BYTES] < 0).any():
                raise Unusual
            unused = 8 * (WIDEST_BYTES - widths[behind])
            value[behind] = (whole.view(np.uint64) >> unused.view(np.uint64)).view(np.int64)
        value[none] = 0
        self._at = self._at + 1 + widths
        return value, none, self._at


def _texts(data: Bytes, begin: Places, length: Places, none: Mask) -> pa.Array:
    """Texts gathered from their places."""
    offsets = np.zeros(len(begin) + 1, np.int64)
    np.cumsum(length, out=offsets[1:])
    if len(begin) and (length == length[0]).all() and length[0]:
        gathered = np.lib.stride_tricks.sliding_window_view(data, int(length[0]))[begin].ravel()
    else:
        steps = np.repeat(begin - offsets[:-1], length)
        gathered = data[steps + np.arange(offsets[-1])]
    valid = pa.py_buffer(np.packbits(~none, bitorder="little")) if none.any() else None
    buffers: list[Any] = [valid, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(gathered)]
    return pa.Array.from_buffers(pa.string(), len(begin), buffers)


def _pieces(data: bytes, begin: Places, length: Places) -> pa.Array:
    """Bytes as they stand in the records."""
    ends = (begin + length).tolist()
    return pa.array([data[start:end] for start, end in zip(begin.tolist(), ends, strict=True)], pa.binary())


def _hashes(data: bytes, begin: Places, length: Places, notes: Mask) -> pa.Array:
    """The SHA-256 of each body, in hex; a note's body is one."""
    sha256 = hashlib.sha256
    ends = (begin + length).tolist()
    digests = b"".join(
        [
            data[start:end] if note else sha256(data[start:end]).digest()
            for start, end, note in zip(begin.tolist(), ends, notes.tolist(), strict=True)
        ]
    )
    halves = np.frombuffer(digests, np.uint8)
    text = np.empty(2 * len(halves), np.uint8)
    text[0::2], text[1::2] = _HEX[halves >> 4], _HEX[halves & 15]
    offsets = np.arange(len(begin) + 1, dtype=np.int32) * 64
    return pa.Array.from_buffers(pa.string(), len(begin), [None, pa.py_buffer(offsets), pa.py_buffer(text)])
