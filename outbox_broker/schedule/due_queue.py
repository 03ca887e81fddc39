"""The due queue: messages that may be due soon, in order of due time, then arrival, and never before their time.

Pure: columns come from a function argument, and so does the time. It merges the messages in memory with the runs of
every bucket whose time has begun; a run is read only when its first message is next. So a minute with a million
messages keeps few runs open at a time, and delays nothing that is due earlier.

If many runs overlap, each neighbour of a message is in another run. So a batch is not taken message by message, which
held the schedule's lock for up to 54 ms at 2,000: bisection finds a bound below which all runs together hold as many
messages as wanted, each run contributes one range, and the result is sorted once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from outbox_broker.schedule.sorted_run import Columns, Entry, SortedRun

CROWD_MESSAGES: Final = 256
"""A topic with more messages than this in memory, or in one bucket's write, gets runs and a lane of its own."""
LANES_MAX: Final = 64
Key = tuple[int, int]
"""(due, seq), unique to each message."""
FAR: Final = (1 << 63, 0)
"""A key after all others."""
_SEQ_END: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a run: entries from `start` up to `stop` (exclusive), including canceled ones."""

    run: SortedRun
    start: int
    stop: int


@dataclass(slots=True)
class TakenMessages:
    """Messages taken from the queue: ranges of runs, and messages in memory."""

    parts: list[Piece | Entry] = field(default_factory=list)
    count: int = 0
    size_bytes: int = 0
    is_mixed: bool = True
    """Whether parts may be out of order: from several lanes, or from overlapping runs."""

    def add(self, *parts: Piece | Entry) -> None:
        """Append parts."""
        self.parts += parts
        for part in parts:
            if isinstance(part, Piece):
                self.count += part.stop - part.start
                self.size_bytes += part.run.messages_bytes * (part.stop - part.start) // part.run.count
            else:
                self.count += 1
                self.size_bytes += len(part.payload)

    @property
    def pieces(self) -> list[Piece]:
        """The parts that are ranges of runs."""
        return [part for part in self.parts if isinstance(part, Piece)]

    @property
    def entries(self) -> list[Entry]:
        """The parts that are messages in memory."""
        return [part for part in self.parts if isinstance(part, Entry)]


class _Due(NamedTuple):
    """Selects messages: before an end, alive, and not behind one of their topic in another lane."""

    end: Key
    is_alive: Callable[[Entry], bool]
    first_held_back: Callable[[MergeChoice], Key]
    """Returns the first key of a choice that must wait for another lane; FAR if none must."""


class _Lane:
    """Messages in memory and a cursor over runs, merged into one order."""

    def __init__(self, columns: Callable[[SortedRun], Columns]) -> None:
        self.cursor = Cursor(columns)
        self.near: list[Entry] = []

    def next_key(self) -> tuple[int, int]:
        return min(self.near[0].key if self.near else FAR, self.cursor.next_key())

    def take(self, taken: TakenMessages, due: _Due, *, until_count: int, until_bytes: int) -> list[Entry]:
        """Take due messages until the batch has grown to either limit; returns all messages removed from memory."""
        popped: list[Entry] = []
        while taken.count < until_count and taken.size_bytes < until_bytes and self.next_key() < due.end:
            count_max, bytes_max = until_count - taken.count, until_bytes - taken.size_bytes
            choice = self.cursor.choose(due.end, count_max=count_max, bytes_max=bytes_max)
            choice.bound = min(choice.bound, due.first_held_back(choice))
            near = self._pop_near(choice, count_max=count_max, bytes_max=bytes_max)
            popped += near
            pieces, is_mixed = self.cursor.take(choice)
            if not pieces and not near:
                break  # the next message waits for another lane
            taken.add(*pieces, *filter(due.is_alive, near))
            taken.is_mixed |= is_mixed or bool(pieces and near)
        return popped

    def _pop_near(self, choice: MergeChoice, *, count_max: int, bytes_max: int) -> list[Entry]:
        """Take messages in memory below the bound of the chosen runs, lowering the bound to fit the limits."""
        near: list[Entry] = []
        while self.near and len(near) < count_max and bytes_max > 0 and self.near[0].key < choice.bound:
            near.append(heapq.heappop(self.near))
            bytes_max -= len(near[-1].payload)
        if near:
            keys = [entry.key for entry in near]
            choice.narrow(len(near) if bytes_max <= 0 else count_max, beside=keys)
            for _ in range(len(near) - bisect_left(keys, choice.bound)):
                heapq.heappush(self.near, near.pop())
        return near


class DueQueue:
    """Everything that may be due soon, in lanes: one shared by all topics, and one for each topic with very many
    messages.

    The due messages of a topic come in order of due time, then arrival; so do those of all topics while a batch holds
    them all. If more is due, the lanes share the batch, so that a million messages of one topic delay no other topic.
    While lanes share, every second batch is short: a small topic waits for at most one long batch, and otherwise for
    little more than its own messages. Not all are short, since a batch mostly waits for two syncs, and for the
    interpreter's lock after each system call: a quarter of the messages takes far more than a quarter of the time.

    A topic with a lane of its own may have earlier messages in the shared lane (runs written before it grew), and later
    ones there as well. So a lane of its own goes no further than the shared one has come, and the shared one stops at a
    message whose topic has an earlier one in its own lane. The earliest message of all can always be taken.
    """

    def __init__(self, columns: Callable[[SortedRun], Columns]) -> None:
        self._columns = columns
        self._shared = _Lane(columns)
        self._own: dict[str, _Lane] = {}
        self._shared_near: Counter[str] = Counter()
        self._is_short = False  # whether the last batch was short

    def push(self, entry: Entry) -> None:
        """Add a message in memory."""
        topic = entry.topic
        lane = self._own.get(topic) if self._own else None
        if lane is None:
            self._shared_near[topic] += 1
            lane = self._shared
            if self._shared_near[topic] > CROWD_MESSAGES:
                lane = self._lane_of(topic)
        heapq.heappush(lane.near, entry)

    def add(self, runs: Iterable[SortedRun]) -> None:
        """Add runs of a bucket whose time has begun."""
        for run in runs:
            if run.taken < run.count:
                self._lane_of(run.topic).cursor.add((run,))

    def clear_near(self) -> None:
        """Drop the messages in memory: they are in runs now."""
        for lane in self._lanes():
            lane.near = []
        self._shared_near.clear()

    def next_due_ms(self) -> int | None:
        """Returns the earliest due time in the queue, which may be of a canceled message."""
        due_ms = min(lane.next_key() for lane in self._lanes())[0]
        return None if due_ms == FAR[0] else due_ms

    def take(self, now_ms: int, *, count_max: int, bytes_max: int, is_alive: Callable[[Entry], bool]) -> TakenMessages:
        """Take due messages, up to either limit. The only place that compares due times with the clock."""
        end = (now_ms + 1, 0)  # nothing due later than now
        own = sorted((lane for lane in self._own.values() if lane.next_key() < end), key=_Lane.next_key)
        # The shared one first: the others go no further than it has come.
        lanes = [self._shared, *own] if self._shared.next_key() < end else own
        self._is_short = len(lanes) > 1 and not self._is_short
        if self._is_short:
            count_max = min(count_max, len(lanes) * CROWD_MESSAGES)
        shares = list(range(len(lanes), 0, -1))  # what one leaves goes to those after it,
        if len(lanes) > 1:
            lanes, shares = lanes * 2, shares + [1] * len(lanes)  # and what all leave to those that have more
        taken = TakenMessages(is_mixed=len(lanes) > 1)
        for lane, share in zip(lanes, shares, strict=True):
            if lane is self._shared:
                due = _Due(end, is_alive, self._first_behind_its_topic)
            else:
                due = _Due(min(end, self._shared.next_key()), is_alive, _nothing_held_back)
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

    def _first_behind_its_topic(self, choice: MergeChoice) -> Key:
        """Returns the first key of shared runs whose topic has an earlier message in its own lane."""
        first = FAR
        for opened in choice.runs if self._own else ():
            reached = {
                topic_number: self._own[topic].next_key()
                for topic_number, topic in enumerate(opened.columns.topics)
                if topic in self._own
            }
            for index in range(opened.start, opened.stop(min(choice.bound, first))) if reached else ():
                if reached.get(opened.columns.topic[index], FAR) < opened.key(index):
                    first = opened.key(index)
                    break
        return first

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
            self._move_near(topic, found)
        return found

    def _move_near(self, topic: str, lane: _Lane) -> None:
        """Move a topic's messages in memory from the shared lane to its own."""
        if not self._shared_near.pop(topic, 0):
            return
        lane.near = [entry for entry in self._shared.near if entry.topic == topic]
        heapq.heapify(lane.near)
        self._shared.near = [entry for entry in self._shared.near if entry.topic != topic]
        heapq.heapify(self._shared.near)


def _nothing_held_back(_choice: MergeChoice) -> Key:
    return FAR


# -- runs, merged ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Open:
    """A run whose columns were read, and the index of its next entry."""

    run: SortedRun
    start: int
    columns: Columns

    def stop(self, bound: Key) -> int:
        return self.columns.first_not_before(bound, start=self.start)

    def key(self, index: int) -> Key:
        return self.columns.due[index], self.columns.seq[index]


class MergeChoice:
    """Runs to take from, and the bound below which to take. No other run has entries there."""

    def __init__(self, runs: Sequence[_Open], bound: Key) -> None:
        self.runs = runs
        self.bound = bound

    def narrow(self, count_max: int, *, beside: Sequence[Key] = ()) -> None:
        """Lower the bound until at most `count_max` entries are below it, including the sorted keys `beside`."""
        if self.count(beside=beside) <= count_max:
            return
        first = min([*(opened.key(opened.start) for opened in self.runs), *beside[:1]])
        due_ms = _last(first[0], self.bound[0], count_max, lambda due: self.count((due, 0), beside=beside))
        seq = _last(0, _SEQ_END, count_max, lambda seq: self.count((due_ms, seq), beside=beside))
        self.bound = (due_ms, seq)

    def count(self, bound: Key | None = None, *, beside: Sequence[Key] = ()) -> int:
        """Returns how many entries are below the bound, or below another one."""
        bound = bound or self.bound
        return sum(opened.stop(bound) - opened.start for opened in self.runs) + bisect_left(beside, bound)

    def fit(self, count_max: int, *, bytes_max: int) -> None:
        """Lower the bound to fit both limits, by the number of entries and approximately by bytes."""
        self.narrow(count_max)
        sizes = [
            (opened.stop(self.bound) - opened.start) * opened.run.messages_bytes // opened.run.count
            for opened in self.runs
        ]
        if sum(sizes) > bytes_max:
            self.narrow(max(1, self.count() * bytes_max // sum(sizes)))


class Cursor:
    """Runs ordered by their next entries. A run is in one cursor at a time, from its first entry not taken on."""

    def __init__(self, columns: Callable[[SortedRun], Columns]) -> None:
        self._columns = columns
        self._heads: list[tuple[int, int, SortedRun, int]] = []

    def add(self, runs: Iterable[SortedRun]) -> None:
        """Add runs, from the point reached in each."""
        for run in runs:
            if run.taken < run.count:
                heapq.heappush(self._heads, self._head(run))

    def next_key(self) -> Key:
        """Returns the next key; FAR if there is none."""
        return self._heads[0][:2] if self._heads else FAR

    def choose(self, limit: Key, *, count_max: int, bytes_max: int) -> MergeChoice:
        """Choose the next runs below the limit: as few as hold `count_max`. The choice must be passed to take().

        A run is read only if its first entry may be included. Whether they suffice is checked each time their number
        has doubled, so that the checks cost no more than the reads.
        """
        opened: list[_Open] = []
        asked_at = 1
        while self._heads and self.next_key() < limit:
            _, _, run, start = self._heads[0]
            opened.append(_Open(run, start, self._columns(run)))
            heapq.heappop(self._heads)
            if len(opened) == asked_at:
                asked_at *= 2
                if MergeChoice(opened, min(limit, self.next_key())).count() >= count_max:
                    break
        choice = MergeChoice(opened, min(limit, self.next_key()))
        choice.fit(count_max, bytes_max=bytes_max)
        return choice

    def take(self, choice: MergeChoice) -> tuple[list[Piece], bool]:
        """Returns the chosen ranges, and whether they overlap: otherwise they are in order.

        The remainders of the runs, and the runs from which nothing was taken, are queued again.
        """
        pieces: list[Piece] = []
        is_mixed, last = False, (0, 0)
        for opened in choice.runs:
            stop = opened.stop(choice.bound)
            if stop > opened.start:
                pieces.append(Piece(opened.run, opened.start, stop))
                is_mixed = is_mixed or opened.key(opened.start) < last
                last = max(last, opened.key(stop - 1))
            if stop < opened.run.count:
                heapq.heappush(self._heads, (*opened.key(stop), opened.run, stop))
        return pieces, is_mixed

    def _head(self, run: SortedRun) -> tuple[int, int, SortedRun, int]:
        if run.taken == 0:
            return run.first_due_ms, run.first_seq, run, 0
        columns = self._columns(run)
        return columns.due[run.taken], columns.seq[run.taken], run, run.taken


def _last(low: int, high: int, count_max: int, count: Callable[[int], int]) -> int:
    """Returns the last number from `low` (which must satisfy it) to `high` at which at most `count_max` are counted."""
    return low + bisect_right(range(low, high + 1), count_max, key=count) - 1
