"""A scheduled message as bytes: what the schedule keeps, the note of it, and what is written once it is due. Pure.

The first differs from the last in its sequence and the time at which it was stored, which are put in without decoding
the rest, where they stand where they are expected; for all messages of a batch in a few calls.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import repeat
from typing import Final

import msgspec

from outbox_core.journal import journal
from outbox_core.messages.message import Message

NOT_STORED_YET_MS: Final = 1 << 52
"""What stands for the time at which a record is stored until it is; no clock shows it."""
_NO_SEQUENCE: Final = b"\x9a\xc0"
"""How a record of ten fields begins whose first one is nil."""
_UINT64: Final = 0xCF
_pack_time: Final = struct.Struct(">BQ").pack
_NOT_STORED: Final = _pack_time(_UINT64, NOT_STORED_YET_MS)
_DUE_BYTES: Final = len(_NOT_STORED) + 1
"""deliver_at_ms and copy, which end a record behind stored_at_ms."""
_HEAD_BYTES: Final = len(_NOT_STORED) + _DUE_BYTES
_encode: Final = msgspec.msgpack.Encoder().encode
_NO_HEADERS: Final[dict[str, str]] = {}
_new_hash: Final = hashlib.sha256().copy  # half the cost of looking the algorithm up


def to_be_fired(message: Message, *, now_ms: int) -> bytes:
    """A message as the schedule keeps it: a journal.MessageRecord without a sequence, not stored yet, a FIRED_COPY."""
    return _encode(
        (
            None, message.id, message.topic, message.key, dict(message.headers) if message.headers else _NO_HEADERS,
            message.body, message.created_at_ms or now_ms, NOT_STORED_YET_MS, message.deliver_at_ms,
            journal.FIRED_COPY,
        )
    )  # fmt: skip


def note_of(message: Message, *, now_ms: int) -> bytes:
    """What the message log tells of a scheduled message: a journal.MessageRecord, SCHEDULED."""
    digest = _new_hash()
    digest.update(message.body)
    return _encode(
        (
            None, message.id, message.topic, message.key, _NO_HEADERS, digest.digest(),
            message.created_at_ms or now_ms, now_ms, message.deliver_at_ms, journal.SCHEDULED,
        )
    )  # fmt: skip


def fired_copies(payloads: Sequence[bytes], *, first_sequence: int, stored_at_ms: int) -> list[bytes]:
    """The records of messages of a topic that fell due, from what to_be_fired() made of each."""
    sequences = range(first_sequence, first_sequence + len(payloads))
    ends = [payload[-_HEAD_BYTES:] for payload in payloads]
    new_ends = {end: _pack_time(_UINT64, stored_at_ms) + end[-_DUE_BYTES:] for end in set(ends)}  # few are different
    if not (
        stored_at_ms > 0xFFFF_FFFF  # shorter ones are encoded shorter
        and {payload[:2] for payload in payloads} == {_NO_SEQUENCE}
        and {end[:-_DUE_BYTES] for end in new_ends} == {_NOT_STORED}
    ):
        return [
            _fired_copy(payload, sequence=sequence, stored_at_ms=stored_at_ms)
            for sequence, payload in zip(sequences, payloads, strict=True)
        ]
    fields = zip(
        repeat(_NO_SEQUENCE[:1]), map(_encode, sequences), [payload[2:-_HEAD_BYTES] for payload in payloads],
        map(new_ends.__getitem__, ends), strict=False,
    )  # fmt: skip
    return list(map(b"".join, fields))


def _fired_copy(payload: bytes, *, sequence: int, stored_at_ms: int) -> bytes:
    record = journal.decode_message(payload)
    return journal.encode_record(msgspec.structs.replace(record, sequence=sequence, stored_at_ms=stored_at_ms))
