"""What bookies keep for a broker at one moment: its owner names the segments and their ends, and others read."""

from __future__ import annotations

from contextlib import ExitStack

from outbox_broker.engine.engine import Engine
from outbox_broker.segments.ledger import LedgerSegments
from outbox_core.common.clock import Clock
from outbox_core.protocol.wire import SnapshotAnswer, SnapshotSegment


class LedgerSnapshots:
    """Snapshots of an engine on ledgers, by its owner."""

    def __init__(self, engine: Engine, segments: LedgerSegments, *, clock: Clock) -> None:
        self._engine = engine
        self._segments = segments
        self._clock = clock

    def take(self) -> SnapshotAnswer:
        """Name all segments as they are at one moment, and have the bookies confirm them. Nothing holds them: one that
        is dropped before it was read is gone, and who reads asks once more. Raises StorageFailed.
        """
        with ExitStack() as still:
            for lock in self._engine.locks():
                still.enter_context(lock)
            segment_infos, at_ms = self._segments.list_ends(), self._clock.now_ms()
        self._segments.make_durable(segment_infos)
        segments = [
            SnapshotSegment(
                name=segment.name, kind=segment.kind, epoch=segment.epoch, first=segment.first,
                created_at_ms=segment.created_at_ms, end=segment.end,
            )
            for segment in segment_infos
        ]  # fmt: skip
        size_bytes = sum(segment.end or 0 for segment in segments)
        return SnapshotAnswer(at_ms=at_ms, files=len(segments), size_bytes=size_bytes, segments=segments)
