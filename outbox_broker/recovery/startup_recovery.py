"""Rebuilds the in-memory state from the data folder when a broker starts. Everything comes from the two logs.

Checkpoints and index files only save time: replay begins where the newest whole checkpoint of the actions was captured,
and a sealed message segment whose index file is intact need not be read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import repeat
from typing import Final

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.group.consumer_group import Group
from outbox_broker.group.in_flight import InFlightRun
from outbox_broker.journal.journal import Journal
from outbox_broker.log.disk_reserve import cure_for
from outbox_broker.log.message_reader import read_runs, record_at
from outbox_broker.log.missing_segments import content_bytes
from outbox_broker.log.segment_index import Directory, read_directory, read_ids, write_index
from outbox_broker.log.segment_scan import Gap, Segment
from outbox_broker.log.segmented_log import SegmentedLog
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
_NIL: Final = 0xC0
"""The first byte of a record's first field if that is None; the byte before it holds the number of fields."""


def recover(
    state: BrokerState, messages: SegmentedLog, actions: Journal, *, options: EngineOptions,
    out: Collection[tuple[str, str]] = (),
) -> None:  # fmt: skip
    """Open the message log, replay both logs into an empty state, and become able to append to them. `out`: topics and
    ids of messages that the schedule will dispatch again.

    Raises SegmentDamaged if a segment is missing, StorageFailed.
    """
    messages.open()
    _refuse_if_a_log_is_missing(messages, actions)
    stored = actions.recovered.checkpoint
    restored = CheckpointView() if stored is None else checkpoint.restore(state, b"".join(stored.parts))
    MessageRecovery(state, messages, restored=restored, ids_max=options.dedup_messages_max).run(out)
    for name, tombstone in restored.deleted.items():  # the log still holds their messages
        state.delete_topic(name, tombstone, is_kept=name in restored.topics)
    replay = state.replay_action
    for block in actions.recovered.blocks(_CHANGES, may_lose_changes=True):
        if block.damaged:
            replay = LostActions(state, messages).replay
        for frame in block.frames:
            replay(journal.decode_action(frame.payload))
    actions.resume()
    _let_go_of_dropped(state)


class MessageRecovery:
    """Recovery of the message log: locations, recent ids, and messages whose dispatch the schedule has not recorded."""

    def __init__(self, state: BrokerState, log: SegmentedLog, *, restored: CheckpointView, ids_max: int) -> None:
        self._state = state
        self._log = log
        self._restored = restored
        self._ids_max = ids_max
        self._dispatched: list[int] = []  # offsets, after the checkpoint

    def run(self, out: Collection[tuple[str, str]]) -> None:
        """Process all segments; write the index files that are missing."""
        folder = self._log.folder
        sealed = self._log.segments[:-1]
        directories = [read_directory(folder, segment.first_offset, segment.end) for segment in sealed]
        for index, (segment, directory) in enumerate(zip(sealed, directories, strict=True)):
            later = sum(directory.ids_count for directory in directories[index + 1 :] if directory is not None)
            if directory is None or not self._takes(segment, directory, with_ids=later < self._ids_max):
                self._make_index(segment)
        for segment in self._log.segments[-1:]:
            self._read(segment)
        self._log.ready()
        self._complete_topics()
        self._note_dispatched(frozenset(out))

    def _takes(self, segment: Segment, directory: Directory, *, with_ids: bool) -> bool:
        """Load a segment's messages from its index; False, with nothing changed, if it does not match."""
        ids = read_ids(self._log.folder, segment.first_offset, directory) if with_ids else []
        topics = self._state.topics
        fits = all(
            not entries or name not in topics or topics[name].index.continues_at(entries[0].first)
            for name, entries in directory.topics.items()
        )
        if ids is None or not fits:
            return False
        for topic, some in ids:
            self._state.recent.add_all(repeat(topic, len(some)), some)
        self._state.replace_locations(segment.first_offset, directory)
        self._dispatched += [offset for offset in directory.special if offset >= self._restored.messages_end]
        return True

    def _make_index(self, segment: Segment) -> None:
        logger.info("segment_index_built", extra={"segment": segment.path.name})
        state = self._state
        before = state.recent.added
        self._read(segment)
        try:
            directory = write_index(
                self._log.folder, segment.first_offset, segment.end, topics=state.active_segment_topics.values(),
                ids=state.recent.newest(state.recent.added - before), special=state.active_segment_special.tolist(),
            )  # fmt: skip
        except OSError as error:
            raise StorageFailed(
                f"cannot write the index of {segment.path.name}: {error.strerror}; {cure_for(error)}"
            ) from error
        state.replace_locations(segment.first_offset, directory)

    def _read(self, segment: Segment) -> None:
        for frame in self._log.scan(segment):
            if isinstance(frame, Gap):
                continue
            if is_marker(frame.payload):
                continue  # there may be millions of them in a segment, and the schedule has them all
            record = journal.decode_message(frame.payload)
            self._state.replay_message(record, offset=frame.offset, size_bytes=frame.end - frame.offset)
            if record.copy == journal.FIRED_COPY and frame.offset >= self._restored.messages_end:
                self._dispatched.append(frame.offset)

    def _note_dispatched(self, out: frozenset[tuple[str, str]]) -> None:
        """Record which messages to be dispatched again have sequences already: they are among the last dispatched."""
        for offset in self._dispatched[-len(out) :] if out else ():
            record = record_at(self._log, offset)
            if record is not None and (record.topic, record.id) in out and record.sequence is not None:
                self._state.dispatched_before[record.topic, record.id] = record.sequence
                if self._state.dispatched_from is None:
                    self._state.dispatched_from = offset

    def _complete_topics(self) -> None:
        """Restore the ends of topics whose messages were dropped, or whose last ones are damaged."""
        for name, end in self._restored.topics.items():
            _go_on_at(self._state, name, end)


def _refuse_if_a_log_is_missing(messages: SegmentedLog, actions: Journal) -> None:
    """Raise SegmentDamaged if one log has segments, and the other, which is created with it, has none.

    The first start creates the message log first, and nothing is written to it before the actions have a record.
    """
    has_messages = any(content_bytes(segment.path) for segment in messages.segments)
    if actions.segments if not messages.segments else has_messages and not actions.segments:
        gone, there = ("actions", "messages") if messages.segments else ("messages", "actions")
        folder = messages.folder.parent
        raise SegmentDamaged(
            f"all segments in {folder / gone} are missing, and there are some in {folder / there}: restore them from a "
            f"copy; or move {folder / there} away too, to begin anew"
        )


def is_marker(payload: bytes) -> bool:
    """Returns whether a record is the marker of a scheduled message, without decoding it."""
    return payload[1] == _NIL and payload[-1] == journal.SCHEDULED


def _go_on_at(state: BrokerState, name: str, sequence: int) -> None:
    """Extend a topic to at least this end; missing messages are lost."""
    index = state.topic(name).index
    index.begin_at(sequence)
    if index.end < sequence:
        logger.error("messages_missing", extra={"topic": name, "messages": sequence - index.end})
        state.active_segment_topics[name] = index
        index.skip_to(sequence, ready_at_ms=0)


def _let_go_of_dropped(state: BrokerState) -> None:
    """Adjust groups to messages that were dropped, by retention or manually, without a record in the action log.

    No topic ends before a sequence that a group has seen delivered: its successors would never be delivered.
    """
    for name, topic in state.topics.items():
        for group in topic.groups.values():
            _go_on_at(state, name, group.position)
            lost = group.drop_before(topic.index.start)
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

    def __init__(self, state: BrokerState, messages: SegmentedLog) -> None:
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
