"""A topic's consume log: sequence -> place in the message log, and when it became ready.

An index, rebuilt from the logs.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Final

HOLE: Final = (1 << 64) - 1
"""Stands where a sequence was given out but its record never reached the disk: nothing to deliver."""


class TopicIndex:
    """Sixteen bytes a message. Appended to under the engine's lock."""

    __slots__ = ("_offsets", "_ready_at_ms", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._offsets = array("Q")
        self._ready_at_ms = array("q")

    def __len__(self) -> int:
        return len(self._offsets)

    def append(self, offset: int, *, ready_at_ms: int) -> int:
        """Place a message at the end; returns its sequence."""
        self._offsets.append(offset)
        self._ready_at_ms.append(ready_at_ms)
        return len(self._offsets) - 1

    def place(self, sequence: int, offset: int, *, ready_at_ms: int) -> None:
        """Place a message at a sequence that was written down earlier (recovery); gaps become holes."""
        missing = sequence + 1 - len(self._offsets)
        if missing > 0:
            self._offsets.extend([HOLE] * missing)
            self._ready_at_ms.extend([ready_at_ms] * missing)
        self._offsets[sequence] = offset
        self._ready_at_ms[sequence] = ready_at_ms

    def offset(self, sequence: int) -> int:
        """The place in the message log, or HOLE."""
        return self._offsets[sequence]

    def ready_at_ms(self, sequence: int) -> int:
        """When the message was stored or, if it was scheduled, fell due."""
        return self._ready_at_ms[sequence]

    def visible_end(self, start: int, *, count_max: int, durable_end: int) -> int:
        """The end of the run from `start` that is durable and at most `count_max` long: what may be handed out
        in order.
        """
        end = min(len(self._offsets), start + count_max)
        for sequence in range(start, end):
            offset = self._offsets[sequence]
            if offset != HOLE and offset >= durable_end:
                return sequence
        return end

    def sequence_at(self, time_ms: int) -> int:
        """The first sequence that became ready at or after a time (times never go back far: clocks step)."""
        return bisect_left(self._ready_at_ms, time_ms)
