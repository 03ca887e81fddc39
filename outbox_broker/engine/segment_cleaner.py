"""Moves what groups may still deliver out of old segments of the message log, to its end, so that these may go.

Segments go oldest first. So one dead letter, or one message that was put off for a month, would keep all that was
published since on the disk, of all topics. As in a log-structured file system (Rosenblum and Ousterhout, 1991) old
segments are cleaned, oldest first, while less than half of their bytes is wanted: so the disk has at most twice what is
wanted beyond the retention time, and what stays wanted is copied once a retention time at most.

A copy is a frame aside from its topic, and counts by an action (MovedAside) alone: a death in between leaves a frame
that nobody reads. What a slow group has not got yet is not moved: it holds its segments, until the group gets it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from heapq import merge
from typing import Final, NamedTuple

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.footer_repair import FooterRepair
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.group.consumer_group import Group, MovedEntry
from outbox_broker.group.messages_aside import OwnPlace
from outbox_broker.journal.message_reader import read_runs
from outbox_broker.journal.stored_record import frames_aside
from outbox_broker.log.topic_index import RUN_MESSAGES_MAX, PlaceRun
from outbox_broker.state.engine_state import Topic
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal
from outbox_core.messages.message import Record
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

WORTH: Final = 2
"""Old segments are cleaned while they have this many times the bytes that are wanted of them."""
RANGES_AT_ONCE: Final = 1_000
"""Parts of runs of wanted messages that are looked up in one hold of the lock: some 15 ms."""
TOPICS_AT_ONCE: Final = 1_000
"""Topics that are asked in one hold of the lock for what their groups need: some milliseconds."""
COPY_BYTES, COPY_PLACES = 1024 * 1024, 10_000
"""About as much is read, appended as one block, and given new places in the groups of its topic together."""
LOOK_AGAIN_MS: Final = 600_000
"""After which old segments that were not worth it, or could not be cleaned, are looked at again: some of what was
wanted may have been settled, and for a million dead letters a look takes seconds of a core.
"""
MEMORY_PART: Final = 2
"""The places of moved messages leave this part of `dead_letters_bytes_max` to dead letters."""


class LogSpan(NamedTuple):
    """A segment that is followed by another one: its offsets in the log."""

    first: int
    end: int


def is_held_by(group: Group, segment: LogSpan, *, end: int) -> bool:
    """Returns whether a group needs a segment, or one before it; its topic's sequences in those end at `end`."""
    return group.oldest() < end or next(group.aside.before(segment.end), None) is not None


class _Piece(NamedTuple):
    """Wanted messages from a sequence to an end (exclusive), and the run that has them: one of the topic, or a message
    aside from it.
    """

    first: int
    end: int
    run: PlaceRun
    is_aside: bool

    @property
    def size_bytes(self) -> int:
        """About how many bytes of the run they are."""
        return self.run.size_bytes * (self.end - self.first) // (self.run.end - self.run.first)


class _Copied(NamedTuple):
    """A message that was copied: where it is now, and where it was; `was_at` is None in its topic."""

    sequence: int
    place: OwnPlace
    was_at: int | None


class SegmentCleaner:
    """Cleans old segments. Not under the lock; by one thread at a time."""

    def __init__(self, context: EngineContext, writer: LogWriter, footer_repair: FooterRepair) -> None:
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._lock = context.lock
        self._state = context.state
        self._reserve = context.reserve
        self._writer = writer
        self._footer_repair = footer_repair
        self._looked_at_ms = context.clock.monotonic_ms()
        self._look_at_bytes = 0
        self.unwanted_bytes = 0
        """Bytes of old segments that nobody wants, and that wait for those before them, at the last look."""
        self.moved_messages = 0
        """How many were copied since the start."""

    def clean(self, old: Sequence[LogSpan]) -> None:
        """Move what is wanted of these segments, oldest first, as long as that is worth it. What cannot be moved is
        told, and tried again later.
        """
        if not old:
            self.unwanted_bytes = 0
            return
        stored = sum(segment.end - segment.first for segment in old)
        now_ms = self._clock.monotonic_ms()
        if stored < self._look_at_bytes and now_ms - self._looked_at_ms < LOOK_AGAIN_MS:
            return
        self._looked_at_ms, self._look_at_bytes = now_ms, 0
        try:
            wanted = self._wanted_bytes(old)
            left = sum(wanted)
            for segment, wanted_bytes in zip(old, wanted, strict=True):
                if stored < WORTH * left or not self._is_emptied(segment):
                    self._look_at_bytes = WORTH * (left if stored < WORTH * left else stored)
                    break
                stored -= segment.end - segment.first
                left -= wanted_bytes
            self.unwanted_bytes = max(0, stored - left)
        except StorageFailed as error:  # segments that nobody needs go all the same
            logger.warning("segments_not_cleaned", extra={"first_offset": old[0].first, "error": str(error)})

    # -- what is wanted ----------------------------------------------------------------------------------------------

    def _wanted_bytes(self, segments: Sequence[LogSpan]) -> list[int]:
        """Returns about how many bytes of each segment groups may still deliver."""
        wanted = [0] * len(segments)
        bounds = [segment.first for segment in segments]
        all_of_them = LogSpan(segments[0].first, segments[-1].end)
        for name in self._holding(all_of_them):
            for piece in self._pieces(name, all_of_them):
                wanted[bisect_right(bounds, piece.run.offset) - 1] += piece.size_bytes
        return wanted

    def _holding(self, segments: LogSpan) -> list[str]:
        """Returns the topics of which a group needs something of segments up to the last one of these."""
        with self._lock:
            names = list(self._state.topics)
        holding: list[str] = []
        for start in range(0, len(names), TOPICS_AT_ONCE):
            with self._lock:
                self._context.refuse_if_closed()
                for name in names[start : start + TOPICS_AT_ONCE]:
                    topic = self._state.topics.get(name)
                    end = 0 if topic is None else topic.index.end_before(segments.end)
                    if topic and any(is_held_by(group, segments, end=end) for group in topic.groups.values()):
                        holding.append(name)
        return holding

    def _pieces(self, name: str, segments: LogSpan) -> Iterator[_Piece]:
        """Yields what the groups of a topic may still deliver of adjacent segments, each piece once; those aside from
        the topic first. The lock is let go after each thousand.
        """
        with self._lock:
            topic = self._state.topics.get(name)
            if topic is None:
                return
            groups = list(topic.groups.values())
            start, end = topic.index.start, topic.index.end_before(segments.end)
        aside: dict[int, _Piece] = {}  # by offset: several groups may share a copy
        for group in groups:
            with self._lock:
                for sequence, own_place in group.aside.before(segments.end):
                    run = PlaceRun(sequence, sequence + 1, *own_place)
                    aside[own_place.offset] = _Piece(sequence, sequence + 1, run, is_aside=True)
        yield from aside.values()
        while start < end:
            located, start = self._footer_repair.looked_up(partial(_located, topic, start, end))
            for first, stop, run in located:
                if segments.first <= run.offset < segments.end or not run.is_stored:
                    yield _Piece(first, stop, run, is_aside=False)

    # -- moving ------------------------------------------------------------------------------------------------------

    def _is_emptied(self, segment: LogSpan) -> bool:
        """Move what is wanted of a segment; returns whether nothing of it is wanted any more."""
        before = self.moved_messages
        is_done = all(self._move(name, segment) for name in self._holding(segment))
        if self.moved_messages > before:
            logger.info(
                "segment_cleaned",
                extra={"first_offset": segment.first, "messages": self.moved_messages - before, "whole": is_done},
            )
        return is_done

    def _move(self, name: str, segment: LogSpan) -> bool:
        """Move what is wanted of a topic's messages in a segment; returns whether all of it was."""
        pieces: list[_Piece] = []
        size_bytes = messages = moved_to = 0
        messages_max = COPY_PLACES // max(1, len(self._groups(name)))
        for piece in self._pieces(name, segment):
            if pieces and (size_bytes + piece.size_bytes > COPY_BYTES or messages >= messages_max):
                if not self._copy(name, pieces, moved_to=moved_to):
                    return False
                pieces, size_bytes, messages = [], 0, 0
            pieces.append(piece)
            size_bytes += piece.size_bytes
            messages += piece.end - piece.first
            moved_to = moved_to if piece.is_aside else piece.end
        with self._lock:
            topic = self._state.topics.get(name)
            end = 0 if topic is None else topic.index.end_before(segment.end)
        return self._copy(name, pieces, moved_to=end)

    def _copy(self, name: str, pieces: Sequence[_Piece], *, moved_to: int) -> bool:
        """Append copies of messages, and have each group take those that it still wants; it wants nothing else of the
        segment below `moved_to`. Returns False, with nothing done, if one of them is damaged, or for lack of memory.
        """
        found: list[tuple[int, _Piece, Record]] = []
        copied: list[_Copied] = []
        for piece in pieces:
            if not piece.run.is_stored:  # of what is in no segment nothing can be kept
                nowhere = OwnPlace(piece.run.offset, 0, piece.run.ready_at_ms)
                copied += [_Copied(sequence, nowhere, None) for sequence in range(piece.first, piece.end)]
                continue
            read = read_runs(self._context.messages, [piece.run], first=piece.first, end=piece.end, bytes_max=0)
            for sequence, record in read:
                if record is None:
                    self._tell_kept(name, sequence, "is damaged", cure="discard it, or restore the segment from a copy")
                    return False
                found.append((sequence, piece, record))
        used = self._state.dead_letter_memory.size_bytes
        if pieces and used >= self._options.dead_letters_bytes_max // MEMORY_PART:
            self._tell_kept(name, pieces[0].first, "has no room in memory", cure="redrive or discard dead letters")
            return False
        copied += self._appended(found) if found else []
        for group in self._groups(name):
            with self._lock:
                self._context.refuse_if_closed()
                if not group.is_deleted:
                    self._take(name, group, copied, moved_to=moved_to)
        return True

    def _groups(self, name: str) -> list[Group]:
        with self._lock:
            topic = self._state.topics.get(name)
            return [] if topic is None else list(topic.groups.values())

    def _appended(self, found: Sequence[tuple[int, _Piece, Record]]) -> list[_Copied]:
        """Append the messages, aside from their topic; returns where they are once that is durable."""
        frames = frames_aside((sequence, record) for sequence, _, record in found)
        with self._lock:
            self._context.refuse_if_closed()
            # What goes with the segment is more than this: so the reserve is for it, too.
            offsets = self._reserve.spend(
                lambda: self._writer.append_messages(frames, at_ms=self._clock.now_ms()), keep_half=True
            )
            messages_end = self._context.messages.end
        self._context.messages.commit(messages_end)
        copied: list[_Copied] = []
        for (sequence, piece, _), offset, size_bytes in zip(found, offsets, frames.sizes, strict=True):
            place = OwnPlace(offset, size_bytes, piece.run.ready_at_ms)
            copied.append(_Copied(sequence, place, piece.run.offset if piece.is_aside else None))
        self.moved_messages += len(copied)
        return copied

    def _take(self, name: str, group: Group, copied: Iterable[_Copied], *, moved_to: int) -> None:
        """Write the action by which a group has messages at their new places, if it wants any. Under the lock."""
        entries: list[MovedEntry] = []
        for sequence, new_place, was_at in copied:
            now_at = group.aside.place(sequence)
            # It may have been settled, or edited, while it was copied.
            if (None if now_at is None else now_at.offset) == was_at and group.may_deliver(sequence):
                entries.append((sequence, *new_place))
        if entries or group.oldest() < min(moved_to, group.position):
            self._writer.act(
                journal.MovedAside(
                    topic=name, group=group.name, at_ms=self._clock.now_ms(), entries=entries, moved_to=moved_to
                )
            )  # fmt: skip

    def _tell_kept(self, topic: str, sequence: int, what: str, *, cure: str) -> None:
        logger.warning(
            "segment_kept",
            extra={"topic": topic, "sequence": sequence, "error": f"a message that a group wants {what}", "cure": cure},
        )


def _located(topic: Topic, start: int, end: int) -> tuple[list[tuple[int, int, PlaceRun]], int]:
    """Returns what groups may still deliver of a topic's sequences from where it has them, RANGES_AT_ONCE parts of
    runs: (first, end, run); and up to where they were looked up. Under the lock.
    """
    found: list[tuple[int, int, PlaceRun]] = []
    for first, stop in _united(merge(*(group.open_in_topic(start, end) for group in topic.groups.values()))):
        for run in topic.index.runs(first, stop):
            # Of lost messages a run may have millions.
            for begin in range(max(first, run.first), min(stop, run.end), RUN_MESSAGES_MAX):
                if len(found) == RANGES_AT_ONCE:
                    return found, begin
                found.append((begin, min(begin + RUN_MESSAGES_MAX, stop, run.end), run))
    return found, end


def _united(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields ordered ranges (first, end), of which some overlap or touch, as few that do not."""
    last: tuple[int, int] | None = None
    for first, end in ranges:
        if last is not None and first <= last[1]:
            last = (last[0], max(last[1], end))
            continue
        if last is not None:
            yield last
        last = (first, end)
    if last is not None:
        yield last
