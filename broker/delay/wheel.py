"""The wheel: what may fall due soon, handed out in order of due time, then arrival, and never before its time.

Pure: columns come from a function it is given, the time is an argument. It merges the messages in memory with the runs
of every bucket whose time has begun; a run is read only when its first message is next. So a minute of a million
messages costs one open run at a time for each write that filled it, and holds up nothing that is due earlier.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from broker.delay.run import Columns, Entry, Run

FAR: Final = (1 << 63, 0)
"""A (due, seq) behind everything."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbours of a run: entries from `start` up to `stop`, canceled ones included."""

    run: Run
    start: int
    stop: int


@dataclass(slots=True)
class Taken:
    """What was taken out: pieces of runs and messages in memory, in order."""

    parts: list[Piece | Entry] = field(default_factory=list)
    count: int = 0
    size_bytes: int = 0

    def add(self, part: Piece | Entry) -> None:
        """Put a part behind the others."""
        self.parts.append(part)
        if isinstance(part, Piece):
            self.count += part.stop - part.start
            self.size_bytes += part.run.messages_bytes * (part.stop - part.start) // part.run.count
        else:
            self.count += 1
            self.size_bytes += len(part.payload)

    @property
    def pieces(self) -> list[Piece]:
        """Those from runs."""
        return [part for part in self.parts if isinstance(part, Piece)]

    @property
    def entries(self) -> list[Entry]:
        """Those from memory."""
        return [part for part in self.parts if isinstance(part, Entry)]


class Cursor:
    """Runs merged by (due, seq). A run is in one cursor at a time, from its first entry that is not taken on."""

    def __init__(self, columns: Callable[[Run], Columns]) -> None:
        self._columns = columns
        self._heads: list[tuple[int, int, Run, int]] = []

    def add(self, runs: Iterable[Run]) -> None:
        """Let runs take part, from where they were left."""
        for run in runs:
            if run.taken < run.count:
                heapq.heappush(self._heads, self._head(run))

    def next_key(self) -> tuple[int, int]:
        """The (due, seq) that is next; FAR where there is none."""
        return self._heads[0][:2] if self._heads else FAR

    def take(self, limit: tuple[int, int], *, count_max: int) -> Piece:
        """Neighbours of the run that is next, below the limit and below what comes next in any other run."""
        _, _, run, start = self._heads[0]
        rival = min((head[:2] for head in self._heads[1:3]), default=FAR)
        columns = self._columns(run)
        end = min(run.count, start + count_max)
        last = (columns.due[end - 1], columns.seq[end - 1])
        bound = min(limit, rival)
        stop = end if last < bound else min(end, columns.first_not_before(bound, start=start))
        if stop < run.count:
            heapq.heapreplace(self._heads, (columns.due[stop], columns.seq[stop], run, stop))
        else:
            heapq.heappop(self._heads)
        return Piece(run, start, stop)

    def _head(self, run: Run) -> tuple[int, int, Run, int]:
        if run.taken == 0:
            return run.first_due_ms, run.first_seq, run, 0
        columns = self._columns(run)
        return columns.due[run.taken], columns.seq[run.taken], run, run.taken


class Wheel:
    """The messages in memory beside a cursor over the runs of begun buckets."""

    def __init__(self, columns: Callable[[Run], Columns]) -> None:
        self._cursor = Cursor(columns)
        self._near: list[Entry] = []

    def push(self, entry: Entry) -> None:
        """Take in a message in memory."""
        heapq.heappush(self._near, entry)

    def add(self, runs: Iterable[Run]) -> None:
        """Take in runs of a bucket whose time has begun."""
        self._cursor.add(runs)

    def near(self) -> list[Entry]:
        """The messages in memory, canceled ones among them, in no order."""
        return self._near

    def clear_near(self) -> None:
        """Forget the messages in memory: they stand in runs now."""
        self._near = []

    def next_due_ms(self) -> int | None:
        """The earliest due time of anything here, or of something canceled."""
        due_ms = min(self._near[0][0] if self._near else FAR[0], self._cursor.next_key()[0])
        return None if due_ms == FAR[0] else due_ms

    def take(self, now_ms: int, *, count_max: int, bytes_max: int, is_alive: Callable[[Entry], bool]) -> Taken:
        """Take out what is due, up to either bound. The one place where a due time meets the clock."""
        taken = Taken()
        end = (now_ms + 1, 0)  # nothing due later than now
        while taken.count < count_max and taken.size_bytes < bytes_max:
            near = self._near[0][:2] if self._near else FAR
            run_key = self._cursor.next_key()
            if min(near, run_key) >= end:
                break
            if near < run_key:
                entry = heapq.heappop(self._near)
                if is_alive(entry):
                    taken.add(entry)
            else:
                taken.add(self._cursor.take(min(near, end), count_max=count_max - taken.count))
        return taken
