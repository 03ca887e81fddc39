"""Runs the schedule's housekeeping in small steps: what is done next, and what is suspended while the disk is full."""

from __future__ import annotations

from dataclasses import dataclass

from outbox_broker.schedule.bucket_expansion import BucketExpansion
from outbox_broker.schedule.index_housekeeping import IndexHousekeeping
from outbox_broker.schedule.memory_flush import MemoryFlush
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.segment_garbage import SegmentGarbage


@dataclass(frozen=True, slots=True, kw_only=True)
class Housekeeping:
    """Housekeeping never decides what is dispatched."""

    context: ScheduleContext
    garbage: SegmentGarbage
    flush: MemoryFlush
    expansion: BucketExpansion
    index: IndexHousekeeping

    def step(self, now_ms: int) -> bool:
        """Take `keeping`, and do one step of work; True if more remains. Raises StorageFailed."""
        reserve = self.context.reserve
        with self.context.keeping:
            self.garbage.delete(now_ms)  # first of all: it frees space
            has_room = reserve is None or reserve.is_whole()
            if self.flush.is_full() and (has_room or self.flush.is_small()):
                self.flush.flush(now_ms)
                return True
            if not has_room:
                return False
            return (
                self.index.load_step()
                or self.index.mend()
                or self.expansion.step(now_ms)
                or self.expansion.merge_step(now_ms)
                or self.index.merge_step(now_ms)
            )
