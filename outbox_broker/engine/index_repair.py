"""Rebuilds index files from their segments if damage is found while the broker runs. Not those found at startup."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from outbox_broker.engine.context import EngineContext
from outbox_broker.log.disk_reserve import cure_for
from outbox_broker.log.segment_index import Directory, IndexDamaged, index_path, write_index
from outbox_broker.log.segment_scan import Gap, Segment, scan
from outbox_broker.log.topic_index import SegmentPlaces
from outbox_broker.recovery.startup_recovery import is_marker
from outbox_broker.state.engine_state import BrokerState, Topic
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)
T = TypeVar("T")

MENDS_MAX: Final = 1_000
"""Maximum number of index files that one lookup repairs."""
MEND_AGAIN_MS: Final = 5_000
"""A failed repair is retried after this time, not by each pull."""


class IndexRepair:
    """Lookups of message locations that repair damaged index files."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._lock = context.lock
        self._state = context.state
        self._messages = context.messages
        self._reserve = context.reserve
        self._index_files = context.index_files
        self._mending = threading.Lock()
        self._unmended: dict[int, tuple[int, str]] = {}
        """When, and why, a segment's index could not be rebuilt."""

    def looked_up(self, lookup: Callable[[], T]) -> T:
        """Run a function that looks up locations, under the lock; called without it. The function changes nothing
        before its last lookup.

        A damaged index file is rebuilt, and the function run again. The segment, which is immutable, is read without
        the lock: only callers that need this index wait.
        """
        for _ in range(MENDS_MAX):
            try:
                with self._lock:
                    return lookup()
            except IndexDamaged as damage:
                self._mend(damage)
        raise StorageFailed("index files are damaged again and again; look after the disk, and restart the broker")

    def refuse_if_unmended(self) -> None:
        """Raise StorageFailed if messages cannot be delivered for lack of an index."""
        for _, problem in self._unmended.values():
            raise StorageFailed(problem)

    def _mend(self, damage: IndexDamaged) -> None:
        with self._mending:
            if damage.mended != self._index_files.mended:
                return  # repaired by another thread, perhaps this very segment: retry
            with self._lock:
                self._context.refuse_if_closed()
                self._refuse_if_tried_lately(damage.segment)
                segment = self._sealed_segment(damage.segment)
                parts = self._parts_in(damage.segment)
            try:
                if segment is not None:
                    self._make_anew(segment, parts)
            except StorageFailed as error:
                with self._lock:
                    if self._sealed_segment(damage.segment) is None:
                        return  # retention dropped it meanwhile
                    self._unmended[damage.segment] = (self._clock.monotonic_ms(), str(error))
                logger.critical("index_rebuild_failed", extra={"segment": damage.segment, "error": str(error)})
                raise

    def _make_anew(self, segment: Segment, parts: Mapping[str, SegmentPlaces]) -> None:
        try:
            rebuilt = read_again(segment, parts, state=BrokerState(self._options, self._index_files))
        except OSError as error:
            cure = f"restore {segment.path.name} from a copy, and restart the broker"
            raise StorageFailed(f"{_damaged(segment)}: {error.strerror}; {cure}") from error
        with self._lock:
            if self._sealed_segment(segment.first_offset) is None:
                return
            directory = self._reserve.spend(lambda: self._write_anew(segment, rebuilt))
            self._state.update_locations(segment.first_offset, directory)
            self._index_files.made_anew(segment.first_offset)
            self._unmended.pop(segment.first_offset, None)
        logger.error("index_rebuilt", extra={"segment": segment.path.name, "topics": len(parts)})

    def _write_anew(self, segment: Segment, rebuilt: BrokerState) -> Directory:
        try:
            return write_index(
                segment.path.parent, segment.first_offset, segment.end, topics=rebuilt.active_segment_topics.values(),
                ids=rebuilt.recent.newest(rebuilt.recent.added), special=rebuilt.active_segment_special.tolist(),
            )  # fmt: skip
        except OSError as error:
            raise StorageFailed(f"{_damaged(segment)}: {error.strerror}; {cure_for(error)}") from error

    def _sealed_segment(self, first_offset: int) -> Segment | None:
        """Returns the segment; None if it was dropped."""
        return next((segment for segment in self._messages.segments[:-1] if segment.first_offset == first_offset), None)

    def _parts_in(self, segment: int) -> dict[str, SegmentPlaces]:
        """Returns the sequences of each topic in a segment."""
        parts = {name: topic.index.part_in(segment) for name, topic in self._state.topics.items()}
        return {name: part for name, part in parts.items() if part is not None}

    def _refuse_if_tried_lately(self, segment: int) -> None:
        tried_ms, problem = self._unmended.get(segment, (0, ""))
        if problem and self._clock.monotonic_ms() - tried_ms < MEND_AGAIN_MS:
            raise StorageFailed(problem)


def read_again(segment: Segment, parts: Mapping[str, SegmentPlaces], *, state: BrokerState) -> BrokerState:
    """Read a segment's messages into an empty state; missing messages of the topics' parts are damaged.

    Raises OSError.
    """
    for name, part in parts.items():
        state.active_segment_topics[name] = state.topic(name).index
        state.active_segment_topics[name].begin_at(part.first)
    for frame in scan(segment, start=segment.first_offset):
        if isinstance(frame, Gap) or is_marker(frame.payload):
            continue
        record = journal.decode_message(frame.payload)
        if record.sequence is None or _is_next(record.sequence, parts.get(record.topic), state.topic(record.topic)):
            state.replay_message(record, offset=frame.offset, size_bytes=frame.end - frame.offset)
    for name, part in parts.items():
        index = state.active_segment_topics[name]
        index.skip_to(part.end, ready_at_ms=index.tail.row(-1)[-1] if len(index.tail) else part.first_time_ms)
    return state


def _is_next(sequence: int, part: SegmentPlaces | None, topic: Topic) -> bool:
    return part is not None and topic.index.end <= sequence < part.end


def _damaged(segment: Segment) -> str:
    name = index_path(segment.path.parent, segment.first_offset).name
    return f"{name} is damaged, and cannot be made anew"
