"""stop(): one deadline for everything, what did not end in time is named, and nothing that ended stays open."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Delivery, consumer
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox_core import ExtendStatus
from outbox_core.runtime.logs import event_name
from tests.outbox.shop import Payment, Shop
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker, message

Running = Callable[..., ConsumerRunner]


def stopped(runner: ConsumerRunner, *, timeout_seconds: float = WAIT_SECONDS) -> bool:
    """What stop() returns; fails if it does not return."""
    returned: list[bool] = []
    caller = threading.Thread(target=lambda: returned.append(runner.stop(timeout_seconds=timeout_seconds)), daemon=True)
    caller.start()
    caller.join(WAIT_SECONDS / 5)
    assert returned, "stop() did not return"
    return returned[0]


def records(caplog: pytest.LogCaptureFixture, name: str) -> list[Any]:
    return [record for record in caplog.records if event_name(record) == name]


def async_url(shop: Shop) -> str:
    return shop.database.url.replace("sqlite://", "sqlite+aiosqlite://")


class HangingBroker(WatchedBroker):
    """A broker whose close() waits."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_close = threading.Event()

    def close(self) -> None:
        assert self.may_close.wait(WAIT_SECONDS)
        super().close()


@contextmanager
def hanging(folder: Path) -> Iterator[HangingBroker]:
    broker = HangingBroker(folder)
    yield broker
    broker.may_close.set()
    broker.close()


def test_a_task_that_ends_the_process_while_the_async_engine_is_closed_holds_up_no_stop(
    sqlite_shop: Shop, watched: WatchedBroker
) -> None:
    engine = create_async_engine(async_url(sqlite_shop))
    left: list[asyncio.Task[None]] = []

    async def exit_when_cancelled_or_closed(closed: asyncio.Event) -> None:
        try:
            await closed.wait()
        finally:
            raise SystemExit(3)

    @consumer("orders", group="g", inbox=engine)
    async def handle(session: AsyncSession, _one: Delivery) -> None:
        closed = asyncio.Event()
        event.listen(engine.sync_engine.pool, "close", lambda *_: closed.set())
        left.append(asyncio.create_task(exit_when_cancelled_or_closed(closed)))
        await session.execute(text("SELECT 1"))

    watched.publish([message()])
    runner = ConsumerRunner([handle], broker=watched)
    runner.start()
    watched.wait_for(lambda: watched.acked == 1)

    assert stopped(runner)
    assert isinstance(left[0].exception(), SystemExit)
    assert engine.pool.checkedin() == 0  # type: ignore[attr-defined]


def test_tasks_that_handlers_left_are_cancelled_and_their_generators_closed(watched: WatchedBroker) -> None:
    ended: list[str] = []

    async def stream() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            ended.append("generator")

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("task")
            raise

    @consumer("orders", group="g")
    async def handle(_one: Delivery) -> None:
        left.append(asyncio.create_task(wait_for_ever()))
        left.append(stream())
        await anext(left[1])

    left: list[Any] = []
    before = set(threading.enumerate())
    watched.publish([message()])
    runner = ConsumerRunner([handle], broker=watched)
    runner.start()
    watched.wait_for(lambda: watched.acked == 1)

    assert stopped(runner)
    assert sorted(ended) == ["generator", "task"]
    remaining = [thread.name for thread in set(threading.enumerate()) - before]
    assert [name for name in remaining if name.startswith("consumer")] == []


def test_a_task_that_cannot_be_cancelled_is_named_and_left(
    sqlite_shop: Shop, watched: WatchedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_async_engine(async_url(sqlite_shop))
    is_over = threading.Event()

    async def go_on() -> None:
        while not is_over.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    @consumer("orders", group="g", inbox=engine)
    async def handle(_session: AsyncSession, _one: Delivery) -> None:
        left.append(asyncio.create_task(go_on()))

    left: list[asyncio.Task[None]] = []
    watched.publish([message()])
    runner = ConsumerRunner([handle], broker=watched)
    runner.start()
    watched.wait_for(lambda: watched.acked == 1)
    assert runner.stop(timeout_seconds=0) is False or is_over.is_set()
    while stopped(runner, timeout_seconds=1) is False and not records(caplog, "consumers_not_closed"):
        pass

    assert records(caplog, "consumers_not_closed")[0].left == ["event loop"]
    is_over.set()


def test_a_broker_that_does_not_close_in_time_is_named_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hanging(tmp_path / "hanging") as broker:
        runner = ConsumerRunner(
            [consumer("orders", group="g")(lambda _one: None)],
            broker=broker, closes_broker=broker, broker_url="http://user:secret@broker:7788",
        )  # fmt: skip
        runner.start()
        while stopped(runner, timeout_seconds=1) is False and not records(caplog, "consumers_not_closed"):
            pass  # under load the worker's pull may take longer than the second

        assert records(caplog, "consumers_not_closed")[0].left == ["broker http://user:***@broker:7788"]
        broker.may_close.set()
        assert stopped(runner)


def test_what_did_not_end_for_lack_of_time_is_ended_by_the_next_stop(
    sqlite_shop: Shop, watched: WatchedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_async_engine(async_url(sqlite_shop))

    @consumer("orders", group="g", inbox=engine)
    async def handle(session: AsyncSession, _one: Delivery) -> None:
        await session.execute(text("SELECT 1"))

    watched.publish([message()])
    before = set(threading.enumerate())
    runner = ConsumerRunner([handle], broker=watched)
    runner.start()
    watched.wait_for(lambda: watched.acked == 1)
    # Until its workers and the thread that extends have ended, it names these.
    while not any(told.left[-1] == "event loop" for told in records(caplog, "consumers_not_closed")):
        assert runner.stop(timeout_seconds=0) is False

    assert stopped(runner)
    assert engine.pool.checkedin() == 0  # type: ignore[attr-defined]
    assert [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("consumer")] == []


def test_all_that_hangs_at_a_stop_shares_its_deadline_and_is_named_at_once(
    sqlite_shop: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    may_end = threading.Event()

    async def go_on() -> None:
        while not may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def leave_a_task(_one: Delivery) -> None:
        left.append(asyncio.create_task(go_on()))

    def use_the_engine(session: Session, _one: Delivery) -> None:
        session.execute(text("SELECT 1"))

    left: list[asyncio.Task[None]] = []
    of_url = consumer("orders", group="h", inbox=sqlite_shop.database.url)(use_the_engine)
    assert of_url.engine is not None
    event.listen(of_url.engine, "engine_disposed", lambda _engine: may_end.wait(WAIT_SECONDS))
    with hanging(tmp_path / "hanging") as broker:
        broker.publish([message()])
        consumers = [consumer("orders", group="g")(leave_a_task), of_url]
        runner = ConsumerRunner(consumers, broker=broker, closes_broker=broker)
        runner.start()
        broker.wait_for(lambda: broker.acked == 2)
        while stopped(runner, timeout_seconds=1) is False and not records(caplog, "consumers_not_closed"):
            pass  # under load the workers' pulls may take longer than the second

        names = sorted(name.partition(" ")[0] for name in records(caplog, "consumers_not_closed")[0].left)
        assert names == ["broker", "engine", "event"]
        may_end.set()
        broker.may_close.set()
        assert stopped(runner)


def test_a_handler_that_does_not_end_in_time_is_named_with_its_message(
    watched: WatchedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    @consumer("orders", group="g")
    def handle(_one: Delivery) -> None:
        begun.set()
        assert may_end.wait(WAIT_SECONDS)

    watched.publish([message(1), message(2)])
    runner = ConsumerRunner([handle], broker=watched)
    runner.start()
    assert begun.wait(WAIT_SECONDS)

    assert stopped(runner, timeout_seconds=0) is False
    record = records(caplog, "consumers_still_busy")[0]
    assert (record.threads, record.message_ids) == (["consumer-g-0"], ["m-1"])
    may_end.set()
    assert stopped(runner)


def test_engines_made_of_a_url_are_closed_and_those_of_the_user_are_not(
    sqlite_shop: Shop, watched: WatchedBroker
) -> None:
    def handle(session: Session, _one: Delivery) -> None:
        session.execute(text("SELECT 1"))

    of_url = consumer("orders", group="g", inbox=sqlite_shop.database.url)(handle)
    of_user = consumer("orders", group="h", inbox=sqlite_shop.engine)(handle)
    closed: list[str] = []
    for name, made in {"url": of_url, "user": of_user}.items():
        assert made.engine is not None
        event.listen(made.engine, "engine_disposed", lambda _engine, name=name: closed.append(name))
    watched.publish([message()])
    runner = ConsumerRunner([of_url, of_user], broker=watched)
    runner.start()
    watched.wait_for(lambda: watched.acked == 2)

    assert stopped(runner)
    assert closed == ["url"]


def test_a_broadcast_consumer_stops_between_two_messages(watched: WatchedBroker) -> None:
    handled: list[str] = []

    @consumer("orders", group="g", broadcast="earliest")
    def handle(one: Delivery) -> None:
        handled.append(one.id)
        runner.stop(timeout_seconds=0)

    watched.publish([message(number) for number in range(20)])
    runner = ConsumerRunner([handle], broker=watched)
    runner.start()
    assert runner.wait(WAIT_SECONDS)

    assert stopped(runner)
    assert handled == ["m-0"]


def test_an_async_handler_that_stops_its_runner_blocks_no_other_handler(watched: WatchedBroker) -> None:
    returned: list[bool] = []
    others: list[asyncio.Event] = []
    both = asyncio.Barrier(2)

    @consumer("orders", group="g", workers=2, prefetch=1)
    async def handle(one: Delivery) -> None:
        others.append(asyncio.Event())
        await both.wait()
        if one.id == "m-1":
            returned.append(runner.stop(timeout_seconds=WAIT_SECONDS))
            others[0].set()
        await others[0].wait()

    watched.publish([message(1), message(2)])
    runner = ConsumerRunner([handle], broker=watched)
    runner.start()
    watched.wait_for(lambda: watched.acked == 2)

    assert returned == [False]
    assert stopped(runner)


@pytest.mark.parametrize("failing", range(5))
def test_a_start_that_gets_no_more_threads_ends_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    @consumer("orders", group="no-thread", workers=3)
    async def handle(_one: Delivery) -> None:
        """Do nothing."""

    broker = WatchedBroker(tmp_path / "data")
    broker.admin.topics()  # which opens it: else a worker may start its threads, one of which is the one that fails
    runner = ConsumerRunner([handle], broker=broker, closes_broker=broker)
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_some(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == failing + 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_some)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            runner.start()

    assert [thread.name for thread in started[: failing + 1] if thread.is_alive()] == []
    assert broker.closed


def test_a_message_that_was_nacked_is_let_go_at_once_while_its_neighbour_is_slow(
    watched: WatchedBroker, ahead: Any, running: Running
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    @consumer("orders", group="g", invisible_ms=60_000)
    def handle(one: Delivery) -> None:
        if one.id == "m-1":
            raise LookupError
        begun.set()
        assert may_end.wait(WAIT_SECONDS)

    watched.repeat_nothing()
    watched.publish([message(1), message(2)])
    running(handle)
    assert begun.wait(WAIT_SECONDS)

    watched.wait_until_extended(ahead, invisible_ms=60_000)
    watched.wait_until_extended(ahead, invisible_ms=60_000)

    may_end.set()
    assert watched.extends == [[ExtendStatus.EXTENDED]] * len(watched.extends)


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_a_handler_that_commits_and_then_ends_the_process_stops_the_runner(
    sqlite_shop: Shop, watched: WatchedBroker, raised: type[BaseException]
) -> None:
    @consumer("orders", group="g", inbox=sqlite_shop.engine)
    def handle(session: Session, _one: Delivery) -> None:
        session.add(Payment(id=1))
        session.commit()
        raise raised

    watched.repeat_nothing()
    watched.publish([message()])
    runner = ConsumerRunner([handle], broker=watched)
    runner.start()

    assert runner.wait(WAIT_SECONDS)
    assert stopped(runner)
    assert raised.__name__ in runner.health().reasons[0]
    assert watched.nacks[0]["reason"].startswith("CommittedByHandler")


def test_the_reason_of_a_failed_task_group_names_the_inner_errors(watched: WatchedBroker, running: Running) -> None:
    async def fail(error: Exception) -> None:
        raise error

    @consumer("orders", group="g")
    async def handle(_one: Delivery) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(LookupError("no seat")))
            group.create_task(fail(ExceptionGroup("two", [OSError("no disk"), ValueError("no number")])))

    watched.repeat_nothing()
    watched.publish([message()])
    running(handle)
    watched.wait_for(lambda: len(watched.nacks) == 1)

    reason = watched.nacks[0]["reason"]
    assert reason.startswith("ExceptionGroup: unhandled errors in a TaskGroup")
    assert reason.endswith("LookupError: no seat; OSError: no disk; ValueError: no number")
