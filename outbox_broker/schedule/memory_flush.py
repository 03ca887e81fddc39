"""Flushes messages from memory into buckets and the id index, and begins a new log segment where that is due."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox_broker.schedule.bucket_filing import BucketFiling, FiledRuns
from outbox_broker.schedule.due_horizon import DueHorizon
from outbox_broker.schedule.flushed_ids import FlushedIds
from outbox_broker.schedule.id_index import IndexPiece
from outbox_broker.schedule.index_housekeeping import IndexHousekeeping
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_records import Flushed, Passed
from outbox_broker.schedule.segment_garbage import SegmentGarbage
from outbox_broker.schedule.sorted_run import ID, TOPIC, Entry
from outbox_broker.state.message_identities import Identities

_CHEAP_PART: Final = 8
"""A checkpoint is cheap with so small a part of what memory may hold."""
_FREED_AT_ONCE: Final = 2_048
_SMALL_PART: Final = 8
"""Of the reserve, that a flush may take where there is no other room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFlush:
    """Writes what is in memory to buckets, in one go, and makes it count."""

    context: ScheduleContext
    horizon: DueHorizon
    recent: FlushedIds
    filing: BucketFiling
    garbage: SegmentGarbage
    index: IndexHousekeeping

    def is_full(self, *, fill: int = 1) -> bool:
        """Whether memory is `fill` times as full as it may be. Waits for nobody."""
        state, options, log = self.context.state, self.context.options, self.context.log
        return (
            state.pending_bytes >= fill * options.memory_bytes_max
            or len(state.pending) + len(state.passed) >= fill * options.memory_messages_max
            or log.grown_bytes >= fill * options.log_bytes_max
        )

    def is_small(self) -> bool:
        """Whether a flush takes a small part of the room that is kept for others: it lets go of the log in return."""
        reserve = self.context.reserve
        return reserve is not None and _SMALL_PART * self.context.state.flushed_bytes_max <= reserve.size_bytes

    def make_room(self, now_ms: int, *, fill: int) -> None:
        """Flush where memory is `fill` times as full as it may be; takes `keeping` then. Raises StorageFailed."""
        if self.is_full(fill=fill):
            with self.context.keeping:
                if self.is_full(fill=fill):
                    self.flush(now_ms)

    def flush(self, now_ms: int) -> None:
        """Put what is in memory into buckets and the id index, and begin a new log segment where that is due. Under
        `keeping`. Raises StorageFailed with nothing lost.

        Everything goes on while it is written: the lock is held to see what is in memory, and to make it count. What
        fires or is canceled in between is marked then.
        """
        context, state = self.context, self.context.state
        with context.lock:
            context.refuse_if_closed()
            seen = _Seen(state.next_seq, state.removed)
            entries = list(state.pending.values())
            came: list[Entry | Passed] = [*entries, *state.passed.values()]
        with self.garbage.deleted_if_refused():
            filed = self.filing.file(entries, now_ms=now_ms)
            piece = self.index.write_piece(came)
        recent = Identities(str, list(map(ID, came)), map(TOPIC, came))
        came.clear()
        with context.lock:
            context.refuse_if_closed()
            self._take_over(filed, piece, recent, seen)
            segments: list[str] = []
            if self._is_checkpoint_due():
                context.log.begin(state.checkpoint())
                segments = context.log.old_segments() + self.garbage.pop_at_checkpoint()
        context.log.commit()
        self.garbage.add(segments)
        filed.entries.clear()
        while entries:
            del entries[-_FREED_AT_ONCE:]  # all at once would hold every thread up

    def _take_over(self, filed: FiledRuns, piece: IndexPiece | None, recent: Identities[str], seen: _Seen) -> None:
        """What was written counts from now on."""
        state = self.context.state
        self.recent.add_flushed(recent)
        gone, fired = filed.gone(state.pending, state.passed) if state.removed != seen.removed else ([], [])
        self.context.act(Flushed(filed.added, None if piece is None else piece.stored, seen.before_seq, gone, fired))
        if piece is not None:
            self.context.index.add(piece)
        self.horizon.replace_memory()
        self.horizon.add_runs(filed.added)

    def _is_checkpoint_due(self) -> bool:
        """A checkpoint has all that came during the flush in it, once more: so not behind each, where that is much."""
        options = self.context.options
        is_little = self.context.state.pending_bytes <= options.memory_bytes_max // _CHEAP_PART
        return is_little or self.context.log.grown_bytes >= options.log_bytes_max


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a flush saw of the state when it began."""

    before_seq: int
    removed: int
