"""Writes to both logs. One rule: an action is logged, then applied, by the same code that replays it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.journal.journal import frames
from outbox_broker.journal.segment_footer import Footer, FoundFooter
from outbox_broker.journal.stored_record import stored_record
from outbox_broker.log.disk_reserve import may_pass
from outbox_broker.log.topic_index import RUN_BYTES_MAX, RUN_MESSAGES_MAX
from outbox_broker.state import checkpoint
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal
from outbox_core.journal.block import Framed, FrameKind, framed
from outbox_core.messages.message import Record
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_OVERHEAD_PART: Final = 64
"""More than heads and blocks of the file system add to a checkpoint's parts."""


class LogWriter:
    """Writes actions, messages, checkpoints and their segments. All under the lock, but for checkpoints."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._clock = context.clock
        self._state = context.state
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
                captured, messages_end = context.actions.end, context.messages.end
                settled_end = messages_end if context.dispatching_from is None else context.dispatching_from
                parts = checkpoint.parts_of(self._state, messages_end=settled_end)
            size_bytes = sum(map(len, parts))
            self._reserve.make_room(size_bytes + size_bytes // _OVERHEAD_PART, spends=spends_reserve)
            context.messages.commit(messages_end)
            context.schedule.commit()
            context.actions.write_checkpoint(
                parts, captured=captured, at_ms=self._clock.now_ms(), lock=context.lock
            )  # fmt: skip

    def write_messages(self, counts: Mapping[str, int], messages: Sequence[Record], *, ready_at_ms: int) -> None:
        """Append published messages as one block, and place them: topics in order, `counts` messages each."""
        payloads = [stored_record(message, now_ms=ready_at_ms) for message in messages]
        frames_of_all = Framed(FrameKind.MESSAGE)
        start = 0
        for topic, count in counts.items():
            end = self._state.end_of(topic)
            some = payloads if count == len(payloads) else payloads[start : start + count]
            frames_of_all.extend(framed(FrameKind.MESSAGE, range(end, end + count), some))
            start += count
        self.place(counts, self.append_messages(frames_of_all, at_ms=ready_at_ms), ready_at_ms=ready_at_ms)
        if self._state.is_filtering:
            start = 0
            for topic, count in counts.items():
                self._match_filters(topic, messages[start : start + count])
                start += count

    def place(self, counts: Mapping[str, int], offsets: Sequence[int], *, ready_at_ms: int) -> None:
        """Assign locations to appended messages: topics in order, `counts` messages of each."""
        messages, place = self._context.messages, self._state.place
        ends = [*offsets[1:], messages.end]
        start = 0
        for topic, count in counts.items():
            end = start + count
            while start < end:
                # The run ends after the message that reaches the limit of its bytes, or of its messages.
                stop = end if count == 1 else bisect_left(ends, offsets[start] + RUN_BYTES_MAX, start) + 1
                stop = min(stop, start + RUN_MESSAGES_MAX, end)
                place(
                    topic, stop - start, offsets[start], ends[stop - 1] - offsets[start],
                    ready_at_ms=ready_at_ms, sealed_end=messages.committed,
                )  # fmt: skip
                start = stop

    def append_messages(self, frames_of_all: Framed, *, at_ms: int) -> list[int]:
        """Append frames of messages as one block, in another segment if the newest one is full; returns their offsets.

        Another segment begins with the full one's footer, which then takes the place of what is in memory. What a
        footer has counts as durable, so all of the full segment is committed first: else a pull would hand out what a
        power failure may take.
        """
        messages = self._context.messages
        is_roll_due = messages.is_roll_due
        full = messages.newest if is_roll_due else None
        if full is None:
            end = messages.append(frames_of_all, at_ms=at_ms, roll=is_roll_due)
        else:
            messages.commit()
            begin = messages.end
            footer = self._state.footer(full.first, begin)
            end = messages.append(frames_of_all, at_ms=at_ms, roll=True, begin_with=footer.frames)
            self._state.replace_locations(full.first, footer.at(begin))
        return list(accumulate(frames_of_all.sizes[:-1], initial=end - frames_of_all.size_bytes))

    def append_footer(self, segment: int, footer: Footer) -> FoundFooter:
        """Append a footer that was made anew, of the sealed segment that begins at this offset. It is not committed: if
        a power failure takes it, it is made once more. Raises StorageFailed.
        """
        self.append_messages(footer.frames, at_ms=self._clock.now_ms())
        found = footer.ending_at(self._context.messages.end)
        self._state.active_segment_footers[segment] = found.offset
        return found

    def _match_filters(self, topic: str, messages: Sequence[Record]) -> None:
        """Match the newest messages of a topic, which were published just now, against the topic's filters."""
        matcher = self._state.topic(topic).matcher
        if matcher is not None:
            first = self._state.end_of(topic) - len(messages)
            matcher.published(first, [message.headers for message in messages], log_end=self._context.messages.end)
