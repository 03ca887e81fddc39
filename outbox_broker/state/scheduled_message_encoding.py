"""Encodes scheduled messages: the record in the schedule, its marker in the message log, the dispatched record. Pure.

The first differs from the last in its sequence and its storage time, which are inserted at their fixed positions
without decoding the rest; a batch takes a few calls.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import repeat
from typing import Final

import msgspec

from outbox_core.journal import journal
from outbox_core.messages.message import Record

NOT_STORED_YET_MS: Final = 1 << 52
"""Stands for the storage time of a record that is not stored yet; no clock returns it."""
_NO_SEQUENCE: Final = b"\x9a\xc0"
"""The first bytes of a record of ten fields whose first field is nil."""
_UINT64: Final = 0xCF
_pack_time: Final = struct.Struct(">BQ").pack
_NOT_STORED: Final = _pack_time(_UINT64, NOT_STORED_YET_MS)
_DUE_BYTES: Final = len(_NOT_STORED) + 1
"""deliver_at_ms and copy, which follow stored_at_ms at the end of a record."""
_HEAD_BYTES: Final = len(_NOT_STORED) + _DUE_BYTES
_encode: Final = msgspec.msgpack.Encoder().encode
_NO_HEADERS: Final[dict[str, str]] = {}
_new_hash: Final = hashlib.sha256().copy  # half the cost of looking the algorithm up


def encode_scheduled(message: Record, *, now_ms: int) -> bytes:
    """Encode a message for the schedule: a journal.MessageRecord without a sequence, not stored yet, a FIRED_COPY."""
    return _encode(
        (
            None, message.id, message.topic, message.key, dict(message.headers) if message.headers else _NO_HEADERS,
            message.body, message.created_at_ms or now_ms, NOT_STORED_YET_MS, message.deliver_at_ms,
            journal.FIRED_COPY,
        )
    )  # fmt: skip


def encode_marker(message: Record, *, now_ms: int) -> bytes:
    """Encode the marker of a scheduled message in the message log: a journal.MessageRecord, SCHEDULED."""
    digest = _new_hash()
    digest.update(message.body)
    return _encode(
        (
            None, message.id, message.topic, message.key, _NO_HEADERS, digest.digest(),
            message.created_at_ms or now_ms, now_ms, message.deliver_at_ms, journal.SCHEDULED,
        )
    )  # fmt: skip


def dispatched_records(payloads: Sequence[bytes], *, first_sequence: int, stored_at_ms: int) -> list[bytes]:
    """Returns the records of a topic's due messages, made from the results of encode_scheduled()."""
    sequences = range(first_sequence, first_sequence + len(payloads))
    ends = [payload[-_HEAD_BYTES:] for payload in payloads]
    new_ends = {end: _pack_time(_UINT64, stored_at_ms) + end[-_DUE_BYTES:] for end in set(ends)}  # few are different
    if not (
        stored_at_ms > 0xFFFF_FFFF  # smaller values have a shorter encoding
        and {payload[:2] for payload in payloads} == {_NO_SEQUENCE}
        and {end[:-_DUE_BYTES] for end in new_ends} == {_NOT_STORED}
    ):
        return [
            _dispatched_record(payload, sequence=sequence, stored_at_ms=stored_at_ms)
            for sequence, payload in zip(sequences, payloads, strict=True)
        ]
    fields = zip(
        repeat(_NO_SEQUENCE[:1]), map(_encode, sequences), [payload[2:-_HEAD_BYTES] for payload in payloads],
        map(new_ends.__getitem__, ends), strict=False,
    )  # fmt: skip
    return list(map(b"".join, fields))


def _dispatched_record(payload: bytes, *, sequence: int, stored_at_ms: int) -> bytes:
    record = journal.decode_message(payload)
    return journal.encode_record(msgspec.structs.replace(record, sequence=sequence, stored_at_ms=stored_at_ms))
