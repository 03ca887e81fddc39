"""A schedule on ledgers whose deposed owners go on calling: random histories against the rules of ownership."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from outbox_broker.schedule.delay_store import DelayOptions, DelayStore, TimedMessage
from outbox_broker.segments.port import WriterFenced
from outbox_core.common.errors import StorageFailed
from tests.outbox_broker.delay.conftest import DAY_MS, HOUR_MS, MINUTE_MS, NOW_MS, SECOND_MS, Opened, timed
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster
from tests.outbox_broker.segments.memory_ledgers import Faults

HISTORIES = 300
FAST_HISTORIES = 40
CALLS = 60
OPTIONS = DelayOptions(
    memory_messages_max=9, batch_messages_max=3, hand_outs_max=2, log_bytes_max=4_000, bucket_writers_max=4
)
AHEAD_MS = (0, 5 * SECOND_MS, MINUTE_MS, 2 * HOUR_MS, 3 * DAY_MS, 30 * DAY_MS, 400 * DAY_MS)
PASSING_MS = (SECOND_MS, HOUR_MS, DAY_MS, 20 * DAY_MS)
FAULTS = Faults(lost=0.01, unknown_outcome=0.05, create_fails=0.01, disguised_fence=0.1)


@dataclass(slots=True)
class History:
    """What the callers were answered."""

    stored: set[str] = field(default_factory=set)
    canceled: set[str] = field(default_factory=set)
    in_doubt: set[str] = field(default_factory=set)
    fired: dict[str, set[int]] = field(default_factory=dict)
    """The batches in which each id was dispatched, by their numbers: a repeated batch has the same."""
    late: list[str] = field(default_factory=list)
    """Dispatched by an owner after the opening of another."""
    settled: set[int] = field(default_factory=set)
    repeated: list[int] = field(default_factory=list)
    refused: int = 0


class Owners:
    """Processes that each believe they own the shard. The last one does."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cluster = LedgerCluster(seed, FAULTS)
        self.now_ms = NOW_MS
        self.made = 0
        self.history = History()
        self.opened: list[DelayStore] = []

    def open(self) -> None:
        while True:
            try:
                store = self.cluster.open(manifest_changes_max=12)
                self.opened.append(DelayStore.open(store, options=OPTIONS))
            except StorageFailed:
                continue
            return

    def call(self) -> None:
        owner = self.random.choice(self.opened[-2:])
        acts = (
            [self.schedule] * 9 + [self.cancel] * 2 + [self.dispatch] * 4 + [self.pass_time] * 2 + [self.maintain] * 2
        )
        try:
            self.random.choice(acts)(owner)
        except StorageFailed:
            self.history.refused += 1
            if owner is self.opened[-1]:
                self.open()
        if self.random.random() < 0.07:
            self.open()

    def schedule(self, owner: DelayStore) -> None:
        batch: list[TimedMessage] = []
        for _ in range(self.random.randint(1, 4)):
            self.made += 1
            batch.append(timed(f"m{self.made}", self.now_ms + self.random.choice(AHEAD_MS)))
        assert set(owner.schedule(batch, now_ms=self.now_ms)) == {"stored"}
        self.history.stored |= {one.id for one in batch}

    def cancel(self, owner: DelayStore) -> None:
        if self.history.stored:
            chosen = self.random.choice(sorted(self.history.stored))
            self.history.in_doubt.add(chosen)
            [status] = owner.cancel([chosen], now_ms=self.now_ms)
            self.history.in_doubt.discard(chosen)
            if status == "canceled":
                self.history.canceled.add(chosen)

    def dispatch(self, owner: DelayStore) -> None:
        batch = owner.due(self.now_ms)
        if batch is None:
            return
        if owner is not self.opened[-1]:
            self.history.late += batch.ids
        if batch.number in self.history.settled:
            self.history.repeated.append(batch.number)
        for message in batch.messages:
            assert message.due_ms <= self.now_ms
            assert message == timed(message.id, message.due_ms)
            self.history.fired.setdefault(message.id, set()).add(batch.number)
        if self.random.random() < 0.8:
            owner.fired(batch.number)
            owner.commit()
            self.history.settled.add(batch.number)

    def pass_time(self, owner: DelayStore) -> None:
        self.now_ms += self.random.choice(PASSING_MS)
        owner.housekeeping.step(self.now_ms)

    def maintain(self, owner: DelayStore) -> None:
        owner.housekeeping.step(self.now_ms)

    def finish(self) -> None:
        """The last owner dispatches everything that is left."""
        self.cluster.ledgers.faults = Faults()
        self.open()
        self.now_ms += 800 * DAY_MS
        owner = self.opened[-1]
        while True:
            batch = owner.due(self.now_ms)
            if batch is not None:
                assert batch.number not in self.history.settled
                for message_id in batch.ids:
                    self.history.fired.setdefault(message_id, set()).add(batch.number)
                owner.fired(batch.number)
            elif not owner.housekeeping.step(self.now_ms) and not owner.is_due(self.now_ms):
                return


@pytest.mark.parametrize(
    "seed",
    [
        *range(FAST_HISTORIES),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FAST_HISTORIES, HISTORIES)),
    ],
)
def test_a_deposed_owner_that_goes_on_calling_neither_loses_nor_repeats(seed: int) -> None:
    owners = Owners(seed)
    owners.open()

    for _ in range(CALLS):
        owners.call()
    owners.finish()

    history = owners.history
    assert history.stored - history.canceled - history.in_doubt <= history.fired.keys()
    assert not history.canceled & history.fired.keys()
    assert {one for one, batches in history.fired.items() if len(batches) > 1} == set()
    assert history.late == []
    assert history.repeated == []


def test_an_owner_that_was_replaced_does_not_hand_out_an_unsettled_batch_again() -> None:
    cluster = LedgerCluster()
    first = DelayStore.open(cluster.open())
    first.schedule([timed("a", NOW_MS)], now_ms=NOW_MS)
    assert first.due(NOW_MS) is not None
    second = DelayStore.open(cluster.open())
    third = DelayStore.open(cluster.open())

    with pytest.raises(WriterFenced):
        second.due(NOW_MS)
    again = third.due(NOW_MS)

    assert again is not None
    assert again.ids == ["a"]


def test_a_batch_whose_dispatch_could_not_be_confirmed_comes_once_after_the_reopening() -> None:
    cluster = LedgerCluster()
    owner = DelayStore.open(cluster.open())
    owner.schedule([timed("a", NOW_MS)], now_ms=NOW_MS)
    cluster.ledgers.faults.lost = 1.0
    with pytest.raises(StorageFailed):
        owner.due(NOW_MS)
    cluster.ledgers.faults.lost = 0.0

    owner = DelayStore.open(cluster.open())
    batch = owner.due(NOW_MS)

    assert batch is not None
    assert batch.ids == ["a"]
    assert owner.due(NOW_MS) is None


def test_a_batch_that_is_settled_before_it_is_handed_out_again_does_not_come(opened: Opened) -> None:
    owner = opened.open()
    owner.schedule([timed("a", NOW_MS), timed("b", NOW_MS + HOUR_MS)], now_ms=NOW_MS)
    batch = owner.due(NOW_MS)
    assert batch is not None
    owner = opened.open()

    owner.fired(batch.number)

    assert owner.due(NOW_MS) is None
    later = owner.due(NOW_MS + HOUR_MS)
    assert later is not None
    assert later.ids == ["b"]
