"""Receipts: what a delivery is settled with. `topic/group/sequence.delivery.life`, opaque to users, checked by us."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_RECEIPT = re.compile(r"([A-Za-z0-9._-]{1,255})/([A-Za-z0-9._-]{1,255})/(\d{1,18})\.(\d{1,18})\.(\d{1,9})", re.ASCII)
_STRETCH_MIN = 8


@dataclass(frozen=True, slots=True)
class Receipt:
    """One hand-out: which message, the how-manieth hand-out of it, in which life of the message in its group."""

    topic: str
    group: str
    sequence: int
    delivery: int
    life: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.group}/{self.sequence}.{self.delivery}.{self.life}"

    @staticmethod
    def parse(text: str) -> Receipt | None:
        """The receipt that a text stands for; None where it is none of ours."""
        match = _RECEIPT.fullmatch(text)
        if match is None:
            return None
        topic, group, sequence, delivery, life = match.groups()
        return Receipt(topic, group, int(sequence), int(delivery), int(life))


@dataclass(frozen=True, slots=True)
class ReceiptRun:
    """Receipts that stand behind each other in a request, from `place` on, and differ in their sequences alone: these
    go up by one.
    """

    topic: str
    group: str
    first: int
    count: int
    delivery: int
    life: int
    place: int

    @property
    def end(self) -> int:
        """The sequence behind the last one."""
        return self.first + self.count


def receipts_of(topic: str, group: str, *, first: int, count: int, delivery: int, life: int) -> list[str]:
    """The texts of a run of receipts."""
    prefix, suffix = f"{topic}/{group}/", f".{delivery}.{life}"
    return [f"{prefix}{sequence}{suffix}" for sequence in range(first, first + count)]


def runs_of(receipts: Sequence[str]) -> Iterator[ReceiptRun]:
    """The receipts of a request as runs; those that are none of ours are left out."""
    place, count = 0, len(receipts)
    while place < count:
        start, found = place, Receipt.parse(receipts[place])
        place += 1
        if found is None:
            continue
        place += _following(receipts, place, found)
        yield ReceiptRun(found.topic, found.group, found.sequence, place - start, found.delivery, found.life, start)


def _following(receipts: Sequence[str], place: int, found: Receipt) -> int:
    """How many receipts from a place on go on from one: stretches, each twice as long, are held against what they
    would be.
    """
    count, size = 0, _STRETCH_MIN
    while place + count < len(receipts):
        there = list(receipts[place + count : place + count + size])
        expected = receipts_of(
            found.topic, found.group, first=found.sequence + 1 + count, count=len(there), delivery=found.delivery,
            life=found.life,
        )  # fmt: skip
        if there != expected:
            return count + next(number for number, one in enumerate(expected) if there[number] != one)
        count += len(there)
        size *= 2
    return count
