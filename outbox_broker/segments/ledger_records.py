"""Records in ledger entries: a record above 4 MiB takes several. Pure.

An entry is one byte, which says whether the record goes on, then a part of the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from outbox_broker.segments.segment_store import Record

CHUNK_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bookies refuse entries above 5 MiB."""
_LAST: Final = b"\x00"
_MORE: Final = b"\x01"
FILLER: Final = b"\x02"
"""An entry without a record: it carries to the bookies that the entries before it are confirmed."""


def entries_of(record: bytes, *, chunk_bytes: int = CHUNK_BYTES_MAX) -> list[bytes]:
    """Returns the entries of a record, in order."""
    if len(record) <= chunk_bytes:
        return [_LAST + record]
    starts = range(0, len(record), chunk_bytes)
    return [
        (_LAST if start + chunk_bytes >= len(record) else _MORE) + record[start : start + chunk_bytes]
        for start in starts
    ]


def entry_count(size_bytes: int, *, chunk_bytes: int = CHUNK_BYTES_MAX) -> int:
    """Returns how many entries a record of this size takes."""
    return max(1, -(-size_bytes // chunk_bytes))


def ends_record(entry: bytes) -> bool:
    """Returns whether an entry is the last one of its record."""
    return entry[:1] == _LAST


def joined(entries: Iterable[bytes]) -> bytes | None:
    """Returns the record that these entries are, exactly; None if they are not one record."""
    parts = list(entries)
    is_whole = bool(parts) and ends_record(parts[-1]) and all(part[:1] == _MORE for part in parts[:-1])
    return b"".join(part[1:] for part in parts) if is_whole else None


def records_of(entries: Iterable[bytes], *, begin: int) -> Iterator[Record]:
    """Yields the records of consecutive entries from a position on; an unfinished one at the end is left out."""
    parts: list[bytes] = []
    start = begin
    for position, entry in enumerate(entries, begin):
        if entry[:1] == FILLER:
            continue
        if not parts:
            start = position
        parts.append(entry[1:])
        if ends_record(entry):
            yield Record(start, b"".join(parts), position + 1)
            parts = []
