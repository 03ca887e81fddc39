"""The steps of firing fail one by one: what was placed is ended before more is placed, and comes once all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from outbox_broker.engine.dispatcher import Copies, Dispatcher, Placed
from outbox_broker.engine.engine import Engine
from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.schedule.due_batch import DueBatch
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import StorageFailed
from outbox_core.messages.message import Message

TOPIC, GROUP = "orders", "billing"
BATCH = 3
IDS = [f"m{number}" for number in range(5 * BATCH)]
type_of_open = Callable[..., Engine]


class Refusing:
    """The schedule settles nothing, and says so once so many batches were placed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, placed: int) -> None:
        self._left = placed
        self._are_placed = threading.Event()
        self._settle, self._end_beside = DelayStore.fired, Dispatcher._end_beside
        self.refused = threading.Event()
        self.is_refusing = True
        # Lambdas, since a bound method would not be given whose it is.
        monkeypatch.setattr(DelayStore, "fired", lambda schedule, number: self.settle(schedule, number))  # noqa: PLW0108
        monkeypatch.setattr(Dispatcher, "_end_beside", lambda firing: self.end_beside(firing))  # noqa: PLW0108

    def settle(self, schedule: DelayStore, number: int) -> None:
        if self.is_refusing:
            if not self._are_placed.wait(120):
                raise TimeoutError("so many batches were not placed")
            self.refused.set()
            raise StorageFailed("the schedule is refusing")
        self._settle(schedule, number)

    def end_beside(self, firing: Dispatcher) -> None:
        self._left -= 1
        if self._left == 0:
            self._are_placed.set()
        self._end_beside(firing)


class PlacingOnce:
    """The message log takes one batch, and no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._place = Dispatcher._place_due
        self._is_left = True
        self.refused = threading.Event()
        monkeypatch.setattr(Dispatcher, "_place_due", lambda *arguments: self.place(*arguments))  # noqa: PLW0108

    def place(self, firing: Dispatcher, batch: DueBatch, copies: Copies) -> Placed:
        if not self._is_left:
            self.refused.set()
            raise StorageFailed("the message log is refusing")
        self._is_left = False
        return self._place(firing, batch, copies)


def test_while_what_is_placed_cannot_be_ended_nothing_more_is_placed_and_then_all_comes_in_order(
    open_engine: type_of_open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(fire_batch_max=BATCH)
    refusing = Refusing(monkeypatch, placed=2)
    _schedule(engine, clock)
    clock.advance(1_000)
    assert refusing.refused.wait(120)

    for _ in range(5):
        engine.dispatcher.fire_what_can_be()
    assert [one.batch.ids for one in engine.dispatcher.placed] == [IDS[:BATCH], IDS[BATCH : 2 * BATCH]]
    refusing.is_refusing = False

    assert _pulled(engine) == IDS
    assert not engine.dispatcher.has_taken()


def test_batches_placed_before_a_kill_are_delivered_once_over_a_checkpoint_between_their_settlements(
    open_engine: type_of_open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(fire_batch_max=BATCH, dedup_messages_max=1)
    with monkeypatch.context() as patched:
        refusing = Refusing(patched, placed=2)
        _schedule(engine, clock)
        clock.advance(1_000)
        assert refusing.refused.wait(120)
        engine.close()

    with monkeypatch.context() as patched:
        placing = PlacingOnce(patched)
        engine = open_engine(fire_batch_max=BATCH, dedup_messages_max=1)
        assert placing.refused.wait(120)
        with engine.context.lock:
            engine.writer.write_checkpoint()
        engine.close()
    engine = open_engine(fire_batch_max=BATCH, dedup_messages_max=1)

    assert _pulled(engine) == IDS
    assert {"stored": len(IDS), "scheduled": 0}.items() <= engine.topic_figures(TOPIC).items()


def _schedule(engine: Engine, clock: ManualClock) -> None:
    due_ms = clock.now_ms() + 1_000
    results = engine.publish([Message(id=one, topic=TOPIC, body=b"b", deliver_at_ms=due_ms) for one in IDS])
    assert {str(one.status) for one in results} == {"stored"}


def _pulled(engine: Engine) -> list[str]:
    """All that comes, settled; twice what is delivered twice."""
    came: list[str] = []
    while found := engine.pull(TOPIC, GROUP, max_messages=1_000):
        engine.ack([one.receipt for one in found])
        came += [one.id for one in found]
    return came
