"""Shared parts of a schedule: the locks and their order, the log, the state, the segments, the options.

A change is written to the log, then applied by the same code that replays it.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from outbox_broker.journal.journal import Journal
from outbox_broker.log.disk_reserve import Reserve
from outbox_broker.schedule.arrivals import ArrivalLog, OwnArrivals
from outbox_broker.schedule.delay_options import DelayOptions
from outbox_broker.schedule.id_index import IdIndex
from outbox_broker.schedule.schedule_log import LOG, SEGMENT_BYTES, CapturedCheckpoint, Place, append
from outbox_broker.schedule.schedule_records import LogRecord
from outbox_broker.schedule.schedule_state import ScheduleState
from outbox_broker.schedule.sorted_run_reader import RunReader
from outbox_broker.segments.port import Segments
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import SegmentKind

Lock = AbstractContextManager[object]


@dataclass(frozen=True, slots=True)
class ScheduleLocks:
    """The two locks of a schedule, both re-entrant. A thread that takes both takes `keeping` first.

    `keeping` is held for a whole step of housekeeping, including disk writes, so no holder of `lock` may wait for it.
    `lock` is held briefly: to decide on a change, to append it to the log and to apply it. Callers wait for syncs of
    the log without `lock`. The guards of the log and of the segments are innermost, and take no other lock.
    """

    keeping: Lock = field(default_factory=threading.RLock)
    lock: Lock = field(default_factory=threading.RLock)


class ScheduleContext:
    """One schedule's shared parts. `state`, `log` and `reader` are used under `lock`, except for methods documented as
    thread-safe; buckets change only under `keeping`.
    """

    def __init__(
        self,
        segments: Segments,
        *,
        options: DelayOptions | None = None,
        reserve: Reserve | None = None,
        locks: ScheduleLocks | None = None,
        arrivals: ArrivalLog | None = None,
    ) -> None:
        """`reserve`: disk space withheld from new messages, if the segments are on a disk. `arrivals`: where messages
        arrive, if not in the schedule's log. Raises as Journal does.
        """
        locks = locks or ScheduleLocks()
        self.keeping = locks.keeping
        self.lock = locks.lock
        self.segments = segments
        self.reserve = reserve
        self.options = options or DelayOptions()
        self.state = ScheduleState(
            cancels_max=self.options.cancels_remembered_max, topic_names_max=self.options.topic_names_max
        )  # fmt: skip
        self.log = Journal(segments, name=LOG, kind=SegmentKind.MESSAGES, segment_bytes=SEGMENT_BYTES)
        self.arrivals = arrivals or OwnArrivals(self.log)
        self._arrived_to: dict[Place, Place] = {}
        """By where a checkpoint was captured, up to where messages had arrived; of those that are kept."""
        self.reader = RunReader(segments, self.state)
        self.index = IdIndex(
            segments,
            pieces_max=self.options.index_pieces_max,
            merged_pieces_max=self.options.index_merged_pieces_max,
        )
        self.is_closed = False

    def act(self, record: LogRecord) -> Place:
        """Write a change to the log, then apply it, under `lock`; durable once the log is committed up to the returned
        place. Raises StorageFailed with nothing changed.
        """
        place = self._write(record)
        self.state.apply(record)
        return place

    def refuse_if_closed(self) -> None:
        """Raise StorageFailed if the schedule is closed."""
        if self.is_closed:
            raise StorageFailed("the schedule is closed")

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def note_checkpoint(self, captured: Place, *, arrived_to: Place) -> None:
        """Note a checkpoint that is on the disk."""
        kept_from = self.log.kept_from
        kept = {other: end for other, end in self._arrived_to.items() if other >= kept_from}
        self._arrived_to = {**kept, captured: arrived_to}  # not in place: others read it without the lock

    def capture_checkpoint(self) -> CapturedCheckpoint:
        """Capture the state, under `lock`: with all that arrived so far, since it is applied under `lock`, too."""
        return CapturedCheckpoint.of(self.log, self.state.checkpoint(arrived_to=self.arrivals.end))

    def write_checkpoint(self, captured: CapturedCheckpoint) -> None:
        """Write a captured state, durably. One at a time, not under `lock`. Raises StorageFailed."""
        # First: else what a power failure takes, and others that arrive in its place, would count as known.
        self.arrivals.commit(captured.arrived_to)
        captured.write(self.log, lock=self.lock)
        self.note_checkpoint(captured.offset, arrived_to=captured.arrived_to)

    @property
    def newest_arrived_to(self) -> Place:
        """Up to where messages had arrived at the newest checkpoint."""
        arrived_to = self._arrived_to
        return arrived_to[max(arrived_to)] if arrived_to else 0

    @property
    def arrivals_needed_from(self) -> Place:
        """The offset from which on the log of arrivals is needed: by the newest checkpoint, or by the one before, if
        the newest is damaged.
        """
        kept_from, arrived_to = self.log.kept_from, self._arrived_to
        if kept_from not in arrived_to:
            return 0
        # The older one may be ahead, where a power failure took the end of that log.
        return min(end for captured, end in arrived_to.items() if captured >= kept_from)

    # -- inner steps -------------------------------------------------------------------------------------------------

    def _write(self, record: LogRecord) -> Place:
        """Append to the log; on a full disk, a change may use the disk reserve."""
        if self.reserve is None:
            return append(self.log, record)
        return self.reserve.spend(lambda: append(self.log, record))
