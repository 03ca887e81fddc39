"""A set of sequences of one topic as a sparse bitmap, in pieces that exist only where a bit is set. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

PIECE_SEQUENCES: Final = 4_096


class SequenceSet:
    """A set of sequences, for dense members: ten million of them take 1.5 MB."""

    def __init__(self, pieces: Iterable[tuple[int, bytes]] = ()) -> None:
        self._pieces = {piece_number: bytearray(piece) for piece_number, piece in pieces}
        self._counts = {
            piece_number: int.from_bytes(piece, "little").bit_count() for piece_number, piece in self._pieces.items()
        }
        self._count = sum(self._counts.values())

    def __len__(self) -> int:
        return self._count

    def __contains__(self, sequence: int) -> bool:
        piece_number, offset = divmod(sequence, PIECE_SEQUENCES)
        piece = self._pieces.get(piece_number)
        return piece is not None and bool(piece[offset >> 3] & 1 << (offset & 7))

    def __iter__(self) -> Iterator[int]:
        return (sequence for first, end in self.ranges(0) for sequence in range(first, end))

    def pieces(self) -> list[tuple[int, bytes]]:
        """Returns the pieces from which an equal set can be made."""
        return [(piece_number, bytes(piece)) for piece_number, piece in self._pieces.items()]

    def add(self, sequence: int) -> None:
        """Add a sequence; idempotent."""
        if sequence in self:
            return
        piece_number, offset = divmod(sequence, PIECE_SEQUENCES)
        if piece_number not in self._pieces:
            self._pieces[piece_number] = bytearray(PIECE_SEQUENCES // 8)
            self._counts[piece_number] = 0
        self._pieces[piece_number][offset >> 3] |= 1 << (offset & 7)
        self._counts[piece_number] += 1
        self._count += 1

    def discard(self, sequence: int) -> bool:
        """Remove a sequence; returns whether it was present."""
        if sequence not in self:
            return False
        piece_number, offset = divmod(sequence, PIECE_SEQUENCES)
        self._pieces[piece_number][offset >> 3] &= ~(1 << (offset & 7))
        self._counts[piece_number] -= 1
        self._count -= 1
        if not self._counts[piece_number]:
            del self._pieces[piece_number], self._counts[piece_number]
        return True

    def discard_before(self, end: int) -> None:
        """Remove all sequences below this one."""
        for piece_number in [piece_number for piece_number in self._pieces if piece_number < end // PIECE_SEQUENCES]:
            self._count -= self._counts[piece_number]
            del self._pieces[piece_number], self._counts[piece_number]
        for sequence in range(end // PIECE_SEQUENCES * PIECE_SEQUENCES, end):
            self.discard(sequence)

    def count_before(self, end: int) -> int:
        """Returns the number of sequences below this one."""
        whole = sum(count for piece_number, count in self._counts.items() if piece_number < end // PIECE_SEQUENCES)
        return whole + sum(sequence in self for sequence in range(end // PIECE_SEQUENCES * PIECE_SEQUENCES, end))

    def clear(self) -> None:
        """Remove all sequences."""
        self._pieces.clear()
        self._counts.clear()
        self._count = 0

    @property
    def first(self) -> int | None:
        """Returns the lowest sequence."""
        return next((first for first, _ in self.ranges(0)), None)

    def ranges(self, start: int) -> Iterator[tuple[int, int]]:
        """Yields the sequences from `start` on as contiguous ranges (first, end), in order."""
        open_range: tuple[int, int] | None = None
        for piece_number in sorted(
            piece_number for piece_number in self._pieces if piece_number >= start // PIECE_SEQUENCES
        ):
            base = piece_number * PIECE_SEQUENCES
            bits = int.from_bytes(self._pieces[piece_number], "little")
            bits = bits >> max(start - base, 0) << max(start - base, 0)
            while bits:
                low = (bits & -bits).bit_length() - 1
                run = bits >> low
                end = low + (~run & run + 1).bit_length() - 1
                if open_range is not None and open_range[1] == base + low:
                    open_range = (open_range[0], base + end)
                else:
                    if open_range is not None:
                        yield open_range
                    open_range = (base + low, base + end)
                bits = bits >> end << end
        if open_range is not None:
            yield open_range
