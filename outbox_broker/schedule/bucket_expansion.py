"""Re-files the messages of a bucket into finer buckets before the bucket's time begins, some runs at a time.

A bucket of few messages is not re-filed: its messages are dispatched from it. But they are written together again where
each of many openings has begun another segment of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from outbox_broker.schedule.bucket_filing import BucketFiling, FiledRuns
from outbox_broker.schedule.due_batch import DueBatch
from outbox_broker.schedule.due_soon import DueSoon
from outbox_broker.schedule.levels import BucketState, is_to_expand
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_records import BucketChanged, Moved, SegmentsMerged
from outbox_broker.schedule.schedule_state import Bucket
from outbox_broker.schedule.segment_garbage import SegmentGarbage
from outbox_broker.schedule.sorted_run import SEQ, Entry, SortedRun, is_marked
from outbox_broker.schedule.sorted_run_reader import RunDamaged

_STEP_BYTES_MAX: Final = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketExpansion:
    """Moves messages out of the earliest bucket that is to be expanded."""

    context: ScheduleContext
    horizon: DueSoon
    filing: BucketFiling
    garbage: SegmentGarbage

    def step(self, now_ms: int) -> bool:
        """Re-file some runs of the earliest bucket that is to be expanded; True if there may be more. Under `keeping`.

        Raises StorageFailed with nothing moved.
        The runs are read, written to their new buckets and synced without the lock, which is only taken to apply the
        change. If the bucket's time began meanwhile, its messages are dispatched from where they are, and nothing has
        moved.
        """
        context = self.context
        with context.lock:
            context.refuse_if_closed()
            bucket = self._to_expand(now_ms)
        if bucket is None:
            return False
        leaving = self._next_to_leave(bucket)
        try:
            entries = sorted(self._left_in(leaving), key=SEQ)
        except RunDamaged as damage:
            self.horizon.set_aside(damage)
            return True
        with self.garbage.deleted_if_refused():
            filed = self.filing.file(entries, now_ms=now_ms, below=bucket.id.level)
        with context.lock:
            context.refuse_if_closed()
            # A run that was found damaged meanwhile has another count of messages taken. What was written for a move
            # that does not count is cut by the next.
            if not self.horizon.has_opened(bucket.id) and all(one.run.taken == one.start for one in leaving):
                self._move(bucket, leaving, filed)
        return True

    def merge_step(self, now_ms: int) -> bool:
        """Write together what the smallest segments of a bucket have, if it has too many; True if there may be more.
        Under `keeping`. Raises StorageFailed with nothing changed.
        """
        context = self.context
        with context.lock:
            context.refuse_if_closed()
            found = self._to_merge()
        if found is None:
            return False
        bucket, segments = found
        leaving = [
            _RefiledRun(run, run.taken, None if run.gone is None else bytes(run.gone))
            for run in bucket.runs.values()
            if run.segment in segments
        ]  # fmt: skip
        try:
            entries = sorted(self._left_in(leaving), key=SEQ)
        except RunDamaged as damage:
            self.horizon.set_aside(damage)
            return True
        with self.garbage.deleted_if_refused():
            filed = self.filing.file_into(bucket.id, entries, now_ms=now_ms)
        with context.lock:
            context.refuse_if_closed()
            if self._is_at_rest(bucket) and all(one.run.taken == one.start for one in leaving):
                self._merge(bucket, segments, leaving, filed)
        return True

    def _to_merge(self) -> tuple[Bucket, list[str]] | None:
        """Returns a bucket with too many segments, and those to merge. One whose segments are too large to be merged in
        a step keeps no other from it.
        """
        for bucket in self.context.state.buckets.values():
            if len(bucket.segments) > self.context.options.bucket_segments_max and self._is_at_rest(bucket):
                segments = self._smallest_segments(bucket)
                if len(segments) > 1:
                    return bucket, segments
        return None

    def _is_at_rest(self, bucket: Bucket) -> bool:
        """Returns whether nothing refers to a bucket's runs but the bucket: it is neither dispatched nor re-filed, and
        none of it is kept for the operator.
        """
        is_busy = bucket.handed or bucket.quarantined or self.horizon.has_opened(bucket.id)
        return bucket.state is BucketState.OPEN and not is_busy

    def _smallest_segments(self, bucket: Bucket) -> list[str]:
        """Returns the segments that one step merges: not the one that they are written to."""
        sizes = {name: 0 for name in bucket.segments if not self.filing.is_writing(name)}
        for run in bucket.runs.values():
            if run.segment in sizes:
                sizes[run.segment] += run.messages_bytes
        smallest, size_bytes = [], 0
        for name in sorted(sizes, key=lambda name: sizes[name]):
            size_bytes += sizes[name]
            if size_bytes > _STEP_BYTES_MAX:
                break
            smallest.append(name)
        return smallest

    def _merge(
        self, bucket: Bucket, segments: Sequence[str], leaving: Sequence[_RefiledRun], filed: FiledRuns
    ) -> None:  # fmt: skip
        """Apply the merge of segments, which are deleted then."""
        gone = {seq for one in leaving for seq in self._gone_since(one)}
        marks = filed.marks(gone) if gone else []
        runs = [one.run.id for one in leaving]
        self.context.act(
            SegmentsMerged(bucket.id.level, bucket.id.slot, runs, list(segments), filed.added, marks)
        )  # fmt: skip
        for one in leaving:
            self.context.reader.forget(one.run)
        self.horizon.add_runs(filed.added)
        self.garbage.add(segments)
        if bucket.is_empty():
            self.garbage.finish(bucket)

    def _to_expand(self, now_ms: int) -> Bucket | None:
        """Returns the bucket to re-file first, after sealing it if needed."""
        waiting = [
            bucket
            for bucket in self.context.state.buckets.values()
            if is_to_expand(bucket.id, now_ms=now_ms)
            and not self.horizon.has_opened(bucket.id)
            and self._is_worth_expanding(bucket)
        ]
        if not waiting:
            return None
        bucket = min(waiting, key=lambda one: one.id.start_ms)
        if bucket.state is BucketState.OPEN:
            self.context.act(BucketChanged(bucket.id.level, bucket.id.slot, BucketState.SEALED))
        return bucket

    def _is_worth_expanding(self, bucket: Bucket) -> bool:
        """Returns whether a bucket is large enough to be re-filed, or is re-filed in part: its segments are deleted
        when the rest has left it. Canceled messages count, since re-filing drops them.
        """
        left = sum(run.count - run.taken for run in bucket.runs.values())
        above = 0 if bucket.state is BucketState.EXPANDING else self.context.options.expand_above_messages
        return bucket.state is not BucketState.DONE and left > above

    def _next_to_leave(self, bucket: Bucket) -> list[_RefiledRun]:
        """Returns the runs of a bucket that one step moves; at least one.

        Whole runs, although finer buckets get runs that overlap in time: merged by due time, each step read every run
        again, gigabytes for a week of 100,000 messages in 150 runs.
        """
        messages_max = self.context.options.expand_messages_max
        leaving: list[_RefiledRun] = []
        count = size = 0
        for run in bucket.runs.values():
            if run.taken < run.count and count < messages_max and size < _STEP_BYTES_MAX:
                leaving.append(_RefiledRun(run, run.taken, None if run.gone is None else bytes(run.gone)))
                count, size = count + run.count - run.taken, size + run.messages_bytes
        return leaving

    def _left_in(self, leaving: Sequence[_RefiledRun]) -> Iterator[Entry]:
        """Yields the remaining messages of runs, bypassing the caches, which belong to the holder of the lock."""
        reader = self.context.reader
        for one in leaving:
            columns = reader.read_columns(one.run)
            stored = reader.read_messages(one.run)
            left = DueBatch()
            left.add_piece(columns, stored, gone=one.gone, start=one.start, stop=one.run.count)
            yield from left.entries()

    def _move(self, bucket: Bucket, leaving: Sequence[_RefiledRun], filed: FiledRuns) -> None:
        """Apply the move of re-filed messages. Messages canceled meanwhile are marked in their new runs."""
        gone = {seq for one in leaving for seq in self._gone_since(one)}
        marks = filed.marks(gone) if gone else []
        taken = [(one.run.id, one.run.count) for one in leaving]
        self.context.act(Moved(bucket.id.level, bucket.id.slot, taken, filed.added, marks))
        self.horizon.add_runs(filed.added)
        if bucket.is_empty():
            self.garbage.finish(bucket)

    def _gone_since(self, leaving: _RefiledRun) -> list[int]:
        """Returns the arrival numbers of messages that were canceled since a run was read."""
        run = leaving.run
        if run.gone is None or bytes(run.gone) == leaving.gone:
            return []
        seqs = self.context.reader.read_columns(run).seq
        return [
            seqs[index]
            for index in range(leaving.start, run.count)
            if run.is_gone(index) and not is_marked(leaving.gone, index)
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _RefiledRun:
    """A run to be re-filed: from which index on, and which messages were canceled when it was read."""

    run: SortedRun
    start: int
    gone: bytes | None
