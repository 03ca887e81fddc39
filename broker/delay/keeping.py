"""Keeping the schedule in order, in small steps. Nothing here decides what fires.

Flushing memory into buckets, re-filing buckets into finer ones, merging the id index, dropping what is behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Final

from broker.delay.core import IDS_PREFIX, DelayCore
from broker.delay.filing import Filed
from broker.delay.id_index import index_entry
from broker.delay.levels import BucketState, is_to_expand
from broker.delay.records import BucketChanged, Flushed, Moved, StoredIndex
from broker.delay.run import Entry
from broker.delay.run_reader import RunDamaged
from broker.delay.state import Bucket
from broker.delay.wheel import FAR, Cursor, Piece
from messaging.errors import StorageFailed

logger = logging.getLogger(__name__)

_ID: Final = itemgetter(2)
_ID_PASSED: Final = itemgetter(0)


class Keeping(DelayCore):
    """The schedule's housekeeping."""

    _merging: tuple[list[StoredIndex], Iterator[StoredIndex | None]] | None = None

    def maintain(self, now_ms: int) -> bool:
        """Do one step of what is to be done; True where more waits. Safe to be ended anywhere.

        Raises StorageFailed with nothing lost; the step is then done again.
        """
        with self._keeping:
            if self.is_full():
                self._flush(now_ms)
                return True
            with self._lock:
                self._refuse_if_closed()
                self._advance(now_ms)
                self._drop_finished()
                place = self._log.place
                garbage, self._garbage = self._garbage, []  # done with by what the log says up to this place
                more = self._expand_step(now_ms) or self._merge_step(now_ms)
                self._look_ahead()
            self._log.commit(place)
            self._store.delete(garbage)
            return more

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

    # -- memory into buckets -----------------------------------------------------------------------------------------

    def _flush(self, now_ms: int) -> None:
        """Put what is in memory into buckets and the id index, and begin a new log segment.

        Everything goes on while it is written: the lock is held to see what is in memory, and to make it count. What
        fires or is canceled in between is marked then.
        """
        with self._lock:
            self._refuse_if_closed()
            before = self._state.next_seq
            entries, passed = list(self._state.pending.values()), list(self._state.passed.items())
        hash_of = {one: self._hash_of(one) for one in (*map(_ID, entries), *map(_ID_PASSED, passed))}.__getitem__
        filed = self._filing.file(entries, now_ms=now_ms, hash_of=hash_of)
        index, hashes = self._write_index(entries, passed, hash_of=hash_of)
        with self._lock:
            self._refuse_if_closed()
            self._take_over(filed, index, hashes, before=before)
            garbage = self._log.old_segments() + self._garbage_at_checkpoint
            self._garbage_at_checkpoint = []
        self._log.commit()
        self._garbage += garbage

    def _take_over(
        self, filed: Filed, index: StoredIndex | None, hashes: frozenset[int], *, before: int
    ) -> None:  # fmt: skip
        """What was written counts from now on."""
        state = self._state
        self._remember_hashes(hashes)
        self._act(Flushed(filed.added, index, before, filed.gone(state.pending)))
        if index is not None:
            self._index.add(index)
        self._hashes.clear()
        self._wheel.clear_near()
        self._far, self._far_first_ms = [], None
        self._remember(state.pending.values())
        self._place_runs(filed.added)
        self._log.begin(state.checkpoint())

    def _write_index(
        self,
        entries: Sequence[Entry],
        passed: Sequence[tuple[str, tuple[int, int]]],
        *,
        hash_of: Callable[[str], int],
    ) -> tuple[StoredIndex | None, frozenset[int]]:
        """A piece of the id index for all that came since the last flush, fired or not."""
        keys = [(hash_of(entry[2]), entry[0], entry[1]) for entry in entries]
        keys += [(hash_of(message_id), *place) for message_id, place in passed]
        hashes = frozenset(key[0] for key in keys)
        if not keys:
            return None, hashes
        segment = self._next_ids_segment()
        index = self._index.write(segment, sorted(index_entry(*key) for key in keys))
        self._store.sync([segment])
        self._store.seal(segment)
        return index, hashes

    def _next_ids_segment(self) -> str:
        """A name that no piece has or had, so that a piece that is to be deleted still is another's."""
        self._ids_made += 1
        return f"{IDS_PREFIX}{self._ids_made:012d}"

    def _remember_hashes(self, newest: frozenset[int]) -> None:
        """Remember the ids of the last flushes, so that a repeated publish is known; at least `dedup_messages`."""
        kept = [*self._recent, newest]
        while kept and sum(map(len, kept[1:])) >= self._options.dedup_messages:
            del kept[0]
        self._recent = tuple(kept)

    # -- buckets into finer ones -------------------------------------------------------------------------------------

    def _expand_step(self, now_ms: int) -> bool:
        """Re-file some messages of the earliest bucket whose turn it is; True where there may be more."""
        found = self._to_expand(now_ms)
        if found is None:
            return False
        bucket, cursor = found
        try:
            pieces = self._next_pieces(cursor)
            entries = [entry for piece in pieces for entry in self._entries(piece)]
        except RunDamaged as damage:
            self._quarantine(damage)
            return True
        try:
            added = self._filing.file(entries, now_ms=now_ms, below=bucket.id.level).added
            taken = [(piece.run.id, piece.stop) for piece in pieces]
            self._act(Moved(bucket.id.level, bucket.id.slot, taken, added))
        except StorageFailed:
            self._expanding = None  # its cursor is ahead of what was done
            raise
        self._place_runs(added)
        if cursor.next_key() == FAR:
            self._expanding = None
            if bucket.is_empty():
                self._finish(bucket)
        return True

    def _to_expand(self, now_ms: int) -> tuple[Bucket, Cursor] | None:
        """The bucket that is being re-filed, or the next one, which is sealed now."""
        if self._expanding is not None:
            return self._expanding
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
        cursor = Cursor(self._reader.columns)
        cursor.add(bucket.runs.values())
        self._expanding = (bucket, cursor)
        return self._expanding

    def _next_pieces(self, cursor: Cursor) -> list[Piece]:
        pieces: list[Piece] = []
        left = self._options.expand_messages_max
        while left > 0 and cursor.next_key() != FAR:
            pieces.append(cursor.take(FAR, count_max=left))
            left -= pieces[-1].stop - pieces[-1].start
        return pieces

    def _entries(self, piece: Piece) -> list[Entry]:
        run, part = piece.run, slice(piece.start, piece.stop)
        columns, messages = self._reader.columns(run), self._reader.messages(run)
        rows = zip(columns.due[part], columns.seq[part], messages[part], strict=True)
        if run.gone is None:
            return [Entry(due_ms, seq, *message) for due_ms, seq, message in rows]
        return [
            Entry(due_ms, seq, *message)
            for index, (due_ms, seq, message) in enumerate(rows, piece.start)
            if not run.is_gone(index)
        ]

    # -- the id index, and what is behind ----------------------------------------------------------------------------

    def _merge_step(self, now_ms: int) -> bool:
        """Merge a little of the id index. What was merged counts from the next checkpoint on."""
        if self._merging is None:
            merged = self._index.to_merge()
            if not merged:
                return False
            segment = self._next_ids_segment()
            oldest_ms = min(filter(None, (one.first_due_ms() for one in self._state.buckets.values())), default=now_ms)
            due_min_ms = min(oldest_ms, now_ms - self._options.fired_memory_ms)
            self._merging = (merged, self._index.merge(merged, segment, due_min_ms=max(0, due_min_ms)))
        merged, steps = self._merging
        try:
            piece = next(steps)
        except StorageFailed:
            self._merging = None
            raise
        if piece is not None:
            self._merging = None
            self._replace_index(merged, piece)
        return True

    def _replace_index(self, merged: list[StoredIndex], piece: StoredIndex) -> None:
        self._store.sync([piece.segment])
        self._store.seal(piece.segment)
        self._index.add(piece)
        self._index.remove(merged)
        gone = {one.segment for one in merged}
        self._state.index = [one for one in self._state.index if one.segment not in gone] + [piece]
        self._garbage_at_checkpoint += sorted(gone)

    def _drop_finished(self) -> None:
        for bucket_id in list(self._opened):
            bucket = self._state.buckets.get(bucket_id)
            if bucket is None:
                self._opened.discard(bucket_id)
            elif bucket.is_empty():
                self._finish(bucket)


def _has_more(bucket: Bucket) -> bool:
    return bucket.state is not BucketState.DONE and any(run.taken < run.count for run in bucket.runs.values())
