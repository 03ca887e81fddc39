"""A log as an owner writes and recovers it, and what was acknowledged of it."""

from __future__ import annotations

from types import TracebackType

from outbox_broker.journal.journal import Journal, frames
from outbox_broker.segments.port import Segments
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import FRAME_HEAD_BYTES, FrameKind, SegmentKind, read_run

LOG = "log"
WANTED = frozenset({FrameKind.CHANGE, FrameKind.SCHEDULED})
SEGMENT_BYTES = 400
AT_MS = 1


def opened(segments: Segments, *, segment_bytes: int = SEGMENT_BYTES) -> Journal:
    """A log that is not resumed yet."""
    return Journal(segments, name=LOG, kind=SegmentKind.MESSAGES, segment_bytes=segment_bytes)


def recovered(journal: Journal) -> list[bytes]:
    """The state that the log has: all records, in order."""
    state: list[bytes] = []
    if journal.recovered.checkpoint is not None:
        state = b"".join(journal.recovered.checkpoint.parts).split()
    for block in journal.recovered.blocks(WANTED):
        state += [frame.payload for frame in block.frames]
    return state


class WrittenJournal:
    """What outlives the owners: all records that were appended, and how many of them were acknowledged."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.acknowledged = 0
        self.ends: list[tuple[int, int]] = []  # of this owner's records: number, the offset behind the record
        self.journal: Journal

    def open(self, segments: Segments, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Recover: what was acknowledged is there, in order; of the rest a prefix. Continues with what was found."""
        self.journal = opened(segments, segment_bytes=segment_bytes)
        found = recovered(self.journal)
        assert found == self.records[: len(found)]
        assert len(found) >= self.acknowledged
        self.records, self.ends = found, []
        self.journal.resume()

    def append(self, kind: FrameKind = FrameKind.CHANGE, *, size_bytes: int = 10) -> None:
        """Append one record. Of the segments that are begun so, some begin with a block that nobody counts."""
        number = len(self.records)
        begin_with = frames(FrameKind.FOOTER, [b"of the segment before"]) if number % 3 else None
        record = (b"%d-" % number).ljust(size_bytes, b"x")
        self.records.append(record)  # before the call, in which the process may be killed behind the write
        try:
            end = self.journal.append(
                frames(kind, [record], first_number=number), at_ms=AT_MS, begin_with=begin_with
            )  # fmt: skip
        except StorageFailed:
            del self.records[number:]
            raise
        if kind == FrameKind.SCHEDULED:
            self.ends.append((number, end))

    def commit(self) -> None:
        """All records up to now are acknowledged."""
        count = len(self.records)
        self.journal.commit()
        self.acknowledged = max(self.acknowledged, count)

    def write_checkpoint(self, *, parts: int, between: int = 0) -> None:
        """Write the state in parts, between which others append."""
        captured, count = self.journal.end, len(self.records)
        state = b" ".join(self.records) + b" "
        step = -(-len(state) // parts)
        self.journal.write_checkpoint(
            [state[start : start + step] for start in range(0, len(state), step)], captured=captured, at_ms=AT_MS,
            lock=_Lock(self, between),
        )  # fmt: skip
        self.acknowledged = max(self.acknowledged, count)

    def check_reads(self) -> None:
        """Each record of this owner that was not dropped is read where it was put."""
        oldest = min((info.first for info in self.journal.segments), default=0)
        for number, end in self.ends:
            size_bytes = FRAME_HEAD_BYTES + len(self.records[number])
            if end - size_bytes >= oldest:
                data = self.journal.read(end - size_bytes, size_bytes)
                numbers = range(number, number + 1)
                assert read_run(data, 0, kind=FrameKind.SCHEDULED, numbers=numbers) == [self.records[number]]

    def names(self) -> list[str]:
        return [info.name for info in self.journal.segments]


class _Lock:
    """An owner's lock, before which others had their turns."""

    def __init__(self, written: WrittenJournal, between: int) -> None:
        self._written = written
        self._between = between

    def __enter__(self) -> None:
        for _ in range(self._between):
            self._written.append()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        pass
