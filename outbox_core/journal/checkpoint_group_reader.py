"""Reads the consumer groups from a checkpoint of the action log, for readers other than the broker.

The broker defines and reads the whole checkpoint; this module has only the leading fields of its arrays. MessagePack
arrays are decoded by position, and new fields are only ever added after these.
"""

from __future__ import annotations

import msgspec


class _Group(msgspec.Struct, array_like=True, frozen=True):
    topic: str
    name: str


class _Checkpoint(msgspec.Struct, array_like=True, frozen=True):
    messages_end: int
    openings: int
    topics: dict[str, int]
    groups: list[_Group]


_decode = msgspec.msgpack.Decoder(_Checkpoint).decode


def read_groups(checkpoint: bytes) -> list[tuple[str, str]]:
    """Returns the (topic, group) pairs of a checkpoint of the action log, of which these are the joined parts.

    Raises DECODE_ERRORS if they are none.
    """
    return [(group.topic, group.name) for group in _decode(checkpoint).groups]
