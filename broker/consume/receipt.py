"""Receipts: what a delivery is settled with. `topic/group/sequence.delivery.life`, opaque to users, checked by us."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_RECEIPT = re.compile(r"([A-Za-z0-9._-]{1,255})/([A-Za-z0-9._-]{1,255})/(\d{1,18})\.(\d{1,18})\.(\d{1,9})", re.ASCII)


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
        prefix, suffix = f"{found.topic}/{found.group}/", f".{found.delivery}.{found.life}"
        sequence = found.sequence + 1
        while place < count and receipts[place] == f"{prefix}{sequence}{suffix}":
            place += 1
            sequence += 1
        yield ReceiptRun(found.topic, found.group, found.sequence, place - start, found.delivery, found.life, start)
