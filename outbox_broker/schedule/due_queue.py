"""The due queue: messages that may be due soon, in order of due time, then arrival, and never before their time.

Pure: columns come from a function argument, and so does the time. It merges the messages in memory with the runs of
every bucket whose time has begun (merge_cursor); a run is read only when its first message is next. So a minute with a
million messages keeps few runs open at a time, and delays nothing that is due earlier.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from outbox_broker.schedule.merge_cursor import FAR, Cursor, Key, MergeChoice, Piece
from outbox_broker.schedule.sorted_run import Columns, Entry, SortedRun

CROWD_MESSAGES: Final = 256
"""A topic with more messages than this in memory, or in one bucket's write, gets runs and a lane of its own."""
LANES_MAX: Final = 64


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
        shares = [len(lanes) - number for number in range(len(lanes))]  # what one leaves goes to those after it,
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
                number: self._own[topic].next_key()
                for number, topic in enumerate(opened.columns.topics)
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
