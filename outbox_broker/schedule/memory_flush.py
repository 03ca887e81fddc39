"""Flushes messages from memory into buckets and the id index, and starts a new log segment when one is due.

Messages are filed here and not at their publish: a batch spread over two years touches a hundred buckets, each of which
would be synced before the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox_broker.schedule.bucket_filing import BucketFiling, FiledRuns
from outbox_broker.schedule.due_soon import DueSoon
from outbox_broker.schedule.id_index import IndexPiece
from outbox_broker.schedule.index_housekeeping import IndexHousekeeping
from outbox_broker.schedule.recent_message_ids import RecentMessageIds
from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_log import CapturedCheckpoint
from outbox_broker.schedule.schedule_records import Flushed, Passed
from outbox_broker.schedule.segment_garbage import SegmentGarbage
from outbox_broker.schedule.sorted_run import ID, TOPIC, Entry
from outbox_broker.state.message_id_map import MessageIdMap

_CHEAP_PART: Final = 8
"""A checkpoint is cheap if at most this fraction (1/8) of the memory limit is pending."""
_FREED_AT_ONCE: Final = 2_048
_SMALL_PART: Final = 8
"""The fraction (1/8) of the disk reserve that a flush may use when there is no other space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFlush:
    """Writes the messages in memory to buckets as one batch, and applies the change."""

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

    def make_room(self, now_ms: int, *, fill: float) -> None:
        """Flush if memory is at `fill` times its limits; takes `keeping` then. Raises StorageFailed.

        Called by publishers, before they take the engine's lock: those that are faster than the flushing thread wait.
        """
        if self.is_full(fill=fill):
            with self.context.keeping:
                if self.is_full(fill=fill):
                    self.flush(now_ms)

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
        with self.garbage.deleted_if_refused():
            filed = self.filing.file(entries, now_ms=now_ms)
            piece = self.index.write_piece(came)
        recent = MessageIdMap(str, list(map(ID, came)), map(TOPIC, came))
        came.clear()
        with context.lock:
            context.refuse_if_closed()
            self._take_over(filed, piece, recent, seen)
            captured = CapturedCheckpoint.of(context.log, state.checkpoint()) if self._is_checkpoint_due() else None
        if captured is not None:
            captured.write(context.log, lock=context.lock)
            with context.lock:
                self.garbage.add(self.garbage.pop_at_checkpoint())
        context.log.commit()
        filed.entries.clear()
        while entries:
            del entries[-_FREED_AT_ONCE:]  # freeing all at once would block every thread

    def _take_over(self, filed: FiledRuns, piece: IndexPiece | None, recent: MessageIdMap[str], seen: _Seen) -> None:
        """Apply the flush to the state."""
        state = self.context.state
        self.recent.add_flushed(recent)
        gone, fired = filed.gone(state.pending, state.passed) if state.removed != seen.removed else ([], [])
        self.context.act(Flushed(filed.added, None if piece is None else piece.stored, seen.before_seq, gone, fired))
        if piece is not None:
            self.context.index.add(piece)
        self.horizon.replace_memory()
        self.horizon.add_runs(filed.added)

    def _is_checkpoint_due(self) -> bool:
        """A checkpoint repeats all messages that arrived during the flush: if they are many, it is skipped."""
        options = self.context.options
        is_little = self.context.state.pending_bytes <= options.memory_bytes_max // _CHEAP_PART
        return is_little or self.context.log.grown_bytes >= options.log_bytes_max


@dataclass(frozen=True, slots=True)
class _Seen:
    """The state as a flush saw it at its start."""

    before_seq: int
    removed: int
