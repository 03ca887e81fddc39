"""Frames payloads chunk by chunk: bounds memory to one chunk, and lets other threads run. Not the frame format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from outbox_core.journal.journal import frames

PIECE_BYTES: Final = 1024 * 1024
Piece = tuple[bytes, Sequence[int]]
"""Concatenated frames, and the length of each."""


def pieces(payloads: Iterable[bytes]) -> Iterator[Piece]:
    """Yields frames in chunks of about PIECE_BYTES; the payloads may be generated lazily."""
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
