"""A scheduled message as bytes: what the schedule keeps, and what is written once it is due. Pure.

The first differs from the second in its sequence and the time at which it was stored, which are put in without decoding
the rest, where they stand where they are expected.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from messaging import journal

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


def to_be_fired(record: journal.MessageRecord) -> bytes:
    """A message as the schedule keeps it. `record`: no sequence, stored at NOT_STORED_YET_MS, a FIRED_COPY."""
    return journal.encode_record(record)


def fired_copy(payload: bytes, *, sequence: int, stored_at_ms: int) -> bytes:
    """The record of a message that fell due, from what to_be_fired() made of it."""
    if (
        payload.startswith(_NO_SEQUENCE)
        and payload[-_HEAD_BYTES:-_DUE_BYTES] == _NOT_STORED
        and stored_at_ms > 0xFFFF_FFFF  # shorter ones are encoded shorter
    ):
        return b"".join(
            (
                payload[:1], _encode(sequence), payload[2:-_HEAD_BYTES], _pack_time(_UINT64, stored_at_ms),
                payload[-_DUE_BYTES:],
            )
        )  # fmt: skip
    record = journal.decode_message(payload)
    return journal.encode_record(msgspec.structs.replace(record, sequence=sequence, stored_at_ms=stored_at_ms))
