"""Reads entries of ledgers, and the bytes of a segment that are in them. Fences nothing, changes nothing."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator
from operator import itemgetter
from typing import Final

from outbox_broker.segments.ledger_records import FILLER, MARK_BYTES, records_of
from outbox_broker.segments.ledgers import EntryMissing, LedgerDamaged, Ledgers
from outbox_core.journal.block import Block, scan
from outbox_core.journal.journal import SegmentDamaged

REQUEST_ENTRIES_FIRST: Final = 16
REQUEST_ENTRIES_MAX: Final = 256
REQUEST_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of a request for more than one entry. Several shards are taken over at a time, in one JVM with little memory."""
_LOST_TOGETHER_MAX: Final = 16
"""Entries, one behind the other, that no bookie has: bytes behind so many are still found."""
_END: Final = itemgetter(0)


def read_entries(ledgers: Ledgers, ledger_id: int, *, count: int, first: int = 0) -> Iterator[bytes]:
    """Yields a ledger's entries from one on, up to `count` of the ledger, with few requests and bounded memory. Raises
    LedgerFailed.

    Small entries may be followed by large ones, so what a request would return is asked for before it is made.
    """
    size = REQUEST_ENTRIES_FIRST
    read_bytes = ledgers.length_bytes(ledger_id, first - 1) if 0 < first < count - 1 else 0
    while first < count:
        size = min(size, count - first)
        if size > 1:
            size_bytes = ledgers.length_bytes(ledger_id, first + size - 1) - read_bytes
            if size_bytes > REQUEST_BYTES_MAX:
                size = next_size(size, size_bytes)
                continue
        entries = ledgers.read(ledger_id, first, first + size - 1)
        yield from entries
        size_bytes = sum(map(len, entries))
        first, read_bytes, size = first + size, read_bytes + size_bytes, next_size(size, size_bytes)


def read_records(ledgers: Ledgers, ledger_id: int, *, count: int, where: str) -> Iterator[bytes]:
    """Yields the whole records of a ledger's first entries.

    Raises SegmentDamaged, naming `where`, if an entry is lost; LedgerFailed.
    """
    try:
        yield from records_of(read_entries(ledgers, ledger_id, count=count))
    except LedgerDamaged as error:
        raise SegmentDamaged(f"{where}: {error}") from error


def next_size(size: int, size_bytes: int) -> int:
    """Returns of how many entries to ask next, if `size` entries have `size_bytes`: fewer, if these are too many."""
    return max(1, min(2 * size, REQUEST_ENTRIES_MAX, size * REQUEST_BYTES_MAX // max(1, size_bytes)))


class LedgerBytes:
    """The bytes of a segment by position, which are in a ledger's entries without their marks. Thread-safe.

    Where an entry ends is asked for by bisection, and remembered, as is what was read or written.
    """

    def __init__(self, ledgers: Ledgers, ledger_id: int, *, where: str) -> None:
        """`where`: the segment's name."""
        self._ledgers = ledgers
        self._ledger_id = ledger_id
        self._where = where
        self._written: array[int] = array("Q")  # where each entry ends that this process wrote
        self._guard = threading.Lock()
        self._asked: list[tuple[int, int]] = []  # of others: (position of the end, number of the entry), sorted

    def note_written(self, end: int) -> None:
        """Remember where the next entry ends: of a ledger that this process writes, all of them."""
        self._written.append(end)

    def read(self, position: int, size_bytes: int, *, count: int) -> bytes:
        """Returns bytes of the ledger's first `count` entries; fewer if these end before, or one is gone. Of an entry
        that is lost, what a damaged copy has. Raises LedgerFailed.
        """
        number, start = self._entry_at(position, count=count)
        parts: list[bytes] = []
        end = position + size_bytes
        while start < end and number < count:
            try:
                data = self._entry(number)
            except EntryMissing:
                break  # how long it was, no bookie knows
            parts.append(data[max(0, position - start) : max(0, end - start)])
            start += len(data)
            self._note_asked(number, start)
            number += 1
        return b"".join(parts)

    def blocks(self, *, first: int, count: int, wanted: Container[int] | None) -> Iterator[Block]:
        """Yields the blocks in the ledger's first `count` entries, of a segment that begins at the offset `first`. What
        is in a closed ledger is durable, and in an open one what is confirmed: nothing is a torn tail but parts of a
        block whose last entry is missing.

        Raises SegmentDamaged if an entry is gone, SegmentRefused, LedgerFailed.
        """
        position = 0
        for data in records_of(self._entries(count)):
            for block in scan(
                data, first=first + position, proven=first + position + len(data), same_boot=True, wanted=wanted
            ):
                yield block.moved(position)
            position += len(data)

    def _entries(self, count: int) -> Iterator[bytes]:
        number = 0
        while number < count:
            try:
                for entry in read_entries(self._ledgers, self._ledger_id, count=count, first=number):
                    yield entry
                    number += 1
            except LedgerDamaged:  # one of those that were asked for together
                yield self._marked_entry(number)
                number += 1
            except EntryMissing as error:  # no bookie has it, though it was confirmed
                raise SegmentDamaged(f"{self._where}: ledger {self._ledger_id} misses entries: {error}") from error

    def _entry_at(self, position: int, *, count: int) -> tuple[int, int]:
        """Returns the entry that holds a position, or one before it, and the position at which it begins."""
        if len(self._written) >= count:
            number = bisect_right(self._written, position)
            return number, self._written[number - 1] if number else 0
        unread = count
        """The first entry that was asked for and not read: until what is before it is known, it may be the end."""
        while True:
            with self._guard:
                known = bisect_right(self._asked, position, key=_END)
                start, before = self._asked[known - 1] if known else (0, -1)
                if before >= unread:  # another thread has found what is behind it
                    unread = count
                behind = min(self._asked[known][1], unread) if known < len(self._asked) else unread
            if behind - before > 1:
                middle = (before + behind) // 2
                unread = middle if self._ask(middle) is None else unread
            elif behind == unread < count and self._is_behind(unread, start=start, position=position, count=count):
                unread = count
            else:
                return before + 1, start

    def _ask(self, number: int) -> int | None:
        """Returns where an entry ends; None if it cannot be read."""
        try:
            length = self._ledgers.length_bytes(self._ledger_id, number)
        except (LedgerDamaged, EntryMissing):
            return None
        end = length - MARK_BYTES * (number + 1)
        self._note_asked(number, end)
        return end

    def _is_behind(self, lost: int, *, start: int, position: int, count: int) -> bool:
        """Returns whether a position is behind an entry that cannot be read and begins at `start`, and remembers where
        that ends.

        A damaged copy tells its length. That of a missing one follows from the next that is read, since each entry says
        how long the ledger is up to itself.
        """
        number = lost
        try:
            end = start + len(self._entry(lost))
        except EntryMissing:
            for behind in range(lost + 1, min(count, lost + 1 + _LOST_TOGETHER_MAX)):
                if (end_behind := self._ask(behind)) is not None:
                    number, end = behind - 1, end_behind - len(self._entry(behind))
                    break
            else:
                return False
        self._note_asked(number, end)
        return position >= end

    def _note_asked(self, number: int, end: int) -> None:
        if number >= len(self._written):
            with self._guard:
                at = bisect_left(self._asked, (end, number))
                if self._asked[at : at + 1] != [(end, number)]:
                    self._asked.insert(at, (end, number))

    def _entry(self, number: int) -> bytes:
        entry = self._marked_entry(number)
        return b"" if entry[:MARK_BYTES] == FILLER else entry[MARK_BYTES:]

    def _marked_entry(self, number: int) -> bytes:
        try:
            [entry] = self._ledgers.read(self._ledger_id, number, number)
        except LedgerDamaged as damage:
            return damage.found
        return entry
