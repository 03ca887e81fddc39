"""Payloads as frames, piece by piece: others have their turn between two, and one is in memory. Not how frames look."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from outbox_core.journal.journal import frames

PIECE_BYTES: Final = 1024 * 1024
Piece = tuple[bytes, Sequence[int]]
"""Frames behind each other, and the length of each."""


def pieces(payloads: Iterable[bytes]) -> Iterator[Piece]:
    """Frames of about PIECE_BYTES at a time, of payloads that may be made as they are asked for."""
    piece: list[bytes] = []
    size_bytes = 0
    for payload in payloads:
        piece.append(payload)
        size_bytes += len(payload)
        if size_bytes >= PIECE_BYTES:
            yield frames(piece)
            piece, size_bytes = [], 0
    if piece:
        yield frames(piece)
