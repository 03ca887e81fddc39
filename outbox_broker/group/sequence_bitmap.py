"""A set of sequences of one topic as a sparse bitmap, in pieces that exist only where a bit is set. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

PIECE_SEQUENCES: Final = 4_096


class SequenceSet:
    """A set of sequences, for dense members: ten million of them take 1.5 MB."""

    def __init__(self, pieces: Iterable[tuple[int, bytes]] = ()) -> None:
        self._pieces = {number: bytearray(piece) for number, piece in pieces}
        self._counts = {number: int.from_bytes(piece, "little").bit_count() for number, piece in self._pieces.items()}
        self._count = sum(self._counts.values())

    def __len__(self) -> int:
        return self._count

    def __contains__(self, sequence: int) -> bool:
        number, place = divmod(sequence, PIECE_SEQUENCES)
        piece = self._pieces.get(number)
        return piece is not None and bool(piece[place >> 3] & 1 << (place & 7))

    def __iter__(self) -> Iterator[int]:
        return (sequence for first, end in self.ranges(0) for sequence in range(first, end))

    def pieces(self) -> list[tuple[int, bytes]]:
        """Returns the pieces from which an equal set can be made."""
        return [(number, bytes(piece)) for number, piece in self._pieces.items()]

    def add(self, sequence: int) -> None:
        """Add a sequence; idempotent."""
        if sequence in self:
            return
        number, place = divmod(sequence, PIECE_SEQUENCES)
        if number not in self._pieces:
            self._pieces[number] = bytearray(PIECE_SEQUENCES // 8)
            self._counts[number] = 0
        self._pieces[number][place >> 3] |= 1 << (place & 7)
        self._counts[number] += 1
        self._count += 1

    def discard(self, sequence: int) -> bool:
        """Remove a sequence; returns whether it was present."""
        if sequence not in self:
            return False
        number, place = divmod(sequence, PIECE_SEQUENCES)
        self._pieces[number][place >> 3] &= ~(1 << (place & 7))
        self._counts[number] -= 1
        self._count -= 1
        if not self._counts[number]:
            del self._pieces[number], self._counts[number]
        return True

    def discard_before(self, end: int) -> None:
        """Remove all sequences below this one."""
        for number in [number for number in self._pieces if number < end // PIECE_SEQUENCES]:
            self._count -= self._counts[number]
            del self._pieces[number], self._counts[number]
        for sequence in range(end // PIECE_SEQUENCES * PIECE_SEQUENCES, end):
            self.discard(sequence)

    def count_before(self, end: int) -> int:
        """Returns the number of sequences below this one."""
        whole = sum(count for number, count in self._counts.items() if number < end // PIECE_SEQUENCES)
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
        held: tuple[int, int] | None = None
        for number in sorted(one for one in self._pieces if one >= start // PIECE_SEQUENCES):
            base = number * PIECE_SEQUENCES
            bits = int.from_bytes(self._pieces[number], "little")
            bits = bits >> max(start - base, 0) << max(start - base, 0)
            while bits:
                low = (bits & -bits).bit_length() - 1
                run = bits >> low
                end = low + (~run & run + 1).bit_length() - 1
                if held is not None and held[1] == base + low:
                    held = (held[0], base + end)
                else:
                    if held is not None:
                        yield held
                    held = (base + low, base + end)
                bits = bits >> end << end
        if held is not None:
            yield held
