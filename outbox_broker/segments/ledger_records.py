"""Bytes in ledger entries: what is longer than 4 MiB takes several. Pure.

An entry is one byte, a mark, and then bytes: one or more whole blocks of a segment, or a part of one; in a manifest
ledger a record, or a part of one. The mark says whether what is begun ends with the entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

CHUNK_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bookies refuse entries above 5 MiB."""
MARK_BYTES: Final = 1
_LAST: Final = b"\x00"
_MORE: Final = b"\x01"
FILLER: Final = b"\x02"
"""An entry without bytes: it carries to the bookies that the entries before it are confirmed."""


def entries_of(data: bytes, *, chunk_bytes: int = CHUNK_BYTES_MAX) -> list[bytes]:
    """Returns the entries of a record, or of blocks, in order."""
    if len(data) <= chunk_bytes:
        return [_LAST + data]
    starts = range(0, len(data), chunk_bytes)
    return [
        (_LAST if start + chunk_bytes >= len(data) else _MORE) + data[start : start + chunk_bytes]
        for start in starts
    ]  # fmt: skip


def ends_record(entry: bytes) -> bool:
    """Returns whether what an entry belongs to ends with it."""
    return entry[:MARK_BYTES] == _LAST


def records_of(entries: Iterable[bytes]) -> Iterator[bytes]:
    """Yields what consecutive entries were made of; what is unfinished at their end is left out."""
    parts: list[bytes] = []
    for entry in entries:
        if entry[:MARK_BYTES] == FILLER:
            continue
        parts.append(entry[MARK_BYTES:])
        if ends_record(entry):
            yield parts[0] if len(parts) == 1 else b"".join(parts)
            parts = []
