"""Key order of an ordered group: which messages may be delivered, and which wait for an earlier one of their key.

The group makes deliveries and reports them here. A message below the group's position has been filed: it is ready, or
it waits in the queue of its key, of which only the head is ready or in flight. The next few messages of each queue are
stored by sequence. The rest is its backlog: a bit per message and a count per key. When a queue reaches its backlog,
the keys are read again from the log. So a key with millions of messages costs one bit a message, and holds up no other
key: SQS scans only the first 120,000 messages of a queue for keys that are free, Pulsar's Key_Shared stops reading when
its replay queue is full (apache/pulsar 23231, 26677). A message is read twice, behind a busy key three times.
A key is represented by a hash of 63 bits. Two keys with one hash wait for each other, which costs speed but breaks no
guarantee.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from outbox_broker.group.sequence_bitmap import SequenceSet

UNKEYED: Final = 0
"""Replaces a key's hash if the message has no key, and so no order."""
NOT_FILED: Final = -1
"""Replaces a key's hash if the sequence is not to be filed."""
QUEUE_MAX: Final = 64
"""The number of waiting messages of a key that are stored by sequence, besides its head."""

NOWHERE: Final = 1 << 62
"""Above every sequence."""
SCAN_MIN: Final = 16
SCAN_MAX: Final = 4_096
"""Bounds of how many messages a pull scans to find enough deliverable ones; doubled after a scan that found too few."""

OrderState = tuple[list[tuple[int, int | None, list[int], int]], list[int], list[tuple[int, bytes]]]
"""Key queues (key, head, waiting, backlog), ready messages without a key, pieces of the bitmap of open messages."""


def key_hash(key: str | None) -> int:
    """Returns the hash of a key: stable across machines and restarts."""
    if key is None:
        return UNKEYED
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") >> 1 or 1


@dataclass(slots=True)
class KeyQueue:
    """The unsettled messages of one key, in order: the head, the waiting ones, then the backlog."""

    head: int | None = None
    waiting: array[int] = field(default_factory=lambda: array("Q"))
    backlog: int = 0
    backlog_from: int = 0
    """Every message of the backlog is at or after this sequence."""


class KeyOrder:
    """Changed only by operations that are replayed from the action log."""

    def __init__(self, *, queue_max: int = QUEUE_MAX) -> None:
        self._queue_max = queue_max
        self._queues: dict[int, KeyQueue] = {}
        self._heads: dict[int, int] = {}
        self._waiting_keys: set[int] = set()
        self._ready: set[int] = set()
        self._ready_order: list[int] = []
        self._open = SequenceSet()
        self._scan = SCAN_MIN
        self._backlog_scan = queue_max
        self._scan_from = NOWHERE

    def __len__(self) -> int:
        """Returns how many messages are filed and not delivered."""
        return len(self._open)

    @property
    def keys(self) -> int:
        """Returns how many keys have unsettled messages."""
        return len(self._queues)

    @property
    def oldest(self) -> int | None:
        """Returns the first sequence that is filed and not delivered."""
        return self._open.first

    def is_open(self, first: int, end: int) -> bool:
        """Returns whether all of these are filed and not delivered."""
        return all(sequence in self._open for sequence in range(first, end))

    def open_ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields those of these sequences that are filed and not delivered as ranges (first, end), in order."""
        for first, stop in self._open.ranges(start):
            if first >= end:
                return
            yield first, min(stop, end)

    def is_ready(self, sequence: int) -> bool:
        """Returns whether a message may be delivered for the first time."""
        return sequence in self._ready

    def is_busy(self, key: int) -> bool:
        """Returns whether a fresh message of this key has to wait."""
        return key in self._queues

    def count_before(self, position: int) -> int:
        """Returns how many messages below a sequence are filed and not delivered."""
        return self._open.count_before(position)

    # -- looking -----------------------------------------------------------------------------------------------------

    def ready(self, count_max: int) -> list[int]:
        """Returns the first `count_max` sequences ready for their first delivery, in order. Changes nothing."""
        sequences: list[int] = []
        while self._ready_order and len(sequences) < count_max:
            sequence = heapq.heappop(self._ready_order)
            if sequence in self._ready and (not sequences or sequences[-1] != sequence):
                sequences.append(sequence)
        for sequence in sequences:
            heapq.heappush(self._ready_order, sequence)
        return sequences

    def to_read(self, count_max: int, *, scan_max: int) -> tuple[list[tuple[int, int]], int]:
        """Returns ranges of open messages to read: at most `count_max` that are ready, and those whose keys must be
        read again because a queue has reached its backlog; and how many fresh messages to scan in addition.
        """
        ready = self.ready(count_max)
        ranges = [(sequence, sequence + 1) for sequence in ready]
        scan_left = min(self._backlog_scan, scan_max)
        self._scan_from = min((self._queues[key].backlog_from for key in self._waiting_keys), default=NOWHERE)
        for first, end in self._open.ranges(self._scan_from) if self._waiting_keys else ():
            ranges.append((first, min(end, first + scan_left)))
            scan_left -= end - first
            if scan_left <= 0:
                break
        fresh = count_max - len(ready)
        return ranges, max(fresh, min(self._scan, scan_max)) if fresh else 0

    def record_scan(self, scanned: int, *, backlog_scan_end: int, enough: bool) -> None:
        """Record that the ranges of to_read() were scanned, and filed as far as there was room: they need no second
        scan. The next scan covers more messages if this one did not find enough in all that it was given.
        """
        for key in self._waiting_keys:
            queue = self._queues[key]
            if queue.backlog_from >= self._scan_from:
                queue.backlog_from = max(queue.backlog_from, backlog_scan_end)
        self._backlog_scan = min(SCAN_MAX, self._backlog_scan * 2) if self._waiting_keys else self._queue_max
        if enough:
            self._scan = max(SCAN_MIN, self._scan // 2)
        elif scanned >= self._scan:
            self._scan = min(SCAN_MAX, self._scan * 2)

    def room(self, key: int, sequence: int) -> int:
        """Returns how many more messages a key queue can take, starting with this open one; 0 if this one is already in
        it.

        A queue whose next message may be before the start of this scan has to wait for a later scan: the backlogs of
        other queues, and of those that became added while the disk was read, must not be skipped.
        """
        queue = self._queues.get(key)
        if queue is None or not queue.backlog or not self._scan_from <= queue.backlog_from <= sequence:
            return 0
        if not self._is_in_backlog(queue, sequence):
            return 0
        return self._queue_max - len(queue.waiting) + (queue.head is None)

    def has_reached_backlog(self, key: int) -> bool:
        """Returns whether the next backlog message of a key may be delivered once it is found."""
        return key in self._waiting_keys

    def knows(self, sequence: int) -> bool:
        """Returns whether an open message is in a key queue, or ready. Scans all queues: only for damaged records."""
        return sequence in self._ready or any(sequence in queue.waiting for queue in self._queues.values())

    # -- changing ----------------------------------------------------------------------------------------------------

    def file(self, first: int, keys: Iterable[int]) -> None:
        """File messages by the hashes of their keys, from a sequence on: fresh, or open and reached by their queue.

        Hashes are in the action log (9 bytes a message), so that replay rebuilds the queues without reading messages.
        """
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

    def deliver(self, first: int, end: int) -> None:
        """Mark these as in flight, or deferred; they stay the heads of their queues."""
        for sequence in range(first, end):
            self._remove_open(sequence)

    def end(self, first: int, end: int) -> None:
        """Settle these: the next message of each key becomes ready."""
        for sequence in range(first, end):
            self._remove_open(sequence)
            key = self._heads.pop(sequence, None)
            if key is not None:
                self._advance(key)

    def drop_before(self, position: int, *, kept: Collection[int] = ()) -> None:
        """Drop everything below a sequence, but for what is `kept`."""
        kept_open = [sequence for sequence in kept if sequence in self._open]
        self._open.discard_before(position)
        for sequence in kept_open:
            self._open.add(sequence)
        for queue in self._queues.values():
            if queue.waiting and queue.waiting[0] < position:
                queue.waiting = array(
                    "Q", [waiting for waiting in queue.waiting if waiting >= position or waiting in kept]
                )
        self._ready = {sequence for sequence in self._ready if sequence >= position or sequence in kept}
        for head in [head for head in self._heads if head < position and head not in kept]:
            self._advance(self._heads.pop(head))

    def clear(self) -> None:
        """Drop everything."""
        self.restore(([], [], []))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def capture(self) -> OrderState:
        """Returns the whole state, for restore()."""
        keys = [(key, queue.head, queue.waiting.tolist(), queue.backlog) for key, queue in self._queues.items()]
        return keys, [sequence for sequence in self._ready if sequence not in self._heads], self._open.pieces()

    def restore(self, state: OrderState) -> None:
        """Load a captured state."""
        keys, unkeyed, pieces = state
        self._open = SequenceSet(pieces)
        self._queues = {key: KeyQueue(head, array("Q", waiting), backlog) for key, head, waiting, backlog in keys}
        self._heads = {queue.head: key for key, queue in self._queues.items() if queue.head is not None}
        self._waiting_keys = {key for key, queue in self._queues.items() if queue.head is None}
        self._ready = {*unkeyed, *(sequence for sequence in self._heads if sequence in self._open)}
        self._ready_order = sorted(self._ready)

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _remove_open(self, sequence: int) -> None:
        """Remove a message from the open ones. A waiting message gets here only if an earlier action that released it
        was lost: it must not become the head of its queue later, when nobody holds it.
        """
        if sequence not in self._heads and sequence not in self._ready and sequence in self._open:
            queue = next((queue for queue in self._queues.values() if sequence in queue.waiting), None)
            if queue is not None:
                queue.waiting.remove(sequence)
        self._open.discard(sequence)
        self._ready.discard(sequence)

    def _file_fresh(self, sequence: int, key: int) -> None:
        self._open.add(sequence)
        queue = self._queues.get(key)
        if queue is None:
            self._queues[key] = queue = KeyQueue()
            self._set_head(queue, key, sequence)
        elif queue.backlog or len(queue.waiting) >= self._queue_max:
            if not queue.backlog:
                queue.backlog_from = sequence
            queue.backlog += 1
        else:
            queue.waiting.append(sequence)

    def _file_again(self, sequence: int, key: int) -> None:
        """Move a message from the backlog into its queue. Other messages are in the queue already."""
        queue = self._queues.get(key)
        if queue is None or not queue.backlog or not self._is_in_backlog(queue, sequence):
            return
        queue.backlog -= 1
        queue.backlog_from = sequence + 1
        if queue.head is None:
            self._set_head(queue, key, sequence)
        else:
            queue.waiting.append(sequence)

    @staticmethod
    def _is_in_backlog(queue: KeyQueue, sequence: int) -> bool:
        newest = queue.waiting[-1] if queue.waiting else queue.head
        return newest is None or sequence > newest

    def _advance(self, key: int) -> None:
        """Replace the settled head of a key queue."""
        queue = self._queues[key]
        queue.head = None
        if queue.waiting:
            self._set_head(queue, key, queue.waiting.pop(0))
        elif queue.backlog:
            self._waiting_keys.add(key)
        else:
            del self._queues[key]

    def _set_head(self, queue: KeyQueue, key: int, sequence: int) -> None:
        queue.head = sequence
        self._heads[sequence] = key
        self._waiting_keys.discard(key)
        self._make_ready(sequence)

    def _make_ready(self, sequence: int) -> None:
        self._ready.add(sequence)
        heapq.heappush(self._ready_order, sequence)
