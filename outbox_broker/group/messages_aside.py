"""Where a group's messages are that are aside from their topic: what an operator made of one, and what retention moved
out of an old segment. In memory, without I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Final, NamedTuple

from outbox_broker.group.dead_letters import MemoryUse
from outbox_broker.log.topic_index import DAMAGED

PLACE_BYTES: Final = 250
"""Size of a place in memory, which counts as that of dead letters does."""


class OwnPlace(NamedTuple):
    """The frame in the message log that holds a message aside from its topic, and when that became ready.

    `offset` is DAMAGED where no segment has the message any more.
    """

    offset: int
    size_bytes: int
    ready_at_ms: int


class MessagesAside:
    """Places by sequence, in the order of their offsets: the oldest segment that they need is known at once."""

    def __init__(self, memory: MemoryUse | None = None) -> None:
        self._memory = MemoryUse() if memory is None else memory
        self._places: dict[int, OwnPlace] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def sequences(self) -> Collection[int]:
        """The sequences of the messages."""
        return self._places.keys()

    def place(self, sequence: int) -> OwnPlace | None:
        """Returns where a message is; None if it is not aside from its topic."""
        return self._places.get(sequence)

    def parts(self, first: int, end: int) -> Iterator[tuple[int, int, OwnPlace | None]]:
        """Yields these sequences in order, in parts (first, end, place): each message that is aside is one of its own,
        and the others have no place.
        """
        start = first
        for sequence in self.within(first, end):
            if start < sequence:
                yield start, sequence, None
            yield sequence, sequence + 1, self._places[sequence]
            start = sequence + 1
        if start < end:
            yield start, end, None

    def within(self, first: int, end: int) -> list[int]:
        """Returns those of these sequences that are aside, in order."""
        if end - first > len(self._places):  # there may be millions of sequences, or of places
            return sorted(sequence for sequence in self._places if first <= sequence < end)
        return [sequence for sequence in range(first, end) if sequence in self._places]

    def before(self, offset: int) -> Iterator[tuple[int, OwnPlace]]:
        """Yields the messages before an offset of the log: sequence and place."""
        return takewhile(lambda item: item[1].offset < offset, self._places.items())

    def behind(self, offset: int) -> list[int]:
        """Returns the sequences of messages at or behind an offset of the log, the last one first."""
        found: list[int] = []
        for sequence, (begin, _, _) in reversed(self._places.items()):
            if begin < offset:
                break
            if begin != DAMAGED:
                found.append(sequence)
        return found

    def first_ready_since(self, time_ms: int) -> int | None:
        """Returns the first sequence of a message that became ready at or after a time."""
        ready = (sequence for sequence, own_place in self._places.items() if own_place.ready_at_ms >= time_ms)
        return min(ready, default=None)

    def capture(self) -> dict[int, OwnPlace]:
        """Returns all places, for put()."""
        return self._places

    def put(self, places: Mapping[int, OwnPlace]) -> None:
        """Add places, in the order of their offsets, and replace those that these messages had."""
        for sequence in places:
            if self._places.pop(sequence, None) is None:
                self._memory.size_bytes += PLACE_BYTES
        newest = next(reversed(self._places.values()), None)
        is_behind = newest is None or all(own_place.offset > newest.offset for own_place in places.values())
        self._places.update(places)
        if not is_behind:  # two that appended frames wrote their actions the other way round
            self._places = dict(sorted(self._places.items(), key=lambda item: item[1].offset))

    def forget(self, sequences: Iterable[int]) -> None:
        """Forget the places of these messages; others are passed over."""
        for sequence in sequences:
            if self._places.pop(sequence, None) is not None:
                self._memory.size_bytes -= PLACE_BYTES
