"""A checkpoint: all that the action log has come to so far, written into the action log itself, as its segment begins.

So replay begins with the newest segment, and older ones may go. It is a part of the log, under the log's checksums and
syncs: where one is torn or damaged, replay begins with the segment before, which is slower and comes to the same. What
follows from the message log alone (places, recent ids) is not in it: that is what the segments' index files are for.
Nor is the schedule, which is durable by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import msgspec

from outbox_broker.group.consumer_group import Group
from outbox_broker.group.dead_letters import DeadRun, DeadState
from outbox_broker.group.failure_reasons import ReasonTexts
from outbox_broker.group.in_flight import InFlightRun, Unsettled
from outbox_broker.group.key_order import KeyOrder, OrderState
from outbox_broker.log.segment_scan import Gap, Segment, scan
from outbox_broker.state.engine_state import BrokerState, Tombstone, config_of, settings_of
from outbox_core.common.pace import Pace
from outbox_core.journal import journal

PART_BYTES: Final = 1024 * 1024


class _Held(msgspec.Struct, array_like=True, frozen=True):
    first: int
    ids: journal.Ids
    visible_at_ms: int
    delivery: int
    attempts_used: int
    life: int
    in_flight: bool
    reason: int | str | None  # a text in checkpoints before there were numbers
    history: tuple[tuple[int | str, int], ...] = ()


class _Group(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    topic: str
    name: str
    settings: dict[str, str | int | float | bool | None]
    position: int
    paused: bool
    life: int
    sought_in_life: int
    held: list[_Held]
    dead: list[tuple[int, journal.Ids, int, str, int]]  # of checkpoints before there were columns
    order: OrderState | None = None
    redrive_pace: tuple[int, int] = (0, 0)
    dead_columns: DeadState | None = None
    reasons: ReasonTexts = []


class _Checkpoint(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    messages_end: int
    openings: int
    topics: dict[str, int]
    groups: list[_Group]
    deleted: dict[str, Tombstone] = {}
    life: int = 0


_encode = msgspec.msgpack.Encoder().encode
_ARRAY_32: Final = b"\xdd"
_decode = msgspec.msgpack.Decoder(_Checkpoint).decode


def records_of(state: BrokerState, *, messages_end: int, at_ms: int) -> list[bytes]:
    """The state as records of the action log.

    `messages_end`: before it, nothing in the message log says more of the schedule than the schedule itself does.
    """
    data = _encode(_capture(state, messages_end))
    parts = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
    return [
        journal.encode_record(journal.Checkpoint(at_ms=at_ms, part=part, last=number == len(parts)))
        for number, part in enumerate(parts, 1)
    ]


def read(records: Iterator[journal.Action | None]) -> bytes | None:
    """The checkpoint that a segment's records begin with; None where they do not, or it is not whole (None is damage).

    Takes no more of the records than belong to it.
    """
    parts: list[bytes] = []
    for record in records:
        if not isinstance(record, journal.Checkpoint):
            return None
        parts.append(record.part)
        if record.last:
            return b"".join(parts)
    return None


def read_from(segment: Segment) -> tuple[bytes, int] | None:
    """The whole checkpoint that a segment begins with, and the offset behind it; None where it begins with none."""
    end = segment.first_offset

    def records() -> Iterator[journal.Action | None]:
        nonlocal end
        for one in scan(segment, start=segment.first_offset):
            end = one.end
            yield None if isinstance(one, Gap) else journal.decode_action(one.payload)

    data = read(records())
    return None if data is None else (data, end)


def second_newest(segments: Sequence[Segment]) -> int:
    """Where in these segments replay begins if the newest whole checkpoint is damaged yet: at the one before it.

    Found by reading; 0 where there is none. The first segment of all needs no checkpoint.
    """
    whole = (
        number
        for number in reversed(range(len(segments)))
        if segments[number].first_offset == 0 or read_from(segments[number]) is not None
    )
    return next(islice(whole, 1, None), 0)


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint says of the message log: from where on it says something of the schedule, and the end of each
    topic, and which were deleted. `is_newest`: whether replay begins with the newest segment.
    """

    messages_end: int = 0
    topics: dict[str, int] = field(default_factory=dict)
    is_newest: bool = True
    deleted: dict[str, Tombstone] = field(default_factory=dict)


def restore(state: BrokerState, data: bytes, *, is_newest: bool = True) -> Restored:
    """Put a checkpoint into an empty state; what it says of the messages is to be held against the message log."""
    found = _decode(data)
    state.openings = found.openings
    for one in found.groups:
        _restore_group(state.declare(one.topic, one.name, config_of(one.settings), position=one.position), one)
    state.life = found.life
    return Restored(found.messages_end, found.topics, is_newest, found.deleted)


def _capture(state: BrokerState, messages_end: int) -> _Checkpoint:
    return _Checkpoint(
        messages_end=messages_end,
        openings=state.openings,
        topics={name: topic.index.end for name, topic in state.topics.items()},
        groups=[_group(name, group) for name, topic in state.topics.items() for group in topic.groups.values()],
        deleted=state.deleted,
        life=state.life,
    )


def _group(topic: str, group: Group) -> _Group:
    return _Group(
        topic=topic, name=group.name, settings=settings_of(group.config), position=group.position,
        paused=group.paused, life=group.life, sought_in_life=group.sought_in_life,
        held=_encode_held(group.unsettled),  # type: ignore[arg-type]  # which is written as the list is
        dead=[], dead_columns=group.dead.capture() if group.dead else None,
        redrive_pace=(group.redrive_pace.second_ms, group.redrive_pace.used),
        order=None if group.order is None else group.order.capture(), reasons=group.reasons.capture(),
    )  # fmt: skip


def _encode_held(unsettled: Unsettled) -> msgspec.Raw:
    """A list of them, each encoded by itself: there may be a hundred thousand, and no call is to hold everybody."""
    runs = [
        _encode(
            _Held(one.first, one.count, one.visible_at_ms, one.delivery, one.attempts_used, one.life, one.in_flight,
                  one.reason, one.history)
        )
        for one in unsettled
    ]  # fmt: skip
    return msgspec.Raw(_ARRAY_32 + len(runs).to_bytes(4, "big") + b"".join(runs))


def _restore_group(group: Group, found: _Group) -> None:
    group.position, group.paused = found.position, found.paused
    group.life, group.sought_in_life = found.life, found.sought_in_life
    group.reasons.restore(found.reasons)
    for one in found.held:
        end = one.first + journal.count_of(one.ids)
        group.unsettled.add(
            InFlightRun(one.first, end, one.visible_at_ms, one.delivery, one.attempts_used, one.life, one.in_flight,
                 None if not one.reason else _number_of(group, one.reason),
                 tuple((_number_of(group, reason), attempts) for reason, attempts in one.history))
        )  # fmt: skip
    for first, ids, attempts, reason, dead_at_ms in found.dead:
        group.dead.add(DeadRun(first, first + journal.count_of(ids), attempts, reason, dead_at_ms))
    if found.dead_columns is not None:
        group.dead.restore(found.dead_columns)
    group.redrive_pace = Pace(*found.redrive_pace)
    if found.order is not None:
        group.order = KeyOrder()
        group.order.restore(found.order)


def _number_of(group: Group, reason: int | str) -> int:
    return group.reasons.number_of(reason) if isinstance(reason, str) else reason
