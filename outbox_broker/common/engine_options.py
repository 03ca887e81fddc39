"""Options of an engine, with safe defaults. Bounds are declared once, with the types, for the configuration too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, get_args, get_type_hints

from msgspec import Meta

from outbox_broker.filter import INDEX_HEADER
from outbox_core.common.errors import ConfigurationError
from outbox_core.journal.block import FRAMES_MAX

Positive: TypeAlias = Annotated[int, Meta(ge=1)]


def bound_of(hint: object) -> Meta | None:
    """Returns the bound that a type is annotated with, by itself or beside None."""
    hints = [hint, *get_args(hint), *(inner for part in get_args(hint) for inner in get_args(part))]
    return next((part for part in hints if isinstance(part, Meta)), None)


@cache
def hints_of(options: type) -> dict[str, Any]:
    """Returns the types of a dataclass's fields, with their bounds."""
    return get_type_hints(options, include_extras=True)


def refuse_out_of_bounds(options: object) -> None:
    """Raise ConfigurationError for a number beyond a bound of its declaration; None has none."""
    declared: type = type(options)
    for name, hint in hints_of(declared).items():
        bound, value = bound_of(hint), getattr(options, name)
        if bound is None or value is None:
            continue
        or_none = ", or none" if type(None) in get_args(hint) else ""
        if bound.ge is not None and value < bound.ge:
            raise ConfigurationError(f"{name} must be at least {bound.ge}{or_none}")
        if bound.le is not None and value > bound.le:
            raise ConfigurationError(f"{name} must be at most {bound.le}{or_none}")


SEGMENT_BYTES_MIN: Final = 4096


class Durability(StrEnum):
    """When a publish or an acknowledgement is answered: once it is on disk, or once the operating system has it."""

    FSYNC = "fsync"
    OS = "os"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Limits and choices of one engine. `durability` OS survives kill -9 but not a power failure.

    Segments older than `retention_ms`, or beyond `retention_bytes`, are dropped once no group needs them any more; with
    `retention_drops_unread` also before. Messages that, by `judged_file`, the reconciliation has not evaluated yet are
    kept for up to twice `retention_ms`, as long as `retention_bytes` allow it. `filter_scan_max` is how many messages a
    pull scans for one that matches its group's filter. Filters are indexed by the header `filter_index_header`, or by
    the one that `filter_index_headers` names for their topic. `redrive_per_second` is how many dead letters a redrive
    makes ready per second by default, `redrive_batch_max` how many runs of them one action names, and
    `dead_search_messages_max` how many are read at a time to find or edit them. A pull that must not wait takes only
    what was written within the last `immediate_pull_lag_bytes_max` of the message log, which is in the page cache. A
    pull delivers nothing new that would raise its group above `group_in_hand_max`
    delivered and unsettled messages, including those waiting for another attempt, or all groups together above
    `in_hand_max` in-flight messages: each run of them is in memory. Each group has `group_in_hand_min` beyond that of
    its own: no group has to wait because of others. Runs of dead letters are in memory, too, up to
    `dead_letters_bytes_max`: above it, messages without attempts left wait in their groups, and are not delivered. So
    are the distinct reasons of failed attempts, of all groups together up to `reasons_bytes_max`, of any group up to
    `group_reasons_bytes_min`: above, a reason is only in the action log. The newest scheduled messages are in memory,
    up to `schedule_memory_...`; all others are on disk. Every `stall_check_ms` groups are looked at for messages that
    wait and are not delivered; what lasts for `stall_event_ms` is logged. A group has no consumer if none waits, and
    none has asked for `consumer_idle_ms`. Recurring messages, up to `recurring_messages_max`, are in memory with their
    bodies.
    """

    durability: Durability = Durability.FSYNC
    segment_bytes: Annotated[int, Meta(ge=SEGMENT_BYTES_MIN)] = 256 * 1024 * 1024
    checkpoint_bytes: Positive = 64 * 1024 * 1024
    retention_ms: Positive | None = 7 * 24 * 60 * 60 * 1000
    retention_bytes: Positive | None = None
    retention_drops_unread: bool = False
    retention_check_ms: Positive = 60_000
    judged_file: Path | None = None
    reserve_bytes: int = 16 * 1024 * 1024
    topics_max: Positive = 40_000
    groups_per_topic_max: Positive = 1_000
    recurring_messages_max: Positive = 1_000
    dedup_messages_max: Positive = 500_000
    cancel_tombstones_max: Positive = 100_000
    # A batch has two syncs and some twenty system calls; after each, its thread waits for the interpreter again.
    fire_batch_max: Annotated[int, Meta(ge=1, le=FRAMES_MAX)] = 2_000
    schedule_memory_messages_max: Positive = 65_536
    schedule_memory_bytes_max: Positive = 32 * 1024 * 1024
    pull_bytes_max: Positive = 32 * 1024 * 1024
    filter_scan_max: Positive = 2_000
    filter_index_header: Annotated[str, Meta(min_length=1)] = INDEX_HEADER
    filter_index_headers: Mapping[str, str] = field(default_factory=dict)
    redrive_per_second: Positive = 1_000
    redrive_batch_max: Positive = 10_000
    # Those that are edited of what was read are the frames of one block.
    dead_search_messages_max: Annotated[int, Meta(ge=1, le=FRAMES_MAX)] = 1_000
    immediate_pull_lag_bytes_max: Positive = 4 * 1024 * 1024
    in_hand_max: Positive = 1_000_000
    group_in_hand_max: Positive = 100_000
    group_in_hand_min: Annotated[int, Meta(ge=0)] = 100
    dead_letters_bytes_max: Positive = 32 * 1024 * 1024
    reasons_bytes_max: Positive = 16 * 1024 * 1024
    group_reasons_bytes_min: int = 64 * 1024
    stall_check_ms: Positive = 5_000
    stall_event_ms: Positive = 60_000
    consumer_idle_ms: Positive = 60_000
    clock_slice_ms: int = 1_000

    def __post_init__(self) -> None:
        refuse_out_of_bounds(self)
