"""A topic beside a burst of another: what of it waits for what, by counts of rounds and by events, not by times."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.engine import dispatcher
from outbox_broker.engine.engine import Engine
from outbox_broker.log.storage import DiskStorage
from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.schedule.due_batch import DueBatch
from outbox_broker.schedule.due_queue import CROWD_MESSAGES
from outbox_core.common.clock import ManualClock
from outbox_core.journal.block import Framed, FrameKind, framed
from outbox_core.messages.message import GroupConfig, Message
from tests.outbox_broker.delay.conftest import NOW_MS, Opened, flush, opened, put, timed
from tests.outbox_broker.polling import until

__all__ = ["opened"]
GROUP = "readers"
BATCH = 1_000
type_of_open = Callable[..., Engine]


class HeldHandOuts(DiskStorage):
    """A log, the schedule's by default, is synced no more, once it is held, until it is let go."""

    def __init__(self, log: str = "/schedule/log-") -> None:
        self._log = log
        self.is_held = False
        self.waiting = threading.Event()
        self.free = threading.Event()

    def sync(self, descriptor: int) -> None:
        if self.is_held and self._log in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            self.waiting.set()
            if not self.free.wait(120):
                raise TimeoutError("nobody let the schedule go on")
        super().sync(descriptor)


@pytest.mark.parametrize("is_flushed", [False, True], ids=["in_memory", "in_buckets"])
@pytest.mark.parametrize("rounds_before", [0, 1, 2, 3])
def test_beside_a_burst_a_message_of_another_topic_waits_for_one_long_round_at_the_most(
    opened: Opened, rounds_before: int, *, is_flushed: bool
) -> None:
    schedule = opened.open(batch_messages_max=BATCH, hand_outs_max=100)
    put(schedule, NOW_MS, *(timed(f"burst-{number}", NOW_MS + 10, topic="burst") for number in range(12_000)))
    if is_flushed:
        flush(schedule, NOW_MS)
    for round_ in range(rounds_before):
        _round(schedule, NOW_MS + 10)
        if round_ % 2 == 0:  # so that some rounds come behind a short one
            put(schedule, NOW_MS, timed(f"earlier-{round_}", NOW_MS + 10, topic="other"))

    put(schedule, NOW_MS, timed("other", NOW_MS + 60, topic="other"))
    rounds = [_round(schedule, NOW_MS + 60) for _ in range(2)]

    waited = next(number for number, round_ in enumerate(rounds, 1) if "other" in round_.ids)
    assert sum(len(round_) > 2 * CROWD_MESSAGES for round_ in rounds[:waited]) <= 1


def test_every_other_round_is_long_however_much_comes_beside_a_burst(opened: Opened) -> None:
    schedule = opened.open(batch_messages_max=BATCH, hand_outs_max=100)
    put(schedule, NOW_MS, *(timed(f"burst-{number}", NOW_MS, topic="burst") for number in range(8_000)))
    flush(schedule, NOW_MS)

    sizes = []
    for round_ in range(8):
        put(schedule, NOW_MS, timed(f"other-{round_}", NOW_MS, topic="other"))
        batch = _round(schedule, NOW_MS)
        assert f"other-{round_}" in batch.ids
        sizes.append(len(batch))

    assert sizes == [2 * CROWD_MESSAGES, BATCH] * 4


def test_a_pull_that_waits_does_not_fire_what_is_due_for_others(open_engine: type_of_open, clock: ManualClock) -> None:
    storage = HeldHandOuts()
    engine = open_engine(storage=storage)
    engine.admin.declare_group("other", GROUP, GroupConfig())
    _publish(engine, "burst", "a", deliver_at_ms=clock.now_ms() + 1_000)
    storage.is_held = True
    clock.advance(1_000)
    assert storage.waiting.wait(120)
    try:
        with ThreadPoolExecutor(1) as pool:
            pulling = pool.submit(engine.puller.pull, "other", GROUP, wait_ms=10_000)
            try:
                _publish(engine, "other", "plain")
                assert [one.id for one in pulling.result(timeout=120)] == ["plain"]
                assert (
                    engine.puller.take_at_hand("other", GROUP, max_messages=1, invisible_ms=1_000, dispatches=False)
                    == []
                )
                assert engine.puller.take_at_hand("other", GROUP, max_messages=1, invisible_ms=1_000) is None
            finally:
                storage.free.set()
    finally:
        storage.is_held = False

    assert [one.id for one in engine.puller.pull("burst", GROUP)] == ["a"]


def test_what_is_published_while_copies_are_made_comes_before_them(
    open_engine: type_of_open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    _publish(engine, "t", "first")
    _publish(engine, "t", "due", "due2", deliver_at_ms=clock.now_ms() + 1_000)
    made: list[int] = []

    def copied(kind: FrameKind, numbers: range, payloads: Sequence[bytes]) -> Framed:
        made.append(len(payloads))
        if len(made) == 1:
            _publish(engine, "t", "between")
        return framed(kind, numbers, payloads)

    monkeypatch.setattr(dispatcher, "framed", copied)
    clock.advance(1_000)
    engine.publisher.cancel([])  # fires what is due, as the timer does at about the same time

    found = engine.puller.pull("t", GROUP)
    assert [one.id for one in found] == ["first", "between", "due", "due2"]
    assert made == [2, 2]
    assert engine.settler.ack([one.receipt for one in found]) == ["acked"] * 4
    engine = open_engine()
    assert engine.puller.pull("t", GROUP) == []
    assert {"stored": 4, "scheduled": 0}.items() <= engine.admin.topic_figures("t").items()


def test_one_batch_is_taken_and_one_placed_while_one_is_synced_and_all_come_once_also_after_a_kill(
    open_engine: type_of_open, clock: ManualClock, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = HeldHandOuts("/messages/")
    engine = open_engine(storage=storage, fire_batch_max=3)
    ids = [f"m{number}" for number in range(12)]
    _publish(engine, "burst", *ids, deliver_at_ms=clock.now_ms() + 1_000)
    storage.is_held = True
    taken = _Noted(engine.context.schedule.due, count=3)
    monkeypatch.setattr(engine.context.schedule, "due", taken)
    clock.advance(1_000)

    assert storage.waiting.wait(120)
    try:
        assert taken.is_done.wait(120)
        until(lambda: len(engine.dispatcher.placed) == 2)
        killed = tmp_path / "killed"
        shutil.copytree(folder, killed)
        assert [one.batch.ids for one in engine.dispatcher.placed] == [ids[:3], ids[3:6]]
        assert [one.ids for one in taken.found] == [ids[:3], ids[3:6], ids[6:9]]
    finally:
        storage.is_held = False
        storage.free.set()

    assert _pulled(engine, "burst", 12) == ids
    engine.close()
    engine = Engine.open(killed, clock=clock)
    try:
        assert _pulled(engine, "burst", 12) == ids
        assert {"stored": 12, "scheduled": 0}.items() <= engine.admin.topic_figures("burst").items()
    finally:
        engine.close()


class _Noted:
    """A function, what it returned, and when it did so many times."""

    def __init__(self, function: Callable[..., Any], *, count: int) -> None:
        self._function = function
        self._count = count
        self.found: list[Any] = []
        self.is_done = threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        found = self._function(*arguments)
        self.found.append(found)
        if len(self.found) == self._count:
            self.is_done.set()
        return found


def _pulled(engine: Engine, topic: str, count: int) -> list[str]:
    """The ids of so many messages, in the order in which they come."""
    came: list[str] = []
    for _ in range(count):
        deliveries = engine.puller.pull(topic, GROUP, wait_ms=10_000)
        engine.settler.ack([one.receipt for one in deliveries])
        came += [one.id for one in deliveries]
        if len(came) >= count:
            break
    return came


def _round(schedule: DelayStore, now_ms: int) -> DueBatch:
    batch = schedule.due(now_ms)
    assert batch is not None
    return batch


def _publish(engine: Engine, topic: str, *ids: str, deliver_at_ms: int | None = None) -> None:
    results = engine.publisher.publish(
        [Message(id=one, topic=topic, body=b"b", deliver_at_ms=deliver_at_ms) for one in ids]
    )
    assert {str(one.status) for one in results} == {"stored"}
