"""Segments that are not needed any more: finished buckets, old logs, and what a refused write left behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from outbox_broker.schedule.due_horizon import DueHorizon
from outbox_broker.schedule.id_index import IndexMerge
from outbox_broker.schedule.levels import BucketState
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_log import PREFIX
from outbox_broker.schedule.schedule_records import BucketChanged
from outbox_broker.schedule.schedule_state import Bucket
from outbox_core.common.errors import StorageFailed


class SegmentGarbage:
    """Finishes buckets, and deletes segments once it is durable that nothing names them."""

    def __init__(self, context: ScheduleContext, horizon: DueHorizon, merge: IndexMerge) -> None:
        self._context = context
        self._horizon = horizon
        self._merge = merge
        self._segments: list[str] = []
        self._at_checkpoint: list[str] = []

    def finish(self, bucket: Bucket) -> None:
        """A bucket is done: its segment goes once that is durable. Under `lock`. Raises StorageFailed."""
        self._context.act(BucketChanged(bucket.id.level, bucket.id.slot, BucketState.DONE))
        for run in bucket.runs.values():
            self._context.reader.forget(run)
        self._horizon.forget(bucket.id)
        self._segments.append(bucket.segment)

    def finish_empty(self) -> None:
        """Every bucket in which nothing waits is done. Under `lock`, before anybody uses the schedule."""
        for bucket in [one for one in self._context.state.buckets.values() if one.is_empty()]:
            self.finish(bucket)

    def add(self, segments: Iterable[str]) -> None:
        """Segments that nothing which is durable names any more. Under `keeping`."""
        self._segments += segments

    def add_at_checkpoint(self, segments: Iterable[str]) -> None:
        """Segments that nothing will name from the next checkpoint on. Under `lock`."""
        self._at_checkpoint += segments

    def pop_at_checkpoint(self) -> list[str]:
        """Those segments, as a checkpoint begins: for add() once it is durable. Under `lock`."""
        segments, self._at_checkpoint = self._at_checkpoint, []
        return segments

    def delete(self, now_ms: int) -> None:
        """Delete segments that have nothing to say any more. Under `keeping`. Raises StorageFailed."""
        context = self._context
        with context.lock:
            context.refuse_if_closed()
            self._horizon.advance(now_ms)
            self._finish_opened()
            self._horizon.update_soonest()
            place = context.log.place
            segments = list(self._segments)  # done with by what the log says up to this place
        context.log.commit(place)
        context.store.delete(segments)
        del self._segments[: len(segments)]

    @contextmanager
    def deleted_if_refused(self) -> Iterator[None]:
        """Delete the segments that were made for what could not be written to its end: they take room, and nothing will
        ever name them. Those of a merge of the id index are among them, which is therefore abandoned.
        """
        try:
            yield
        except StorageFailed:
            self._merge.abandon()
            context = self._context
            with context.lock, suppress(StorageFailed):
                named = {*context.state.segments(), *self._segments, *self._at_checkpoint}
                unnamed = {one for one in context.store.list() if not one.startswith(PREFIX)} - named
                context.store.delete(sorted(unnamed))
            raise

    def _finish_opened(self) -> None:
        for bucket_id in self._horizon.opened():
            bucket = self._context.state.buckets.get(bucket_id)
            if bucket is None:
                self._horizon.forget(bucket_id)
            elif bucket.is_empty():
                self.finish(bucket)
