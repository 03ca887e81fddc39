"""Retention: decides which old segments may be dropped. Decisions are pure; drops are whole segments, by age or size.
Messages that the reconciliation has not evaluated yet may be kept longer.

A segment is held back by messages that a group still has to deliver, including dead letters, unless
`retention_drops_unread` is set: then the group is moved past it, which is logged. To drop by age whether consumed or
not, as QMQ does after 72 hours, is loss and must be chosen. Scheduled messages are not in the
log, and hold nothing back; dispatched ones do until their dispatch is settled with the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dispatcher import Dispatcher
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.wakeups import Wakeups
from outbox_broker.log.segment_scan import Segment
from outbox_broker.state import checkpoint
from outbox_broker.state.engine_state import BrokerState, Topic
from outbox_core.journal import journal
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.retention_hold import EvidenceRetention, Purgeable

logger: EventLogger = EventLogger(__name__)

_KEPT_CHECKPOINTS: Final = 2


def outdated(segments: Sequence[Segment], *, now_ms: int, options: EngineOptions) -> int:
    """Returns how many of the oldest sealed segments exceed the retention time or size. A segment's age is that of its
    last record: the start of the next segment.
    """
    count = 0
    total = segments[-1].end - segments[0].first_offset if segments else 0
    for segment, following in pairwise(segments):
        aged = options.retention_ms is not None and following.created_at_ms <= now_ms - options.retention_ms
        beyond = options.retention_bytes is not None and total > options.retention_bytes
        if not (aged or beyond):
            break
        count += 1
        total -= segment.end - segment.first_offset
    return count


def held_from(state: BrokerState, segments: Sequence[Segment], *, drops_unread: bool) -> int:
    """Returns the offset from which on the message log is needed, within these segments."""
    if drops_unread:
        return segments[-1].end
    for segment in segments:
        if any(_is_needed(topic, segment) for topic in state.topics.values()):
            return segment.first_offset
    return segments[-1].end


def _is_needed(topic: Topic, segment: Segment) -> bool:
    end = topic.index.end_in(segment.first_offset)
    return end is not None and any(group.oldest() < end for group in topic.groups.values())


class LogRetention:
    """Drops segments of the two logs."""

    def __init__(
        self, context: EngineContext, writer: LogWriter, wakeups: Wakeups, groups: GroupRegistry,
        dispatcher: Dispatcher,
    ) -> None:  # fmt: skip
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._lock = context.lock
        self._state = context.state
        self._messages = context.messages
        self._actions = context.actions
        self._reserve = context.reserve
        self._index_files = context.index_files
        self._writer = writer
        self._wakeups = wakeups
        self._groups = groups
        self._dispatcher = dispatcher
        self._looked_at_ms = context.clock.monotonic_ms()
        file = context.options.judged_file
        self._retention = None if file is None else EvidenceRetention(file, clock=context.clock)

    def check(self) -> None:
        """Check for segments to drop, every `retention_check_ms`; called by the timer."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._looked_at_ms >= self._options.retention_check_ms:
            self._looked_at_ms = now_ms
            self.drop_outdated()

    def drop_outdated(self) -> int:
        """Drop the segments that may go, of both logs; returns how many of the message log."""
        with self._lock:
            self._context.refuse_if_closed()
            now_ms = self._clock.now_ms()
            dropped = self._drop_messages(now_ms)
            self._drop_actions(now_ms)
            if self._state.deleted and not self._dispatcher.has_taken():
                self._state.forget_deleted(
                    messages_start=self._messages.segments[0].first_offset,
                    actions_start=self._actions.segments[0].first_offset,
                )
            return dropped

    def _outdated(self, segments: Sequence[Segment], now_ms: int) -> int:
        """Returns how many of the oldest may go; if any, messages that are not evaluated yet are taken into account."""
        options = self._options
        count = outdated(segments, now_ms=now_ms, options=options)
        if not count or self._retention is None or options.retention_ms is None:
            return count
        age_ms = self._retention.age_ms(Purgeable.BROKER, keep_ms=options.retention_ms)
        return outdated(segments, now_ms=now_ms, options=replace(options, retention_ms=age_ms))

    def _drop_messages(self, now_ms: int) -> int:
        segments = self._messages.segments
        old = segments[: self._outdated(segments, now_ms)]
        if not old:
            return 0
        for topic in self._state.topics.values():
            for group in topic.groups.values() if topic.matcher else ():
                self._groups.skip_filtered(topic, group)
        drops_unread = self._options.retention_drops_unread
        end = held_from(self._state, old, drops_unread=drops_unread)
        if self._context.dispatching_from is not None:
            # A restart looks in the log for what the schedule has not settled, and would append it a second time.
            end = min(end, self._context.dispatching_from)
        going = [segment for segment in old if segment.end <= end]
        if not going:
            return 0
        if drops_unread:
            self._move_groups_behind(going[-1])
        # A power failure must not lose what groups have settled, and where topics end, once the messages are gone.
        self._reserve.spend(self._writer.write_checkpoint)
        self._actions.commit()
        for topic in self._state.topics.values():
            topic.index.drop(going[-1].first_offset)
        for segment in self._messages.drop_before(end):
            self._index_files.remove(segment.first_offset)
        logger.info("segments_dropped", extra={"log": "messages", "segments": len(going), "first_offset": end})
        return len(going)

    def _move_groups_behind(self, segment: Segment) -> None:
        for name, topic in self._state.topics.items():
            end = topic.index.end_in(segment.first_offset)
            for group in topic.groups.values():
                if end is None or group.oldest() >= end:
                    continue
                lost = group.unread_before(end)
                self._writer.act(
                    journal.Dropped(topic=name, group=group.name, at_ms=self._clock.now_ms(), position=end)
                )
                self._state.counters["dropped_unread", name, group.name] += lost
                logger.warning("unread_messages_dropped", extra={"topic": name, "group": group.name, "messages": lost})
                self._wakeups.wake_next(name, group)

    def _drop_actions(self, now_ms: int) -> None:
        """Drop segments before the second newest whole checkpoint; the reconciliation reads them too, so they stay for
        the retention time.
        """
        segments = self._actions.segments
        count = self._outdated(segments, now_ms) if len(segments) > _KEPT_CHECKPOINTS else 0
        if count > 0:
            self._actions.commit()
            count = min(count, checkpoint.second_newest(segments))
        if count > 0:
            self._actions.drop_before(segments[count].first_offset)
            logger.info("segments_dropped", extra={"log": "actions", "segments": count})
