"""What readers other than the broker take from a checkpoint of the action log: the consumer groups that it carries.

The broker defines and reads the whole checkpoint; here are only the leading fields of its arrays. MessagePack arrays
are decoded by position, and fields are only ever added behind these.
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


def groups_in(payloads: Iterable[bytes]) -> list[tuple[str, str]] | None:
    """The (topic, group) pairs of the checkpoint with which a segment of the action log begins.

    `payloads`: the segment's records, from its first one on; no more are taken than belong to the checkpoint. None
    where the segment does not begin with a whole checkpoint. Raises msgspec.MsgspecError where a record is none.
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
