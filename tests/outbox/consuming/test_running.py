"""Runners: what stops, fails, stands still or is poison, and what becomes of the messages meanwhile."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from outbox import Consumer, RetryLater, Telemetry, consumer, run_consumers
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.consumers.consumer_runner import PAUSES, THREADS_MAX, RunnerTimes
from outbox.consumers.delivery_settler import ACK_TRIES_MAX
from outbox.telemetry import NO_TRACING
from outbox.telemetry.metrics import OutboxMetrics
from outbox.telemetry.tracing import OpenTelemetryTracing
from outbox.testing import AdvancingClock
from outbox_core import AckStatus, Broker, Delivery, GroupConfig, connect
from outbox_core.common.backoff import Backoff
from outbox_core.common.errors import (
    BrokerRefused,
    BrokerThrottled,
    BrokerUnavailable,
    ConfigurationError,
    NotSupported,
)
from outbox_core.messages.limits import REASON_CHARS_MAX
from outbox_core.runtime.logs import event_name
from tests.outbox.shop import Payment, Shop, open_shop
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker, message

INVISIBLE_MS = 60_000
SHORTLY_INVISIBLE_MS = 10_000
"""Where a leap of the clock may have a delivery extended that is just being given up, and its time passes for real."""
Running = Callable[..., ConsumerRunner]


def handler_of(handled: list[str], **options: Any) -> Consumer:
    """A consumer that notes what it gets."""
    return consumer("orders", group="g", **options)(lambda one: handled.append(one.id))


# -- poison --------------------------------------------------------------------------------------------------------


def test_a_poison_body_becomes_a_dead_letter_with_its_reason_and_holds_up_nobody(
    watched: WatchedBroker, running: Running
) -> None:
    watched.admin.declare_group("orders", "g", GroupConfig(max_attempts=2, backoff_initial_ms=1, backoff_max_ms=1))
    handled: list[Any] = []
    watched.publish([message(1, body=b"{"), message(2), message(3)])

    running(consumer("orders", group="g")(lambda one: handled.append(one.json())))
    watched.wait_for(lambda: watched.acked == 2 and len(watched.nacks) == 2)

    dead, _ = watched.admin.dead("orders", "g")
    assert handled == [2, 3]
    assert [(one.id, one.attempts) for one in dead] == [("m-1", 2)]
    assert dead[0].reason.startswith("InvalidMessage: message m-1 on orders has a body that is not JSON")


class Mute(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such name: \ud800"), r"ValueError: no such name: \ud800"),
        (RetryLater(delay_ms=3_600_000, reason="later \udcff"), r"later \udcff"),
        (Mute(), "Mute: an error without a text"),
    ],
    ids=["surrogate", "retry", "mute"],
)
def test_an_error_without_a_proper_text_costs_its_own_message_and_no_other(
    watched: WatchedBroker, running: Running, caplog: pytest.LogCaptureFixture, error: Exception, reason: str
) -> None:
    caplog.set_level(logging.CRITICAL, "outbox.consumers")  # a worker of pytest-xdist cannot pass on such a text
    handled: list[str] = []

    def handle(one: Delivery) -> None:
        if one.id == "m-1":
            raise error
        handled.append(one.id)

    traced = Telemetry(tracing=OpenTelemetryTracing(provider=TracerProvider(shutdown_on_exit=False)))
    watched.repeat_nothing()
    watched.publish([message(1), message(2), message(3)])
    running(consumer("orders", group="g")(handle), telemetry=traced)
    watched.wait_for(lambda: watched.acked == 2 and len(watched.nacks) == 1)

    assert handled == ["m-2", "m-3"]
    assert watched.nacks[0]["reason"] == reason


@pytest.mark.parametrize("raised", [GeneratorExit(), KeyError("x")], ids=["GeneratorExit", "KeyError"])
def test_a_handler_that_wants_the_thread_to_end_fails_like_any_other(
    watched: WatchedBroker, running: Running, raised: BaseException
) -> None:
    def handle(one: Delivery) -> None:
        if one.id == "m-1":
            raise raised

    watched.repeat_nothing()
    watched.publish([message(1), message(2)])
    running(consumer("orders", group="g")(handle))
    watched.wait_for(lambda: watched.acked == 1 and len(watched.nacks) == 1)

    assert watched.nacks[0]["reason"].startswith(type(raised).__name__)


def test_why_a_statement_failed_is_told_without_its_values(
    sqlite_shop: Shop, watched: WatchedBroker, running: Running
) -> None:
    @consumer("orders", group="g", inbox=sqlite_shop.engine)
    def pay(session: Session, _one: Delivery) -> None:
        session.execute(text("INSERT INTO nowhere VALUES (:secret)"), {"secret": "4711"})

    watched.publish([message()])
    running(pay)
    watched.wait_for(lambda: bool(watched.nacks))

    assert watched.nacks[0]["reason"] == "OperationalError: no such table: nowhere"


# -- acknowledgements ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrives", [True, False])
def test_an_ack_that_fails_is_tried_again(watched: WatchedBroker, running: Running, arrives: bool) -> None:
    handled: list[str] = []
    watched.ack_arrives = arrives
    watched.ack_fails = [BrokerUnavailable("down")] * (ACK_TRIES_MAX - 1)
    watched.publish([message()])

    running(handler_of(handled))
    watched.wait_for(lambda: len(watched.acks) == 1)

    assert watched.acks == [[AckStatus.ALREADY_ACKED if arrives else AckStatus.ACKED]]
    assert handled == ["m-1"]


@pytest.mark.parametrize(
    ("error", "tries"), [(BrokerUnavailable("down"), ACK_TRIES_MAX), (BrokerRefused("never"), 1)], ids=["down", "never"]
)
def test_an_ack_that_fails_for_good_costs_a_repetition_that_the_inbox_drops(
    shop: Shop, watched: WatchedBroker, running: Running, ahead: AdvancingClock, error: Any, tries: int
) -> None:
    watched.ack_arrives = False
    watched.ack_fails = [error] * tries

    @consumer("orders", group="g", inbox=shop.engine, schema=shop.database.schema, invisible_ms=SHORTLY_INVISIBLE_MS)
    def pay(session: Session, one: Delivery) -> None:
        session.add(Payment(id=int(one.body)))

    watched.publish([message()])
    runner = running(pay)
    watched.wait_for(lambda: not watched.ack_fails)
    watched.wait_while_time_passes(lambda: watched.acked == 1, ahead, SHORTLY_INVISIBLE_MS)

    assert shop.payments() == [1]
    assert (runner.figures.handled, runner.figures.deduplicated) == (1, 1)


def test_a_stale_ack_is_counted(watched: WatchedBroker, running: Running) -> None:
    metrics = OutboxMetrics()

    def handle(_one: Delivery) -> None:
        if not seen.is_set():
            seen.set()
            watched.admin.seek("orders", "g", to_offset=1)

    seen = threading.Event()
    watched.publish([message()])
    running(consumer("orders", group="g")(handle), telemetry=Telemetry(metrics=metrics, tracing=NO_TRACING))
    watched.wait_for(lambda: watched.acks == [[AckStatus.STALE]])

    # The broker has answered, but the consumer may not have counted it yet.
    labels = {"topic": "orders", "group": "g", "event": "ack_stale"}
    watched.wait_for(lambda: metrics.registry.get_sample_value("outbox_consumer_events_total", labels) == 1)


# -- outages -------------------------------------------------------------------------------------------------------


def test_an_outage_of_the_inboxs_database_uses_up_no_attempt(
    sqlite_shop: Shop, watched: WatchedBroker, running: Running, tmp_path: Path
) -> None:
    attempts: list[int] = []
    engine = create_engine(sqlite_shop.engine.url)
    names = [f"{table.name}" for table in (sqlite_shop.tables.inbox,)]

    @consumer("orders", group="g", inbox=engine)
    def pay(session: Session, one: Delivery) -> None:
        attempts.append(one.attempt)
        session.add(Payment(id=int(one.body)))

    sqlite_shop.execute(f"ALTER TABLE {names[0]} RENAME TO gone")
    watched.publish([message(number) for number in range(3)])
    runner = running(pay)
    watched.wait_for(lambda: len(watched.nacks) >= 5)
    outage = list(watched.nacks)
    sqlite_shop.execute(f"ALTER TABLE gone RENAME TO {names[0]}")
    watched.wait_for(lambda: watched.acked == 3)

    assert attempts == [1, 1, 1]
    assert all(nack["counts"] is False for nack in outage)
    assert runner.figures.failed == 0
    assert sqlite_shop.payments() == [0, 1, 2]
    engine.dispose()


def test_a_killed_database_uses_up_no_attempt_and_work_goes_on_when_it_is_back(
    mariadb_server: Any, watched: WatchedBroker, running: Running
) -> None:
    with mariadb_server.fresh_database() as database, open_shop(database) as shop:
        attempts: list[int] = []

        @consumer("orders", group="g", inbox=shop.engine, schema=database.schema)
        def pay(session: Session, one: Delivery) -> None:
            attempts.append(one.attempt)
            session.add(Payment(id=int(one.body)))

        watched.publish([message(1)])
        running(pay)
        watched.wait_for(lambda: watched.acked == 1)
        mariadb_server.kill9()
        watched.publish([message(2), message(3)])
        watched.wait_for(lambda: len(watched.nacks) >= 2)
        outage = list(watched.nacks)
        mariadb_server.restart()
        watched.wait_for(lambda: watched.acked == 3)

        assert attempts == [1, 1, 1]
        assert {nack["counts"] for nack in outage} == {False}
        assert shop.payments() == [1, 2, 3]


def test_what_is_no_consumer_is_refused_with_the_cure() -> None:
    def handle(_delivery: Delivery) -> None: ...

    with pytest.raises(ConfigurationError, match="handle is no consumer; decorate it: @consumer"):
        run_consumers([handle], broker="http://127.0.0.1:1")  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="no consumer"):
        run_consumers([], broker="http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("broker", "broadcast", "missing"),
    [
        ("redis://127.0.0.1:1", False, "no pull for"),
        ("redis://127.0.0.1:1", True, "no broadcast for"),
        ("redis://127.0.0.1:1/?store=timers", True, "no broadcast for"),
    ],
)
def test_a_broker_that_cannot_serve_the_consumer_is_refused_at_the_start(
    broker: str, broadcast: bool, missing: str
) -> None:
    handle = consumer("orders", group="g", broadcast=broadcast)(lambda _one: None)

    with pytest.raises(NotSupported, match=rf"{missing}.*outbox\.Inbox"):
        run_consumers([handle], broker=broker)


def test_an_inbox_in_autocommit_is_refused_before_anything_happens(sqlite_shop: Shop, watched: WatchedBroker) -> None:
    handled: list[str] = []
    engine = create_engine(sqlite_shop.engine.url).execution_options(isolation_level="AUTOCOMMIT")
    made = consumer("orders", group="g", inbox=engine)(lambda _session, one: handled.append(one.id))
    watched.publish([message()])
    (one,) = watched.pull("orders", "g")

    with pytest.raises(Exception, match="AUTOCOMMIT"):
        made.handle(one)

    assert handled == []
    engine.dispose()


def test_the_pauses_of_an_outage_grow_to_a_bound_and_are_spread(
    watched: WatchedBroker, running: Running, random_seed: int
) -> None:
    random = Random(random_seed)

    pauses = [PAUSES.delay_ms(failures, random) for failures in range(1, 2_000)]

    assert max(pauses) <= PAUSES.max_ms
    assert min(pauses[20:]) >= PAUSES.max_ms * (1 - PAUSES.jitter)
    assert len(set(pauses[20:])) > 1_000


def test_a_broker_that_asks_for_a_pause_gets_it(
    watched: WatchedBroker, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    watched.pull_fails = [
        BrokerThrottled("later", retry_after_ms=3_600_000),  # the last, since they are taken from the end
        BrokerUnavailable("down"),
        BrokerThrottled("later", retry_after_ms=2),
    ]
    handled: list[str] = []

    with caplog.at_level("WARNING"):
        runner = running(handler_of(handled), pauses=Backoff(initial_ms=1, max_ms=1))
        watched.wait_for(lambda: not watched.pull_fails)
        running(consumer("orders", group="others")(lambda one: None))
        for number in range(1, 21):  # a time in which one that did not pause would have pulled
            watched.publish([message(number)])
            watched.wait_for(lambda: watched.acked >= number)  # noqa: B023  (it has returned before the next)
        assert runner.stop(timeout_seconds=WAIT_SECONDS)

    assert [one.pause_ms for one in caplog.records if event_name(one) == "pull_failed"] == [2, 1, 3_600_000]  # type: ignore[attr-defined]
    assert handled == []


# -- slow handlers, stopping ---------------------------------------------------------------------------------------


def test_neighbours_of_a_hung_handler_go_to_another_worker(
    watched: WatchedBroker, ahead: AdvancingClock, running: Running
) -> None:
    begun, hung = threading.Event(), threading.Event()
    handled: list[str] = []

    def handle(one: Delivery) -> None:
        if one.id == "m-0":
            begun.set()
            hung.wait(WAIT_SECONDS)
        handled.append(one.id)
        watched.tell()

    watched.publish([message(number) for number in range(4)])
    runner = running(consumer("orders", group="g", invisible_ms=INVISIBLE_MS)(handle))
    assert begun.wait(WAIT_SECONDS)
    assert watched.pulled == 4
    second = running(consumer("orders", group="g", invisible_ms=INVISIBLE_MS)(handle))
    watched.wait_until_extended(ahead, invisible_ms=INVISIBLE_MS, deliveries=4)
    watched.wait_while_time_passes(lambda: len(handled) == 3, ahead, INVISIBLE_MS // 2)
    hung.set()
    watched.wait_for(lambda: watched.acked == 4)

    assert sorted(handled) == ["m-0", "m-1", "m-2", "m-3"]
    assert second.figures.handled == 3
    watched.wait_for(lambda: runner.figures.lost == 3)


def test_what_is_handled_is_acknowledged_while_its_batch_goes_on(watched: WatchedBroker, running: Running) -> None:
    go_on = threading.Event()

    def handle(one: Delivery) -> None:
        if one.id == "m-2":
            go_on.wait(WAIT_SECONDS)

    watched.publish([message(number) for number in range(3)])
    running(consumer("orders", group="g")(handle), times=RunnerTimes(ack_delay_ms=0))
    watched.wait_for(lambda: watched.acked == 2)  # the third is still in hand
    go_on.set()
    watched.wait_for(lambda: watched.acked == 3)

    assert (sum(map(len, watched.acks[:-1])), len(watched.acks[-1])) == (2, 1)


def test_what_is_handled_is_acknowledged_in_time_however_long_the_next_handler_takes(
    watched: WatchedBroker, running: Running
) -> None:
    go_on = threading.Event()

    def handle(one: Delivery) -> None:
        if one.id == "m-2":
            go_on.wait(WAIT_SECONDS)

    watched.publish([message(number) for number in range(3)])
    running(consumer("orders", group="g")(handle), times=RunnerTimes(ack_delay_ms=200))
    watched.wait_for(lambda: watched.acked == 2)  # the third is still in hand
    go_on.set()
    watched.wait_for(lambda: watched.acked == 3)

    assert (sum(map(len, watched.acks[:-1])), len(watched.acks[-1])) == (2, 1)


def test_a_quick_batch_costs_one_ack(watched: WatchedBroker, running: Running) -> None:
    watched.publish([message(number) for number in range(40)])

    running(handler_of([], prefetch=20), times=RunnerTimes(ack_delay_ms=60_000))
    watched.wait_for(lambda: watched.acked == 40)

    assert [len(statuses) for statuses in watched.acks] == [20, 20]


def test_stop_gives_back_in_one_call_what_was_not_begun(watched: WatchedBroker, running: Running) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def handle(_one: Delivery) -> None:
        inside.set()
        go_on.wait(WAIT_SECONDS)

    watched.publish([message(number) for number in range(30)])
    runner = running(consumer("orders", group="g")(handle))
    assert inside.wait(WAIT_SECONDS)
    assert not runner.stop(timeout_seconds=0)
    go_on.set()
    assert runner.stop(timeout_seconds=WAIT_SECONDS)

    assert (watched.acked, len(watched.nacks)) == (1, 1)
    assert runner.figures.handed_back == 29


def test_stop_and_start_may_be_called_again_and_again(watched: WatchedBroker, running: Running) -> None:
    assert watched.admin.topics() == []  # opens it: its own threads begin now, and not with the first pull
    before = set(threading.enumerate())
    runner = running(handler_of([]))
    runner.start()
    threads = set(threading.enumerate()) - before

    assert all(runner.stop(timeout_seconds=WAIT_SECONDS) for _ in range(3))
    runner.start()

    assert (runner.health().workers, runner.health().workers_alive) == (1, 0)
    assert len(threads) >= 2  # a worker, and what extends
    assert not any(thread.is_alive() for thread in threads)


# -- many topics, bounds ---------------------------------------------------------------------------------------------


def test_one_consumer_serves_many_topics_and_an_idle_one_holds_up_none(
    watched: WatchedBroker, running: Running
) -> None:
    handled: list[tuple[str, str]] = []
    made = consumer(["idle", "orders", "bills"], group="g")(lambda one: handled.append((one.topic, one.id)))

    watched.publish([message(1, topic="bills"), message(2), message(3, topic="bills")])
    running(made)
    watched.wait_for(lambda: watched.acked == 3)

    assert sorted(handled) == [("bills", "m-1"), ("bills", "m-3"), ("orders", "m-2")]
    assert (made.topic, made.topics) == ("idle", ("idle", "orders", "bills"))


class Names(str, Enum):  # noqa: UP042 - as people name their topics
    """Texts that are formatted as others."""

    TOPIC = "orders"
    GROUP = "g"


def test_topic_and_group_of_a_consumer_are_the_texts_that_members_of_an_enum_equal() -> None:
    made = consumer([Names.TOPIC], group=Names.GROUP)(lambda _one: None)

    assert f"{made.topic} {made.group}" == "orders g"


@pytest.mark.parametrize(
    "options",
    [{"workers": 65}, {"prefetch": 1001}, {"invisible_ms": 43_200_001}, {"handle_ms_max": 0}],
    ids=str,
)
def test_everything_of_a_consumer_is_bounded(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        consumer("orders", group="g", **options)


@pytest.mark.parametrize("topics", [[], [f"t-{number}" for number in range(65)]], ids=["none", "too many"])
def test_a_consumer_has_some_topics_and_not_too_many(topics: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="topics"):
        consumer(topics, group="g")


def test_the_threads_of_a_runner_are_bounded(watched: WatchedBroker) -> None:
    one = handler_of([], workers=64)

    with pytest.raises(ConfigurationError, match=str(THREADS_MAX)):
        ConsumerRunner([one] * (THREADS_MAX // 64 + 1), broker=watched)


# -- signals, brokers by URL -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_in_good_order(watched: WatchedBroker, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    handled: list[str] = []

    def handle(one: Delivery) -> None:
        handled.append(one.id)
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    watched.publish([message(1)])
    runner = ConsumerRunner([consumer("orders", group="g")(handle)], broker=watched)
    stopped = runner.run_until_signal(timeout_seconds=WAIT_SECONDS)

    assert stopped
    assert (handled, watched.acked) == (["m-1"], 1)
    assert signal.getsignal(number) is before


def test_stop_in_another_thread_ends_the_run_too(watched: WatchedBroker) -> None:
    runner = ConsumerRunner([consumer("orders", group="g")(lambda _one: stopper.start())], broker=watched)
    stopper = threading.Thread(target=runner.stop)
    watched.publish([message(1)])

    assert runner.run_until_signal(timeout_seconds=WAIT_SECONDS)

    stopper.join(WAIT_SECONDS)


def test_a_handler_may_ask_for_the_stop_of_its_own_runner(watched: WatchedBroker) -> None:
    said: list[bool] = []
    made = consumer("orders", group="g")(lambda _one: said.append(runner.stop(timeout_seconds=0)))
    runner = ConsumerRunner([made], broker=watched)
    watched.publish([message(1), message(2)])

    assert runner.run_until_signal(timeout_seconds=WAIT_SECONDS)

    assert (said, watched.acked, runner.figures.handed_back) == ([False], 1, 1)


def test_signals_are_for_the_main_thread(watched: WatchedBroker) -> None:
    runner = ConsumerRunner([handler_of([])], broker=watched)
    said: list[str] = []

    def run() -> None:
        try:
            runner.run_until_signal()
        except ConfigurationError as error:
            said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT_SECONDS)

    assert "main thread" in said[0]


def test_a_broker_that_the_runner_opened_is_closed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Broker] = []
    inside, go_on = threading.Event(), threading.Event()

    def connect_and_note(url: str) -> Broker:
        opened.append(connect(url))
        return opened[-1]

    def handle(_one: Delivery) -> None:
        inside.set()
        go_on.wait(WAIT_SECONDS)

    monkeypatch.setattr("outbox.consumers.consumer_decorator.connect", connect_and_note)
    runner = run_consumers([consumer("orders", group="g")(handle)], broker=f"embedded:{tmp_path / 'data'}")
    opened[0].publish([message()])
    assert inside.wait(WAIT_SECONDS)
    assert not runner.stop(timeout_seconds=0)
    go_on.set()
    assert runner.stop(timeout_seconds=WAIT_SECONDS)

    with pytest.raises(ConfigurationError, match="closed"):
        opened[0].pull("orders", "g")


def test_a_broker_of_the_users_stays_open(watched: WatchedBroker) -> None:
    with run_consumers([handler_of([])], broker=watched):
        pass

    assert not watched.closed


@pytest.mark.parametrize("delay_ms", [-1, 731 * 24 * 60 * 60 * 1000 + 1, float("nan"), float("inf")])
def test_a_retry_that_no_broker_takes_is_refused_where_it_is_asked_for(delay_ms: float) -> None:
    with pytest.raises(ConfigurationError, match="delay_ms"):
        RetryLater(delay_ms=delay_ms)


def test_a_delay_in_parts_of_a_millisecond_is_rounded_up(watched: WatchedBroker, running: Running) -> None:
    def handle(_one: Delivery) -> None:
        raise RetryLater(delay_ms=timedelta(hours=1, microseconds=1).total_seconds() * 1_000)

    watched.publish([message(1)])
    running(consumer("orders", group="g")(handle))
    watched.wait_for(lambda: len(watched.nacks) == 1)

    assert [(type(nack["delay_ms"]), nack["delay_ms"]) for nack in watched.nacks] == [(int, 3_600_001)]


def test_a_long_reason_is_cut(watched: WatchedBroker, running: Running) -> None:
    def handle(one: Delivery) -> None:
        raise RetryLater(delay_ms=3_600_000, reason="x" * 5_000) if one.id == "m-1" else ValueError("y" * 5_000)

    watched.repeat_nothing()
    watched.publish([message(1), message(2)])
    running(consumer("orders", group="g")(handle))
    watched.wait_for(lambda: len(watched.nacks) == 2)

    assert [len(nack["reason"]) for nack in watched.nacks] == [REASON_CHARS_MAX] * 2


def test_a_consumer_process_says_at_its_start_what_it_consumes(
    watched: WatchedBroker, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    running(consumer(["orders", "bills"], group="g", workers=2)(lambda _one: None))

    (record,) = (one for one in caplog.records if event_name(one) == "consumers_started")
    assert vars(record)["consumes"] == ["orders/g x 2", "bills/g x 2"]
    assert vars(record)["broker"] == "WatchedBroker"
