"""The message log, as that in which scheduled messages arrive: one append and one sync store them, as any others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.journal.message_reader import readable_blocks
from outbox_broker.schedule.schedule_log import Place
from outbox_broker.schedule.schedule_records import Scheduled
from outbox_broker.schedule.sorted_run import Entry, TimedMessage
from outbox_core.journal.block import Block, Framed, FrameKind, framed
from outbox_core.messages.message import decode_record
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_ARRIVALS: Final = frozenset({FrameKind.SCHEDULED, FrameKind.CANCELED})


class MessageArrivals:
    """Appends messages that the schedule takes, with their arrival numbers, and reads them again at an opening. Under
    the engine's lock, but for reads and commits.
    """

    def __init__(self, context: EngineContext, writer: LogWriter) -> None:
        self._context = context
        self._writer = writer

    @property
    def end(self) -> Place:
        """The end of the message log."""
        return self._context.messages.end

    def append(self, entries: Sequence[Entry], dead: Sequence[TimedMessage], *, at_ms: int) -> None:
        """Append them as one block. Raises StorageFailed with nothing appended."""
        # Canceled ones first: a block's kind is that of its first frame, and a recovery of the messages reads the ids
        # of these, but passes over blocks of scheduled ones alone.
        frames = Framed(FrameKind.CANCELED if dead else FrameKind.SCHEDULED)
        frames.extend(framed(FrameKind.CANCELED, range(len(dead)), [message.payload for message in dead]))
        first = entries[0].seq if entries else 0
        numbers = range(first, first + len(entries))
        frames.extend(framed(FrameKind.SCHEDULED, numbers, [entry.payload for entry in entries]))
        self._writer.append_messages(frames, at_ms=at_ms)

    def commit(self, end: Place) -> None:
        """Commit the message log."""
        self._context.messages.commit(end)

    def since(self, begin: Place) -> Iterator[Scheduled]:
        """Yields the arrivals of each block from an offset on. What is damaged is left out; the log tells of it."""
        log = self._context.messages
        if begin < log.start:
            logger.error("arrivals_missing", extra={"log": "messages", "from_offset": begin, "to_offset": log.start})
        segments = log.segments
        holding = sum(segment.first <= begin for segment in segments) - 1  # the index of the segment with that offset
        for segment in segments[max(0, holding) :]:
            for block in readable_blocks(log, segment, _ARRIVALS):
                if block.position >= begin:
                    yield _arrivals_of(block)


def _arrivals_of(block: Block) -> Scheduled:
    arrived = Scheduled([], [], [])
    for frame in block.frames:
        if frame.kind not in _ARRIVALS:
            continue  # of a block whose head is damaged
        record = decode_record(frame.payload)
        if frame.kind == FrameKind.SCHEDULED:
            due_ms = record.deliver_at_ms
            due_ms = (block.at_ms or 0) if due_ms is None else max(0, due_ms)
            arrived.entries.append(Entry(due_ms, frame.number, record.id, record.topic, frame.payload))
        else:
            arrived.dead.append(record.id)
            arrived.dead_topics.append(record.topic)
    return arrived
