"""Reads entries and records of ledgers. Fences nothing, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from outbox_broker.segments.ledger_manifest import LedgerPiece
from outbox_broker.segments.ledger_records import entry_count, joined, records_of
from outbox_broker.segments.ledgers import EntryMissing, LedgerDamaged, Ledgers
from outbox_broker.segments.segment_store import Record, RecordDamaged
from outbox_core.journal.journal import SegmentDamaged

REQUEST_ENTRIES_FIRST: Final = 16
REQUEST_ENTRIES_MAX: Final = 256
REQUEST_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of a request for more than one entry. Several shards are taken over at a time, in one JVM with little memory."""


class RecordPlace(NamedTuple):
    """Where a record is, and its size."""

    segment: str
    position: int
    size_bytes: int


def read_entries(ledgers: Ledgers, ledger_id: int, *, count: int) -> Iterator[bytes]:
    """Yields a ledger's first entries, with few requests and bounded memory. Raises LedgerFailed.

    Small entries may be followed by large ones, so what a request would return is asked for before it is made.
    """
    first, read_bytes, size = 0, 0, REQUEST_ENTRIES_FIRST
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


def read_records(ledgers: Ledgers, ledger_id: int, *, count: int, begin: int, where: str) -> Iterator[Record]:
    """Yields the whole records of a ledger's first entries, the first of which is at the position `begin`.

    Raises SegmentDamaged, naming `where`, if an entry is lost; LedgerFailed.
    """
    try:
        yield from records_of(read_entries(ledgers, ledger_id, count=count), begin=begin)
    except LedgerDamaged as error:
        raise SegmentDamaged(f"{where}: {error}") from error


def next_size(size: int, size_bytes: int) -> int:
    """Returns of how many entries to ask next, if `size` entries have `size_bytes`: fewer, if these are too many."""
    return max(1, min(2 * size, REQUEST_ENTRIES_MAX, size * REQUEST_BYTES_MAX // max(1, size_bytes)))


def read_record(ledgers: Ledgers, piece: LedgerPiece | None, place: RecordPlace, *, end: int | None) -> bytes:
    """Returns a record of a piece, which ends at `end` (None: where it ends is not known).

    Raises RecordDamaged if there is no such record, LedgerFailed.
    """
    segment, position, size_bytes = place
    last = position + entry_count(size_bytes) - 1
    entries: list[bytes] = []
    if piece is not None and (end is None or last < end):
        first, last = position - piece.begin, last - piece.begin
        try:
            entries = ledgers.read(piece.ledger, first, last)
        except EntryMissing:
            pass
        except LedgerDamaged as damage:
            found = b"".join(_parts(ledgers, piece.ledger, range(first, last + 1), damage))
            raise RecordDamaged(f"{segment}: damaged record at {position}: {damage}", found=found) from damage
    record = joined(entries)
    if record is None or len(record) != size_bytes or not record:
        raise RecordDamaged(
            f"{segment}: damaged record at {position}", found=b"".join(entry[1:] for entry in entries)
        )  # fmt: skip
    return record


def _parts(ledgers: Ledgers, ledger_id: int, entries: Sequence[int], damage: LedgerDamaged) -> Iterator[bytes]:
    """Yields the parts of a record some of whose entries are lost, for which something stands that is not proven."""
    if len(entries) == 1:
        yield damage.found[1:]
        return
    for number in entries:
        try:
            [entry] = ledgers.read(ledger_id, number, number)
        except EntryMissing:
            return
        except LedgerDamaged as error:
            entry = error.found
        yield entry[1:]
