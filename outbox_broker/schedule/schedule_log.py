"""The schedule's log: records of changes, in a Journal. Makes no decisions.

All changes share one log, so that their relative order is given by it. A record of messages that arrive in it is one
frame; any other is framed twice, so that a flipped bit costs neither. Where a frame is lost nevertheless, the log is
refused: what follows a change that is not known cannot be applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from outbox_broker.journal.journal import Journal, frames
from outbox_broker.journal.replay import JournalReplay
from outbox_broker.schedule import schedule_records
from outbox_broker.segments.port import SegmentReader
from outbox_core.common.errors import DECODE_ERRORS
from outbox_core.journal.block import FrameKind
from outbox_core.journal.journal import SegmentDamaged

LOG: Final = "log"
PREFIX: Final = f"{LOG}-"
_LOGS: Final = (PREFIX, "messages-", "actions-")
"""How the segments of logs are called: an engine may have all that it keeps in the same segments, on ledgers."""
SEGMENT_BYTES: Final = 64 * 1024 * 1024
"""Each checkpoint begins another one, too."""
CONTINUED_MAX: Final = 16
"""Segments from the newest checkpoint on, after which an opening writes another one: each is a ledger to read."""
_PART_BYTES: Final = 1024 * 1024
"""Of a checkpoint's part: it repeats all that is in memory, to which publishers that come at once may add hundreds of
megabytes, and a frame has at most 128 MiB."""
_WANTED: Final = frozenset({FrameKind.SCHEDULED, FrameKind.CHANGE})
FIRST_CHECKPOINT_BYTES_MAX: Final = 4096
"""Of a log's first checkpoint, which is that of nothing; it has some two hundred."""
_UNTIMED: Final = 0
"""A block's time: the records have their own."""
Place = int
"""The end of a record: the offset behind it, over all segments."""


def filed(segments: SegmentReader) -> set[str]:
    """Returns the names of the segments that are the schedule's, but for its log: buckets, and pieces of the index."""
    return {segment.name for segment in segments.list() if not segment.name.startswith(_LOGS)}


def records_of(replay: JournalReplay) -> Iterator[schedule_records.LogRecord]:
    """Yields every record since the newest whole checkpoint, which is the first. Raises SegmentDamaged at any that is
    lost, and if the checkpoint is of an earlier format.
    """
    if replay.checkpoint is not None:
        try:
            yield schedule_records.decode(b"".join(replay.checkpoint.parts))
        except DECODE_ERRORS as error:
            raise SegmentDamaged(
                f"the checkpoint in {PREFIX}* is of a format that this version does not read ({error}): drain it with "
                "the version that wrote it, or empty the store, to begin anew"
            ) from error
    for block in replay.blocks(_WANTED):
        if block.damaged != 0:
            name = next(segment.name for segment in reversed(replay.segments) if segment.first <= block.position)
            raise SegmentDamaged(f"{name}: damaged record at offset {block.position}; restore {name} from a copy")
        for frame in block.frames:
            yield schedule_records.decode(frame.payload)


def append(log: Journal, record: schedule_records.LogRecord) -> Place:
    """Append a record, under the lock; not durable before commit(). Raises StorageFailed with nothing appended."""
    payload = schedule_records.encode(record)
    if isinstance(record, schedule_records.Scheduled):
        first_seq = record.entries[0].seq if record.entries else 0
        return log.append(frames(FrameKind.SCHEDULED, [payload], first_number=first_seq), at_ms=_UNTIMED)
    return log.append(frames(FrameKind.CHANGE, [payload]), at_ms=_UNTIMED)


@dataclass(frozen=True, slots=True)
class CapturedCheckpoint:
    """A state as it was at an offset of the log, to be written without the lock."""

    parts: list[bytes]
    offset: Place
    arrived_to: Place

    @classmethod
    def of(cls, log: Journal, checkpoint: schedule_records.ScheduleCheckpoint) -> CapturedCheckpoint:
        """Capture a state, under the lock. Another segment begins, so that those before it can be dropped soon."""
        payload = schedule_records.encode(checkpoint)
        log.roll()
        parts = [payload[start : start + _PART_BYTES] for start in range(0, len(payload), _PART_BYTES)]
        return cls(parts, log.end, checkpoint.arrived_to)

    def write(self, log: Journal, *, lock: AbstractContextManager[object]) -> None:
        """Write it, durably, then delete the segments that no checkpoint needs any more; what arrived up to
        `arrived_to` is durable. Raises StorageFailed.
        """
        log.write_checkpoint(self.parts, captured=self.offset, at_ms=_UNTIMED, lock=lock)
        log.drop_before(self.offset)
