"""No dispatched batch stays unsettled for ever, whichever call of the disk or of the target fails, and for how long."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
from msgspec import structs

from outbox_broker.delay_service.target_publisher import PARKED_AGAIN_MS
from outbox_broker.schedule.delay_store import TimedMessage
from outbox_broker.schedule.schedule_runner import DeliveryOutcome, ScheduleRunner
from outbox_broker.segments.local import LocalSegments
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import BrokerUnavailable, StorageFailed
from tests.outbox_broker.delay.conftest import (
    HOUR_MS,
    MINUTE_MS,
    NOW_MS,
    SECOND_MS,
    Opened,
    flush,
    put,
    recorded,
    settle,
    timed,
)
from tests.outbox_broker.delay.failing_disk import Killed
from tests.outbox_broker.failing_storage import FailingStorage

ROUNDS_MS = (*[SECOND_MS] * 4, *[20 * SECOND_MS] * 6, *[20 * MINUTE_MS] * 6, *[HOUR_MS] * 3)
OUTCOMES = ("delivered", "out", "defect", "refused", "no room to settle", "killed")
SMALL = {
    "memory_messages_max": 8, "batch_messages_max": 3, "hand_outs_max": 2, "expand_messages_max": 4,
    "log_bytes_max": 2_000, "index_pieces_max": 3, "index_merged_pieces_max": 2,
}  # fmt: skip


class Target:
    """Takes what is due, after the outcomes that it is told."""

    def __init__(self, disk: FailingStorage) -> None:
        self.came: list[str] = []
        self.outcomes: list[str] = []
        self._disk = disk

    def __call__(self, batch: Sequence[TimedMessage]) -> DeliveryOutcome:
        outcome = self.outcomes.pop(0) if self.outcomes else "delivered"
        if outcome == "out":
            raise BrokerUnavailable("out")
        if outcome == "defect":
            raise ZeroDivisionError("a defect of the target's client")
        if outcome == "refused":
            return DeliveryOutcome(again=[structs.replace(one, due_ms=one.due_ms + HOUR_MS) for one in batch])
        self.came += [one.id for one in batch]
        if outcome == "killed":
            raise Killed
        if outcome == "no room to settle":
            self._disk.fail("write", errno.ENOSPC)
        return DeliveryOutcome()


class Fixture:
    """A delay service on a disk that can fail, turned by hand."""

    def __init__(self, folder: Path) -> None:
        self.disk = FailingStorage()
        self.clock = ManualClock(NOW_MS)
        self.target = Target(self.disk)
        self.opened = Opened(folder, opener=self._open_store)
        self.opened.defaults = SMALL
        self.restart()

    def restart(self) -> None:
        """As a kill, and a start."""
        self.disk.mend()
        self.schedule = self.opened.open()
        self.service = ScheduleRunner(self.schedule, deliver=self.target, clock=self.clock)

    def round(self, pass_ms: int) -> None:
        """Time passes, and both threads do what they can."""
        self.clock.advance(pass_ms)
        for turn in (self.service.turn, self.service.keep):
            for _ in range(12):
                try:
                    if turn():
                        break
                except Exception:  # the thread logs it, and waits
                    break

    def rounds(self) -> None:
        for pass_ms in ROUNDS_MS:
            self.round(pass_ms)

    def unsettled(self) -> list[int]:
        """The batches that were dispatched and not settled, as the log says."""
        return list(recorded(self.opened).hand_outs)

    def _open_store(self) -> LocalSegments:
        return LocalSegments.open(self.opened.folder, storage=self.disk, open_files_max=2)


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    one = Fixture(tmp_path / "delay")
    yield one
    one.opened.drop()


def fill(fixture: Fixture) -> set[str]:
    """Messages in memory and in buckets of minutes and hours, some canceled; returns those to be delivered."""
    ahead_ms = {"s": 2 * SECOND_MS, "c": 30 * SECOND_MS, "m": 90 * SECOND_MS, "h": 3 * HOUR_MS, "i": 4 * HOUR_MS}
    for name, ms in ahead_ms.items():
        put(fixture.schedule, NOW_MS, *(timed(f"{name}{number}", NOW_MS + ms + number) for number in range(7)))
        flush(fixture.schedule, NOW_MS)
    canceled = [f"c{number}" for number in range(7)] + ["m3", "h0"]
    assert set(fixture.schedule.cancel(canceled, now_ms=NOW_MS)) == {"canceled"}
    put(fixture.schedule, NOW_MS, *(timed(f"n{number}", NOW_MS + 40 * SECOND_MS) for number in range(4)))
    settle(fixture.schedule, NOW_MS)
    names = {f"{name}{number}" for name in ahead_ms for number in range(7)} | {f"n{number}" for number in range(4)}
    return names - set(canceled)


def test_more_batches_than_may_be_unsettled_are_delivered_once_on_a_disk_with_no_room_to_settle_them(
    fixture: Fixture,
) -> None:
    put(fixture.schedule, NOW_MS, *(timed(f"m{number:02}", NOW_MS) for number in range(30)))
    fixture.target.outcomes = ["no room to settle"] * 10
    for _ in range(60):
        fixture.round(31 * SECOND_MS)
        fixture.disk.mend()

    assert fixture.target.came == [f"m{number:02}" for number in range(30)]
    assert fixture.unsettled() == []


def test_while_a_batch_cannot_be_settled_the_service_is_not_ready_and_says_why_and_what_to_do(fixture: Fixture) -> None:
    put(fixture.schedule, NOW_MS, timed("a", NOW_MS))
    fixture.target.outcomes = ["no room to settle"]
    fixture.round(0)

    with pytest.raises(StorageFailed, match=r"due messages are not dispatched.*No space left.*free some disk space"):
        fixture.service.check_ready()

    fixture.disk.mend()
    fixture.round(SECOND_MS)
    fixture.service.check_ready()
    assert (fixture.target.came, fixture.unsettled()) == (["a"], [])


def test_after_a_failed_sync_nothing_is_dispatched_any_more_the_cure_is_told_and_a_restart_delivers_all(
    fixture: Fixture,
) -> None:
    promised = fill(fixture)
    fixture.target.outcomes = ["out"]
    fixture.round(3 * SECOND_MS)
    fixture.disk.fail("sync", errno.EIO)
    with pytest.raises(StorageFailed):
        fixture.schedule.cancel(["nobody"], now_ms=NOW_MS)
    fixture.disk.mend()

    fixture.rounds()
    with pytest.raises(StorageFailed, match=r"due messages are not dispatched.*until the broker is restarted"):
        fixture.service.check_ready()
    assert fixture.target.came == []
    fixture.restart()
    fixture.rounds()

    assert Counter(fixture.target.came) == Counter(promised)
    assert fixture.unsettled() == []


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, 7])
def test_whichever_call_of_the_disk_is_refused_all_is_delivered_once_and_settled_without_a_restart(
    tmp_path: Path, random_seed: int, calls: int
) -> None:
    total = calls_of_a_run(tmp_path / "whole")
    for first in random.Random(random_seed).sample(range(total), k=min(total, 80)):
        fixture = Fixture(tmp_path / f"{first}")
        promised = fill(fixture)
        refuse(fixture.disk, first=first, calls=calls)
        fixture.rounds()
        fixture.disk.mend()
        fixture.rounds()

        assert Counter(fixture.target.came) == Counter(promised), f"calls {first} to {first + calls - 1} are refused"
        assert fixture.unsettled() == [], f"calls {first} to {first + calls - 1} are refused"
        fixture.service.check_ready()
        fixture.opened.drop()


@pytest.mark.parametrize("first", OUTCOMES)
def test_whatever_becomes_of_a_batch_it_is_delivered_and_settled(tmp_path: Path, first: str) -> None:
    promised = {f"m{number}" for number in range(7)}
    for number, later in enumerate(product(OUTCOMES, repeat=2)):
        fixture = Fixture(tmp_path / f"{number}")
        put(fixture.schedule, NOW_MS, *(timed(one, NOW_MS) for one in sorted(promised)))
        fixture.target.outcomes = [first, *later]
        for _ in range(12):
            try:
                fixture.round(PARKED_AGAIN_MS)
            except Killed:
                fixture.restart()
            fixture.disk.mend()

        assert set(fixture.target.came) == promised, [first, *later]
        assert len(fixture.target.came) == len(promised) or "killed" in [first, *later]
        assert fixture.unsettled() == [], [first, *later]
        fixture.opened.drop()


def calls_of_a_run(folder: Path) -> int:
    """How many calls of the disk a whole run makes, but for syncs."""
    fixture = Fixture(folder)
    fill(fixture)
    before = len(fixture.disk.calls)
    fixture.rounds()
    fixture.opened.drop()
    return sum(not call.startswith("sync") for call in fixture.disk.calls[before:])


def refuse(disk: FailingStorage, *, first: int, calls: int) -> None:
    """Refuse some of the next calls, but for syncs, whose failure is final."""
    made = 0

    def before(call: str) -> None:
        nonlocal made
        if not call.startswith("sync"):
            made += 1
            if first < made <= first + calls:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.before = before
