"""Exports what a delay cluster holds, while it runs, as logs that the reconciliation reads like a broker's.

The message log has each message that waits, the action log the cancels that are remembered.
Owners are not fenced. A shard that changes while it is read is read again from the start.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from outbox_broker.delay_service.target_publisher import published
from outbox_broker.journal.journal import Journal, frames
from outbox_broker.journal.stored_record import stored_record
from outbox_broker.log.storage import DiskStorage, UnsyncedStorage
from outbox_broker.schedule.recent_cancels import CANCEL_MEMORY_MS, Cancel
from outbox_broker.schedule.schedule_view import ScheduleView
from outbox_broker.schedule.sorted_run import TimedMessage
from outbox_broker.schedule.sorted_run_reader import RunDamaged
from outbox_broker.segments.local import LocalSegments
from outbox_broker.segments.port import SegmentReader
from outbox_core.common.clock import Clock
from outbox_core.common.errors import ConfigurationError, InvalidMessage, StorageFailed
from outbox_core.journal import journal
from outbox_core.journal.block import Framed, FrameKind, SegmentKind
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_DAMAGED_AFTER: Final = 3
"""A run that is unreadable in so many attempts is damaged, not deleted."""
_TIME_UNKNOWN: Final = 0
"""When these messages were stored: the shards do not keep it."""
_RECORDS_A_BLOCK: Final = 4_096
"""A block has one frame of each message and two of each cancel, and at most block.FRAMES_MAX."""
_BLOCK_BYTES: Final = 4 * 1024 * 1024
"""A block of messages ends after the one that reaches this size."""


class ShardViews(Protocol):
    """Views of a cluster's shards."""

    def view(self, shard: str) -> SegmentReader | None:
        """Returns a shard's segments as they are now; None if it was never opened. Fences nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """`cancels_max`: how many cancels a shard remembers. A shard that keeps changing is read `attempts_max` times."""

    cancels_max: int
    attempts_max: int = 20
    retry_ms: int = 250


@dataclass(slots=True)
class ExportReport:
    """What was exported. Cancels before `cancels_since_ms` may be forgotten, so that their absence proves nothing.

    `begun_ms`: what the owners confirmed well before it, by half a second, is in the export.
    """

    begun_ms: int
    shards: int = 0
    messages: int = 0
    cancels: int = 0
    undecodable: int = 0
    cancels_since_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterExport:
    """Exports some shards to a folder that is empty, or is not there yet."""

    shards: Sequence[str]
    views: ShardViews
    clock: Clock
    options: ExportOptions
    _pause: threading.Event = field(default_factory=threading.Event)

    def write(self, folder: Path) -> ExportReport:
        """Read all shards. Raises ConfigurationError, StorageFailed if the bookies do not answer or a shard changes all
        the time, SegmentDamaged.
        """
        if folder.exists() and any(folder.iterdir()):
            raise ConfigurationError(f"{folder} is not empty: name a folder that is, or that is not there yet")
        folder.mkdir(parents=True, exist_ok=True)
        now_ms = self.clock.now_ms()
        report = ExportReport(begun_ms=now_ms, cancels_since_ms=now_ms - CANCEL_MEMORY_MS)
        # Not durable either: readers are here. Where nothing waits, or was canceled, that log has no segment.
        storage = UnsyncedStorage(DiskStorage())
        with (
            closing(LocalSegments.open(folder / "messages", storage=storage, clock=self.clock)) as messages,
            closing(LocalSegments.open(folder / "actions", storage=storage, clock=self.clock)) as canceled,
        ):
            actions = Journal(canceled, name="actions", kind=SegmentKind.ACTIONS)
            for shard in self.shards:
                self._write_shard(shard, messages, actions, report)
            actions.seal()
        return report

    def _write_shard(self, shard: str, segments: LocalSegments, actions: Journal, report: ExportReport) -> None:
        damages: Counter[int] = Counter()
        for attempt in range(1, self.options.attempts_max + 1):
            damaged = {run for run, count in damages.items() if count >= _DAMAGED_AFTER}
            # Of its own for each attempt: it reads the newest segment alone, and those of one that failed are deleted.
            messages = Journal(segments, name="messages", kind=SegmentKind.MESSAGES, has_checkpoints=False)
            messages.resume()
            earlier = messages.segments
            try:
                view = self.views.view(shard)
                if view is None:
                    return
                snapshot = ScheduleView(view, cancels_max=self.options.cancels_max)
                count, undecodable = 0, 0
                for batch in snapshot.waiting(damaged=damaged):
                    records = _records(batch)
                    for some in _blocks(records):
                        is_first = messages.segments == earlier
                        # An attempt begins a segment: what is deleted with it is of this attempt alone.
                        messages.append(some, at_ms=_TIME_UNKNOWN, roll=True if is_first else None)
                        messages.commit()  # a full segment is followed by another one only then
                    count, undecodable = count + len(records), undecodable + len(batch) - len(records)
                messages.seal()
            except (StorageFailed, SegmentDamaged) as error:
                segments.delete([segment.name for segment in messages.segments[len(earlier) :]])
                if isinstance(error, RunDamaged):
                    damages[error.run.id] += 1
                if attempt == self.options.attempts_max:
                    raise
                logger.info("shard_read_again", extra={"shard": shard, "error": str(error)})
                self._pause.wait(self.options.retry_ms / 1000)
                continue
            report.shards += 1
            report.messages += count
            report.undecodable += undecodable
            self._write_cancels(snapshot.cancels(), actions, report)
            return

    def _write_cancels(self, cancels: Sequence[Cancel], actions: Journal, report: ExportReport) -> None:
        for start in range(0, len(cancels), _RECORDS_A_BLOCK):
            records = [_action(cancel) for cancel in cancels[start : start + _RECORDS_A_BLOCK]]
            actions.append(frames(FrameKind.CHANGE, records), at_ms=report.begun_ms)
            actions.commit()  # a full segment is followed by another one only then
        report.cancels += len(cancels)
        if len(cancels) >= self.options.cancels_max:  # then older ones of a scope were forgotten
            oldest_ms = {cancel.scope: cancel.at_ms for cancel in reversed(cancels)}
            report.cancels_since_ms = max(report.cancels_since_ms, *oldest_ms.values())


def _records(batch: Sequence[TimedMessage]) -> list[bytes]:
    """Returns what is stored of each message; one that cannot be decoded is never delivered, and left out."""
    records = []
    for timed_message in batch:
        try:
            message = published(timed_message)
        except InvalidMessage as error:
            logger.warning(
                "message_not_decodable",
                extra={"topic": timed_message.topic, "message_id": timed_message.id, "error": str(error)},
            )
            continue
        records.append(stored_record(message, now_ms=0))
    return records


def _blocks(records: Sequence[bytes]) -> Iterator[Framed]:
    """Yields the frames of a block each."""
    start = 0
    while start < len(records):
        stop, size_bytes = start, 0
        while stop < min(start + _RECORDS_A_BLOCK, len(records)) and size_bytes < _BLOCK_BYTES:
            size_bytes += len(records[stop])
            stop += 1
        yield frames(FrameKind.SCHEDULED, records[start:stop])
        start = stop


def _action(cancel: Cancel) -> bytes:
    record = journal.Canceled(
        at_ms=cancel.at_ms, ids=[cancel.id], topics=[cancel.topic or ""], scope=cancel.scope
    )  # fmt: skip
    return journal.encode_record(record)
