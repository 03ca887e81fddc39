"""The order of an ordered group: which messages may be handed out, and which wait for an earlier one of their key.

Not the hand-outs: those are the group's, which tells this of them. A message that the group came past has been filed:
it is ready, or it waits in the lane of its key, whose leader alone is ready or in hand. Of each lane the next few are
known by their places. Of all others it is known that they are open, by a bit each, and how many there are of a lane:
when the lane has come to them, their keys are looked up again. So a key that holds millions takes a bit a message.

A key is its hash of 63 bits. Two keys with one hash wait for each other, which breaks no promise but speed.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from outbox_broker.group.sequence_bitmap import SequenceSet

UNKEYED: Final = 0
"""In place of a key's hash: the message has no key, and no order."""
NOT_FILED: Final = -1
"""In place of a key's hash: nothing is to be done about this sequence."""
LANE_MAX: Final = 64
"""So many messages of a key are known by their places, beyond its leader."""

NOWHERE: Final = 1 << 62
"""Behind every sequence."""
LOOK_MIN: Final = 16
LOOK_MAX: Final = 4_096
"""A pull looks at so many messages for enough that may be handed out; more the next time, where these were too few."""

OrderState = tuple[list[tuple[int, int | None, list[int], int]], list[int], list[tuple[int, bytes]]]
"""Lanes (key, leader, waiting, behind), what is ready and has no key, pieces of what is open."""


def key_hash(key: str | None) -> int:
    """What stands for a key: the same on every machine, at every time."""
    if key is None:
        return UNKEYED
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") >> 1 or 1


@dataclass(slots=True)
class Lane:
    """The messages of one key that are not settled, in order: the leader, the next ones, then those that are behind."""

    leader: int | None = None
    waiting: array[int] = field(default_factory=lambda: array("Q"))
    behind: int = 0
    behind_from: int = 0
    """No message that is behind stands before this sequence."""


class KeyOrder:
    """Changed by what replays it from the action log, and by that alone."""

    def __init__(self, *, lane_max: int = LANE_MAX) -> None:
        self._lane_max = lane_max
        self._lanes: dict[int, Lane] = {}
        self._leaders: dict[int, int] = {}
        self._starved: set[int] = set()
        self._ready: set[int] = set()
        self._ready_order: list[int] = []
        self._open = SequenceSet()
        self._look = LOOK_MIN
        self._look_up = lane_max
        self._looks_from = NOWHERE

    def __len__(self) -> int:
        """How many messages have been filed and not handed out."""
        return len(self._open)

    @property
    def lanes(self) -> int:
        """How many keys have messages that are not settled."""
        return len(self._lanes)

    @property
    def oldest(self) -> int | None:
        """The first sequence that was filed and not handed out."""
        return self._open.first

    def is_open(self, first: int, end: int) -> bool:
        """Whether all of these were filed and not handed out."""
        return all(sequence in self._open for sequence in range(first, end))

    def is_ready(self, sequence: int) -> bool:
        """Whether it may be handed out for the first time."""
        return sequence in self._ready

    def is_busy(self, key: int) -> bool:
        """Whether a fresh message of this key has to wait."""
        return key in self._lanes

    def count_before(self, position: int) -> int:
        """How many messages below a sequence were filed and not handed out."""
        return self._open.count_before(position)

    # -- looking -----------------------------------------------------------------------------------------------------

    def ready(self, count_max: int) -> list[int]:
        """The first so many sequences that may be handed out for the first time, in order. Changes nothing."""
        found: list[int] = []
        while self._ready_order and len(found) < count_max:
            sequence = heapq.heappop(self._ready_order)
            if sequence in self._ready and (not found or found[-1] != sequence):
                found.append(sequence)
        for sequence in found:
            heapq.heappush(self._ready_order, sequence)
        return found

    def to_read(self, count_max: int, *, scan_max: int) -> tuple[list[tuple[int, int]], int]:
        """Stretches of open messages to read: those that are ready, at most `count_max`, and those whose keys are to
        be looked up again, since a lane has come to them; and how many fresh messages to look at besides.
        """
        ready = self.ready(count_max)
        found = [(one, one + 1) for one in ready]
        left = min(self._look_up, scan_max)
        self._looks_from = min((self._lanes[key].behind_from for key in self._starved), default=NOWHERE)
        for first, end in self._open.ranges(self._looks_from) if self._starved else ():
            found.append((first, min(end, first + left)))
            left -= end - first
            if left <= 0:
                break
        fresh = count_max - len(ready)
        return found, max(fresh, min(self._look, scan_max)) if fresh else 0

    def note_look(self, looked_at: int, *, looked_up_end: int, enough: bool) -> None:
        """What to_read() named was looked at, and filed where it had room: no need to look it up again. The next look
        goes further where this one did not find enough in all that it was given.
        """
        for key in self._starved:
            lane = self._lanes[key]
            if lane.behind_from >= self._looks_from:
                lane.behind_from = max(lane.behind_from, looked_up_end)
        self._look_up = min(LOOK_MAX, self._look_up * 2) if self._starved else self._lane_max
        if enough:
            self._look = max(LOOK_MIN, self._look // 2)
        elif looked_at >= self._look:
            self._look = min(LOOK_MAX, self._look * 2)

    def room(self, key: int, sequence: int) -> int:
        """For how many more messages, from this open one on, a lane has room; 0 where this one is in it.

        A lane whose next message may stand before where this look began has to wait for a look of its own: other
        lanes, and those that were starved while the disk was read, must not have theirs passed over.
        """
        lane = self._lanes.get(key)
        if lane is None or not lane.behind or not self._looks_from <= lane.behind_from <= sequence:
            return 0
        if not self._is_behind(lane, sequence):
            return 0
        return self._lane_max - len(lane.waiting) + (lane.leader is None)

    def is_starved(self, key: int) -> bool:
        """Whether the next message of a key that is looked up may be handed out."""
        return key in self._starved

    def knows(self, sequence: int) -> bool:
        """Whether an open message has its place in a lane, or is ready. Looks through all lanes: for damage alone."""
        return sequence in self._ready or any(sequence in one.waiting for one in self._lanes.values())

    # -- changing ----------------------------------------------------------------------------------------------------

    def file(self, first: int, keys: Iterable[int]) -> None:
        """The hashes of the keys of messages from a sequence on: fresh ones, or open ones that a lane has come to."""
        for sequence, key in enumerate(keys, first):
            if key == NOT_FILED:
                continue
            if key == UNKEYED:
                self._open.add(sequence)
                self._make_ready(sequence)
            elif sequence in self._open:
                self._file_again(sequence, key)
            else:
                self._file_fresh(sequence, key)

    def hand_out(self, first: int, end: int) -> None:
        """These are in hand from now on, or held back; they keep their places as leaders of their lanes."""
        for sequence in range(first, end):
            self._take_up(sequence)

    def end(self, first: int, end: int) -> None:
        """These are settled: the next of their keys may go."""
        for sequence in range(first, end):
            self._take_up(sequence)
            key = self._leaders.pop(sequence, None)
            if key is not None:
                self._go_on(key)

    def drop_before(self, position: int) -> None:
        """Let go of everything below a sequence."""
        self._open.discard_before(position)
        for lane in self._lanes.values():
            while lane.waiting and lane.waiting[0] < position:
                lane.waiting.pop(0)
        self._ready = {one for one in self._ready if one >= position}
        for sequence in [one for one in self._leaders if one < position]:
            self._go_on(self._leaders.pop(sequence))

    def clear(self) -> None:
        """Let go of everything."""
        self.restore(([], [], []))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def capture(self) -> OrderState:
        """All of it, as restore() takes it."""
        lanes = [(key, one.leader, one.waiting.tolist(), one.behind) for key, one in self._lanes.items()]
        return lanes, [one for one in self._ready if one not in self._leaders], self._open.pieces()

    def restore(self, state: OrderState) -> None:
        """Be what was captured."""
        lanes, unkeyed, pieces = state
        self._open = SequenceSet(pieces)
        self._lanes = {key: Lane(leader, array("Q", waiting), behind) for key, leader, waiting, behind in lanes}
        self._leaders = {one.leader: key for key, one in self._lanes.items() if one.leader is not None}
        self._starved = {key for key, one in self._lanes.items() if one.leader is None}
        self._ready = {*unkeyed, *(one for one in self._leaders if one in self._open)}
        self._ready_order = sorted(self._ready)

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _take_up(self, sequence: int) -> None:
        """It is open no more. One that had to wait is told of only where an action before is lost, which let it go: it
        must not lead its lane later, when nobody has it.
        """
        if sequence not in self._leaders and sequence not in self._ready and sequence in self._open:
            lane = next((one for one in self._lanes.values() if sequence in one.waiting), None)
            if lane is not None:
                lane.waiting.remove(sequence)
        self._open.discard(sequence)
        self._ready.discard(sequence)

    def _file_fresh(self, sequence: int, key: int) -> None:
        self._open.add(sequence)
        lane = self._lanes.get(key)
        if lane is None:
            self._lanes[key] = lane = Lane()
            self._lead(lane, key, sequence)
        elif lane.behind or len(lane.waiting) >= self._lane_max:
            if not lane.behind:
                lane.behind_from = sequence
            lane.behind += 1
        else:
            lane.waiting.append(sequence)

    def _file_again(self, sequence: int, key: int) -> None:
        """What was behind is behind no more. Anything else is there already."""
        lane = self._lanes.get(key)
        if lane is None or not lane.behind or not self._is_behind(lane, sequence):
            return
        lane.behind -= 1
        lane.behind_from = sequence + 1
        if lane.leader is None:
            self._lead(lane, key, sequence)
        else:
            lane.waiting.append(sequence)

    @staticmethod
    def _is_behind(lane: Lane, sequence: int) -> bool:
        known = lane.waiting[-1] if lane.waiting else lane.leader
        return known is None or sequence > known

    def _go_on(self, key: int) -> None:
        """The leader of a lane is settled."""
        lane = self._lanes[key]
        lane.leader = None
        if lane.waiting:
            self._lead(lane, key, lane.waiting.pop(0))
        elif lane.behind:
            self._starved.add(key)
        else:
            del self._lanes[key]

    def _lead(self, lane: Lane, key: int, sequence: int) -> None:
        lane.leader = sequence
        self._leaders[sequence] = key
        self._starved.discard(key)
        self._make_ready(sequence)

    def _make_ready(self, sequence: int) -> None:
        self._ready.add(sequence)
        heapq.heappush(self._ready_order, sequence)
