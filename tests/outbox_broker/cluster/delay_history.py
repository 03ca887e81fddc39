"""Checks a history of a delay service: nothing lost, early, or both canceled and delivered; repetitions are counted.

A history is what its clients saw: publishes and cancels with their answers, arrivals at the target, and at the end what
is still scheduled or quarantined. Pure: no clock, no server.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

LISTED_MAX = 5


class Fate(StrEnum):
    """What became of an acknowledged message."""

    DELIVERED = "delivered"
    CANCELED = "canceled"
    PENDING = "pending"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message as the target got it, by the target's clock in milliseconds."""

    id: str
    at_ms: int


@dataclass(slots=True)
class DelayHistory:
    """What clients saw. Recorded by any thread; checked at the end by verdict_on()."""

    acknowledged: dict[str, int] = field(default_factory=dict)
    """id -> due time."""
    in_doubt: dict[str, int] = field(default_factory=dict)
    """id -> due time of messages whose publish was not answered, or not yet: each may come, or not."""
    canceled: set[str] = field(default_factory=set)
    cancels_in_doubt: set[str] = field(default_factory=set)
    arrivals: list[Arrival] = field(default_factory=list)
    pending: set[str] = field(default_factory=set)
    quarantined: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def publishing(self, dues: Mapping[str, int]) -> None:
        """Record that messages are about to be published."""
        with self.lock:
            self.in_doubt.update(dues)

    def published(self, ids: Iterable[str]) -> None:
        """Record that the publish of these messages was acknowledged."""
        with self.lock:
            for one in ids:
                self.acknowledged[one] = self.in_doubt.pop(one)

    def canceling(self, ids: Iterable[str]) -> None:
        """Record that messages are about to be canceled."""
        with self.lock:
            self.cancels_in_doubt.update(ids)

    def cancel_answered(self, message_id: str, *, is_canceled: bool) -> None:
        """Record the answer to a cancel."""
        with self.lock:
            self.cancels_in_doubt.discard(message_id)
            if is_canceled:
                self.canceled.add(message_id)

    def arrived(self, arrivals: Iterable[Arrival]) -> None:
        """Record arrivals at the target, repetitions too."""
        with self.lock:
            self.arrivals += arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryVerdict:
    """The totals, and each violation in words; a history is right if there is none.

    acknowledged = delivered + canceled + pending + quarantined. `repeated`: arrivals of an id that had arrived before.
    `unacknowledged`: delivered ids whose publish was never answered.
    """

    acknowledged: int
    fates: Mapping[Fate, int]
    repeated: int
    unacknowledged: int
    violations: tuple[str, ...]


def verdict_on(history: DelayHistory) -> HistoryVerdict:
    """Returns the totals and the violations."""
    arrived = Counter(arrival.id for arrival in history.arrivals)
    fates, violations = Counter[Fate](), list[str]()
    lost, several = [], []
    for one in history.acknowledged:
        found = _fates(one, history, arrived)
        fates.update(found[:1])
        if not found:
            lost.append(one)
        elif len(found) > 1:
            several.append(f"{one} ({' and '.join(found)})")
    dues = history.in_doubt | history.acknowledged
    early = [one for one in history.arrivals if one.id in dues and one.at_ms < dues[one.id]]
    _note(violations, lost, "acknowledged and lost")
    _note(violations, several, "with more than one fate")
    _note(violations, [f"{one.id} ({dues[one.id] - one.at_ms} ms)" for one in early], "early")
    _note(violations, sorted(arrived.keys() - dues.keys()), "delivered and never published")
    doubtful = history.canceled - history.acknowledged.keys()
    _note(violations, sorted(doubtful & arrived.keys()), "canceled and delivered, of those whose publish is in doubt")
    return HistoryVerdict(
        acknowledged=len(history.acknowledged),
        fates={fate: fates[fate] for fate in Fate},
        repeated=arrived.total() - len(arrived),
        unacknowledged=len(arrived.keys() & history.in_doubt.keys()),
        violations=tuple(violations),
    )


def _fates(one: str, history: DelayHistory, arrived: Mapping[str, int]) -> list[Fate]:
    fates = [
        fate
        for fate, ids in (
            (Fate.DELIVERED, arrived),
            (Fate.CANCELED, history.canceled),
            (Fate.PENDING, history.pending),
            (Fate.QUARANTINED, history.quarantined),
        )
        if one in ids
    ]
    if not fates and one in history.cancels_in_doubt:
        return [Fate.CANCELED]  # its cancel was not answered, and explains why it is nowhere
    return fates


def _note(violations: list[str], found: list[str], what: str) -> None:
    if found:
        more = f" and {len(found) - LISTED_MAX} more" if len(found) > LISTED_MAX else ""
        violations.append(f"{len(found)} {what}: {', '.join(found[:LISTED_MAX])}{more}")
