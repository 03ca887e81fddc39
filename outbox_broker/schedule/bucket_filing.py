"""Files messages into their buckets, as runs at the ends of their segments. The caller applies the change."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from outbox_broker.schedule.damaged_run_salvage import encode_spare
from outbox_broker.schedule.due_queue import CROWD_MESSAGES
from outbox_broker.schedule.levels import FINEST, LEVELS, BucketId, place
from outbox_broker.schedule.schedule_records import RunsAdded
from outbox_broker.schedule.schedule_state import ScheduleState
from outbox_broker.schedule.sorted_run import (
    DUE,
    RUN_MESSAGES_MAX,
    TOPIC,
    Entry,
    SortedRun,
    cut,
    encode_run,
    stored_columns,
)
from outbox_broker.segments.segment_store import SegmentAppend, SegmentStore

_APPENDED_BYTES_MAX: Final = 4 * 1024 * 1024
_RECORDS: Final = 3
"""Records per run: columns, messages, spare."""
_GROUP_MAX: Final = 32
"""Segments that are appended to at once."""
_UNSYNCED_MAX: Final = 64
"""Limit of segments with unsynced writes: low enough that the store need not close any, which would delay it."""


@dataclass(slots=True)
class FiledRuns:
    """Result of filing: what was added to buckets, and the messages of each run by its id."""

    added: list[RunsAdded] = field(default_factory=list)
    entries: list[tuple[int, Sequence[Entry]]] = field(default_factory=list)

    def gone(
        self, alive: Container[int], passed: Container[int]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Returns (run id, index) of messages whose arrival numbers are not alive any more; and of dispatched ones."""
        gone = [
            (run_id, index, entry.seq)
            for run_id, entries in self.entries
            for index, entry in enumerate(entries)
            if entry.seq not in alive
        ]
        fired = [(run_id, index) for run_id, index, seq in gone if seq in passed]
        return [one[:2] for one in gone], fired

    def marks(self, seqs: Collection[int]) -> list[tuple[int, int]]:
        """Returns (run id, index) of the messages with these arrival numbers."""
        return [
            (run_id, index)
            for run_id, entries in self.entries
            for index, entry in enumerate(entries)
            if entry.seq in seqs
        ]  # fmt: skip


class BucketFiling:
    """Writes runs. What was written but never applied to the state is overwritten by the next attempt."""

    def __init__(self, store: SegmentStore, state: ScheduleState) -> None:
        self._store = store
        self._state = state

    def file(
        self,
        entries: Iterable[Entry],
        *,
        now_ms: int,
        below: int = -1,
    ) -> FiledRuns:
        """Write messages to their buckets, on levels finer than `below`, durably; returns their locations.

        Messages with the same due time must be in order of arrival.
        Raises StorageFailed with nothing changed.
        """
        by_bucket: dict[BucketId, list[Entry]] = {}
        for bucket_id, filed in self._placed(sorted(entries, key=DUE), now_ms=now_ms, below=below):
            by_bucket.setdefault(bucket_id, []).extend(filed)
        next_run = self._state.next_run
        writes = _GroupedWrites(self._store)
        for bucket_id, filed in by_bucket.items():
            target = self._target(bucket_id, life=next_run)
            for part in _encoded(target, filed, first_run=next_run):
                writes.add(part)
                next_run += len(part.pieces)
        return writes.finish()

    def _placed(self, entries: list[Entry], *, now_ms: int, below: int) -> Iterator[tuple[BucketId, list[Entry]]]:
        """Groups sorted messages by bucket, for whole ranges of due times: up to a bucket's end, or to a barrier."""
        barriers = sorted(now_ms + level.barrier_ms for level in LEVELS)
        start = 0
        while start < len(entries):
            due_ms = entries[start].due_ms
            bucket_id = place(due_ms, now_ms=now_ms, is_open=self._state.is_open, below=below)
            end_ms = min([bucket_id.end_ms, *(one for one in barriers if one > due_ms)])
            stop = bisect_left(entries, end_ms, start, key=DUE)
            yield bucket_id, entries[start:stop]
            start = stop

    def _target(self, bucket_id: BucketId, *, life: int) -> _Target:
        bucket = self._state.buckets.get(bucket_id)
        if bucket is None:
            return _Target(bucket_id, segment_name(bucket_id, life=life), 0)
        return _Target(bucket_id, bucket.segment, bucket.end)


@dataclass(slots=True, eq=False)
class _Target:
    """A bucket that is written to: its segment, the end of it so far, and the runs that were added."""

    id: BucketId
    segment: str
    end: int
    runs: list[SortedRun] = field(default_factory=list)

    def added(self) -> RunsAdded:
        return RunsAdded(self.id.level, self.id.slot, self.segment, self.end, self.runs)


@dataclass(slots=True, eq=False)
class _EncodedRuns:
    """Runs for the end of a bucket's segment: three records for each of the pieces."""

    target: _Target
    first_run: int
    records: list[bytes] = field(default_factory=list)
    pieces: list[tuple[str | None, Sequence[Entry]]] = field(default_factory=list)
    size_bytes: int = 0

    def add(self, topic: str | None, piece: Sequence[Entry]) -> None:
        """Encode a run."""
        columns = stored_columns(piece)
        records = [*encode_run(piece, columns), encode_spare(piece, columns)]
        self.records += records
        self.pieces.append((topic, piece))
        self.size_bytes += sum(map(len, records))

    def place(self, positions: Sequence[int], end: int) -> Iterator[tuple[int, Sequence[Entry]]]:
        """Note where the records are; yields the messages of each run by its id."""
        self.target.end = end
        for number, (topic, piece) in enumerate(self.pieces):
            first, last, at = piece[0], piece[-1], _RECORDS * number
            columns, messages, spare = self.records[at : at + _RECORDS]
            self.target.runs.append(
                SortedRun(
                    id=self.first_run + number, position=positions[at], columns_bytes=len(columns),
                    messages_position=positions[at + 1], messages_bytes=len(messages), count=len(piece),
                    first_due_ms=first.due_ms, first_seq=first.seq, last_due_ms=last.due_ms, last_seq=last.seq,
                    topic=topic, spare_position=positions[at + 2], spare_bytes=len(spare),
                )
            )  # fmt: skip
            yield self.first_run + number, piece


class _GroupedWrites:
    """Appends runs in groups, one part of a bucket in each, and syncs them: the next group is encoded meanwhile."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._group: list[_EncodedRuns] = []
        self._unsynced: set[str] = set()
        self._targets: dict[BucketId, _Target] = {}
        self._entries: list[tuple[int, Sequence[Entry]]] = []

    def add(self, part: _EncodedRuns) -> None:
        """Append a part, with the next ones. One that others of its bucket follow is full, so it is written before they
        come: their position is its end.
        """
        self._targets[part.target.id] = part.target
        self._group.append(part)
        size_bytes = sum(one.size_bytes for one in self._group)
        if size_bytes >= _APPENDED_BYTES_MAX or len(self._group) == _GROUP_MAX:
            self._append()

    def finish(self) -> FiledRuns:
        """Write the rest; returns all that was added, once it is durable."""
        self._append()
        self._store.sync(sorted(self._unsynced))
        return FiledRuns([target.added() for target in self._targets.values()], self._entries)

    def _append(self) -> None:
        if len(self._unsynced) + len(self._group) > _UNSYNCED_MAX:
            self._store.sync(sorted(self._unsynced))
            self._unsynced.clear()
        written = self._store.append_all(
            [SegmentAppend(one.target.segment, one.records, one.target.end) for one in self._group]
        )
        for part, (*positions, end) in zip(self._group, written, strict=True):
            self._entries += part.place(positions, end)
            self._unsynced.add(part.target.segment)
        self._group = []


def _encoded(target: _Target, entries: list[Entry], *, first_run: int) -> Iterator[_EncodedRuns]:
    """Encodes a bucket's messages, in parts of bounded size. What is small stays in one order, although one topic may
    have most of it: it may be dispatched from there, beside messages of the same topic that are in buckets of other
    levels. Moving such buckets to finer levels made 16,000 files for 200,000 messages of a year, and a tenth of the
    rate.
    """
    is_small = target.id.level != FINEST and len(entries) <= RUN_MESSAGES_MAX
    crowds: Iterable[tuple[str | None, list[Entry]]] = [(None, entries)] if is_small else by_crowd(entries)
    part = _EncodedRuns(target, first_run)
    for topic, crowd in crowds:
        for piece in cut(crowd):
            part.add(topic, piece)
            if part.size_bytes >= _APPENDED_BYTES_MAX:
                yield part
                part = _EncodedRuns(target, part.first_run + len(part.pieces))
    if part.pieces:
        yield part


def by_crowd(entries: list[Entry]) -> Iterator[tuple[str | None, list[Entry]]]:
    """Splits sorted messages: those of each topic with very many messages, and the others together (None)."""
    counts = Counter(map(TOPIC, entries))
    crowds: dict[str | None, list[Entry]] = {topic: [] for topic, n in counts.items() if n > CROWD_MESSAGES}
    if len(counts) == 1 or not crowds:
        yield next(iter(crowds), None), entries
        return
    rest: list[Entry] = []
    for entry in entries:
        crowds.get(entry.topic, rest).append(entry)
    yield from crowds.items()
    if rest:
        yield None, rest


def segment_name(bucket_id: BucketId, *, life: int) -> str:
    """Returns the name of a bucket's segment. A bucket that is created again after it was done gets another one."""
    return f"{LEVELS[bucket_id.level].name.lower()}-{bucket_id.slot}-{life}"
