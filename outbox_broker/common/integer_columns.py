"""Columns of integers as bytes, little-endian on every machine, and back. Not what the numbers mean."""

from __future__ import annotations

import sys
from array import array


def to_bytes(column: array[int]) -> bytes:
    """The column's numbers; the column stays as it is."""
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()


def from_bytes(typecode: str, data: bytes) -> array[int]:
    """A column of this type from what to_bytes() made."""
    column: array[int] = array(typecode, data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
