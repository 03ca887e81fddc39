"""Retention: decides which old segments may be dropped. Decisions are pure; drops are whole segments, by age or size.
Messages that the reconciliation has not evaluated yet may be kept longer.

A segment is held back by messages that a group still has to deliver, including dead letters: those that it has not got
yet hold it, others are moved out of it (SegmentCleaner). Unless `retention_drops_unread` is set: then the group is
moved past it, which is logged. To drop by age whether consumed or not, as QMQ does after 72 hours, is loss and must be
chosen. Scheduled messages hold nothing back: checkpoints of the schedule let go of where they arrived. Dispatched ones
do until their dispatch is settled with the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise

from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dispatcher import Dispatcher
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.segment_cleaner import LogSpan, SegmentCleaner, is_held_by
from outbox_broker.engine.wakeups import Wakeups
from outbox_broker.log.disk_reserve import may_pass
from outbox_broker.state.engine_state import BrokerState, Topic
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.retention_hold import EvidenceRetention, Purgeable

logger: EventLogger = EventLogger(__name__)


LogBegin = tuple[int, int]
"""The offset at which a segment begins, and when it was created, in epoch milliseconds."""


def outdated(begins: Sequence[LogBegin], *, end: int, now_ms: int, options: EngineOptions) -> int:
    """Returns how many of the oldest sealed segments exceed the retention time or size. A segment's age is that of its
    last record: the start of the next segment. `end`: of the log, an offset.
    """
    count = 0
    total = end - begins[0][0] if begins else 0
    for (first, _), (following, created_at_ms) in pairwise(begins):
        aged = options.retention_ms is not None and created_at_ms <= now_ms - options.retention_ms
        beyond = options.retention_bytes is not None and total > options.retention_bytes
        if not (aged or beyond):
            break
        count += 1
        total -= following - first
    return count


def held_from(state: BrokerState, segments: Sequence[LogSpan], *, drops_unread: bool) -> int:
    """Returns the offset from which on the message log is needed, within these segments."""
    if drops_unread:
        return segments[-1].end
    for segment in segments:
        if any(_is_needed(topic, segment) for topic in state.topics.values()):
            return segment.first
    return segments[-1].end


def _is_needed(topic: Topic, segment: LogSpan) -> bool:
    end = topic.index.end_before(segment.end)
    return any(is_held_by(group, segment, end=end) for group in topic.groups.values())


class LogRetention:
    """Drops segments of the two logs. Not under the lock."""

    def __init__(
        self, context: EngineContext, writer: LogWriter, wakeups: Wakeups, groups: GroupRegistry,
        dispatcher: Dispatcher, cleaner: SegmentCleaner,
    ) -> None:  # fmt: skip
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._lock = context.lock
        self._state = context.state
        self._reserve = context.reserve
        self._writer = writer
        self._wakeups = wakeups
        self._groups = groups
        self._dispatcher = dispatcher
        self._cleaner = cleaner
        self._looked_at_ms = context.clock.monotonic_ms()
        file = context.options.judged_file
        self._retention = None if file is None else EvidenceRetention(file, clock=context.clock)

    def check(self) -> None:
        """Check for segments to drop, every `retention_check_ms`; called by the keeper."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._looked_at_ms >= self._options.retention_check_ms:
            self._looked_at_ms = now_ms
            self.drop_outdated()

    def drop_outdated(self) -> int:
        """Drop the segments that may go, of both logs; returns how many of the message log."""
        with self._lock:
            self._context.refuse_if_closed()
            now_ms = self._clock.now_ms()
            old = self._outdated_messages(now_ms)
        if old:
            self._let_go_of_arrivals(old[-1].end, now_ms=now_ms)
        with self._lock:
            going = self._unneeded(old)
            cleanable = self._cleanable(old) if len(going) < len(old) else ()
        self._cleaner.clean(cleanable)
        with self._lock:
            going = self._unneeded(old) if cleanable else going
            if going and self._options.retention_drops_unread:
                self._move_groups_behind(going[-1])
        if going:
            # A power failure must not lose what groups have settled, and where topics end, once the messages are gone.
            self._writer.write_checkpoint(spends_reserve=True)
        with self._lock:
            self._context.refuse_if_closed()
            if going and self._options.retention_drops_unread:
                self._move_groups_behind(going[-1])  # whichever was made, or moved back, meanwhile
            going = self._unneeded(going)
            for topic in self._state.topics.values() if going else ():
                topic.index.drop(going[-1].first)
        # Not under the lock: each segment that goes costs a sync of its folder.
        dropped = self._context.messages.drop_before(going[-1].end) if going else ()
        if dropped:
            logger.info(
                "segments_dropped", extra={"log": "messages", "segments": len(dropped), "first_offset": going[-1].end}
            )
        self._drop_actions(now_ms)
        with self._lock:
            if self._state.deleted and not self._dispatcher.has_taken():
                self._state.forget_deleted(
                    messages_start=self._context.messages.start, actions_start=self._context.actions.start
                )
        return len(dropped)

    def _let_go_of_arrivals(self, end: int, *, now_ms: int) -> None:
        """Have the schedule need nothing before an offset, if there is room for that: else what it needs stays."""
        try:
            self._context.schedule.housekeeping.let_go_of_arrivals(end, now_ms=now_ms)
        except StorageFailed as error:
            if not may_pass(error):
                raise
            logger.warning("arrivals_kept", extra={"error": str(error)})

    def _outdated(self, begins: Sequence[LogBegin], *, end: int, now_ms: int) -> int:
        """Returns how many of the oldest may go; if any, messages that are not evaluated yet are taken into account."""
        options = self._options
        count = outdated(begins, end=end, now_ms=now_ms, options=options)
        if not count or self._retention is None or options.retention_ms is None:
            return count
        age_ms = self._retention.age_ms(Purgeable.BROKER, keep_ms=options.retention_ms)
        return outdated(begins, end=end, now_ms=now_ms, options=replace(options, retention_ms=age_ms))

    def _outdated_messages(self, now_ms: int) -> Sequence[LogSpan]:
        begins = [(segment.first, segment.created_at_ms) for segment in self._context.messages.segments]
        count = self._outdated(begins, end=self._context.messages.end, now_ms=now_ms)
        return [LogSpan(first, end) for (first, _), (end, _) in islice(pairwise(begins), count)]

    def _cleanable(self, old: Sequence[LogSpan]) -> Sequence[LogSpan]:
        """Returns the outdated segments that nothing but what a cleaner can move holds back: no messages that a group
        has not got yet, and none whose dispatch is not settled.
        """
        if self._options.retention_drops_unread:
            return ()
        end = old[-1].end if self._context.dispatching_from is None else self._context.dispatching_from
        for topic in self._state.topics.values():
            for group in topic.groups.values():
                segment = topic.index.segment_of(group.position)
                end = end if segment is None else min(end, segment)
        return [segment for segment in old if segment.end <= end]

    def _unneeded(self, old: Sequence[LogSpan]) -> Sequence[LogSpan]:
        """Returns the outdated segments that may go. Between a checkpoint and the drop a group may have been moved
        back, so this is asked again.
        """
        if not old:
            return ()
        with self._lock:
            for topic in self._state.topics.values():
                for group in topic.groups.values() if topic.matcher else ():
                    self._groups.skip_filtered(topic, group)
            if self._options.durability is Durability.OS and self._has_unsealed_copies():
                # They are in the page cache alone, and what they are copies of may be on the disk for long.
                self._context.messages.roll()
                return ()
            end = held_from(self._state, old, drops_unread=self._options.retention_drops_unread)
            if self._context.dispatching_from is not None:
                # A restart looks in the log for what the schedule has not settled, and would append it a second time.
                end = min(end, self._context.dispatching_from)
            end = min(end, self._context.schedule.housekeeping.arrivals_needed_from())
            return [segment for segment in old if segment.end <= end]

    def _has_unsealed_copies(self) -> bool:
        """Returns whether a message that is aside from its topic is in the newest segment. Under the lock."""
        newest = self._context.messages.newest
        groups = (group for topic in self._state.topics.values() for group in topic.groups.values())
        return newest is not None and any(group.aside.behind(newest.first) for group in groups)

    def _move_groups_behind(self, segment: LogSpan) -> None:
        for name, topic in self._state.topics.items():
            end = topic.index.end_before(segment.end)
            for group in topic.groups.values():
                if not is_held_by(group, segment, end=end):
                    continue
                lost = group.unsettled_before(end, offset=segment.end)
                self._writer.act(
                    journal.Dropped(
                        topic=name, group=group.name, at_ms=self._clock.now_ms(), position=end,
                        offset=segment.end,
                    )
                )  # fmt: skip
                self._state.counters["dropped_unread", name, group.name] += lost
                logger.warning("unread_messages_dropped", extra={"topic": name, "group": group.name, "messages": lost})
                self._wakeups.wake_next(name, group)

    def _drop_actions(self, now_ms: int) -> None:
        """Drop segments before the second newest whole checkpoint; the reconciliation reads them too, so they stay for
        the retention time.
        """
        actions = self._context.actions
        begins = [(segment.first, segment.created_at_ms) for segment in actions.segments]
        count = self._outdated(begins, end=actions.end, now_ms=now_ms)
        if count > 0:
            actions.commit()
            dropped = actions.drop_before(begins[count][0])
            if dropped:
                logger.info("segments_dropped", extra={"log": "actions", "segments": len(dropped)})
