"""Handlers that raise what ends a thread, an event loop or a process: no consumer hangs, none stops in silence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from outbox import Consumer, consumer
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox_core import Delivery
from outbox_core.runtime.logs import event_name
from tests.fixtures.fork_server import environment, fork_server
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker, message

CHILD = "tests.outbox.consuming.exiting_consumer"
Running = Callable[..., ConsumerRunner]


class Interrupted(BaseException):
    """What a library may end its own thread with."""


def plain(raises: Callable[[], BaseException], **options: Any) -> Consumer:
    @consumer("orders", group="g", **options)
    def handle(one: Delivery) -> None:
        if one.id == "m-1":
            raise raises()

    return handle


def awaited(raises: Callable[[], BaseException], **options: Any) -> Consumer:
    @consumer("orders", group="g", **options)
    async def handle(one: Delivery) -> None:
        await asyncio.sleep(0)
        if one.id == "m-1":
            raise raises()

    return handle


def in_a_child_task(raises: Callable[[], BaseException], **options: Any) -> Consumer:
    async def child() -> None:
        raise raises()

    @consumer("orders", group="g", **options)
    async def handle(one: Delivery) -> None:
        if one.id == "m-1":
            await asyncio.create_task(child())

    return handle


KINDS = pytest.mark.parametrize("made", [plain, awaited, in_a_child_task])


@KINDS
@pytest.mark.parametrize("raised", [Interrupted, asyncio.CancelledError, GeneratorExit])
def test_what_is_no_exception_fails_its_delivery_and_the_consumer_goes_on(
    watched: WatchedBroker, running: Running, made: Callable[..., Consumer], raised: type[BaseException]
) -> None:
    if (made, raised) == (in_a_child_task, GeneratorExit):
        raised = Interrupted  # asyncio takes a task's GeneratorExit for the task's own end
    watched.repeat_nothing()
    watched.publish([message(1), message(2)])

    runner = running(made(raised))
    watched.wait_for(lambda: watched.acked == 1 and len(watched.nacks) == 1)

    assert watched.nacks[0]["reason"].startswith(raised.__name__)
    assert runner.health().healthy
    assert (runner.health().workers_alive, runner.figures.failed) == (1, 1)


@KINDS
@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_a_handler_that_asks_for_the_end_of_the_process_stops_all_consumers_in_order(
    watched: WatchedBroker, made: Callable[..., Consumer], raised: type[BaseException]
) -> None:
    idle = consumer("bills", group="g", workers=2)(lambda _one: None)
    asleep = consumer("notes", group="g", broadcast=True)(lambda _one: None)
    runner = ConsumerRunner([made(raised), idle, asleep], broker=watched, closes_broker=None)
    watched.publish([message(1), message(2)])

    runner.start()
    assert runner.wait(WAIT_SECONDS)
    assert runner.stop(timeout_seconds=WAIT_SECONDS)

    assert [one["counts"] for one in watched.nacks] == [True, False]
    assert watched.nacks[0]["reason"].startswith(raised.__name__)
    assert watched.acked == 0
    assert runner.health().workers_alive == 0
    assert raised.__name__ in runner.health().reasons[0]


def test_a_broadcast_handler_that_asks_for_the_end_of_the_process_stops_all(watched: WatchedBroker) -> None:
    began = threading.Event()

    @consumer("orders", group="g", broadcast="earliest")
    def handle(_one: Delivery) -> None:
        began.set()
        raise SystemExit(3)

    watched.publish([message(1)])
    runner = ConsumerRunner([handle], broker=watched)
    runner.start()

    assert runner.wait(WAIT_SECONDS)
    assert runner.stop(timeout_seconds=WAIT_SECONDS)
    assert began.is_set()
    assert not runner.health().healthy


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_the_process_ends_with_exit_status_1_and_gives_back_what_it_has(tmp_path: Path, kind: str) -> None:
    broker = WatchedBroker(tmp_path / "data")
    broker.publish([message(1), message(2)])
    broker.close()

    done = fork_server().run(CHILD, f"embedded:{tmp_path / 'data'}", kind, env=environment())

    assert done.returncode == 1, done.stdout + done.stderr
    assert "consumers_exit" in done.stderr
    again = WatchedBroker(tmp_path / "data")
    given_back = {one.id: one.attempt for one in again.pull("orders", "g")}
    again.close()
    assert given_back["m-2"] == 1
    assert given_back.get("m-1", 2) == 2  # it waits for its backoff, perhaps no more


def test_health_tells_of_a_worker_that_is_gone(watched: WatchedBroker, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Random):
        def random(self) -> float:
            dying.append(threading.current_thread())
            gone.set()
            raise Interrupted

        uniform = random  # type: ignore[assignment]

    gone, dying = threading.Event(), list[threading.Thread]()
    handlers = [consumer(topic, group="g")(lambda _one: None) for topic in ("orders", "bills")]
    runner = ConsumerRunner(handlers, broker=watched, random=Broken())
    assert runner.health().healthy
    runner.start()
    assert runner.health().healthy

    watched.pull_fails = [RuntimeError("once")]
    assert gone.wait(WAIT_SECONDS)
    dying[0].join(WAIT_SECONDS)

    health = runner.health()
    assert (health.workers, health.workers_alive, health.healthy) == (2, 1, False)
    assert health.reasons == ("1 of 2 workers are gone",)
    assert "consumer_worker_died" in [event_name(record) for record in caplog.records]
    assert runner.stop(timeout_seconds=WAIT_SECONDS)


def test_a_handler_may_stop_the_consumers_that_are_still_being_started(watched: WatchedBroker) -> None:
    stopped = threading.Event()

    @consumer("orders", group="g")
    def first(_one: Delivery) -> None:
        runner.stop(timeout_seconds=0)
        stopped.set()

    others = [consumer(topic, group="g", workers=20)(lambda _one: None) for topic in ("bills", "notes")]
    watched.publish([message(1)])
    runner = ConsumerRunner([first, *others], broker=watched)

    runner.start()
    assert stopped.wait(WAIT_SECONDS)
    assert runner.stop(timeout_seconds=WAIT_SECONDS)

    assert (runner.health().workers, runner.health().workers_alive) == (41, 0)
    assert watched.nacks == []
