"""Reads entries and records of ledgers. Fences nothing, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from outbox_broker.schedule.segment_store import RecordDamaged
from outbox_broker.schedule.stores.ledger_manifest import LedgerPiece
from outbox_broker.schedule.stores.ledger_records import entry_count, joined
from outbox_broker.schedule.stores.ledgers import EntryMissing, Ledgers

_READ_ENTRIES_MIN: Final = 16
_READ_ENTRIES_MAX: Final = 256
_READ_BYTES_AIM: Final = 4 * 1024 * 1024


class RecordPlace(NamedTuple):
    """Where a record is, and its size."""

    segment: str
    position: int
    size_bytes: int


def read_entries(ledgers: Ledgers, ledger_id: int, *, count: int) -> Iterator[bytes]:
    """Yields a ledger's first entries, with few requests and bounded memory. Raises LedgerFailed."""
    first, size = 0, _READ_ENTRIES_MIN
    while first < count:
        last = min(first + size, count) - 1
        entries = ledgers.read(ledger_id, first, last)
        yield from entries
        first = last + 1
        is_small = sum(map(len, entries)) < _READ_BYTES_AIM // 2
        size = min(_READ_ENTRIES_MAX, 2 * size) if is_small else max(_READ_ENTRIES_MIN, size // 2)


def read_record(ledgers: Ledgers, piece: LedgerPiece | None, place: RecordPlace, *, end: int | None) -> bytes:
    """Returns a record of a piece, which ends at `end` (None: where it ends is not known).

    Raises RecordDamaged if there is no such record, LedgerFailed.
    """
    segment, position, size_bytes = place
    last = position + entry_count(size_bytes) - 1
    entries: list[bytes] = []
    if piece is not None and (end is None or last < end):
        with suppress(EntryMissing):
            entries = ledgers.read(piece.ledger, position - piece.begin, last - piece.begin)
    record = joined(entries)
    if record is None or len(record) != size_bytes or not record:
        raise RecordDamaged(
            f"{segment}: damaged record at {position}", found=b"".join(entry[1:] for entry in entries)
        )  # fmt: skip
    return record
