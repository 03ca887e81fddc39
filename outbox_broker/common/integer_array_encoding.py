"""Serialises columns of integers, little-endian on every machine."""

from __future__ import annotations

import sys
from array import array


def to_bytes(column: array[int]) -> bytes:
    """Encode the column's numbers; the column is unchanged."""
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()


def from_bytes(typecode: str, data: bytes) -> array[int]:
    """Decode a column of this type from to_bytes()."""
    column: array[int] = array(typecode, data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
