"""Totals of batches: rows by outcome, and their sums. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox_core.common.errors import BrokerError

OUTCOMES: Final = ("accepted", "retried", "held", "parked", "stale")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTotals:
    """Rows of batches by outcome; `outage` is the broker's error that ended them early.

    `retried` rows were postponed, `held` ones wait behind an older message of their key, `stale` ones had another
    owner by then; `defects` counts calls that failed with an unforeseen error.
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


def add(earlier: BatchTotals, later: BatchTotals) -> BatchTotals:
    """Returns the sum of two reports; the outage of the later one, if it has one."""
    counts = ("batches", "claimed", *OUTCOMES, "defects")
    sums = {name: getattr(earlier, name) + getattr(later, name) for name in counts}
    return BatchTotals(**sums, outage=later.outage or earlier.outage)
