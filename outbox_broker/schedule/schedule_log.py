"""The schedule's log: records of changes, as blocks of segments. Makes no decisions.

Scheduling and dispatch share one log, so that their relative order is given by it. A segment begins with a checkpoint,
in parts, or goes on from the one before, as after a takeover. A record of messages is one frame; any other change of
state is framed twice, so that a flipped bit costs neither. Where a frame is lost nevertheless, the log is refused: what
follows a change that is not known cannot be applied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from outbox_broker.schedule import schedule_records
from outbox_broker.segments.port import SegmentReader, Segments, SegmentWriter
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import (
    LAST_PART,
    Block,
    Framed,
    FrameKind,
    SegmentKind,
    block,
    changes_of,
    framed,
    framed_changes,
)
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

PREFIX: Final = "log-"
CONTINUED_MAX: Final = 16
"""Segments from the newest checkpoint on, after which an opening begins with another checkpoint: each is a ledger to
read."""
_PART_BYTES: Final = 1024 * 1024
"""Of a checkpoint's part: it repeats all that is in memory, to which publishers that come at once may add hundreds of
megabytes, and a frame has at most 128 MiB."""
_FIRST_CHECKPOINT_BYTES_MAX: Final = 4096
"""Of a log's first checkpoint, which is that of nothing; it has some two hundred."""
_UNTIMED: Final = 0
"""A block's time: the records have their own."""
Place = int
"""The end of a record: the offset behind it, over all segments."""


class LogReplay:
    """The records since the newest whole checkpoint. Reads only; what it knows of the end is right once records() is
    exhausted.
    """

    def __init__(self, segments: SegmentReader) -> None:
        """Find the checkpoint. Raises SegmentDamaged if it is damaged, or if none is whole though one must be."""
        self._segments = segments
        infos = segments.list()
        self._infos = {info.name: info for info in infos if info.name.startswith(PREFIX)}
        self._others = [info.name for info in infos if not info.name.startswith(PREFIX)]
        self.older = sorted(self._infos)
        self.names: list[str] = []
        """The segments from the checkpoint on."""
        self.unfinished: list[str] = []
        """A segment whose checkpoint is not whole does not count yet: its predecessor is there until it is durable."""
        self.end = 0
        """The position behind the last whole block of the newest segment."""
        self.frames = 0
        """How many frames that block has."""
        self.begun = 0
        """The offset behind the checkpoint."""
        self.grown_bytes = 0
        """Bytes of the records behind it."""
        self._checkpoint: Iterator[schedule_records.LogRecord] = iter(())
        self._first: schedule_records.LogRecord | None = None
        self._find_checkpoint()

    @property
    def first(self) -> int:
        """The offset at which the newest segment begins."""
        return self._infos[self.names[-1]].first if self.names else 0

    def records(self) -> Iterator[schedule_records.LogRecord]:
        """Yields every record since the checkpoint, which is the first; none if nothing was ever logged.

        Raises SegmentDamaged at any that is lost.
        """
        if self._first is None:
            return
        yield self._first
        self.begun = self._infos[self.names[0]].first + self.end
        self.grown_bytes = 0
        yield from self._checkpoint
        for before, name in pairwise(self.names):
            end, first = self._infos[before].first + self.end, self._infos[name].first
            if first != end:
                raise SegmentDamaged(
                    f"{name} begins at {first}, and what is before it ends at {end}: a segment or a block is lost; "
                    f"restore the segments from {before} to {name} from a copy"
                )
            yield from self._read(name)

    def _find_checkpoint(self) -> None:
        while self.older:
            name = self.older.pop()
            records = self._read(name)
            first = next(records, None)
            if first is None and not self.names:
                self.unfinished.append(name)
                continue
            self.names.insert(0, name)
            if isinstance(first, schedule_records.ScheduleCheckpoint):
                self._first, self._checkpoint = first, records
                return
        # Its predecessor was deleted only after its checkpoint was durable: it was whole. And nothing else was written
        # before the first one's was: to begin anew would delete all buckets.
        begun = self.names or [name for name in self.unfinished if self._others or not self._may_be_first(name)]
        if begun:
            raise SegmentDamaged(f"{begun[0]}: its checkpoint is damaged; restore {begun[0]} from a copy")
        if self._others:
            raise SegmentDamaged(
                f"{self._others[0]} is there, and no log that says what is in it: restore the segments {PREFIX}* from "
                "a copy; or empty the store, to begin anew"
            )

    def _may_be_first(self, name: str) -> bool:
        """Returns whether nothing was durable yet when this was left: until then the first checkpoint stands alone."""
        return name == name_of(1) and not self._segments.read(name, _FIRST_CHECKPOINT_BYTES_MAX, 1)

    def _read(self, name: str) -> Iterator[schedule_records.LogRecord]:
        """Yields the records of a segment; nothing if the checkpoint that it begins with is not whole."""
        parts: list[bytes] = []
        self.end = self.frames = 0
        for found in self._segments.blocks(name):
            payload = self._payload_of(name, found)
            self.end, self.frames = found.end, len(found.frames) + (found.damaged or 0)
            if found.kind == FrameKind.CHECKPOINT:
                parts.append(payload)
                if not found.frames[0].number & LAST_PART:
                    continue
                payload = b"".join(parts)
            self.grown_bytes += len(payload)
            yield schedule_records.decode(payload)

    def _payload_of(self, name: str, found: Block) -> bytes:
        """Returns the record in a block. Raises SegmentDamaged if no copy of it is whole."""
        whole = list(changes_of(found.frames).values()) or [frame.payload for frame in found.frames]
        if len(whole) != 1 or (found.damaged and found.kind != FrameKind.CHANGE):
            raise SegmentDamaged(f"{name}: damaged record at {found.position}; restore {name} from a copy")
        if found.damaged:
            logger.error("log_record_read_from_copy", extra={"segment": name, "position": found.position})
        return whole[0]


class ScheduleLog:
    """One log. append() and begin() need the caller's lock; commit() is thread-safe, and shares syncs."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._writer: SegmentWriter | None = None  # None: the next append begins a segment
        self._names: list[str] = []  # from the newest checkpoint on
        self._first = 0  # the offset at which the newest segment begins
        self._begun = 0  # the offset behind its checkpoint
        self._frames = 0  # of the last block in it
        self._end = 0
        self._durable = 0
        self._grown_bytes = 0
        self._old: list[str] = []
        self._guard = threading.Lock()

    @property
    def names(self) -> Sequence[str]:
        """The segments from the newest checkpoint on."""
        return tuple(self._names)

    @property
    def place(self) -> Place:
        """The current end of the log."""
        return self._end

    @property
    def size_bytes(self) -> int:
        """Bytes of the newest segment."""
        return self._end - self._first

    @property
    def grown_bytes(self) -> int:
        """Bytes of the records behind the checkpoint, without what frames and blocks add."""
        return self._grown_bytes

    def recover(self) -> Iterator[schedule_records.LogRecord]:
        """Yields every record since the newest whole checkpoint; none where there is nothing. Must be exhausted.

        Raises SegmentDamaged if that checkpoint is damaged, or any record but those of a torn tail.
        """
        replay = LogReplay(self._segments)
        if replay.unfinished:
            logger.warning("unfinished_log_removed", extra={"segments": replay.unfinished})
            self._segments.delete(replay.unfinished)
        yield from replay.records()
        self._names = replay.names
        self._first, self._frames, self._begun = replay.first, replay.frames, replay.begun
        self._end = self._first + replay.end
        self._grown_bytes = replay.grown_bytes

    def resume(self, checkpoint: Callable[[], schedule_records.ScheduleCheckpoint]) -> None:
        """Go on after recovery: where the log ends, or in another segment from the first append on. So the time until
        this log can be written to does not depend on what it holds. Raises StorageFailed.
        """
        if not self._names or len(self._names) >= CONTINUED_MAX:
            self.begin_anew(checkpoint())
            return
        self._writer = self._segments.reopen(self._names[-1], end=self._end - self._first)
        # What a medium without syncs has is not known to be durable, although it is all there is.
        self._durable = self._end if self._writer is None else self._first + self._writer.commit(0)

    def append(self, record: schedule_records.LogRecord) -> Place:
        """Append a record; not durable before commit(). Raises StorageFailed with nothing appended."""
        payload = schedule_records.encode(record)
        if isinstance(record, schedule_records.Scheduled):
            first_seq = record.entries[0].seq if record.entries else 0
            frames = framed(FrameKind.SCHEDULED, range(first_seq, first_seq + 1), [payload])
        else:
            frames, copies = framed_changes([payload])
            frames.extend(copies)
        writer = self._writer
        if writer is None:
            writer, first = self._create(), self._end
            self._write(writer, frames, first=first)
            with self._guard:
                self._names.append(writer.name)
                self._writer, self._first = writer, first
        else:
            self._write(writer, frames, first=self._first)
        self._grown_bytes += len(payload)
        return self._end

    def commit(self, place: Place | None = None) -> None:
        """Return once everything up to a place (all, by default) is durable."""
        with self._guard:
            end = self._end if place is None else place
            writer, first = self._writer, self._first
            if end <= self._durable or writer is None:
                return
            end = max(end, self._begun)  # a later segment's checkpoint includes all of an earlier one
        durable = first + writer.commit(end - first)
        with self._guard:
            self._durable = max(self._durable, durable)

    def seal(self) -> None:
        """Accept no more records."""
        if self._writer is not None:
            self._writer.seal()

    def check_ready(self) -> None:
        """Raise StorageFailed if nothing can be made durable until the segments are opened again."""
        self._segments.check()

    def begin(self, checkpoint: schedule_records.ScheduleCheckpoint) -> None:
        """Start a new segment; once it is durable, the older ones are obsolete. Raises StorageFailed.

        If that fails, the log continues in the old segment.
        """
        payload = schedule_records.encode(checkpoint)
        writer, first, before = self._create(), self._end, (self._end, self._frames)
        starts = range(0, len(payload), _PART_BYTES)
        self._frames = 0
        try:
            for number, start in enumerate(starts):
                numbers = range(number, number + 1) if number + 1 < len(starts) else range(
                    number + LAST_PART, number + LAST_PART + 1
                )  # fmt: skip
                part = payload[start : start + _PART_BYTES]
                self._write(writer, framed(FrameKind.CHECKPOINT, numbers, [part]), first=first)
        except StorageFailed:
            self._end, self._frames = before
            writer.abandon()
            self._segments.delete([writer.name])
            raise
        with self._guard:
            # The old writer stays: others may wait for what it appended, until its segment is deleted.
            self._old += self._names
            self._names = [writer.name]
            self._writer, self._first, self._begun = writer, first, self._end
            self._grown_bytes = 0

    def begin_anew(self, checkpoint: schedule_records.ScheduleCheckpoint) -> None:
        """Start a new segment, durably, after recovery. Raises StorageFailed."""
        self.begin(checkpoint)
        self.commit()

    def old_segments(self) -> list[str]:
        """Returns the segments that may be deleted; each is returned once."""
        old, self._old = self._old, []
        return old

    def _create(self) -> SegmentWriter:
        """Begin the next segment."""
        number = int(self._names[-1].removeprefix(PREFIX)) + 1 if self._names else 1
        return self._segments.create(name_of(number), kind=SegmentKind.MESSAGES, first=self._end)

    def _write(self, writer: SegmentWriter, frames: Framed, *, first: int) -> None:
        offset = first + writer.end
        before = self._frames if writer.end else 0
        writer.append(
            block(frames, offset=offset, durable=self._durable, at_ms=_UNTIMED, frames_before=before)
        )  # fmt: skip
        self._end, self._frames = first + writer.end, len(frames)


def name_of(number: int) -> str:
    """Returns the name of the log's segment with a number, from 1 on."""
    return f"{PREFIX}{number:012d}"
