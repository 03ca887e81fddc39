"""Checkpoints: the state that results from the action log, written into the log itself.

So replay begins where the newest one was captured, and older segments can be removed. A checkpoint is covered by the
log's checksums and syncs: if one is torn or damaged, replay begins with the one before, which is slower and gives the
same state.
State that follows from the message log alone (locations, recent ids) is not included: the segments' footers hold
it. Nor is the schedule, which is durable by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from outbox_broker.group.consumer_group import Group
from outbox_broker.group.dead_letters import DeadState
from outbox_broker.group.failure_reasons import ReasonTexts
from outbox_broker.group.in_flight import InFlightRun, UnsettledRuns
from outbox_broker.group.key_order import KeyOrder, OrderState
from outbox_broker.group.messages_aside import OwnPlace
from outbox_broker.recurring.recurring_state import RecurringState
from outbox_broker.state.engine_state import BrokerState, Tombstone, config_of, settings_of
from outbox_core.common.rate_limit import RateLimit
from outbox_core.journal.recurring_records import AddedRecurring

PART_BYTES: Final = 1024 * 1024


class _InFlightRun(msgspec.Struct, array_like=True, frozen=True):
    first: int
    count: int
    visible_at_ms: int
    delivery: int
    attempts_used: int
    generation: int
    in_flight: bool
    reason: int | None  # its number among the reasons of the group, as in the history
    history: tuple[tuple[int, int], ...] = ()
    together: int = 1
    expiry_counts: bool = True
    redriven: bool = False
    suspects: int = 0


class _Group(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    topic: str
    name: str
    settings: dict[str, str | int | float | bool | None]
    position: int
    paused: bool
    generation: int
    seek_generation: int
    in_flight: list[_InFlightRun]
    order: OrderState | None = None
    redrive_pace: tuple[int, int] = (0, 0)
    dead: DeadState | None = None
    reasons: ReasonTexts = []
    redriven: DeadState | None = None
    places: dict[int, OwnPlace] = {}
    moved_to: int = 0
    edited_ids: list[str] = []


class _Recurring(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    added: AddedRecurring
    fired_to_ms: int
    paused: bool


class _Checkpoint(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    messages_end: int
    epoch: int
    topics: dict[str, int]
    groups: list[_Group]
    deleted: dict[str, Tombstone] = {}
    generation: int = 0
    latest_ms: int = 0
    recurring: list[_Recurring] = []
    recurring_generation: int = 0


_encode = msgspec.msgpack.Encoder().encode
_ARRAY_32: Final = b"\xdd"
_decode = msgspec.msgpack.Decoder(_Checkpoint).decode


def parts_of(state: BrokerState, *, messages_end: int) -> list[bytes]:
    """Encode the state, in parts of PART_BYTES.

    `messages_end`: records of the message log before this offset add nothing to the durable schedule.
    """
    data = _encode(_capture(state, messages_end))
    return [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """A checkpoint's view of the message log: the offset from which records add to the schedule, the end of each topic,
    and the deleted topics.
    """

    messages_end: int = 0
    topics: dict[str, int] = field(default_factory=dict)
    deleted: dict[str, Tombstone] = field(default_factory=dict)


def restore(state: BrokerState, data: bytes) -> CheckpointView:
    """Load a checkpoint into an empty state; what it says of the messages must be checked against the message log."""
    decoded = _decode(data)
    state.epoch = decoded.epoch
    for group_state in decoded.groups:
        _restore_group(
            state.declare(
                group_state.topic, group_state.name, config_of(group_state.settings), position=group_state.position
            ),
            group_state,
        )
    state.generation, state.latest_ms = decoded.generation, decoded.latest_ms
    for stored in decoded.recurring:
        state.recurring.restore(
            RecurringState(added=stored.added, fired_to_ms=stored.fired_to_ms, paused=stored.paused)
        )
    state.recurring.generation = decoded.recurring_generation
    return CheckpointView(decoded.messages_end, decoded.topics, decoded.deleted)


def _capture(state: BrokerState, messages_end: int) -> _Checkpoint:
    return _Checkpoint(
        messages_end=messages_end,
        epoch=state.epoch,
        topics={name: topic.index.end for name, topic in state.topics.items()},
        groups=[_group(name, group) for name, topic in state.topics.items() for group in topic.groups.values()],
        deleted=state.deleted,
        generation=state.generation,
        latest_ms=state.latest_ms,
        recurring=[
            _Recurring(added=recurring.added, fired_to_ms=recurring.fired_to_ms, paused=recurring.paused)
            for recurring in state.recurring.by_name.values()
        ],
        recurring_generation=state.recurring.generation,
    )


def _group(topic: str, group: Group) -> _Group:
    return _Group(
        topic=topic, name=group.name, settings=settings_of(group.config), position=group.position,
        paused=group.paused, generation=group.generation, seek_generation=group.seek_generation,
        in_flight=_encode_in_flight(group.unsettled),  # type: ignore[arg-type]  # which is written as the list is
        dead=group.dead.capture() if group.dead else None,
        redriven=group.redriven.capture() if group.redriven else None,
        redrive_pace=(group.redrive_pace.second_ms, group.redrive_pace.used),
        order=None if group.order is None else group.order.capture(), reasons=group.reasons.capture(),
        places=group.aside.capture(), moved_to=group.moved_to, edited_ids=list(group.edited_ids),
    )  # fmt: skip


def _encode_in_flight(unsettled: UnsettledRuns) -> msgspec.Raw:
    """Encode a list of runs, each on its own: there may be a hundred thousand, and no call may block others."""
    runs = [
        _encode(
            _InFlightRun(run.first, run.count, run.visible_at_ms, run.delivery, run.attempts_used, run.generation,
                  run.in_flight, run.reason, run.history, run.together, run.expiry_counts, run.redriven, run.suspects)
        )
        for run in unsettled
    ]  # fmt: skip
    return msgspec.Raw(_ARRAY_32 + len(runs).to_bytes(4, "big") + b"".join(runs))


def _restore_group(group: Group, group_state: _Group) -> None:
    group.position, group.paused = group_state.position, group_state.paused
    group.generation, group.seek_generation = group_state.generation, group_state.seek_generation
    group.reasons.restore(group_state.reasons)
    for run in group_state.in_flight:
        end = run.first + run.count
        group.unsettled.add(
            InFlightRun(run.first, end, run.visible_at_ms, run.delivery, run.attempts_used, run.generation,
                 run.in_flight, run.reason, run.history, run.together, run.expiry_counts, suspects=run.suspects,
                 redriven=run.redriven)
        )  # fmt: skip
    if group_state.dead is not None:
        group.dead.restore(group_state.dead)
    if group_state.redriven is not None:
        group.redriven.restore(group_state.redriven)
    group.redrive_pace = RateLimit(*group_state.redrive_pace)
    group.aside.put(group_state.places)
    group.moved_to = group_state.moved_to
    group.remember_edited(group_state.edited_ids)
    if group_state.order is not None:
        group.order = KeyOrder()
        group.order.restore(group_state.order)
