"""Whenever the process is killed or the power fails: what was answered holds, and nothing is invented."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from outbox_broker.schedule.delay_store import DelayStore
from outbox_core.messages.message import CancelStatus
from tests.outbox_broker.delay.conftest import DAY_MS, HOUR_MS, MINUTE_MS, NOW_MS, Opened, drain, flush, settle, timed
from tests.outbox_broker.delay.failing_disk import Killed, KillingDisk

OPTIONS = {"memory_messages_max": 8, "batch_messages_max": 3, "expand_messages_max": 3, "hand_outs_max": 3}
AHEAD_MS = [0, 5, 70_000, 3 * HOUR_MS, 50 * HOUR_MS, 16 * DAY_MS, 30 * DAY_MS, 30 * DAY_MS + 1, 700 * DAY_MS]
CALLS_MAX = 2_000
STRIDE = 5


@dataclass
class Told:
    """What a killed process had asked for and been answered."""

    asked: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    cancel_asked: set[str] = field(default_factory=set)
    canceled: set[str] = field(default_factory=set)
    too_late: set[str] = field(default_factory=set)
    out: set[str] = field(default_factory=set)
    fired: set[str] = field(default_factory=set)
    now_ms: int = NOW_MS


class Client:
    """Uses a schedule, and keeps what it was told."""

    def __init__(self, schedule: DelayStore, told: Told) -> None:
        self.schedule = schedule
        self.told = told

    def put(self, prefix: str) -> None:
        batch = [timed(f"{prefix}{number}", self.told.now_ms + one) for number, one in enumerate(AHEAD_MS)]
        self.told.asked |= {message.id for message in batch}
        self.schedule.schedule(batch, now_ms=self.told.now_ms)
        self.told.stored |= {message.id for message in batch}

    def cancel(self, *ids: str) -> None:
        self.told.cancel_asked |= set(ids)
        for one, status in zip(ids, self.schedule.cancel(ids, now_ms=self.told.now_ms), strict=True):
            (self.told.too_late if status is CancelStatus.TOO_LATE else self.told.canceled).add(one)

    def take(self, *, count_max: int = 100, settles: bool = True) -> None:
        for _ in range(count_max):
            batch = self.schedule.due(self.told.now_ms)
            if batch is None:
                return
            ids = {message.id for message in batch.messages}
            assert all(message.due_ms <= self.told.now_ms for message in batch.messages)
            assert not ids & self.told.fired
            self.told.out |= ids
            if settles:
                self.schedule.fired(batch.number)
                self.told.fired |= ids

    def pass_time(self, ms: int) -> None:
        self.told.now_ms += ms
        settle(self.schedule, self.told.now_ms)


def story(client: Client) -> None:
    """Every kind of change, over every level."""
    client.put("a")
    client.cancel("a2", "a6", "early0")
    client.put("b")
    client.take(count_max=1, settles=False)
    client.put("early")
    client.pass_time(MINUTE_MS)
    client.cancel("b0", "b5", "a8")
    client.take()
    client.pass_time(3 * HOUR_MS)
    client.take(count_max=1)
    client.put("c")
    client.cancel("c5")
    client.pass_time(10 * DAY_MS)
    client.take()
    flush(client.schedule, client.told.now_ms)
    client.pass_time(10 * DAY_MS)
    client.cancel("a7", "b1", "c7")
    client.take(count_max=2, settles=False)
    client.pass_time(9 * DAY_MS)
    client.put("d")
    client.pass_time(DAY_MS)
    client.take()
    client.schedule.close()


def check(opened: Opened, told: Told) -> None:
    """Open what the killed process left behind, and hold it against what it was told."""
    schedule = opened.open()
    again = {one: status for one in told.too_late for status in schedule.cancel([one], now_ms=told.now_ms)}
    assert set(again.values()) <= {CancelStatus.TOO_LATE}
    assert CancelStatus.CANCELED not in schedule.cancel(sorted(told.out), now_ms=told.now_ms), "delivered, and canceled"
    settle(schedule, told.now_ms)
    late = drain(schedule, told.now_ms)
    after = drain(schedule, told.now_ms + 731 * DAY_MS)
    came = [*late, *after]

    assert len(came) == len(set(came))
    assert not set(came) & told.canceled, "canceled, and delivered"
    assert not told.out & told.canceled, "delivered, and canceled"
    assert set(came) <= told.asked
    assert told.stored - told.cancel_asked - told.fired <= set(came), "stored, and lost"
    assert told.too_late - told.fired <= set(came), "too late, and lost"
    assert told.out - told.fired <= set(came), "handed out, not settled, and lost"
    schedule.close()
    assert opened.open().queries.count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["before", "half", "power"])
def test_whatever_call_to_the_disk_is_the_last_one(opened: Opened, way: str, random_seed: int) -> None:
    opened.defaults = {"index_pieces_max": 3, "index_merged_pieces_max": 2}
    root = opened.folder
    for at in range(1 + random_seed % STRIDE, CALLS_MAX, STRIDE):  # every call within a few runs of the suite
        told, disk = Told(), KillingDisk(at=at, way=way)
        opened.folder = root / f"{way}-{at}"
        try:
            story(Client(opened.open(storage=disk, **OPTIONS), told))
        except Killed:
            check(opened, told)
        else:
            assert at > 200, "the story is longer than this"
            return
    pytest.fail(f"the story did not end within {CALLS_MAX} calls")


@pytest.mark.slow
def test_killed_again_while_it_recovers(opened: Opened, random_seed: int) -> None:
    root = opened.folder
    for at in range(40, 400, 20):
        told = Told()
        opened.folder = root / f"{at}"
        disk = KillingDisk(at=at + random_seed % 20, way="power")
        try:
            story(Client(opened.open(storage=disk, **OPTIONS), told))
        except Killed:
            for again in range(1, 8):
                try:
                    settle(opened.open(storage=KillingDisk(at=again, way="half")), told.now_ms)
                except Killed:
                    continue
            check(opened, told)
