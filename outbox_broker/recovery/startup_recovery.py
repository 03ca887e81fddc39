"""Rebuilds the in-memory state from the data folder when a broker starts. Everything comes from the two logs.

Checkpoints and footers only save time: replay begins where the newest whole checkpoint of the actions was captured, and
a sealed message segment whose footer is intact need not be read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise, repeat
from pathlib import Path
from typing import Final

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.group.consumer_group import Group
from outbox_broker.group.in_flight import InFlightRun
from outbox_broker.journal.journal import Journal
from outbox_broker.journal.message_reader import message_at, messages_of, read_runs
from outbox_broker.journal.segment_footer import FoundFooter, find_footer, footers_in, read_ids
from outbox_broker.segments.port import SegmentInfo
from outbox_broker.state import checkpoint
from outbox_broker.state.checkpoint import CheckpointView
from outbox_broker.state.engine_state import BrokerState
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal
from outbox_core.journal.block import FrameKind
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.journal.order_records import Filed
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_CHANGES: Final = frozenset({FrameKind.CHANGE})


def recover(
    state: BrokerState, messages: Journal, actions: Journal, *, folder: Path, options: EngineOptions,
    now_ms: int, out: Collection[tuple[str, str]] = (),
) -> None:  # fmt: skip
    """Replay both logs into an empty state, and become able to append to the actions, as one is to the messages. `out`:
    topics and ids of messages that the schedule will dispatch again. `now_ms`: when what is appended meanwhile is
    stored.

    Raises SegmentDamaged if a segment is missing, StorageFailed.
    """
    _refuse_if_a_log_is_missing(messages, actions, folder=folder)
    stored = actions.recovered.checkpoint
    restored = CheckpointView() if stored is None else checkpoint.restore(state, b"".join(stored.parts))
    recovery = MessageRecovery(state, messages, restored=restored, ids_max=options.dedup_messages_max, now_ms=now_ms)
    recovery.run(out)
    for name, tombstone in restored.deleted.items():  # the log still holds their messages
        state.delete_topic(name, tombstone, is_kept=name in restored.topics)
    replay = state.replay_action
    for block in actions.recovered.blocks(_CHANGES, may_lose_changes=True):
        if block.damaged:
            replay = LostActions(state, messages).replay
        for frame in block.frames:
            replay(journal.decode_action(frame.payload))
    _refuse_if_messages_are_gone(
        state, messages, folder=folder, noted_end=max(state.messages_end, restored.messages_end)
    )
    actions.resume()
    _let_go_of_dropped(state, messages)


class MessageRecovery:
    """Recovery of the message log: locations, recent ids, and messages whose dispatch the schedule has not recorded."""

    def __init__(
        self, state: BrokerState, log: Journal, *, restored: CheckpointView, ids_max: int, now_ms: int
    ) -> None:  # fmt: skip
        self._state = state
        self._log = log
        self._restored = restored
        self._ids_max = ids_max
        self._now_ms = now_ms
        self._dispatched: list[int] = []  # offsets, after the checkpoint
        self._unnamed: dict[int, int] | None = None  # footers in the newest segment, once they are looked for

    def run(self, out: Collection[tuple[str, str]]) -> None:
        """Process all segments; append the footers that are missing."""
        segments = self._log.segments
        sealed = list(pairwise(segments))
        footers = [self._find(segment, following, following.first) for segment, following in sealed]
        named: dict[int, int] = {}
        for footer in footers:
            named.update({} if footer is None else footer.directory.remade)
        made: dict[int, int] = {}
        later_ids = sum(footer.directory.ids_count for footer in footers if footer is not None)
        for (segment, following), first in zip(sealed, footers, strict=True):
            later_ids -= 0 if first is None else first.directory.ids_count
            candidates = self._candidates(segment, following, named, first)
            if not any(self._takes(segment, footer, with_ids=later_ids < self._ids_max) for footer in candidates):
                made[segment.first] = self._make_footer(segment, following.first)
        if segments:
            self._read_newest(sealed, segments[-1], made)
        self._complete_topics()
        self._note_dispatched(frozenset(out))

    def _candidates(
        self, segment: SegmentInfo, following: SegmentInfo, named: Mapping[int, int], first: FoundFooter | None
    ) -> Iterator[FoundFooter | None]:  # fmt: skip
        """Yields the footers of a sealed segment that there may be: what was made anew and a directory names; the one
        that the next segment begins with; what was made anew since the newest segment was begun.
        """
        if segment.first in named:
            yield self._find(segment, following, named[segment.first])
        yield first
        if self._unnamed is None:
            self._unnamed = footers_in(self._log, self._log.segments[-1])
        if segment.first in self._unnamed:
            yield self._find(segment, following, self._unnamed[segment.first])

    def _find(self, segment: SegmentInfo, following: SegmentInfo, offset: int) -> FoundFooter | None:
        return find_footer(self._log, offset, segment=segment.first, segment_end=following.first)

    def _read_newest(
        self, sealed: Sequence[tuple[SegmentInfo, SegmentInfo]], newest: SegmentInfo, made: dict[int, int]
    ) -> None:  # fmt: skip
        """Read the newest segment; of what was made anew in it, runs may be damaged in the footers that were taken."""
        state, standing = self._state, dict[int, int]()
        self._read(newest, standing)
        for segment, following in sealed:
            offset = standing.get(segment.first, following.first)
            footer = None if offset == following.first else self._find(segment, following, offset)
            if footer is not None:
                state.update_locations(segment.first, footer)
        state.active_segment_footers = standing
        if self._log.newest != newest:  # where none is gone on with, the first of the footers began another
            made[newest.first] = self._append_footer(newest, self._log.segments[-1].first)
        state.active_segment_footers.update(made)

    def _takes(self, segment: SegmentInfo, footer: FoundFooter | None, *, with_ids: bool) -> bool:
        """Load a segment's messages from a footer; False, with nothing changed, if it does not match."""
        if footer is None:
            return False
        ids = read_ids(self._log, footer) if with_ids else []
        topics = self._state.topics
        fits = all(
            not entries or name not in topics or topics[name].index.continues_at(entries[0].first)
            for name, entries in footer.directory.topics.items()
        )
        if ids is None or not fits:
            return False
        for topic, some in ids:
            self._state.recent.add_all(repeat(topic, len(some)), some)
        self._state.replace_locations(segment.first, footer)
        self._dispatched += [offset for offset in footer.directory.special if offset >= self._restored.messages_end]
        return True

    def _make_footer(self, segment: SegmentInfo, end: int) -> int:
        """Read a segment, and append its footer; returns where that begins."""
        logger.info("segment_footer_made", extra={"segment": segment.name})
        self._read(segment)
        return self._append_footer(segment, end)

    def _append_footer(self, segment: SegmentInfo, end: int) -> int:
        """Append the footer of a segment that was read; returns where that begins."""
        footer = self._state.footer(segment.first, end)
        found = footer.ending_at(self._log.append(footer.frames, at_ms=self._now_ms))
        self._state.replace_locations(segment.first, found)
        return found.offset

    def _read(self, segment: SegmentInfo, footers: dict[int, int] | None = None) -> None:
        for stored in messages_of(self._log, segment, footers=footers):
            self._state.replay_message(stored)
            if stored.is_dispatched and stored.offset >= self._restored.messages_end:
                self._dispatched.append(stored.offset)

    def _note_dispatched(self, out: frozenset[tuple[str, str]]) -> None:
        """Record which messages to be dispatched again have sequences already: they are among the last dispatched."""
        for offset in self._dispatched[-len(out) :] if out else ():
            found = message_at(self._log, offset)
            if found is not None and (found[1].topic, found[1].id) in out:
                sequence, record = found
                self._state.dispatched_before[record.topic, record.id] = sequence
                if self._state.dispatched_from is None:
                    self._state.dispatched_from = offset

    def _complete_topics(self) -> None:
        """Restore the ends of topics whose messages were dropped, or whose last ones are damaged."""
        for name, end in self._restored.topics.items():
            _go_on_at(self._state, name, end)


def _refuse_if_a_log_is_missing(messages: Journal, actions: Journal, *, folder: Path) -> None:
    """Raise SegmentDamaged if one log has segments, and all of the other's are gone.

    Both are opened at each start, and actions have a record before anything is published. A folder that was removed
    has fewer openings than the other.
    """
    is_gone = not messages.segments and messages.epoch < actions.epoch
    if is_gone or (messages.segments and not actions.segments):
        raise _log_is_gone(folder, "messages" if is_gone else "actions")


def _refuse_if_messages_are_gone(state: BrokerState, messages: Journal, *, folder: Path, noted_end: int) -> None:
    """Raise SegmentDamaged if the message log has no segment, and its end was noted by an action, or a group has passed
    a message: retention leaves the newest segment.
    """
    groups = (group for topic in state.topics.values() for group in topic.groups.values())
    if not messages.segments and (noted_end or any(group.position for group in groups)):
        raise _log_is_gone(folder, "messages")


def _log_is_gone(folder: Path, gone: str) -> SegmentDamaged:
    there = "actions" if gone == "messages" else "messages"
    return SegmentDamaged(
        f"all segments in {folder / gone} are missing, and there are some in {folder / there}: restore them from a "
        f"copy; or move {folder / there} away too, to begin anew"
    )


def _go_on_at(state: BrokerState, name: str, sequence: int) -> None:
    """Extend a topic to at least this end; missing messages are lost."""
    index = state.topic(name).index
    index.begin_at(sequence)
    if index.end < sequence:
        logger.error("messages_missing", extra={"topic": name, "messages": sequence - index.end})
        state.active_segment_topics[name] = index
        index.skip_to(sequence, ready_at_ms=0)


def _let_go_of_dropped(state: BrokerState, messages: Journal) -> None:
    """Adjust groups to messages that were dropped, by retention or manually, without a record in the action log.

    No topic ends before a sequence that a group has seen delivered: its successors would never be delivered.
    """
    for name, topic in state.topics.items():
        for group in topic.groups.values():
            _go_on_at(state, name, group.position)
            group.forget_aside_behind(messages.end)
            lost = group.drop_before(topic.index.start, offset=messages.start)
            if lost:
                logger.error("unread_messages_missing", extra={"topic": name, "group": group.name, "messages": lost})


# -- messages that a group passed by an action that damage took --------------------------------------------------------

_LOOK_MESSAGES: Final = 1_000
"""How many messages are read at a time, to apply a group's filter."""
Range = tuple[int, int]


class LostActions:
    """Replays what follows damage in the action log: messages that a group passed by a lost action are made deliverable
    again.

    An action that advances a group over messages which it does not list implies a lost action before it: most likely a
    delivery. Its messages are redelivered, rather than lost. Those of an ordered group are then outside its key order,
    like redriven ones. This is logged, and durable with the group's next checkpoint; until then each start finds it
    again. The broker opens all the same: its messages are whole, and consumers must bear duplicates.
    """

    def __init__(self, state: BrokerState, messages: Journal) -> None:
        self._state = state
        self._messages = messages

    def replay(self, action: journal.Action) -> None:
        """Replay an action, and reopen messages over which it advances the group without listing them."""
        named = _named(action)
        if named is None:
            self._state.replay_action(action)
            return
        topic, name, ranges = named
        group = self._state.group(topic, name)
        before = 0 if group is None else group.position
        self._state.replay_action(action)
        if group is not None:
            for first, end in _beside(before, group.position, ranges):
                self._open_again(topic, group, first, end)

    def _open_again(self, topic: str, group: Group, first: int, end: int) -> None:
        count = 0
        for low, high in self._wanted(topic, group, first, end):
            group.unsettled.add(InFlightRun(low, high, 0, 0, 0, group.generation, in_flight=False))
            count += high - low
        if count:
            group.moved_to = min(group.moved_to, first)
            logger.error("lost_action", extra={"topic": topic, "group": group.name, "messages_again": count})

    def _wanted(self, topic: str, group: Group, first: int, end: int) -> Iterator[Range]:
        """Returns the sequences that match the group's filter, as ranges; unreadable ones count as matching."""
        index = self._state.topic(topic).index
        if group.accepts is None:
            yield first, end
            return
        start = max(first, index.start)
        while start < end:
            stop = min(start + _LOOK_MESSAGES, end)
            try:
                runs = list(index.runs(start, stop))
                records = read_runs(self._messages, runs, first=start, end=stop, bytes_max=1 << 62)
            except StorageFailed:  # the index is damaged, too
                yield start, stop
            else:
                yield from (
                    (sequence, sequence + 1)
                    for sequence, record in records
                    if record is None or group.accepts(record.headers)
                )
            start = stop


def _named(action: journal.Action) -> tuple[str, str, list[Range]] | None:
    """Returns topic, group, and the sequences that an action lists; None if it does not advance a group by itself."""
    match action:
        case journal.Handed():
            ranges = [(run.first, run.first + run.count) for run in action.runs]
        case journal.Settled():
            ranges = [(first, first + count) for first, count in action.runs]
        case journal.Requeued():
            ranges = [(first, first + count) for first, count, _, _ in action.entries]
        case journal.Died():
            ranges = [(first, first + count) for first, count, _ in action.entries]
        case Filed():
            ranges = [(first, first + len(keys)) for first, keys in action.runs]
        case _:
            return None
    return action.topic, action.group, ranges


def _beside(first: int, end: int, named: Sequence[Range]) -> Iterator[Range]:
    """Yields the parts of first to end (exclusive) that are in none of the ranges."""
    start = first
    for low, high in sorted(named):
        if low > start:
            yield start, min(low, end)
        start = max(start, high)
        if start >= end:
            return
    if start < end:
        yield start, end
