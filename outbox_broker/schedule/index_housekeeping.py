"""Housekeeping of the id index: a piece for each flush, merges of many pieces, rebuilds of damaged ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import Final

from outbox_broker.schedule.due_soon import DueSoon
from outbox_broker.schedule.id_index import IndexMerge, IndexPiece, index_entries, unpacked
from outbox_broker.schedule.recent_message_ids import RecentMessageIds
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_records import Passed, StoredIndex
from outbox_broker.schedule.segment_garbage import SegmentGarbage
from outbox_broker.schedule.sorted_run import DUE, ID, SEQ, TOPIC, Entry, SortedRun, id_hashes
from outbox_broker.schedule.sorted_run_reader import RunDamaged
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

IDS_PREFIX: Final = "ids-"
_RECOVERED_FACTOR: Final = 4
"""On opening, a piece with more than this many times the ids to remember is not read."""


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
        numbers = (int(one.removeprefix(IDS_PREFIX)) for one in segments if one.startswith(IDS_PREFIX))
        self._segments_made = max(numbers, default=0)
        index, stored = self._context.index, self._context.state.index
        for one in stored:
            index.add(IndexPiece(one))
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
        pieces = [context.index.load(one) for one in new]
        with context.lock:
            context.refuse_if_closed()
            context.state.index = context.index.replace(old, pieces)
            self._garbage.add_at_checkpoint(sorted(one.segment for one in old))

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
            recent += ((one.topic, [hash_]) for hash_, one in map(unpacked, some) if one.seq >= newest_seq)
        self._merge.abandon()  # it read the old pieces
        self._recent.add_recovered(recent)
        self._replace(damaged, written)
        logger.warning(
            "id_index_rebuilt",
            extra={"segments": [one.segment for one in damaged], "ids": sum(one.count for one in written)},
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
                hashes, dues, seqs = (compress(one, left) for one in (id_hashes(stored.ids), columns.due, columns.seq))
                return index_entries(hashes, dues, seqs, compress(map(columns.topics.__getitem__, columns.topic), left))
        return []
