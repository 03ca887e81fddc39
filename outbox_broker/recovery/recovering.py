"""From the data folder to the state in memory, when a broker opens. Everything comes from the two logs.

Checkpoints and index files only save time: a segment of actions that begins with a whole checkpoint is where replay
begins, and a sealed segment of messages whose index file is sound need not be read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from itertools import repeat
from typing import Final

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.log.completeness import content_bytes
from outbox_broker.log.disk_reserve import cure_for
from outbox_broker.log.message_reader import record_at
from outbox_broker.log.segment_index import Directory, read_directory, read_ids, write_index
from outbox_broker.log.segment_scan import Gap, Segment
from outbox_broker.log.segmented_log import SegmentedLog
from outbox_broker.recovery.damaged_log_replay import LostActions
from outbox_broker.state import checkpoint
from outbox_broker.state.checkpoint import Restored
from outbox_broker.state.engine_state import BrokerState
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal
from outbox_core.journal.journal import SegmentDamaged

logger = logging.getLogger(__name__)

_NIL: Final = 0xC0
"""How the record's first field begins where it is None; the byte before says how many fields there are."""


def recover(
    state: BrokerState, messages: SegmentedLog, actions: SegmentedLog, *, options: EngineOptions,
    out: Collection[tuple[str, str]] = (),
) -> Restored:  # fmt: skip
    """Open both logs and replay them into an empty state; returns where replay began. `out`: topics and ids of what the
    schedule will hand out again.

    Raises SegmentDamaged where a segment is missing, StorageFailed where no checkpoint is whole and the beginning of
    the action log was dropped.
    """
    messages.open()
    actions.open()
    _refuse_if_a_log_is_missing(messages, actions)
    restored, replayed = _restore_checkpoint(state, actions)
    MessageRecovery(state, messages, restored=restored, ids_max=options.dedup_messages_max).run(out)
    for name, place in restored.deleted.items():  # whose messages the log still holds
        state.delete_topic(name, place, is_kept=name in restored.topics)
    replay = state.replay_action
    for segment in replayed:
        for one in actions.scan(segment):
            if isinstance(one, Gap):
                replay = LostActions(state, messages).replay
            else:
                replay(journal.decode_action(one.payload))
    actions.ready()
    _let_go_of_dropped(state)
    return restored


class MessageRecovery:
    """The message log's part: places, recent ids, and what fell due without the schedule's knowing it."""

    def __init__(self, state: BrokerState, log: SegmentedLog, *, restored: Restored, ids_max: int) -> None:
        self._state = state
        self._log = log
        self._restored = restored
        self._ids_max = ids_max
        self._fired: list[int] = []  # offsets, after the checkpoint

    def run(self, out: Collection[tuple[str, str]]) -> None:
        """Go through all segments; write the index files that are missing."""
        folder = self._log.folder
        sealed = self._log.segments[:-1]
        directories = [read_directory(folder, one.first_offset, one.end) for one in sealed]
        for number, (segment, directory) in enumerate(zip(sealed, directories, strict=True)):
            later = sum(one.ids_count for one in directories[number + 1 :] if one is not None)
            if directory is None or not self._takes(segment, directory, with_ids=later < self._ids_max):
                self._make_index(segment)
        for segment in self._log.segments[-1:]:
            self._read(segment)
        self._log.ready()
        self._complete_topics()
        self._note_fired(frozenset(out))

    def _takes(self, segment: Segment, directory: Directory, *, with_ids: bool) -> bool:
        """Take a segment's messages from its index; False, with nothing changed, where it does not fit."""
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
        self._state.take_over(segment.first_offset, directory)
        self._fired += [offset for offset in directory.special if offset >= self._restored.messages_end]
        return True

    def _make_index(self, segment: Segment) -> None:
        logger.info("segment_index_made", extra={"segment": segment.path.name})
        state = self._state
        before = state.recent.added
        self._read(segment)
        try:
            directory = write_index(
                self._log.folder, segment.first_offset, segment.end, topics=state.written.values(),
                ids=state.recent.newest(state.recent.added - before), special=state.written_special.tolist(),
            )  # fmt: skip
        except OSError as error:
            raise StorageFailed(
                f"cannot write the index of {segment.path.name}: {error.strerror}; {cure_for(error)}"
            ) from error
        state.take_over(segment.first_offset, directory)

    def _read(self, segment: Segment) -> None:
        for one in self._log.scan(segment):
            if isinstance(one, Gap):
                continue
            if is_note(one.payload):
                continue  # millions of them may stand in a segment, and the schedule knows more
            record = journal.decode_message(one.payload)
            self._state.replay_message(record, offset=one.offset, size_bytes=one.end - one.offset)
            if record.copy == journal.FIRED_COPY and one.offset >= self._restored.messages_end:
                self._fired.append(one.offset)

    def _note_fired(self, out: frozenset[tuple[str, str]]) -> None:
        """Which of the messages that will come again have their places: they are among the last that fell due."""
        for offset in self._fired[-len(out) :] if out else ():
            record = record_at(self._log, offset)
            if record is not None and (record.topic, record.id) in out and record.sequence is not None:
                self._state.fired_before[record.topic, record.id] = record.sequence
                if self._state.fired_from is None:
                    self._state.fired_from = offset

    def _complete_topics(self) -> None:
        """Topics whose messages were dropped, or whose last ones are damaged, go on where they were."""
        for name, end in self._restored.topics.items():
            _go_on_at(self._state, name, end)


def _refuse_if_a_log_is_missing(messages: SegmentedLog, actions: SegmentedLog) -> None:
    """Raise SegmentDamaged where one log has segments, and the other, which is made with it, has none.

    A first opening begins the log of messages first, and nothing is written to it before both are there.
    """
    gone, there = (actions, messages) if messages.segments else (messages, actions)
    if (
        there.segments
        and not gone.segments
        and (there is actions or any(content_bytes(one.path) for one in there.segments))
    ):
        raise SegmentDamaged(
            f"all segments in {gone.folder} are missing, and there are some in {there.folder}: restore them from a "
            f"copy; or move {there.folder} away too, to begin anew"
        )


def _restore_checkpoint(state: BrokerState, actions: SegmentedLog) -> tuple[Restored, list[Segment]]:
    """Restore the newest checkpoint that is whole; returns it, and the segments to replay."""
    newest = len(actions.segments) - 1
    for number, segment in reversed(list(enumerate(actions.segments))):
        found = checkpoint.read_from(segment)
        if found is not None:
            data, segment.grown_from = found
            return checkpoint.restore(state, data, is_newest=number == newest), actions.segments[number:]
        if segment.first_offset == 0:
            return Restored(is_newest=number == newest), actions.segments
        logger.warning("checkpoint_unusable", extra={"segment": segment.path.name})
    if actions.segments:
        raise StorageFailed(
            f"no checkpoint in {actions.folder} is whole, and its first segments were dropped: restore the folder from "
            "a copy"
        )
    return Restored(), actions.segments


def is_note(payload: bytes) -> bool:
    """Whether a record has no sequence and is the note of a scheduled message, without decoding it."""
    return payload[1] == _NIL and payload[-1] == journal.SCHEDULED


def _go_on_at(state: BrokerState, name: str, sequence: int) -> None:
    """Let a topic end here at least; what it lacks of that is gone."""
    index = state.topic(name).index
    index.begin_at(sequence)
    if index.end < sequence:
        logger.error("messages_missing", extra={"topic": name, "messages": sequence - index.end})
        state.written[name] = index
        index.skip_to(sequence, ready_at_ms=0)


def _let_go_of_dropped(state: BrokerState) -> None:
    """Messages may have been dropped, by retention or by hand, without a word of it in the action log.

    No topic goes back behind what a group was handed out: those sequences would never be delivered.
    """
    for name, topic in state.topics.items():
        for group in topic.groups.values():
            _go_on_at(state, name, group.position)
            lost = group.drop_before(topic.index.start)
            if lost:
                logger.error("unread_messages_missing", extra={"topic": name, "group": group.name, "messages": lost})
