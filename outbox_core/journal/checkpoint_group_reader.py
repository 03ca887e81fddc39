"""Reads the consumer groups from a checkpoint of the action log, for readers other than the broker.

The broker defines and reads the whole checkpoint; this module has only the leading fields of its arrays. MessagePack
arrays are decoded by position, and new fields are only ever added after these.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from outbox_core.journal import journal


class _Group(msgspec.Struct, array_like=True, frozen=True):
    topic: str
    name: str


class _Checkpoint(msgspec.Struct, array_like=True, frozen=True):
    messages_end: int
    openings: int
    topics: dict[str, int]
    groups: list[_Group]


_decode = msgspec.msgpack.Decoder(_Checkpoint).decode


def read_groups(payloads: Iterable[bytes]) -> list[tuple[str, str]] | None:
    """Returns the (topic, group) pairs of the checkpoint at the start of a segment of the action log.

    `payloads`: the segment's records, from its first one on; reading stops after the checkpoint. Returns None if the
    segment does not begin with a whole checkpoint. Raises msgspec.MsgspecError if a payload is not a record.
    """
    parts: list[bytes] = []
    for payload in payloads:
        record = journal.decode_action(payload)
        if not isinstance(record, journal.Checkpoint):
            return None
        parts.append(record.part)
        if record.last:
            return [(group.topic, group.name) for group in _decode(b"".join(parts)).groups]
    return None
