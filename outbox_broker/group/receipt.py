"""Receipts, which settle deliveries: `topic/group/sequence.delivery.generation`, opaque to users, validated here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_RECEIPT = re.compile(r"([A-Za-z0-9._-]{1,255})/([A-Za-z0-9._-]{1,255})/(\d{1,18})\.(\d{1,18})\.(\d{1,9})", re.ASCII)
_SLICE_MIN = 8


@dataclass(frozen=True, slots=True)
class Receipt:
    """One delivery of a message: its sequence, its delivery number, and the generation of the message in its group."""

    topic: str
    group: str
    sequence: int
    delivery: int
    generation: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.group}/{self.sequence}.{self.delivery}.{self.generation}"

    @staticmethod
    def parse(text: str) -> Receipt | None:
        """Parses a receipt; None if the text is not one."""
        match = _RECEIPT.fullmatch(text)
        if match is None:
            return None
        topic, group, sequence, delivery, generation = match.groups()
        return Receipt(topic, group, int(sequence), int(delivery), int(generation))


@dataclass(frozen=True, slots=True)
class ReceiptRun:
    """Consecutive receipts of a request, from `index` on, that differ only in their sequences, which are
    consecutive too.
    """

    topic: str
    group: str
    first: int
    count: int
    delivery: int
    generation: int
    index: int

    @property
    def end(self) -> int:
        """Returns the sequence after the last one."""
        return self.first + self.count


def receipts_of(topic: str, group: str, *, first: int, count: int, delivery: int, generation: int) -> list[str]:
    """Returns the texts of a run of receipts."""
    prefix, suffix = f"{topic}/{group}/", f".{delivery}.{generation}"
    return [f"{prefix}{sequence}{suffix}" for sequence in range(first, first + count)]


def runs_of(receipts: Sequence[str]) -> Iterator[ReceiptRun]:
    """Groups the receipts of a request into runs; texts that are not receipts are left out."""
    index, count = 0, len(receipts)
    while index < count:
        start, receipt = index, Receipt.parse(receipts[index])
        index += 1
        if receipt is None:
            continue
        index += _continuation(receipts, index, receipt)
        yield ReceiptRun(
            receipt.topic, receipt.group, receipt.sequence, index - start, receipt.delivery, receipt.generation, start
        )


def _continuation(receipts: Sequence[str], index: int, receipt: Receipt) -> int:
    """Returns how many receipts from an index on continue a run: compares slices, each twice as long, with the expected
    texts.
    """
    count, size = 0, _SLICE_MIN
    while index + count < len(receipts):
        there = list(receipts[index + count : index + count + size])
        expected = receipts_of(
            receipt.topic, receipt.group, first=receipt.sequence + 1 + count, count=len(there),
            delivery=receipt.delivery, generation=receipt.generation,
        )  # fmt: skip
        if there != expected:
            return count + next(offset for offset, text in enumerate(expected) if there[offset] != text)
        count += len(there)
        size *= 2
    return count
