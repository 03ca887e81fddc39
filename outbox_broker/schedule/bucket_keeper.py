"""Keeping the schedule in order, in small steps. Nothing here decides what fires.

Flushing memory into buckets, re-filing buckets into finer ones, merging the id index, dropping what is behind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import compress
from typing import Final

from outbox_broker.schedule.bucket_filing import FiledRuns
from outbox_broker.schedule.due_batch import DueBatch
from outbox_broker.schedule.id_index import IndexPiece, index_entries, unpacked
from outbox_broker.schedule.levels import BucketState, is_to_expand
from outbox_broker.schedule.schedule_context import IDS_PREFIX, DelayCore
from outbox_broker.schedule.schedule_log import PREFIX
from outbox_broker.schedule.schedule_records import BucketChanged, Flushed, Moved, Passed, StoredIndex
from outbox_broker.schedule.schedule_state import Bucket
from outbox_broker.schedule.sorted_run import DUE, ID, SEQ, TOPIC, Entry, SortedRun, id_hashes, is_marked
from outbox_broker.schedule.sorted_run_reader import RunDamaged
from outbox_broker.state.message_identities import Identities
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import SegmentDamaged

logger = logging.getLogger(__name__)

_STEP_BYTES_MAX: Final = 8 * 1024 * 1024
_CHEAP_PART: Final = 8
"""A checkpoint is cheap with so small a part of what memory may hold."""
_FREED_AT_ONCE: Final = 2_048
_SMALL_PART: Final = 8
"""Of the reserve, that a flush may take where there is no other room."""
_RECOVERED_FACTOR: Final = 4
"""A piece of the id index that has so many times the ids that are to be remembered is not read for them."""


class Keeping(DelayCore):
    """The schedule's housekeeping."""

    _merging: tuple[list[StoredIndex], Iterator[StoredIndex | None]] | None = None

    def maintain(self, now_ms: int) -> bool:
        """Do one step of what is to be done; True where more waits. Safe to be ended anywhere.

        Raises StorageFailed with nothing lost; the step is then done again.
        """
        with self._keeping:
            self._delete_finished(now_ms)  # first of all: it makes room
            has_room = self._reserve is None or self._reserve.is_whole()
            if self.is_full() and (has_room or self._is_flush_small()):
                self._flush(now_ms)
                return True
            if not has_room:
                return False
            if self._index.damaged():
                with self._undone_if_refused():
                    self._mend_index()
                return True
            return self._expand_step(now_ms) or self._merge_step(now_ms)

    def is_full(self) -> bool:
        """Whether memory is to be flushed. Waits for nobody."""
        return self._is_filled(1)

    def make_room(self, now_ms: int, *, fill: int = 1) -> None:
        """Flush memory where it is `fill` times as full as it may be, before more is taken in. Raises StorageFailed.

        To be called without the lock, or one's own, since it may take long.
        """
        if self._is_filled(fill):
            with self._keeping:
                if self._is_filled(fill):
                    self._flush(now_ms)

    def _is_filled(self, fill: int) -> bool:
        state, options = self._state, self._options
        return (
            state.pending_bytes >= fill * options.memory_bytes_max
            or len(state.pending) + len(state.passed) >= fill * options.memory_messages_max
            or self._log.grown_bytes >= fill * options.log_bytes_max
        )

    def _is_flush_small(self) -> bool:
        """Whether a flush takes a small part of the room that is kept for others: it lets go of the log in return."""
        return self._reserve is not None and _SMALL_PART * self._state.flushed_bytes_max <= self._reserve.size_bytes

    def _delete_finished(self, now_ms: int) -> None:
        """Delete segments that have nothing to say any more."""
        with self._lock:
            self._refuse_if_closed()
            self._advance(now_ms)
            self._drop_finished()
            self._look_ahead()
            place = self._log.place
            garbage = list(self._garbage)  # done with by what the log says up to this place
        self._log.commit(place)
        self._store.delete(garbage)
        del self._garbage[: len(garbage)]

    @contextmanager
    def _undone_if_refused(self) -> Iterator[None]:
        """Delete the segments that were made for what could not be written to its end: they take room, and nothing will
        ever name them.
        """
        try:
            yield
        except StorageFailed:
            self._merging = None
            with self._lock, suppress(StorageFailed):
                named = {*self._state.segments(), *self._garbage, *self._garbage_at_checkpoint}
                unnamed = {one for one in self._store.list() if not one.startswith(PREFIX)} - named
                self._store.delete(sorted(unnamed))
            raise

    # -- memory into buckets -----------------------------------------------------------------------------------------

    def _flush(self, now_ms: int) -> None:
        """Put what is in memory into buckets and the id index, and begin a new log segment where that is due.

        Everything goes on while it is written: the lock is held to see what is in memory, and to make it count. What
        fires or is canceled in between is marked then.
        """
        with self._lock:
            self._refuse_if_closed()
            seen = _Seen(self._state.next_seq, self._state.removed)
            entries = list(self._state.pending.values())
            came: list[Entry | Passed] = [*entries, *self._state.passed.values()]
        with self._undone_if_refused():
            filed = self._filing.file(entries, now_ms=now_ms)
            piece = self._write_index(came)
        recent = Identities(str, list(map(ID, came)), map(TOPIC, came))
        came.clear()
        with self._lock:
            self._refuse_if_closed()
            self._take_over(filed, piece, recent, seen)
            garbage: list[str] = []
            if self._is_checkpoint_due():
                self._log.begin(self._state.checkpoint())
                garbage = self._log.old_segments() + self._garbage_at_checkpoint
                self._garbage_at_checkpoint = []
        self._log.commit()
        self._garbage += garbage
        filed.entries.clear()
        while entries:
            del entries[-_FREED_AT_ONCE:]  # all at once would hold every thread up

    def _take_over(self, filed: FiledRuns, piece: IndexPiece | None, recent: Identities[str], seen: _Seen) -> None:
        """What was written counts from now on."""
        state = self._state
        self._remember_recent(recent)
        gone, fired = filed.gone(state.pending, state.passed) if state.removed != seen.removed else ([], [])
        self._act(Flushed(filed.added, None if piece is None else piece.stored, seen.before_seq, gone, fired))
        if piece is not None:
            self._index.add(piece)
        self._wheel.clear_near()
        self._far, self._far_first_ms = [], None
        self._remember(state.pending.values())
        self._place_runs(filed.added)

    def _is_checkpoint_due(self) -> bool:
        """A checkpoint has all that came during the flush in it, once more: so not behind each, where that is much."""
        is_little = self._state.pending_bytes <= self._options.memory_bytes_max // _CHEAP_PART
        return is_little or self._log.grown_bytes >= self._options.log_bytes_max

    def _write_index(self, came: Sequence[Entry | Passed]) -> IndexPiece | None:
        """A piece of the id index for all that came since the last flush, fired or not."""
        if not came:
            return None
        segment = self._next_ids_segment()
        entries = index_entries(id_hashes(map(ID, came)), map(DUE, came), map(SEQ, came), map(TOPIC, came))
        stored = self._index.write(segment, entries)
        self._store.sync([segment])
        self._store.seal(segment)
        return self._index.load(stored)

    def _next_ids_segment(self) -> str:
        """A name that no piece has or had, so that a piece that is to be deleted still is another's."""
        self._ids_made += 1
        return f"{IDS_PREFIX}{self._ids_made:012d}"

    def _remember_recent(self, newest: Identities[str]) -> None:
        """Remember the ids of the last flushes, so that a repeated publish is known; at least `dedup_messages`."""
        kept = [*self._recent, newest]
        while kept and sum(map(len, kept[1:])) >= self._options.dedup_messages:
            del kept[0]
        self._recent = tuple(kept)
        if sum(map(len, kept)) >= self._options.dedup_messages:
            self._recovered = {}

    # -- buckets into finer ones -------------------------------------------------------------------------------------

    def _expand_step(self, now_ms: int) -> bool:
        """Re-file some runs of the earliest bucket whose turn it is; True where there may be more.

        They are read, written to their new buckets and synced while everything goes on: only that it counts needs the
        lock. Where the bucket's time began meanwhile, it fires from where it is, and nothing has moved.
        """
        with self._lock:
            self._refuse_if_closed()
            bucket = self._to_expand(now_ms)
        if bucket is None:
            return False
        leaving = self._next_to_leave(bucket)
        try:
            entries = sorted(self._left_in(bucket, leaving), key=SEQ)
        except RunDamaged as damage:
            self._set_aside(damage)
            return True
        with self._undone_if_refused():
            filed = self._filing.file(entries, now_ms=now_ms, below=bucket.id.level)
        with self._lock:
            self._refuse_if_closed()
            if bucket.id not in self._opened and all(one.run.taken == one.start for one in leaving):
                self._move(bucket, leaving, filed)
        return True

    def _to_expand(self, now_ms: int) -> Bucket | None:
        """The bucket that is to be re-filed first, sealed now where it is not yet."""
        waiting = [
            bucket
            for bucket in self._state.buckets.values()
            if is_to_expand(bucket.id, now_ms=now_ms) and bucket.id not in self._opened and _has_more(bucket)
        ]
        if not waiting:
            return None
        bucket = min(waiting, key=lambda one: one.id.start_ms)
        if bucket.state is BucketState.OPEN:
            self._act(BucketChanged(bucket.id.level, bucket.id.slot, BucketState.SEALED))
        return bucket

    def _next_to_leave(self, bucket: Bucket) -> list[_Leaving]:
        """As many runs of a bucket as a step moves; one at least."""
        leaving: list[_Leaving] = []
        count = size = 0
        for run in bucket.runs.values():
            if run.taken < run.count and count < self._options.expand_messages_max and size < _STEP_BYTES_MAX:
                leaving.append(_Leaving(run, run.taken, None if run.gone is None else bytes(run.gone)))
                count, size = count + run.count - run.taken, size + run.messages_bytes
        return leaving

    def _left_in(self, bucket: Bucket, leaving: Sequence[_Leaving]) -> Iterator[Entry]:
        """What runs hold still, read past the caches, which are for who holds the lock."""
        for one in leaving:
            columns = self._reader.read_columns(bucket.segment, one.run)
            stored = self._reader.read_messages(bucket.segment, one.run)
            left = DueBatch()
            left.add_piece(columns, stored, gone=one.gone, start=one.start, stop=one.run.count)
            yield from left.entries()

    def _move(self, bucket: Bucket, leaving: Sequence[_Leaving], filed: FiledRuns) -> None:
        """What was re-filed counts from now on. What was canceled meanwhile is marked where it is now."""
        gone = {seq for one in leaving for seq in self._gone_since(bucket, one)}
        marks = filed.marks(gone) if gone else []
        taken = [(one.run.id, one.run.count) for one in leaving]
        self._act(Moved(bucket.id.level, bucket.id.slot, taken, filed.added, marks))
        self._place_runs(filed.added)
        if bucket.is_empty():
            self._finish(bucket)

    def _gone_since(self, bucket: Bucket, leaving: _Leaving) -> list[int]:
        """The arrivals of those that were canceled since a run was read."""
        run = leaving.run
        if run.gone is None or bytes(run.gone) == leaving.gone:
            return []
        seqs = self._reader.read_columns(bucket.segment, run).seq
        return [
            seqs[index]
            for index in range(leaving.start, run.count)
            if run.is_gone(index) and not is_marked(leaving.gone, index)
        ]  # fmt: skip

    # -- the id index, and what is behind ----------------------------------------------------------------------------

    def _merge_step(self, now_ms: int) -> bool:
        """Merge a little of the id index. What was merged counts from the next checkpoint on."""
        if self._merging is None:
            merged = self._index.to_merge(newest=self._options.dedup_messages)
            if not merged:
                return False
            with self._lock:
                firsts = [one.first_due_ms() for one in self._state.buckets.values()]
            oldest_ms = min((one for one in firsts if one is not None), default=now_ms)
            due_min_ms = max(0, min(oldest_ms, now_ms - self._options.fired_memory_ms))
            self._merging = (merged, self._index.merge(merged, self._next_ids_segment(), due_min_ms=due_min_ms))
        merged, steps = self._merging
        try:
            with self._undone_if_refused():
                stored = next(steps)
                if stored is not None:
                    self._merging = None
                    self._replace_index(merged, [stored])
        except StorageFailed:
            self._merging = None
            raise
        except SegmentDamaged:  # that piece is made anew before the next merge
            self._merging = None
        return True

    def _replace_index(self, old: list[StoredIndex], new: Sequence[StoredIndex]) -> None:
        self._store.sync([one.segment for one in new])
        for one in new:
            self._store.seal(one.segment)
        pieces = [self._index.load(one) for one in new]
        with self._lock:
            self._refuse_if_closed()
            self._state.index = self._index.replace(old, pieces)
            self._garbage_at_checkpoint += sorted(one.segment for one in old)

    def _open_index(self) -> None:
        """Read what is to be in memory of the id index; what of it is damaged is made anew."""
        for one in self._state.index:
            self._index.add(self._index.load(one))
        count = self._options.dedup_messages
        for _ in range(len(self._state.index) + 1):
            if self._index.damaged():
                self._mend_index()
            try:
                self._note_recovered(list(self._index.newest_hashes(count, count_max=_RECOVERED_FACTOR * count)))
            except SegmentDamaged:
                continue
            return

    def _mend_index(self) -> None:
        """Make the pieces that are damaged anew, of all that stands in buckets: more than was in them.

        What had fired of it is not known any more: that it is too late to cancel, and that its id came before.
        """
        damaged = self._index.damaged()
        newest_seq = self._state.next_seq - self._options.dedup_messages
        written: list[StoredIndex] = []
        recent: list[tuple[int, int]] = []
        for some in self._standing_entries():
            written.append(self._index.write(self._next_ids_segment(), sorted(some)))
            recent += ((one.topic, hash_) for hash_, one in map(unpacked, some) if one.seq >= newest_seq)
        self._merging = None  # of what was there before
        self._note_recovered(recent)
        self._replace_index(damaged, written)
        logger.warning(
            "id_index_made_anew",
            extra={"segments": [one.segment for one in damaged], "ids": sum(one.count for one in written)},
        )

    def _standing_entries(self) -> Iterator[list[bytes]]:
        """Entries of the id index for all that stands in buckets, so many at a time as are in memory anyway."""
        with self._lock:
            places = [(one.segment, run) for one in self._state.buckets.values() for run in one.runs.values()]
        entries: list[bytes] = []
        for segment, run in places:
            entries += self._entries_of(segment, run)
            if len(entries) >= self._options.memory_messages_max:
                yield entries
                entries = []
        if entries:
            yield entries

    def _entries_of(self, segment: str, run: SortedRun) -> list[bytes]:
        """Entries of the id index for a run, but for those that are lost."""
        for _ in range(2):
            try:
                columns, stored = self._reader.read_columns(segment, run), self._reader.read_messages(segment, run)
            except RunDamaged as damage:
                self._set_aside(damage)
            else:
                left = [not run.is_lost(at) for at in range(run.count)]
                hashes, dues, seqs = (compress(one, left) for one in (id_hashes(stored.ids), columns.due, columns.seq))
                return index_entries(hashes, dues, seqs, compress(map(columns.topics.__getitem__, columns.topic), left))
        return []

    def _drop_finished(self) -> None:
        for bucket_id in list(self._opened):
            bucket = self._state.buckets.get(bucket_id)
            if bucket is None:
                self._opened.discard(bucket_id)
            elif bucket.is_empty():
                self._finish(bucket)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A run whose messages are re-filed, from which on, and which of them were canceled when it was read."""

    run: SortedRun
    start: int
    gone: bytes | None


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a flush saw of the state when it began."""

    before_seq: int
    removed: int


def _has_more(bucket: Bucket) -> bool:
    return bucket.state is not BucketState.DONE and any(run.taken < run.count for run in bucket.runs.values())
