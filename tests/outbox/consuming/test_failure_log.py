"""What a log has of a failure: the traceback, what it was about, once a kind and minute under a flood."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox import RetryLater, consumer, run_consumers
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.telemetry.failure_log import FailureLog
from outbox_core import Delivery, GroupConfig, ManualClock
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.log_interval import LOG_AGAIN_MS, LOG_KEYS_MAX
from outbox_core.runtime.logs import event_name, formatter
from tests.outbox.shop import Shop
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker, message

Running = Callable[..., ConsumerRunner]
log = EventLogger("outbox.test_failure_log")
NOBODY = "http://user:hunter2@127.0.0.1:1"


class Tracker(logging.Handler):
    """What an error tracker that listens to `logging` makes an event of: records of level ERROR, as they come."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.events: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(record)


@contextmanager
def tracked() -> Iterator[list[logging.LogRecord]]:
    tracker = Tracker()
    logging.getLogger().addHandler(tracker)
    try:
        yield tracker.events
    finally:
        logging.getLogger().removeHandler(tracker)


def fail_within(depth: int) -> None:
    if depth:
        fail_within(depth - 1)
    raise LookupError("no such order")


def failed(kind: type[Exception] = LookupError) -> Exception:
    """An error that was raised."""
    with pytest.raises(kind) as caught:
        fail_as(kind)
    return caught.value


def fail_as(kind: type[Exception]) -> None:
    raise kind("x")


@pytest.mark.parametrize("options", [{}, {"broadcast": "earliest"}], ids=["shared", "broadcast"])
def test_a_failed_handler_is_logged_with_its_traceback_and_all_that_names_the_delivery(
    watched: WatchedBroker, running: Running, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    done: list[str] = []

    @consumer("orders", group="g", **options)
    def handle(one: Delivery) -> None:
        if one.id == "m-1" and one.attempt < 3:
            fail_within(2)
        done.append(one.id)
        watched.tell()

    watched.admin.declare_group("orders", "g", GroupConfig(backoff_initial_ms=1, backoff_max_ms=1))
    watched.publish([message(1)])
    with tracked() as events:
        running(handle)
        watched.wait_for(lambda: done == ["m-1"])

    [event] = events
    shown = formatter("text").format(event)
    assert event_name(event) == "handler_failed"
    assert event.exc_info is not None
    assert isinstance(event.exc_info[1], LookupError)
    assert "fail_within" in shown
    assert "no such order" in shown
    assert {**vars(event), "wanted": 1}.items() >= {
        "topic": "orders", "group": "g", "message_id": "m-1", "attempt": 1, "repeated": 0
    }.items()  # fmt: skip
    repetitions = [one for one in caplog.records if event_name(one) == "handler_failed" and one is not event]
    assert [(one.levelno, one.exc_info) for one in repetitions] == [(logging.WARNING, None)]


def test_a_retry_that_the_handler_asks_for_is_no_failure(watched: WatchedBroker, running: Running) -> None:
    @consumer("orders", group="g")
    def handle(one: Delivery) -> None:
        if one.attempt == 1:
            raise RetryLater(delay_ms=0)

    watched.publish([message(1)])
    with tracked() as events:
        running(handle)
        watched.wait_for(lambda: watched.acked == 1)

    assert events == []


def test_a_traceback_shows_no_value_of_a_statement(sqlite_shop: Shop, watched: WatchedBroker, running: Running) -> None:
    value = "47" + "11" * 8

    @consumer("orders", group="g", inbox=sqlite_shop.engine)
    def pay(session: Session, _one: Delivery) -> None:
        try:
            session.execute(text("INSERT INTO nowhere VALUES (:value)"), {"value": value})
        except Exception as error:
            raise LookupError from error

    watched.publish([message()])
    with tracked() as events:
        running(pay)
        watched.wait_for(lambda: bool(watched.nacks))

    shown = formatter("text").format(events[0])
    assert "INSERT INTO nowhere" in shown
    assert value not in shown


def test_a_pull_that_fails_names_the_url_without_its_password_and_the_cause(tmp_path: Path) -> None:
    handle = consumer("orders", group="g")(lambda _one: None)
    with tracked() as events:
        broker = WatchedBroker(tmp_path / "data")
        cause = ConnectionRefusedError("nobody listens")
        error = BrokerUnavailable("the broker is out")
        error.__cause__ = cause
        broker.pull_fails = [error]
        runner = ConsumerRunner([handle], broker=broker, broker_url=NOBODY)
        runner.start()
        broker.wait_for(lambda: not broker.pull_fails and bool(events))
        assert runner.stop(timeout_seconds=WAIT_SECONDS)
        broker.close()

    [event] = events
    found = vars(event)
    assert event_name(event) == "pull_failed"
    assert found["error"] == "BrokerUnavailable: the broker is out"
    assert found["cause"] == "ConnectionRefusedError: nobody listens"
    assert "127.0.0.1:1" in found["url"]
    assert "hunter2" not in found["url"]
    assert event.exc_info is None, "an outage needs no traceback"


def test_an_outage_that_is_an_unexpected_error_has_its_traceback(clock: ManualClock) -> None:
    failures = FailureLog(log, clock=clock)
    with tracked() as events:
        failures.write_outage("pull_failed", failed(), fields={})

    assert [event.exc_info is not None for event in events] == [True]


def test_a_runner_by_url_names_it(caplog: pytest.LogCaptureFixture) -> None:
    with tracked() as events:
        runner = run_consumers([consumer("orders", group="g")(lambda _one: None)], broker="http://127.0.0.1:1")
        while not events:
            runner.wait(0.01)
        assert runner.stop(timeout_seconds=WAIT_SECONDS)

    assert vars(events[0])["url"] == "http://127.0.0.1:1"
    assert "refused" in str(vars(events[0])["cause"])


def test_a_kind_shows_one_traceback_a_minute_and_says_how_often_it_failed_meanwhile(clock: ManualClock) -> None:
    failures = FailureLog(log, clock=clock)
    with tracked() as events:
        for _ in range(50):
            failures.write("handler_failed", failed(), fields={})
        clock.advance(LOG_AGAIN_MS - 1)
        failures.write("handler_failed", failed(), fields={})
        clock.advance(1)
        failures.write("handler_failed", failed(), fields={})

    assert [vars(event)["repeated"] for event in events] == [0, 50]


def test_kinds_are_told_apart_by_type_place_and_what_they_are_about(clock: ManualClock) -> None:
    failures = FailureLog(log, clock=clock)
    with tracked() as events:
        for kind in (("a",), ("b",)):
            for error in (failed(), failed(KeyError), failed(), failed(KeyError)):
                failures.write("handler_failed", error, fields={}, kind=kind)
        with pytest.raises(LookupError) as elsewhere:
            fail_within(0)
        failures.write("handler_failed", elsewhere.value, fields={}, kind=("a",))

    assert len(events) == 5


def test_no_more_kinds_are_remembered_than_the_bound(clock: ManualClock) -> None:
    failures, error = FailureLog(log, clock=clock), failed()
    with tracked() as events:
        for number in [*range(LOG_KEYS_MAX + 1), LOG_KEYS_MAX, 0]:
            failures.write("handler_failed", error, fields={}, kind=(number,))

    assert len(events) == LOG_KEYS_MAX + 2
