"""Reads the consumer groups from a checkpoint of the action log, and the messages that they have aside from their
topics, for readers other than the broker.

The broker defines and reads the whole checkpoint; this module has only the leading fields of its arrays. MessagePack
arrays are decoded by position, and new fields are only ever added after these.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class PlacedMessage(NamedTuple):
    """A message that a group has aside from its topic: its sequence there, its frame, and when it became ready."""

    topic: str
    group: str
    sequence: int
    offset: int
    size_bytes: int
    ready_at_ms: int


class _Group(msgspec.Struct, array_like=True, frozen=True):
    topic: str
    name: str
    settings: msgspec.Raw = msgspec.Raw()
    position: msgspec.Raw = msgspec.Raw()
    paused: msgspec.Raw = msgspec.Raw()
    generation: msgspec.Raw = msgspec.Raw()
    seek_generation: msgspec.Raw = msgspec.Raw()
    in_flight: msgspec.Raw = msgspec.Raw()
    order: msgspec.Raw = msgspec.Raw()
    redrive_pace: msgspec.Raw = msgspec.Raw()
    dead: msgspec.Raw = msgspec.Raw()
    reasons: msgspec.Raw = msgspec.Raw()
    redriven: msgspec.Raw = msgspec.Raw()
    places: dict[int, tuple[int, int, int]] = {}


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


def read_places(checkpoint: bytes) -> list[PlacedMessage]:
    """Returns the messages that groups had aside from their topics. Raises DECODE_ERRORS."""
    return [
        PlacedMessage(group.topic, group.name, sequence, *own_place)
        for group in _decode(checkpoint).groups
        for sequence, own_place in group.places.items()
    ]
