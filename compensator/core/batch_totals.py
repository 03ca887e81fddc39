"""What batches came to, in figures that add up. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox_core.common.errors import BrokerError

OUTCOMES: Final = ("accepted", "retried", "held", "parked", "stale")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """What batches came to; `outage` carries the broker's error that ended them early.

    `retried` rows were put off, `held` ones wait behind an older message of their key, `stale` ones had got another
    owner meanwhile; `defects` counts calls that failed in a way that nobody foresaw.
    """

    batches: int = 0
    claimed: int = 0
    accepted: int = 0
    retried: int = 0
    held: int = 0
    parked: int = 0
    stale: int = 0
    defects: int = 0
    outage: BrokerError | None = None


def add(one: PassReport, other: PassReport) -> PassReport:
    """Two reports as one; the outage of the later one, if it has one."""
    counts = ("batches", "claimed", *OUTCOMES, "defects")
    sums = {name: getattr(one, name) + getattr(other, name) for name in counts}
    return PassReport(**sums, outage=other.outage or one.outage)
