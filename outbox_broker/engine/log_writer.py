"""Writes to both logs. One rule: an action is logged, then applied, by the same code that replays it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.journal.journal import frames
from outbox_broker.log.disk_reserve import cure_for, may_pass
from outbox_broker.log.frame_batching import PIECE_BYTES, Piece, pieces
from outbox_broker.log.segment_index import write_index
from outbox_broker.log.topic_index import RUN_BYTES_MAX, RUN_MESSAGES_MAX
from outbox_broker.state import checkpoint
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal
from outbox_core.journal.block import FrameKind
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_FRAMES_PART: Final = 64
"""More than heads and blocks of the file system add to a checkpoint's parts."""


class LogWriter:
    """Writes actions, messages, checkpoints and their segments. All under the lock, but for checkpoints."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._clock = context.clock
        self._state = context.state
        self._messages = context.messages
        self._reserve = context.reserve
        self._checkpointing = threading.Lock()
        """Held while a checkpoint is written; acquired before the lock."""

    def act(self, action: journal.Action) -> None:
        """Log an action, then apply it, by the same code that replays it."""
        self.write_action(action)
        self._state.replay_action(action)

    def write_action(self, action: journal.Action) -> None:
        """Log an action."""
        changes = frames(FrameKind.CHANGE, [journal.encode_record(action)])
        self._reserve.spend(lambda: self._context.actions.append(changes, at_ms=action.at_ms))

    def write_checkpoint_if_due(self) -> None:
        """Write a checkpoint once a restart would have to replay as much as is allowed, or as much as the last one had.
        Not under the lock. Without room for it, it is tried again once as much again was logged.
        """
        context = self._context
        if context.actions.grown_bytes < max(context.options.checkpoint_bytes, context.actions.checkpoint_bytes):
            return
        try:
            self.write_checkpoint()
        except StorageFailed as error:
            if not may_pass(error):
                raise
            logger.warning("checkpoint_deferred", extra={"error": str(error)})

    def write_checkpoint(self, *, spends_reserve: bool = False) -> None:
        """Write a checkpoint of all actions so far; it is durable then. Not under the lock, but for its capture.
        `spends_reserve`: what is dropped behind it makes room. Raises StorageFailed; for lack of room, before its first
        part where the disk says so: the parts of one that fails stay in the log.

        The messages that it refers to are durable before its first part is appended, so it is never ahead of them.
        """
        context = self._context
        with self._checkpointing:
            with context.lock:
                context.refuse_if_closed()
                captured, messages_end = context.actions.end, self._messages.end
                settled_end = messages_end if context.dispatching_from is None else context.dispatching_from
                parts = checkpoint.parts_of(self._state, messages_end=settled_end)
            size_bytes = sum(map(len, parts))
            self._reserve.make_room(size_bytes + size_bytes // _FRAMES_PART, spends=spends_reserve)
            self._messages.commit(messages_end)
            context.schedule.commit()
            context.actions.write_checkpoint(
                parts, captured=captured, at_ms=self._clock.now_ms(), lock=context.lock
            )  # fmt: skip

    def write_messages(
        self, counts: Mapping[str, int], records: Sequence[journal.MessageRecord], *, ready_at_ms: int
    ) -> None:
        """Append records that have sequences as one write, and place them: topics in order, `counts` messages each."""
        encode = journal.encode_record
        is_long = sum([len(record.body) for record in records]) > PIECE_BYTES
        framed = pieces(map(encode, records)) if is_long else [journal.frames([encode(record) for record in records])]
        self.place(counts, self.append_messages(framed), ready_at_ms=ready_at_ms)
        if self._state.is_filtering:
            start = 0
            for topic, count in counts.items():
                self._match_filters(topic, records[start : start + count])
                start += count

    def place(self, counts: Mapping[str, int], offsets: Sequence[int], *, ready_at_ms: int) -> None:
        """Assign locations to appended messages: topics in order, `counts` messages of each."""
        ends = [*offsets[1:], self._messages.end]
        durable_end, place = self._messages.durable_end, self._state.place
        start = 0
        for topic, count in counts.items():
            end = start + count
            while start < end:
                # The run ends after the message that reaches the limit of its bytes, or of its messages.
                stop = end if count == 1 else bisect_left(ends, offsets[start] + RUN_BYTES_MAX, start) + 1
                stop = min(stop, start + RUN_MESSAGES_MAX, end)
                place(
                    topic, stop - start, offsets[start], ends[stop - 1] - offsets[start],
                    ready_at_ms=ready_at_ms, sealed_end=durable_end,
                )  # fmt: skip
                start = stop

    def append_messages(self, framed: Iterable[Piece]) -> list[int]:
        """Append framed message records contiguously, in a new segment if the old one is full."""
        try:
            if self._messages.is_full:
                self._seal_message_segment()
            return self._messages.append_pieces(framed)
        except OSError as error:
            raise StorageFailed(f"cannot write to the log: {error.strerror}; {cure_for(error)}") from error

    def _seal_message_segment(self) -> None:
        """Write the index of the full segment, then start a new one."""
        segment, state = self._messages.segments[-1], self._state
        directory = write_index(
            self._context.folder / "messages", segment.first_offset, self._messages.end,
            topics=state.active_segment_topics.values(),
            ids=state.recent.newest(state.recent.added - state.recent_before_written),
            special=state.active_segment_special.tolist(),
        )  # fmt: skip
        self._messages.roll()
        state.replace_locations(segment.first_offset, directory)

    def _match_filters(self, topic: str, records: Sequence[journal.MessageRecord]) -> None:
        """Match what was published on a topic, and has its sequences, against the topic's filters."""
        matcher = self._state.topic(topic).matcher
        if matcher is not None:
            matcher.published(
                records[0].sequence or 0, [record.headers for record in records], log_end=self._messages.end
            )
