"""Makes footers anew from their segments if damage is found while the broker runs. Not those found at startup."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Final, TypeVar

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.journal.journal import Journal
from outbox_broker.journal.message_reader import messages_of
from outbox_broker.journal.segment_footer import FooterDamaged
from outbox_broker.log.topic_index import SegmentPlaces
from outbox_broker.segments.port import SegmentInfo
from outbox_broker.state.engine_state import BrokerState, Topic
from outbox_core.common.errors import StorageFailed
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)
T = TypeVar("T")

MENDS_MAX: Final = 1_000
"""Maximum number of footers that one lookup repairs."""
MEND_AGAIN_MS: Final = 5_000
"""A failed repair is retried after this time, not by each pull."""


class FooterRepair:
    """Lookups of message locations that repair damaged footers."""

    def __init__(self, context: EngineContext, writer: LogWriter) -> None:
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._lock = context.lock
        self._state = context.state
        self._reserve = context.reserve
        self._writer = writer
        self._footer_blocks = context.footer_blocks
        self._mending = threading.Lock()
        self._unmended: dict[int, tuple[int, str]] = {}
        """When, and why, a segment's footer could not be made anew."""

    def looked_up(self, lookup: Callable[[], T]) -> T:
        """Run a function that looks up locations, under the lock; called without it. The function changes nothing
        before its last lookup.

        A damaged footer is made anew, and the function run again. The segment, which is immutable, is read without
        the lock: only callers that need this footer wait.
        """
        for _ in range(MENDS_MAX):
            try:
                with self._lock:
                    return lookup()
            except FooterDamaged as damage:
                self._mend(damage)
        raise StorageFailed("footers are damaged again and again; look after the disk, and restart the broker")

    def refuse_if_unmended(self) -> None:
        """Raise StorageFailed if messages cannot be delivered for lack of an index."""
        for _, problem in self._unmended.values():
            raise StorageFailed(problem)

    def _mend(self, damage: FooterDamaged) -> None:
        with self._mending:
            if damage.mended != self._footer_blocks.mended:
                return  # repaired by another thread, perhaps this very segment: retry
            with self._lock:
                self._context.refuse_if_closed()
                self._refuse_if_tried_lately(damage.segment)
                sealed = self._sealed_segment(damage.segment)
                parts = self._parts_in(damage.segment)
            try:
                if sealed is not None:
                    self._make_anew(*sealed, parts)
            except StorageFailed as error:
                with self._lock:
                    if self._sealed_segment(damage.segment) is None:
                        return  # retention dropped it meanwhile
                    self._unmended[damage.segment] = (self._clock.monotonic_ms(), str(error))
                logger.critical("segment_footer_failed", extra={"segment": damage.segment, "error": str(error)})
                raise

    def _make_anew(self, segment: SegmentInfo, end: int, parts: Mapping[str, SegmentPlaces]) -> None:
        try:
            rebuilt = read_again(
                self._context.messages, segment, parts, state=BrokerState(self._options, self._footer_blocks)
            )
        except StorageFailed as error:
            cure = f"restore {segment.name} from a copy, and restart the broker"
            raise StorageFailed(f"{_damaged(segment)}: {error}; {cure}") from error
        with self._lock:
            if self._sealed_segment(segment.first) is None:
                return
            footer = rebuilt.footer(segment.first, end)
            found = self._reserve.spend(lambda: self._writer.append_footer(segment.first, footer))
            self._state.update_locations(segment.first, found)
            self._footer_blocks.mended += 1
            self._unmended.pop(segment.first, None)
        logger.error("segment_footer_made", extra={"segment": segment.name, "topics": len(parts)})

    def _sealed_segment(self, first: int) -> tuple[SegmentInfo, int] | None:
        """Returns the segment, and the offset at which it ends; None if it was dropped."""
        pairs = pairwise(self._context.messages.segments)
        return next(((segment, following.first) for segment, following in pairs if segment.first == first), None)

    def _parts_in(self, segment: int) -> dict[str, SegmentPlaces]:
        """Returns the sequences of each topic in a segment."""
        parts = {name: topic.index.part_in(segment) for name, topic in self._state.topics.items()}
        return {name: part for name, part in parts.items() if part is not None}

    def _refuse_if_tried_lately(self, segment: int) -> None:
        tried_ms, problem = self._unmended.get(segment, (0, ""))
        if problem and self._clock.monotonic_ms() - tried_ms < MEND_AGAIN_MS:
            raise StorageFailed(problem)


def read_again(
    log: Journal, segment: SegmentInfo, parts: Mapping[str, SegmentPlaces], *, state: BrokerState
) -> BrokerState:  # fmt: skip
    """Read a segment's messages into an empty state; missing messages of the topics' parts are damaged.

    Raises StorageFailed.
    """
    for name, part in parts.items():
        state.active_segment_topics[name] = state.topic(name).index
        state.active_segment_topics[name].begin_at(part.first)
    for stored in messages_of(log, segment):
        topic, sequence = stored.record.topic, stored.sequence
        if sequence is None or _is_next(sequence, parts.get(topic), state.topic(topic)):
            state.replay_message(stored)
    for name, part in parts.items():
        index = state.active_segment_topics[name]
        index.skip_to(part.end, ready_at_ms=index.tail.row(-1)[-1] if len(index.tail) else part.first_time_ms)
    return state


def _is_next(sequence: int, part: SegmentPlaces | None, topic: Topic) -> bool:
    return part is not None and topic.index.end <= sequence < part.end


def _damaged(segment: SegmentInfo) -> str:
    return f"the footer of {segment.name} is damaged, and cannot be made anew"
