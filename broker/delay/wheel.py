"""The wheel: what may fall due soon, handed out in order of due time, then arrival, and never before its time.

Pure: columns come from a function it is given, the time is an argument. It merges the messages in memory with the runs
of every bucket whose time has begun; a run is read only when its first message is next. So a minute of a million
messages costs one open run at a time for each write that filled it, and holds up nothing that is due earlier.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from broker.delay.run import Columns, Entry, Run

FAR: Final = (1 << 63, 0)
"""A (due, seq) behind everything."""
CROWD_MESSAGES: Final = 256
"""A topic with more messages than this in memory, or in one bucket's write, has runs and a lane of its own."""
LANES_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbours of a run: entries from `start` up to `stop`, canceled ones included."""

    run: Run
    start: int
    stop: int


@dataclass(slots=True)
class Taken:
    """What was taken out: pieces of runs and messages in memory."""

    parts: list[Piece | Entry] = field(default_factory=list)
    count: int = 0
    size_bytes: int = 0
    is_mixed: bool = True
    """Whether it may be of several lanes, each in order by itself."""

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


class _Due(NamedTuple):
    """What may be taken: before an end, and alive."""

    end: tuple[int, int]
    is_alive: Callable[[Entry], bool]


class _Lane:
    """Messages in memory beside a cursor over runs, in one order."""

    def __init__(self, columns: Callable[[Run], Columns]) -> None:
        self.cursor = Cursor(columns)
        self.near: list[Entry] = []

    def next_key(self) -> tuple[int, int]:
        return min(self.near[0].key if self.near else FAR, self.cursor.next_key())

    def take(self, taken: Taken, due: _Due, *, until_count: int, until_bytes: int) -> list[Entry]:
        """Take what is due, until the batch has grown to either bound; returns all that left memory."""
        popped: list[Entry] = []
        end = due.end
        while taken.count < until_count and taken.size_bytes < until_bytes:
            near = self.near[0].key if self.near else FAR
            run_key = self.cursor.next_key()
            if min(near, run_key) >= end:
                break
            if near < run_key:
                popped.append(heapq.heappop(self.near))
                if due.is_alive(popped[-1]):
                    taken.add(popped[-1])
            else:
                taken.add(self.cursor.take(min(near, end), count_max=until_count - taken.count))
        return popped


class Wheel:
    """Everything that may be due soon, in lanes: one for all topics together, one for each that has very many messages.

    What is due comes in order of due time, then arrival. Where more is due than a batch holds, the lanes share it, each
    in that order, so that a million messages of one topic hold up no other. Every second batch is short where lanes
    share: whoever is beside a crowd waits for one long batch at the most, and then for little more than itself.
    """

    def __init__(self, columns: Callable[[Run], Columns]) -> None:
        self._columns = columns
        self._shared = _Lane(columns)
        self._own: dict[str, _Lane] = {}
        self._shared_near: Counter[str] = Counter()
        self._is_short = False  # the last batch was

    def push(self, entry: Entry) -> None:
        """Take in a message in memory."""
        topic = entry.topic
        lane = self._own.get(topic) if self._own else None
        if lane is None:
            self._shared_near[topic] += 1
            lane = self._shared
            if self._shared_near[topic] > CROWD_MESSAGES:
                lane = self._lane_of(topic)
        heapq.heappush(lane.near, entry)

    def add(self, runs: Iterable[Run]) -> None:
        """Take in runs of a bucket whose time has begun."""
        for run in runs:
            if run.taken < run.count:
                self._lane_of(run.topic).cursor.add((run,))

    def near_count(self) -> int:
        """How many messages in memory are here, canceled ones among them."""
        return sum(len(lane.near) for lane in self._lanes())

    def clear_near(self) -> None:
        """Forget the messages in memory: they stand in runs now."""
        for lane in self._lanes():
            lane.near = []
        self._shared_near.clear()

    def next_due_ms(self) -> int | None:
        """The earliest due time of anything here, or of something canceled."""
        due_ms = min(lane.next_key() for lane in self._lanes())[0]
        return None if due_ms == FAR[0] else due_ms

    def take(self, now_ms: int, *, count_max: int, bytes_max: int, is_alive: Callable[[Entry], bool]) -> Taken:
        """Take out what is due, up to either bound. The one place where a due time meets the clock."""
        due = _Due((now_ms + 1, 0), is_alive)  # nothing due later than now
        lanes = sorted((lane for lane in self._lanes() if lane.next_key() < due.end), key=_Lane.next_key)
        self._is_short = len(lanes) > 1 and not self._is_short
        if self._is_short:
            count_max = min(count_max, len(lanes) * CROWD_MESSAGES)
        shares = [len(lanes) - number for number in range(len(lanes))]  # what one leaves is for those behind,
        if len(lanes) > 1:
            lanes, shares = lanes * 2, shares + [1] * len(lanes)  # and what all leave for whoever has more
        taken = Taken(is_mixed=len(lanes) > 1)
        for lane, share in zip(lanes, shares, strict=True):
            popped = lane.take(
                taken, due,
                until_count=taken.count + -(-(count_max - taken.count) // share),
                until_bytes=taken.size_bytes + -(-(bytes_max - taken.size_bytes) // share),
            )  # fmt: skip
            if lane is self._shared:
                self._shared_near.subtract(entry.topic for entry in popped)
        for topic in [topic for topic, lane in self._own.items() if lane.next_key() == FAR]:
            del self._own[topic]
        return taken

    def _lanes(self) -> list[_Lane]:
        return [self._shared, *self._own.values()]

    def _lane_of(self, topic: str | None) -> _Lane:
        if topic is None:
            return self._shared
        found = self._own.get(topic)
        if found is None:
            if len(self._own) >= LANES_MAX:
                return self._shared
            found = self._own[topic] = _Lane(self._columns)
        return found
