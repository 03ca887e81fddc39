"""Deletes segments that are no longer needed: finished buckets, old logs, and the remains of failed writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from outbox_broker.schedule.bucket_filing import BucketFiling
from outbox_broker.schedule.due_soon import DueSoon
from outbox_broker.schedule.id_index import IndexMerge
from outbox_broker.schedule.levels import BucketState
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_log import Place, filed
from outbox_broker.schedule.schedule_records import BucketChanged
from outbox_broker.schedule.schedule_state import Bucket
from outbox_core.common.errors import StorageFailed


class SegmentGarbage:
    """Finishes buckets, and deletes segments once it is durable that nothing references them."""

    def __init__(
        self, context: ScheduleContext, *, horizon: DueSoon, merge: IndexMerge, filing: BucketFiling
    ) -> None:  # fmt: skip
        self._context = context
        self._horizon = horizon
        self._filing = filing
        self._merge = merge
        self._segments: list[str] = []
        self._at_checkpoint: list[str] = []
        self._at_checkpoint_after: list[str] = []
        self._seen: Place | None = None  # the end of the log at the last step

    def finish(self, bucket: Bucket) -> None:
        """Mark a bucket as done: its segment is deleted once that is durable. Under `lock`. Raises StorageFailed."""
        self._context.act(BucketChanged(bucket.id.level, bucket.id.slot, BucketState.DONE))
        for run in bucket.runs.values():
            self._context.reader.forget(run)
        self._horizon.forget(bucket.id)
        self._segments += bucket.segments

    def finish_empty(self) -> None:
        """Finish every bucket in which nothing waits. Under `lock`, before the schedule is used."""
        for bucket in [one for one in self._context.state.buckets.values() if one.is_empty()]:
            self.finish(bucket)

    def add(self, segments: Iterable[str]) -> None:
        """Add segments that no durable record references any more. Under `keeping`."""
        self._segments += segments

    def add_at_checkpoint(self, segments: Iterable[str]) -> None:
        """Add segments that nothing will reference from the next checkpoint on. Under `lock`."""
        self._at_checkpoint_after += segments

    def add_named_before(self, segments: Iterable[str]) -> None:
        """Add segments that the newest checkpoint does not name, and the one before it may. Before the schedule is
        used.
        """
        self._at_checkpoint += segments

    def pop_at_checkpoint(self) -> list[str]:
        """Returns those of which the checkpoint before the newest knows nothing either, for add(); called once the
        newest is durable. If that is damaged, the one before it counts, which names what it does not. Under `lock`.
        """
        segments, self._at_checkpoint = self._at_checkpoint, self._at_checkpoint_after
        self._at_checkpoint_after = []
        return segments

    def delete(self, now_ms: int) -> None:
        """Delete obsolete segments, and make durable what nobody has waited for since the last step. Under `keeping`.

        Raises StorageFailed.
        """
        context = self._context
        with context.lock:
            context.refuse_if_closed()
            self._horizon.advance(now_ms)
            self._finish_opened()
            self._horizon.update_soonest()
            place = context.log.end
            segments = list(self._segments)  # obsolete by the log up to this place
        self._seen, seen = place, self._seen
        if not segments:
            if seen is not None:
                context.log.commit(seen)
            return
        context.log.commit(place)
        context.segments.delete(segments)
        self._filing.forget(segments)
        del self._segments[: len(segments)]

    @contextmanager
    def deleted_if_refused(self) -> Iterator[None]:
        """Delete the segments of a write that failed halfway: they use space, and nothing will ever reference them.
        They include those of a merge of the id index, which is therefore abandoned.
        """
        try:
            yield
        except StorageFailed:
            self._merge.abandon()
            context = self._context
            with context.lock, suppress(StorageFailed):
                named = {*context.state.segments(), *self._segments, *self._at_checkpoint, *self._at_checkpoint_after}
                unnamed = filed(context.segments) - named
                self._filing.forget(unnamed)
                context.segments.delete(sorted(unnamed))
            raise

    def _finish_opened(self) -> None:
        for bucket_id in self._horizon.opened():
            bucket = self._context.state.buckets.get(bucket_id)
            if bucket is None:
                self._horizon.forget(bucket_id)
            elif bucket.is_empty():
                self.finish(bucket)
