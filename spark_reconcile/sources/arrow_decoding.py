"""Decodes batches of stored messages to Arrow columns: MessagePack read by numpy, field by field over all records.

A record is seven consecutive fields, so a cursor for each record steps from field to field. Only the broker's encoding
(outbox_core.messages.message.Record) is supported: any other record raises UnusualEncoding, and the caller decodes
records one by one. Record by record, each was a Python object, a tuple and nine items of lists before it was a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from outbox_core.journal.block import KIND_SHIFT, NUMBER_MAX, FrameKind, Payloads
from outbox_core.messages.message import DUE_HEADER, Record
from spark_reconcile.sources.broker_logs import NUMBERED_KINDS, asked_due_ms

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_WIDEST_BYTES: Final = 8
"""Bytes that are read after a tag: batches need as many bytes after their last record."""
FIELDS: Final = len(Record.__struct_fields__)
HEADERS_MAX: Final = 64
_NIL: Final = 0xC0
_ARRAY: Final = 0x90
_MAP: Final = 0x80
_DUE_HEADER: Final = DUE_HEADER.encode()
_decode_headers = msgspec.msgpack.Decoder(dict[str, str]).decode
_HEX: Final = np.frombuffer(b"0123456789abcdef", np.uint8)


class UnusualEncoding(Exception):
    """A record has another encoding than the broker's."""


def _table(fixed: range, tags: dict[int, int]) -> Bytes:
    """Returns for each tag 1 + the bytes of the number after it; 0: another tag. `fixed`: the tag has the number."""
    table = np.zeros(256, np.uint8)
    table[list(fixed)] = 1
    for tag, width in tags.items():
        table[tag] = 1 + width
    return table


_INTEGER: Final = _table(range(0x80), {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, _NIL: 0})
_TEXT: Final = _table(range(0xA0, 0xC0), {0xD9: 1, 0xDA: 2, 0xDB: 4, _NIL: 0})
_BINARY: Final = _table(range(0), {0xC4: 1, 0xC5: 2, 0xC6: 4})


def message_columns(data: bytes, found: Payloads, names: Sequence[str]) -> pa.RecordBatch:
    """Decodes the columns `names` of HEADER_SCHEMA from the messages that were found in `data`: what
    broker_logs.header_rows() tells of each. Raises UnusualEncoding.
    """
    start = found.begins[0]
    data = data[start : found.end] + bytes(_WIDEST_BYTES)
    begins, ends, marks = (np.array(column, np.int64) for column in (found.begins, found.ends, found.marks))
    fields = _Fields(data, begins - start)
    texts = {"id": fields.texts(), "topic": fields.texts(), "message_key": fields.texts()}
    headers = fields.headers()
    body = fields.byte_strings(_BINARY, 0)
    created_ms, deliver_at_ms = fields.integers(), fields.integers()
    kinds = marks >> KIND_SHIFT
    if any(texts[name][2].any() for name in ("id", "topic")) or created_ms[1].any():
        raise UnusualEncoding
    if not fields.end_at(ends - start):
        raise UnusualEncoding
    stored_ms = np.repeat(np.array(found.times_ms, np.int64), found.counts)
    numbers = {
        "sequence": (marks & NUMBER_MAX, ~np.isin(kinds, list(NUMBERED_KINDS))),
        "created_ms": created_ms,
        "stored_ms": (np.where(stored_ms, stored_ms, created_ms[0]), kinds == FrameKind.DISPATCHED),
        "deliver_at_ms": _with_asked_dues(data, headers, *deliver_at_ms),
    }
    arrays = []
    for name in names:
        if name in texts:
            begin, length, none = texts[name]
            arrays.append(_texts(fields.data, begin, length, none))
        elif name in numbers:
            value, none = numbers[name]
            arrays.append(pa.array(value, mask=none))
        elif name == "body_sha256":
            arrays.append(_hashes(data, *body[:2]))
        elif name == "headers":
            arrays.append(_pieces(data, *headers))
        else:
            arrays.append(pa.nulls(len(marks), pa.string()))
    return pa.RecordBatch.from_arrays(arrays, names=list(names))


class _Fields:
    """A cursor for each record; each call reads the next field of all records."""

    def __init__(self, data: bytes, starts: Positions) -> None:
        self.data: Bytes = np.frombuffer(data, np.uint8)
        self._wide = np.lib.stride_tricks.sliding_window_view(self.data, _WIDEST_BYTES)
        if (self.data[starts] != _ARRAY + FIELDS).any():
            raise UnusualEncoding
        self._at = starts + 1

    def end_at(self, ends: Positions) -> bool:
        """Whether every record ends at the end of its frame."""
        return bool((self._at == ends).all())

    def integers(self) -> tuple[Positions, Mask]:
        """Reads unsigned integers, and a mask of nil values."""
        return self._numbers(_INTEGER, 0)[:2]

    def texts(self) -> tuple[Positions, Positions, Mask]:
        """Reads the start and length of each text, and a mask of nil values."""
        return self.byte_strings(_TEXT, 0xA0)

    def byte_strings(self, table: Bytes, low: int) -> tuple[Positions, Positions, Mask]:
        """Reads the start and length of each byte string, and a mask of nil values; the cursors skip it."""
        length, none, begin = self._numbers(table, low)
        self._at = begin + length
        if self._at.max(initial=0) > len(self.data):
            raise UnusualEncoding
        return begin, length, none

    def headers(self) -> tuple[Positions, Positions]:
        """Reads the start, including the tag, and the length of each map of texts; the cursors skip it."""
        begin = self._at
        tags = self.data[self._at]
        count = tags.astype(np.int64) - _MAP
        if ((count < 0) | (count > 15)).any():
            raise UnusualEncoding
        self._at = self._at + 1
        every = self._at
        for text_index in range(2 * int(count.max(initial=0))):
            rows_left = np.flatnonzero(count * 2 > text_index)
            self._at = every[rows_left]
            self.texts()
            every[rows_left] = self._at
        self._at = every
        return begin, every - begin

    def _numbers(self, table: Bytes, low: int) -> tuple[Positions, Mask, Positions]:
        """Reads the number in or after each tag, a mask of nil values, and the start of the next value."""
        tags = self.data[self._at]
        widths = table[tags].astype(np.int64) - 1
        if widths.min(initial=0) < 0 or self._at.max(initial=0) + 1 + _WIDEST_BYTES > len(self.data):
            raise UnusualEncoding
        none = tags == _NIL
        value = tags.astype(np.int64) - low
        behind = np.flatnonzero(widths > 0)
        if len(behind):
            whole = self._wide[self._at[behind] + 1].view(">i8").ravel().astype(np.int64)
            if (whole[widths[behind] == _WIDEST_BYTES] < 0).any():
                raise UnusualEncoding
            unused = 8 * (_WIDEST_BYTES - widths[behind])
            value[behind] = (whole.view(np.uint64) >> unused.view(np.uint64)).view(np.int64)
        value[none] = 0
        self._at = self._at + 1 + widths
        return value, none, self._at


def _with_asked_dues(
    data: bytes, headers: tuple[Positions, Positions], due_ms: Positions, none: Mask
) -> tuple[Positions, Mask]:
    """Returns the due times, with those that delay services have put in headers."""
    if _DUE_HEADER not in data:
        return due_ms, none
    due_ms, none = due_ms.copy(), none.copy()
    begin, length = headers
    for index in np.flatnonzero(none & (length > len(_DUE_HEADER))).tolist():
        asked_ms = asked_due_ms(_decode_headers(data[begin[index] : begin[index] + length[index]]))
        if asked_ms is not None:
            due_ms[index], none[index] = asked_ms, False
    return due_ms, none


def _texts(data: Bytes, begin: Positions, length: Positions, none: Mask) -> pa.Array:
    """Gathers texts from their positions."""
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


def _pieces(data: bytes, begin: Positions, length: Positions) -> pa.Array:
    """Gathers bytes from the records, unchanged."""
    ends = (begin + length).tolist()
    return pa.array([data[start:end] for start, end in zip(begin.tolist(), ends, strict=True)], pa.binary())


def _hashes(data: bytes, begin: Positions, length: Positions) -> pa.Array:
    """Returns the SHA-256 of each body, in hex."""
    sha256 = hashlib.sha256
    ends = (begin + length).tolist()
    digests = b"".join([sha256(data[start:end]).digest() for start, end in zip(begin.tolist(), ends, strict=True)])
    halves = np.frombuffer(digests, np.uint8)
    text = np.empty(2 * len(halves), np.uint8)
    text[0::2], text[1::2] = _HEX[halves >> 4], _HEX[halves & 15]
    offsets = np.arange(len(begin) + 1, dtype=np.int32) * 64
    return pa.Array.from_buffers(pa.string(), len(begin), [None, pa.py_buffer(offsets), pa.py_buffer(text)])
