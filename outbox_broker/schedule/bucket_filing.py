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
from outbox_broker.schedule.segment_store import SegmentStore
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

_APPENDED_BYTES_MAX: Final = 4 * 1024 * 1024
_RECORDS: Final = 3
"""Records per run: columns, messages, spare."""
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
        result = FiledRuns()
        synced = 0
        for bucket_id, filed in by_bucket.items():
            added = self._write(bucket_id, filed, result, next_run=next_run)
            next_run += len(added.runs)
            if len(result.added) - synced == _UNSYNCED_MAX:
                self._store.sync([one.segment for one in result.added[synced:]])
                synced = len(result.added)
        self._store.sync([one.segment for one in result.added[synced:]])
        return result

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

    def _write(
        self,
        bucket_id: BucketId,
        entries: list[Entry],
        result: FiledRuns,
        *,
        next_run: int,
    ) -> RunsAdded:
        """Append runs to a bucket's segment. What is small stays in one order, although one topic may have most of it:
        it may be dispatched from there, beside messages of the same topic that are in buckets of other levels.
        """
        bucket = self._state.buckets.get(bucket_id)
        segment = bucket.segment if bucket else segment_name(bucket_id, life=next_run)
        end = bucket.end if bucket else 0
        runs: list[SortedRun] = []
        waiting: list[bytes] = []
        cuts: list[tuple[str | None, Sequence[Entry]]] = []

        def append() -> None:
            nonlocal end
            *positions, end = self._store.append(segment, waiting, position=end)
            for number, (topic, piece) in enumerate(cuts):
                first, last = piece[0], piece[-1]
                at = _RECORDS * number
                columns, messages, spare = waiting[at : at + _RECORDS]
                runs.append(
                    SortedRun(
                        id=next_run + len(runs), position=positions[at], columns_bytes=len(columns),
                        messages_position=positions[at + 1], messages_bytes=len(messages), count=len(piece),
                        first_due_ms=first.due_ms, first_seq=first.seq, last_due_ms=last.due_ms, last_seq=last.seq,
                        topic=topic, spare_position=positions[at + 2], spare_bytes=len(spare),
                    )
                )  # fmt: skip
                result.entries.append((runs[-1].id, piece))
            waiting.clear()
            cuts.clear()

        is_small = bucket_id.level != FINEST and len(entries) <= RUN_MESSAGES_MAX
        crowds: Iterable[tuple[str | None, list[Entry]]] = [(None, entries)] if is_small else by_crowd(entries)
        for topic, crowd in crowds:
            for piece in cut(crowd):
                columns = stored_columns(piece)
                waiting += *encode_run(piece, columns), encode_spare(piece, columns)
                cuts.append((topic, piece))
                if sum(map(len, waiting)) >= _APPENDED_BYTES_MAX:
                    append()
        if waiting:
            append()
        result.added.append(RunsAdded(bucket_id.level, bucket_id.slot, segment, end, runs))
        return result.added[-1]


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
