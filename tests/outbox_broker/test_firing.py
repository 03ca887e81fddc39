"""The steps of firing fail one by one: what was placed is ended before more is placed, and comes once all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager

import pytest

from outbox_broker.engine import dispatcher
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import Framed, FrameKind, framed
from outbox_core.messages.message import GroupConfig, Message
from tests.outbox_broker.failing_storage import FailingStorage
from tests.outbox_broker.polling import until

TOPIC, GROUP = "orders", "billing"
BATCH = 3
IDS = [f"m{number}" for number in range(5 * BATCH)]
type_of_open = Callable[..., Engine]


class Refusing:
    """The schedule settles nothing, and says so once so many batches were placed."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, placed: int) -> None:
        self._dispatcher = engine.dispatcher
        self._placed = placed
        self._settle = engine.context.schedule.fired
        self.refused = threading.Event()
        self.is_refusing = True
        monkeypatch.setattr(engine.context.schedule, "fired", self.settle)

    def settle(self, number: int) -> None:
        if self.is_refusing:
            until(lambda: len(self._dispatcher.placed) >= self._placed or self.refused.is_set())
            self.refused.set()
            raise StorageFailed("the schedule is refusing")
        self._settle(number)


class CopyingOnce:
    """The messages of one batch are copied for the message log, and no more: so no more are placed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_left = True
        self.refused = threading.Event()
        monkeypatch.setattr(dispatcher, "framed", self.copy)

    def copy(self, kind: FrameKind, numbers: range, payloads: Sequence[bytes]) -> Framed:
        if not self._is_left:
            self.refused.set()
            raise StorageFailed("the message log is refusing")
        self._is_left = False
        return framed(kind, numbers, payloads)


def test_while_what_is_placed_cannot_be_ended_nothing_more_is_placed_and_then_all_comes_in_order(
    open_engine: type_of_open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(fire_batch_max=BATCH)
    refusing = Refusing(engine, monkeypatch, placed=2)
    _schedule(engine, clock)
    clock.advance(1_000)
    assert refusing.refused.wait(120)
    engine.dispatcher.dispatch_unless_disk_is_full()  # returns when the ending that runs beside has failed, too

    placed = [one.batch.ids for one in engine.dispatcher.placed]
    for _ in range(5):
        engine.dispatcher.dispatch_unless_disk_is_full()
    assert [one.batch.ids for one in engine.dispatcher.placed] == placed
    # The third is placed where the ending of the second has not begun yet when the first one's has failed.
    assert placed in ([IDS[:BATCH], IDS[BATCH : 2 * BATCH]], [IDS[at : at + BATCH] for at in (0, BATCH, 2 * BATCH)])
    refusing.is_refusing = False

    assert _pulled(engine) == IDS
    assert not engine.dispatcher.has_taken()


def test_batches_placed_before_a_kill_are_delivered_once_over_a_checkpoint_between_their_settlements(
    open_engine: type_of_open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(fire_batch_max=BATCH, dedup_messages_max=1)
    with monkeypatch.context() as patched:
        refusing = Refusing(engine, patched, placed=2)
        _schedule(engine, clock)
        clock.advance(1_000)
        assert refusing.refused.wait(120)
        engine.close()

    with monkeypatch.context() as patched:
        placing = CopyingOnce(patched)
        engine = open_engine(fire_batch_max=BATCH, dedup_messages_max=1)
        assert placing.refused.wait(120)
        with engine.context.lock:
            engine.writer.write_checkpoint()
        engine.close()
    engine = open_engine(fire_batch_max=BATCH, dedup_messages_max=1)

    assert _pulled(engine) == IDS
    assert {"stored": len(IDS), "scheduled": 0}.items() <= engine.admin.topic_figures(TOPIC).items()


def test_a_message_that_is_just_due_is_counted_in_one_of_scheduled_and_backlog_at_each_step(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    storage, arrived, go_on = FailingStorage(), threading.Semaphore(0), threading.Semaphore(0)
    engine = open_engine(storage=storage, fire_batch_max=BATCH)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    _schedule(engine, clock)

    def wait_for_look(call: str) -> None:
        if call == "sync":
            arrived.release()
            assert go_on.acquire(timeout=120)

    def counted() -> list[int]:
        figures = [engine.admin.topic_figures(TOPIC), engine.admin.group_figures(TOPIC, GROUP)]
        return [one["scheduled"] + one["backlog"] for one in figures]

    seen: list[list[int]] = []
    storage.before = wait_for_look
    clock.advance(1_000)
    while engine.admin.topic_figures(TOPIC)["stored"] < len(IDS) or engine.dispatcher.has_taken():
        if arrived.acquire(timeout=0.01):
            seen.append(counted())
            go_on.release()
    storage.mend()
    go_on.release(100)

    assert len(seen) >= len(IDS) / BATCH, "a claim is synced before its batch is placed"
    assert seen == [[len(IDS), len(IDS)]] * len(seen)


def test_what_was_placed_before_a_kill_is_not_scheduled_any_more(
    open_engine: type_of_open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(fire_batch_max=len(IDS))
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    with monkeypatch.context() as patched:
        refusing = Refusing(engine, patched, placed=1)
        _schedule(engine, clock)
        clock.advance(1_000)
        assert refusing.refused.wait(120)
        engine.close()

    with monkeypatch.context() as patched:
        patched.setattr(dispatcher.Dispatcher, "dispatch_due", lambda *_, **__: False)
        engine = open_engine(fire_batch_max=len(IDS))
        figures = engine.admin.group_figures(TOPIC, GROUP)

    assert (figures["scheduled"], figures["backlog"]) == (0, len(IDS))


def test_what_the_schedule_has_not_settled_is_not_dropped_with_old_segments_and_comes_once(
    open_engine: type_of_open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"fire_batch_max": len(IDS), "segment_bytes": 4096, "retention_ms": 1, "retention_check_ms": 10**15}
    engine = open_engine(**options)
    with monkeypatch.context() as patched:
        refusing = Refusing(engine, patched, placed=1)
        _schedule(engine, clock)
        clock.advance(1_000)
        assert refusing.refused.wait(120)
        before = _pulled(engine)
        for number in range(3):
            engine.publisher.publish([Message(id=f"later{number}", topic=TOPIC, body=b"b" * 4096)])
            clock.advance(1_000)
        later = _pulled(engine)
        engine.retention.drop_outdated()
        engine.close()

    engine = open_engine(**options)
    until(lambda: not engine.dispatcher.has_taken())
    again = _pulled(engine)

    assert (before, later) == (IDS, ["later0", "later1", "later2"])
    assert again == []
    assert engine.retention.drop_outdated() > 0


def test_an_interrupt_while_the_next_batch_is_claimed_loses_no_batch(
    open_engine: type_of_open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(fire_batch_max=BATCH)

    def interrupted(claims: Sequence[Future[object]]) -> None:
        wait(claims)
        monkeypatch.setattr(dispatcher, "wait", wait)
        raise KeyboardInterrupt

    _schedule(engine, clock)
    with _timer_held(engine, clock):  # it does not dispatch before this thread
        clock.advance(1_000)
        engine.dispatcher.dispatch_due()
        monkeypatch.setattr(dispatcher, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.dispatcher.dispatch_due()

    assert _pulled(engine) == IDS


def test_a_broker_that_cannot_dispatch_is_not_ready_and_says_why(
    open_engine: type_of_open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(fire_batch_max=BATCH)
    refusing = Refusing(engine, monkeypatch, placed=1)
    _schedule(engine, clock)
    clock.advance(1_000)
    assert refusing.refused.wait(120)
    until(lambda: not _is_ready(engine))

    with pytest.raises(StorageFailed, match="due messages are not dispatched: the schedule is refusing"):
        engine.check_ready()

    refusing.is_refusing = False
    assert _pulled(engine) == IDS
    until(lambda: _is_ready(engine))


@contextmanager
def _timer_held(engine: Engine, clock: ManualClock) -> Iterator[None]:
    """Hold the engine's lock while the timer's thread waits for it or for the clock, not while it looks what is due."""
    with ExitStack() as stack:

        def waits() -> bool:
            stack.enter_context(engine.context.lock)
            if not clock.is_waited_on(engine.wakeups.changed):
                stack.close()
                return False
            return True

        until(waits)
        yield


def _is_ready(engine: Engine) -> bool:
    try:
        engine.check_ready()
    except StorageFailed:
        return False
    return True


def _schedule(engine: Engine, clock: ManualClock) -> None:
    due_ms = clock.now_ms() + 1_000
    results = engine.publisher.publish([Message(id=one, topic=TOPIC, body=b"b", deliver_at_ms=due_ms) for one in IDS])
    assert {str(one.status) for one in results} == {"stored"}


def _pulled(engine: Engine) -> list[str]:
    """All that comes, settled; twice what is delivered twice."""
    came: list[str] = []
    while found := engine.puller.pull(TOPIC, GROUP, max_messages=1_000):
        engine.settler.ack([one.receipt for one in found])
        came += [one.id for one in found]
    return came
