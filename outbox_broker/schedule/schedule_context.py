"""Shared parts of a schedule: the locks and their order, the log, the state, the segments, the options.

A change is written to the log, then applied by the same code that replays it.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from outbox_broker.journal.journal import Journal
from outbox_broker.log.disk_reserve import Reserve
from outbox_broker.schedule.delay_options import DelayOptions
from outbox_broker.schedule.id_index import IdIndex
from outbox_broker.schedule.schedule_log import LOG, SEGMENT_BYTES, Place, append
from outbox_broker.schedule.schedule_records import LogRecord, Scheduled
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
    ) -> None:
        """`reserve`: disk space withheld from new messages, if the segments are on a disk. Raises as Journal does."""
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

    def _write(self, record: LogRecord) -> Place:
        """Append to the log; on a full disk, all but new messages may use the disk reserve."""
        if self.reserve is None or isinstance(record, Scheduled):
            return append(self.log, record)
        return self.reserve.spend(lambda: append(self.log, record))
