"""The ports of a timing store: it holds when rows of message tables are due, and their ids, but no bodies.

Nothing depends on what it holds. A row is due in its table, too, where the compensator finds it: the store makes that
precise. So it may lose or repeat timers, and each of its users treats what it says as a hint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True, order=True)
class TimedRow:
    """A row of a message table: the table's name, without its schema, and the id."""

    table: str
    id: str


@dataclass(frozen=True, slots=True)
class Timer:
    """When a row is due, in milliseconds since the Unix epoch."""

    row: TimedRow
    due_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenTimers:
    """Timers of one slot, the longest due first, for the taker alone until the lease ends.

    `lease` names this take. `late_ms`: how long the first of them has been due, 0 if it is not yet; `next_ms`: until
    the slot's next timer can be taken, None where it has none. `complete`: whether all timers were added since the
    store last lost everything.
    """

    slot: int
    rows: Sequence[TimedRow]
    lease: str
    late_ms: int
    next_ms: int | None
    complete: bool


class SlotState(StrEnum):
    """Whether a slot has all timers: COMPLETE, or not since the store lost them (INCOMPLETE), which a rebuild mends."""

    COMPLETE = "complete"
    REBUILDING = "being rebuilt"
    INCOMPLETE = "to be rebuilt"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFigures:
    """What one slot holds: its timers, those of them that are due, and how long until the next one is due.

    Timers that a worker has taken count; they are due again at the end of its lease.
    """

    slot: int
    timers: int
    due: int
    next_ms: int | None
    state: SlotState

    @property
    def complete(self) -> bool:
        """Whether all timers were added since the store last lost everything."""
        return self.state is SlotState.COMPLETE


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotServer:
    """The process whose worker serves a slot; `instance`: its id in the registry of leases, empty without leases.

    `rebuilt_rows`: the pending rows that its rebuild has read so far, None while it rebuilds nothing;
    `rows_to_rebuild`: those that were pending when it began, None where they are too many to be counted.
    """

    host: str
    process: int
    instance: str
    rebuilt_rows: int | None = None
    rows_to_rebuild: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatus:
    """What one slot holds, or why it does not answer; who announced itself as its server last, and how long ago."""

    slot: int
    figures: SlotFigures | None = None
    problem: str | None = None
    server: SlotServer | None = None
    seen_ms_ago: int | None = None


class TimerSink(Protocol):
    """Takes timers. Thread-safe."""

    def add(self, timers: Sequence[Timer], *, only_missing: bool = False) -> int:
        """Set when rows are due, replacing earlier times; `only_missing`: of rows that have none. Returns how many
        times were set or changed. Idempotent.

        Raises BrokerError: then some may have been set. StorageFailed: the store is full, or set up in another way.
        """

    def close(self) -> None:
        """Close connections. Idempotent."""


class TimerQueue(Protocol):
    """Hands out timers that are due, or will be soon, to workers. Any number of them may take from a slot.

    Raises BrokerError.
    """

    def take(self, slots: Sequence[int], *, limit: int, lease_ms: int, ahead_ms: int = 0) -> list[TakenTimers]:
        """Take timers of these slots that are due, or will be within `ahead_ms`, at most `limit` of all together, and
        say when the next can be taken. Slots that do not answer are left out; raises if none does.

        A timer that is not settled within the lease is taken again.
        """

    def settle(self, taken: Sequence[TakenTimers], *, later_ms: Mapping[TimedRow, int]) -> None:
        """Remove what one take returned, but for rows that are due later, in so many milliseconds. What was set or
        taken again since then stays as it is. After an error some may be settled; the others are handed out again.
        """

    def wait(self, timeout_ms: int) -> None:
        """Wait until a timer was added that is due before all others of its slot, or until the time is over. One
        worker of a store at a time. Raises nothing: without a connection it waits for the whole time.
        """


@dataclass(frozen=True, slots=True)
class Rebuild:
    """A rebuild that began: its name, and the slots that are its own."""

    name: str
    slots: Sequence[int]


class TimingAdmin(Protocol):
    """Checks and rebuilds a store. Raises BrokerError."""

    @property
    def slots(self) -> int:
        """The number of slots, by the URL."""

    def prepare(self) -> None:
        """Check the servers' settings and register the source. Raises ConfigurationError for settings with which the
        store would lose timers, or a number of slots that differs from the registered one.
        """

    def begin_rebuild(self, slots: Sequence[int]) -> Rebuild:
        """Begin to rebuild those of these slots that are neither complete nor being rebuilt by others. One rebuild at a
        time: what an earlier one of this object left unfinished is taken over.
        """

    def continue_rebuild(self, rebuild: Rebuild) -> bool:
        """Keep the slots for a further 20 seconds, after which others may rebuild them. Returns whether all are still
        this rebuild's: False if one lost its timers in between.
        """

    def end_rebuild(self, rebuild: Rebuild) -> bool:
        """Mark the slots as complete. Returns as continue_rebuild()."""

    def abandon_rebuild(self, rebuild: Rebuild) -> None:
        """Let others rebuild at once those of the slots that are still this rebuild's. Idempotent."""

    def figures(self) -> list[SlotFigures]:
        """Returns what each slot holds. Raises BrokerError if one does not answer."""


class TimingStatus(Protocol):
    """Shows slots to people, and who serves them. Nothing is decided by it. Raises BrokerError."""

    def announce(self, slots: Sequence[int], server: SlotServer) -> None:
        """Record who serves these slots, for 30 seconds, unless another server announces itself. After an error some
        may have it.
        """

    def statuses(self, slots: Sequence[int]) -> list[SlotStatus]:
        """Returns the status of these slots; raises if none of them answers."""


@dataclass(frozen=True, slots=True)
class StoredTimer:
    """A row and its time as the store has it now, in microseconds: its due time, or the end of a lease."""

    row: TimedRow
    at_us: int


@dataclass(frozen=True, slots=True)
class TimerPage:
    """A part of a slot's timers, and where the next part begins; None: there is no more."""

    timers: Sequence[StoredTimer]
    next_cursor: int | None


class TimerScan(Protocol):
    """Lists what is in a store, to compare it with the tables. Raises BrokerError."""

    def list_timers(self, slot: int, *, cursor: int, limit: int) -> TimerPage:
        """About `limit` timers of a slot, from cursor 0 on. Some may come twice; where the slot moves to another server
        in the meantime, some may be left out.
        """

    def remove_timers(self, slot: int, timers: Sequence[StoredTimer]) -> int:
        """Remove timers of a slot whose time is still the same; returns how many."""


class TimingStore(TimerSink, TimerQueue, TimingAdmin, TimingStatus, TimerScan, Protocol):
    """The whole store of one source."""
