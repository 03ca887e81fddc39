"""Receipts: what a delivery is settled with. `topic/group/sequence.delivery.life`, opaque to users, checked by us."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RECEIPT = re.compile(r"([A-Za-z0-9._-]{1,255})/([A-Za-z0-9._-]{1,255})/(\d{1,18})\.(\d{1,9})\.(\d{1,9})", re.ASCII)


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
