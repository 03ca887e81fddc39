"""What is done with a schedule beside its deliveries, in small steps, in one thread: nothing here decides what is due.

Messages in memory are flushed into buckets, and their ids into a piece of the id index (MemoryFlush); a bucket is
re-filed into finer ones before its time begins (BucketExpansion); many pieces of the index become one, and damaged ones
are made anew (IndexHousekeeping); what nothing names any more is deleted (SegmentGarbage). Each step holds `keeping`,
and takes the lock only to capture what it works on, and to apply the change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import compress
from typing import Final

from outbox_broker.journal.journal import CHECKPOINTS_KEPT
from outbox_broker.log.disk_reserve import may_pass
from outbox_broker.schedule.bucket_filing import BucketFiling, FiledRuns
from outbox_broker.schedule.due_batch import DueBatch
from outbox_broker.schedule.due_soon import DueSoon
from outbox_broker.schedule.id_index import IndexMerge, IndexPiece, index_entries, unpacked
from outbox_broker.schedule.levels import BucketState, is_to_expand
from outbox_broker.schedule.recent_message_ids import RecentMessageIds
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_log import CapturedCheckpoint, Place, filed
from outbox_broker.schedule.schedule_records import BucketChanged, Flushed, Moved, Passed, SegmentsMerged, StoredIndex
from outbox_broker.schedule.schedule_state import Bucket
from outbox_broker.schedule.sorted_run import DUE, ID, SEQ, TOPIC, Entry, SortedRun, id_hashes, is_marked
from outbox_broker.schedule.sorted_run_reader import RunDamaged
from outbox_broker.state.message_id_map import MessageIdMap
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

IDS_PREFIX: Final = "ids-"
_CHEAP_PART: Final = 8
"""A checkpoint is cheap if at most this fraction (1/8) of the memory limit is pending."""
_FREED_AT_ONCE: Final = 2_048
_SMALL_PART: Final = 8
"""The fraction (1/8) of the disk reserve that a flush may use when there is no other space."""
_STEP_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of messages that one step re-files."""
_CHECKPOINTS_MAX: Final = CHECKPOINTS_KEPT + 1
"""So many let go of all before them: the newest may not be known to be durable."""
_RECOVERED_FACTOR: Final = 4
"""On opening, a piece with more than this many times the ids to remember is not read."""


class Housekeeping:
    """Does what is due of it, a step at a time; says when memory is full, and makes room. Thread-safe."""

    def __init__(self, context: ScheduleContext, *, horizon: DueSoon, recent: RecentMessageIds) -> None:
        self._context = context
        merge = IndexMerge()
        filing = BucketFiling(context.segments, context.state, writers_max=context.options.bucket_writers_max)
        self._garbage = SegmentGarbage(context, horizon=horizon, merge=merge, filing=filing)
        self._index = IndexHousekeeping(context, horizon=horizon, recent=recent, garbage=self._garbage, merge=merge)
        self._flush = MemoryFlush(
            context=context, horizon=horizon, recent=recent, filing=filing, garbage=self._garbage, index=self._index
        )
        self._expansion = BucketExpansion(context=context, horizon=horizon, filing=filing, garbage=self._garbage)

    def open(self, segments: Iterable[str], *, unnamed_pieces: Iterable[str]) -> None:
        """Begin, before the schedule is used. `segments`: all that there were when it was opened; `unnamed_pieces`:
        those of the id index among them that the newest checkpoint does not name. Raises StorageFailed.
        """
        self._garbage.add_named_before(unnamed_pieces)
        self._garbage.finish_empty()
        self._index.open(segments)

    def step(self, now_ms: int) -> bool:
        """Do one step of work; True if more remains. Safe to interrupt anywhere.

        Raises StorageFailed with nothing lost; the step is repeated then.
        """
        reserve = self._context.reserve
        with self._context.keeping:
            self._garbage.delete(now_ms)  # first of all: it frees space
            has_room = reserve is None or reserve.is_whole()
            if self._flush.is_full() and (has_room or self._flush.is_small()):
                self._flush.flush(now_ms)
                return True
            if not has_room:
                return False
            if self._flush.is_far_behind():
                self._flush.checkpoint(now_ms)
                return True
            return (
                self._index.load_step()
                or self._index.mend()
                or self._expansion.step(now_ms)
                or self._expansion.merge_step(now_ms)
                or self._index.merge_step(now_ms)
            )

    def is_full(self) -> bool:
        """Returns whether memory should be flushed. Takes no lock."""
        return self._flush.is_full()

    def make_room(self, now_ms: int, *, fill: float | None = None) -> None:
        """Flush memory if it is at `fill` times its limits (the option `fill_max` by default), before more is accepted:
        publishers that are faster than the flushing thread wait. Raises StorageFailed.

        May take long: call it without holding the lock, or one of your own.
        """
        fill = self._context.options.fill_max if fill is None else fill
        if self._flush.is_full(fill=fill):
            with self._context.keeping:
                if self._flush.is_full(fill=fill):
                    self._flush.flush(now_ms)

    def arrivals_needed_from(self) -> int:
        """Returns the offset from which on the log is needed in which messages arrive."""
        return self._context.arrivals_needed_from

    def let_go_of_arrivals(self, offset: int, *, now_ms: int) -> None:
        """Write as many checkpoints as it takes that nothing before an offset of the log of arrivals is needed any
        more. May take long: call it without a lock. Raises StorageFailed.
        """
        with self._context.keeping:
            for _ in range(_CHECKPOINTS_MAX):
                if self._context.arrivals_needed_from >= offset:
                    break
                self._flush.checkpoint(now_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFlush:
    """Writes the messages in memory to buckets as one batch, and applies the change.

    Messages are filed here and not at their publish: a batch spread over two years touches a hundred buckets, each of
    which would be synced before the answer.
    """

    context: ScheduleContext
    horizon: DueSoon
    recent: RecentMessageIds
    filing: BucketFiling
    garbage: SegmentGarbage
    index: IndexHousekeeping

    def is_full(self, *, fill: float = 1) -> bool:
        """Returns whether memory is at `fill` times its limits. Takes no lock."""
        state, options, log = self.context.state, self.context.options, self.context.log
        return (
            state.pending_bytes >= fill * options.memory_bytes_max
            or len(state.pending) + len(state.passed) >= fill * options.memory_messages_max
            or log.grown_bytes >= fill * options.log_bytes_max
        )

    def is_small(self) -> bool:
        """Returns whether a flush needs a small part of the disk reserve: it frees log segments in return."""
        reserve = self.context.reserve
        return reserve is not None and _SMALL_PART * self.context.state.flushed_bytes_max <= reserve.size_bytes

    def flush(self, now_ms: int) -> None:
        """Move the messages in memory into buckets and the id index, and start a new log segment when one is due. Under
        `keeping`. Raises StorageFailed with nothing lost.

        The lock is held only to capture what is in memory, and to apply the change, not during the writes. Messages
        dispatched or canceled in between are marked when the change is applied.
        """
        context, state = self.context, self.context.state
        with context.lock:
            context.refuse_if_closed()
            seen = _Seen(state.next_seq, state.removed)
            entries = list(state.pending.values())
            came: list[Entry | Passed] = [*entries, *state.passed.values()]
            arrived_to = context.arrivals.end
        with self.garbage.deleted_if_refused():
            filed = self.filing.file(entries, now_ms=now_ms)
            piece = self.index.write_piece(came)
        context.arrivals.commit(arrived_to)  # what is filed has arrived, also after a power failure
        recent = MessageIdMap(str, list(map(ID, came)), map(TOPIC, came))
        came.clear()
        with context.lock:
            context.refuse_if_closed()
            self._take_over(filed, piece, recent, seen)
            captured = context.capture_checkpoint() if self._is_checkpoint_due() else None
        if captured is not None:
            self._write_checkpoint(captured)
        context.log.commit()
        filed.entries.clear()
        while entries:
            del entries[-_FREED_AT_ONCE:]  # freeing all at once would block every thread

    def _take_over(self, filed: FiledRuns, piece: IndexPiece | None, recent: MessageIdMap[str], seen: _Seen) -> None:
        """Apply the flush to the state."""
        state = self.context.state
        self.recent.add_flushed(recent)
        gone, fired = filed.gone(state.pending, state.passed) if state.removed != seen.removed else ([], [])
        index = None if piece is None else piece.stored
        topics = state.topics_before(seen.before_seq)
        self.context.act(Flushed(filed.added, index, seen.before_seq, gone, fired, topics))
        if piece is not None:
            self.context.index.add(piece)
        self.horizon.replace_memory()
        self.horizon.add_runs(filed.added)

    def checkpoint(self, now_ms: int) -> None:
        """Write a checkpoint, so that less of the logs is replayed, and kept for that; where much is in memory, it is
        flushed first. Under `keeping`. Raises StorageFailed, for lack of room before its first part.
        """
        context = self.context
        if not self._is_little():
            try:
                self.flush(now_ms)
            except StorageFailed as error:
                if not may_pass(error):
                    raise
                # A full disk has no room for buckets. The checkpoint has all that is in memory, and may use the
                # reserve: what is dropped behind it makes room.
        with context.lock:
            context.refuse_if_closed()
            captured = context.capture_checkpoint()
        if context.reserve is not None:
            context.reserve.make_room(sum(map(len, captured.parts)), spends=True)
        self._write_checkpoint(captured)

    def _write_checkpoint(self, captured: CapturedCheckpoint) -> None:
        self.context.write_checkpoint(captured)
        with self.context.lock:
            self.garbage.add(self.garbage.pop_at_checkpoint())

    def _is_checkpoint_due(self) -> bool:
        """A checkpoint repeats all messages that arrived during the flush: if they are many, it is skipped."""
        is_long = self.context.log.grown_bytes >= self.context.options.log_bytes_max
        return self._is_little() or is_long or self.is_far_behind()

    def _is_little(self) -> bool:
        return self.context.state.pending_bytes <= self.context.options.memory_bytes_max // _CHEAP_PART

    def is_far_behind(self) -> bool:
        """Returns whether more of the log of arrivals would be replayed than is allowed. Takes no lock."""
        context = self.context
        return context.arrivals.end - context.newest_arrived_to >= context.options.arrivals_bytes_max


@dataclass(frozen=True, slots=True)
class _Seen:
    """The state as a flush saw it at its start."""

    before_seq: int
    removed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketExpansion:
    """Re-files the messages of a bucket into finer buckets before the bucket's time begins, some runs at a time.

    A bucket of few messages is not re-filed: its messages are dispatched from it. But they are written together again
    where each of many openings has begun another segment of it.
    """

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
            if not self.horizon.has_opened(bucket.id) and all(
                refiled.run.taken == refiled.start for refiled in leaving
            ):
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
            if self._is_at_rest(bucket) and all(refiled.run.taken == refiled.start for refiled in leaving):
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
        gone = {seq for refiled in leaving for seq in self._gone_since(refiled)}
        marks = filed.marks(gone) if gone else []
        runs = [refiled.run.id for refiled in leaving]
        self.context.act(
            SegmentsMerged(bucket.id.level, bucket.id.slot, runs, list(segments), filed.added, marks)
        )  # fmt: skip
        for refiled in leaving:
            self.context.reader.forget(refiled.run)
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
        for refiled in leaving:
            columns = reader.read_columns(refiled.run)
            stored = reader.read_messages(refiled.run)
            left = DueBatch()
            left.add_piece(columns, stored, gone=refiled.gone, start=refiled.start, stop=refiled.run.count)
            yield from left.entries()

    def _move(self, bucket: Bucket, leaving: Sequence[_RefiledRun], filed: FiledRuns) -> None:
        """Apply the move of re-filed messages. Messages canceled meanwhile are marked in their new runs."""
        gone = {seq for refiled in leaving for seq in self._gone_since(refiled)}
        marks = filed.marks(gone) if gone else []
        taken = [(refiled.run.id, refiled.run.count) for refiled in leaving]
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


class IndexHousekeeping:
    """Writes the segments of the id index. Used under `keeping`."""

    def __init__(
        self,
        context: ScheduleContext,
        *,
        horizon: DueSoon,
        recent: RecentMessageIds,
        garbage: SegmentGarbage,
        merge: IndexMerge,
    ) -> None:
        self._context = context
        self._horizon = horizon
        self._recent = recent
        self._garbage = garbage
        self._merge = merge
        self._segments_made = 0

    def open(self, segments: Iterable[str]) -> None:
        """Read the newest ids of the id index, rebuilding pieces that are damaged there; the rest is read when it is
        needed, or by load_step(). `segments`: all segments of the store when it was opened, so that none of their names
        is reused.
        """
        numbers = (int(segment.removeprefix(IDS_PREFIX)) for segment in segments if segment.startswith(IDS_PREFIX))
        self._segments_made = max(numbers, default=0)
        index, stored = self._context.index, self._context.state.index
        for stored_piece in stored:
            index.add(IndexPiece(stored_piece))
        count = self._context.options.dedup_messages
        for _ in range(len(stored) + 1):
            if index.damaged():
                self._mend()
            try:
                self._recent.add_recovered(index.newest_hashes(count, count_max=_RECOVERED_FACTOR * count))
            except SegmentDamaged:
                continue
            return

    def write_piece(self, came: Sequence[Entry | Passed]) -> IndexPiece | None:
        """Write a piece of the id index for all messages since the last flush, dispatched or not; durable, to be added.

        None if there were no messages. Raises StorageFailed.
        """
        if not came:
            return None
        index = self._context.index
        entries = index_entries(id_hashes(map(ID, came)), map(DUE, came), map(SEQ, came), map(TOPIC, came))
        return index.load(index.write(self._next_segment(), entries))

    def load_step(self) -> bool:
        """Read a part of the index that opening left out; False if nothing is left. Raises StorageFailed."""
        return self._context.index.load_next()

    def mend(self) -> bool:
        """Rebuild damaged pieces; False if there are none. Raises StorageFailed."""
        if not self._context.index.damaged():
            return False
        with self._garbage.deleted_if_refused():
            self._mend()
        return True

    def merge_step(self, now_ms: int) -> bool:
        """Do one step of a merge of the id index; False if there is nothing to merge. Raises StorageFailed.

        The merged piece is in effect from the next checkpoint on.
        """
        if not self._merge.is_begun and not self._begin_merge(now_ms):
            return False
        try:
            with self._garbage.deleted_if_refused():
                stored = self._merge.step()
                if stored is not None:
                    merged = self._merge.merged
                    self._merge.abandon()  # done: a failure from here on starts a new merge
                    self._replace(merged, [stored])
        except SegmentDamaged:  # that piece is rebuilt before the next merge
            self._merge.abandon()
        return True

    def _begin_merge(self, now_ms: int) -> bool:
        context = self._context
        merged = context.index.to_merge(newest=context.options.dedup_messages)
        if not merged:
            return False
        with context.lock:
            # An unsettled batch may be delivered at any time yet, however long its target has been out.
            oldest_ms = context.state.first_undelivered_ms()
        due_min_ms = now_ms - context.options.fired_memory_ms
        due_min_ms = max(0, due_min_ms if oldest_ms is None else min(oldest_ms, due_min_ms))
        self._merge.begin(merged, context.index.merge(merged, self._next_segment(), due_min_ms=due_min_ms))
        return True

    def _next_segment(self) -> str:
        """Returns a name that no piece has or had, since a piece waiting for deletion must not share it."""
        self._segments_made += 1
        return f"{IDS_PREFIX}{self._segments_made:012d}"

    def _replace(self, old: list[StoredIndex], new: Sequence[StoredIndex]) -> None:
        context = self._context
        pieces = [context.index.load(stored_piece) for stored_piece in new]
        with context.lock:
            context.refuse_if_closed()
            context.state.index = context.index.replace(old, pieces)
            self._garbage.add_at_checkpoint(sorted(stored_piece.segment for stored_piece in old))

    def _mend(self) -> None:
        """Rebuild damaged pieces from everything in buckets, which is more than they contained: some eight seconds a
        million messages, in which nothing is flushed.

        Dispatched messages are no longer known: neither that they are too late to cancel, nor that their ids are
        duplicates.
        """
        context = self._context
        damaged = context.index.damaged()
        newest_seq = context.state.next_seq - context.options.dedup_messages
        written: list[StoredIndex] = []
        recent: list[tuple[int, list[int]]] = []
        for some in self._standing_entries():
            written.append(context.index.write(self._next_segment(), sorted(some)))
            recent += ((entry.topic, [hash_]) for hash_, entry in map(unpacked, some) if entry.seq >= newest_seq)
        self._merge.abandon()  # it read the old pieces
        self._recent.add_recovered(recent)
        self._replace(damaged, written)
        logger.warning(
            "id_index_rebuilt",
            extra={
                "segments": [stored_piece.segment for stored_piece in damaged],
                "ids": sum(stored_piece.count for stored_piece in written),
            },
        )

    def _standing_entries(self) -> Iterator[list[bytes]]:
        """Yields entries of the id index for everything in buckets, in portions as large as the in-memory limit."""
        context = self._context
        with context.lock:
            runs = [run for bucket in context.state.buckets.values() for run in bucket.runs.values()]
        entries: list[bytes] = []
        for run in runs:
            entries += self._entries_of(run)
            if len(entries) >= context.options.memory_messages_max:
                yield entries
                entries = []
        if entries:
            yield entries

    def _entries_of(self, run: SortedRun) -> list[bytes]:
        """Returns the index entries of a run, without the lost messages."""
        reader = self._context.reader
        for _ in range(2):
            try:
                columns, stored = reader.read_columns(run), reader.read_messages(run)
            except RunDamaged as damage:
                self._horizon.set_aside(damage)
            else:
                left = [not run.is_lost(at) for at in range(run.count)]
                hashes, dues, seqs = (
                    compress(column, left) for column in (id_hashes(stored.ids), columns.due, columns.seq)
                )
                return index_entries(hashes, dues, seqs, compress(map(columns.topics.__getitem__, columns.topic), left))
        return []


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
        for bucket in [bucket for bucket in self._context.state.buckets.values() if bucket.is_empty()]:
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
