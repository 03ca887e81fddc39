"""Consumers: with an inbox an effect happens once, whoever delivers how often; what was not handled is given back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from outbox import Consumer, Outcome, RetryLater, consumer
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.consumers.inbox_table import InboxStore
from outbox.testing import AdvancingClock
from outbox_core import Delivery, GroupConfig
from outbox_core.common.backoff import Backoff
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError, InvalidMessage, TransactionDoomed
from tests.outbox.deadlock import add_rows_to_fight_over, become_a_deadlocks_victim
from tests.outbox.innodb_locks import wait_for_lock_waits
from tests.outbox.shop import NO_SENDER, Payment, Shop
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker, delivery, message

INVISIBLE_MS = 60_000
SHORT = Backoff(initial_ms=1, max_ms=2)


@pytest.fixture
def ahead() -> AdvancingClock:
    """The watched broker's and its consumers' clock: it runs, and can be put forward."""
    return AdvancingClock()


@pytest.fixture
def watched(tmp_path: Path, ahead: AdvancingClock) -> Iterator[WatchedBroker]:
    """A broker to watch."""
    broker = WatchedBroker(tmp_path / "watched", clock=ahead)
    yield broker
    broker.close()


@pytest.fixture
def running(watched: WatchedBroker, ahead: AdvancingClock) -> Iterator[Callable[..., ConsumerRunner]]:
    """Starts consumers on the watched broker; they are stopped at the end of the test."""
    runners: list[ConsumerRunner] = []

    def start(*consumers: Consumer, **options: Any) -> ConsumerRunner:
        runners.append(ConsumerRunner(consumers, broker=watched, clock=ahead, pauses=SHORT, **options))
        runners[-1].start()
        return runners[-1]

    yield start
    for runner in runners:
        assert runner.stop(timeout_seconds=WAIT_SECONDS)


def paying(shop: Shop, **options: Any) -> Consumer:
    """A consumer whose effect is a payment."""

    @consumer("orders", group="payments", inbox=shop.engine, schema=shop.database.schema, **options)
    def pay(session: Session, one: Delivery) -> None:
        session.add(Payment(id=int(one.body)))

    return pay


def marks(shop: Shop) -> int:
    """How many messages the inbox knows."""
    with shop.engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(shop.tables.inbox)) or 0


def test_a_redelivered_message_has_its_effect_once(shop: Shop) -> None:
    pay = paying(shop)

    outcomes = [pay.handle(delivery()) for _ in range(3)]

    assert outcomes == [Outcome.HANDLED, Outcome.DEDUPLICATED, Outcome.DEDUPLICATED]
    assert shop.payments() == [1]
    assert marks(shop) == 1


def test_each_group_has_the_effect_of_its_own(shop: Shop) -> None:
    seen: list[str] = []
    for group in ("one", "two"):
        made = consumer("orders", group=group, inbox=shop.engine, schema=shop.database.schema)(
            lambda _session, _delivery, name=group: seen.append(name)
        )
        made.handle(delivery())
        made.handle(delivery())

    assert seen == ["one", "two"]
    assert marks(shop) == 2


@pytest.mark.parametrize("first_fails", [False, True])
def test_of_two_concurrent_duplicates_one_has_the_effect(mysql_shop: Shop, first_fails: bool) -> None:
    inside, go_on = threading.Event(), threading.Event()
    outcomes: list[object] = []

    @consumer("orders", group="payments", inbox=mysql_shop.engine, schema=mysql_shop.database.schema)
    def pay(session: Session, one: Delivery) -> None:
        session.add(Payment(id=int(one.body)))
        session.flush()
        if not inside.is_set():
            inside.set()
            go_on.wait(WAIT_SECONDS)
            if first_fails:
                raise RuntimeError("the first one fails")

    def handle() -> None:
        try:
            outcomes.append(pay.handle(delivery()))
        except RuntimeError as error:
            outcomes.append(str(error))

    first, second = threading.Thread(target=handle), threading.Thread(target=handle)
    first.start()
    assert inside.wait(WAIT_SECONDS)
    second.start()
    wait_for_lock_waits(mysql_shop)
    go_on.set()
    first.join(WAIT_SECONDS)
    second.join(WAIT_SECONDS)

    expected = ["the first one fails", Outcome.HANDLED] if first_fails else [Outcome.DEDUPLICATED, Outcome.HANDLED]
    assert sorted(map(str, outcomes), reverse=first_fails) == sorted(map(str, expected), reverse=first_fails)
    assert mysql_shop.payments() == [1]
    assert marks(mysql_shop) == 1


def test_a_handler_that_fails_rolls_back_effect_and_mark_and_the_message_comes_again(
    shop: Shop, watched: WatchedBroker, running: Callable[..., ConsumerRunner]
) -> None:
    attempts: list[int] = []

    @consumer("orders", group="payments", inbox=shop.engine, schema=shop.database.schema)
    def pay(session: Session, one: Delivery) -> None:
        attempts.append(one.attempt)
        session.add(Payment(id=int(one.body)))
        session.flush()
        if len(attempts) == 1:
            raise RuntimeError("not today")

    watched.admin.declare_group("orders", "payments", GroupConfig(backoff_initial_ms=1))
    watched.publish([message()])
    runner = running(pay)
    watched.wait_for(lambda: watched.acked == 1)

    assert attempts == [1, 2]
    assert [nack["reason"] for nack in watched.nacks] == ["RuntimeError: not today"]
    assert shop.payments() == [1]
    assert marks(shop) == 1
    assert (runner.figures.handled, runner.figures.failed) == (1, 1)


def test_a_duplicate_is_acknowledged_and_counted(
    shop: Shop, watched: WatchedBroker, running: Callable[..., ConsumerRunner]
) -> None:
    pay = paying(shop)
    pay.handle(delivery())

    watched.publish([message(1), message(2)])
    runner = running(pay)
    watched.wait_for(lambda: watched.acked == 2)

    assert shop.payments() == [1, 2]
    assert (runner.figures.handled, runner.figures.deduplicated) == (1, 1)


def test_retry_later_gives_the_message_back_with_its_delay(
    sqlite_shop: Shop, watched: WatchedBroker, running: Callable[..., ConsumerRunner]
) -> None:
    @consumer("orders", group="payments", inbox=sqlite_shop.engine)
    def pay(session: Session, one: Delivery) -> None:
        session.add(Payment(id=int(one.body)))
        raise RetryLater(delay_ms=3_600_000, reason="the bank is closed")

    watched.publish([message()])
    running(pay)
    watched.wait_for(lambda: bool(watched.nacks))

    assert watched.nacks == [{"delay_ms": 3_600_000, "reason": "the bank is closed", "counts": True}]
    assert sqlite_shop.payments() == []
    assert marks(sqlite_shop) == 0


def test_stop_finishes_the_message_in_hand_and_gives_the_others_back_untried(
    watched: WatchedBroker, running: Callable[..., ConsumerRunner]
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    @consumer("orders", group="payments")
    def pay(_one: Delivery) -> None:
        inside.set()
        go_on.wait(WAIT_SECONDS)

    watched.publish([message(number) for number in range(5)])
    runner = running(pay)
    assert inside.wait(WAIT_SECONDS)
    stopped_at_once = runner.stop(timeout_seconds=0)
    go_on.set()
    stopped = runner.stop(timeout_seconds=WAIT_SECONDS)

    assert (stopped_at_once, stopped) == (False, True)
    assert (watched.acked, runner.figures.handed_back) == (1, 4)
    assert all(nack["counts"] is False for nack in watched.nacks)
    again = watched.pull("orders", "payments")
    assert [(one.id, one.attempt) for one in again] == [(f"m-{number}", 1) for number in range(1, 5)]


def test_a_slow_handlers_message_stays_invisible_to_others(
    watched: WatchedBroker, ahead: AdvancingClock, running: Callable[..., ConsumerRunner]
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    @consumer("orders", group="payments", invisible_ms=INVISIBLE_MS)
    def pay(_one: Delivery) -> None:
        begun.set()
        go_on.wait(WAIT_SECONDS)

    watched.publish([message()])
    running(pay)
    assert begun.wait(WAIT_SECONDS)
    for _ in range(3):
        watched.wait_until_extended(ahead, invisible_ms=INVISIBLE_MS)
    others = watched.pull("orders", "payments")
    go_on.set()
    watched.wait_for(lambda: watched.acked == 1)

    assert others == []
    assert watched.nacks == []


def test_a_message_in_hand_stays_invisible_while_its_runner_stops(
    watched: WatchedBroker, ahead: AdvancingClock, running: Callable[..., ConsumerRunner]
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    @consumer("orders", group="payments", invisible_ms=INVISIBLE_MS)
    def pay(_one: Delivery) -> None:
        begun.set()
        go_on.wait(WAIT_SECONDS)

    watched.publish([message()])
    runner = running(pay)
    assert begun.wait(WAIT_SECONDS)
    watched.wait_until_extended(ahead, invisible_ms=INVISIBLE_MS)
    assert not runner.stop(timeout_seconds=0)
    stopped = threading.Thread(target=runner.stop)
    stopped.start()
    for _ in range(2):
        watched.wait_until_extended(ahead, invisible_ms=INVISIBLE_MS)
    go_on.set()
    stopped.join(WAIT_SECONDS)

    assert watched.acked == 1
    assert watched.nacks == []


def test_a_nack_that_fails_loses_no_acknowledgement_of_what_was_handled(
    watched: WatchedBroker, running: Callable[..., ConsumerRunner]
) -> None:
    handled: list[str] = []

    @consumer("orders", group="payments")
    def pay(one: Delivery) -> None:
        if one.id == "m-2":
            raise RuntimeError("not this one")
        handled.append(one.id)

    watched.nack_fails = True
    watched.publish([message(number) for number in range(4)])
    running(pay)
    watched.wait_for(lambda: watched.acked >= 3)

    assert handled == ["m-0", "m-1", "m-3"]


def test_a_consumer_survives_a_broker_that_is_out(
    watched: WatchedBroker, running: Callable[..., ConsumerRunner]
) -> None:
    failures = iter([BrokerUnavailable("down"), RuntimeError("a defect"), BrokerUnavailable("down")])
    whole = watched.pull

    def pull(*args: Any, **options: Any) -> list[Delivery]:
        for failure in failures:
            raise failure
        return whole(*args, **options)

    watched.pull = pull  # type: ignore[method-assign]
    watched.publish([message()])
    running(consumer("orders", group="payments")(lambda _one: None))

    watched.wait_for(lambda: watched.acked == 1)


def test_many_workers_handle_each_message_once_and_count_all(
    watched: WatchedBroker, running: Callable[..., ConsumerRunner]
) -> None:
    handled: list[str] = []
    watched.publish([message(number) for number in range(400)])

    runner = running(consumer("orders", group="payments", workers=4, prefetch=7)(lambda one: handled.append(one.id)))
    watched.wait_for(lambda: watched.acked == 400)
    runner.stop(timeout_seconds=WAIT_SECONDS)

    assert sorted(handled) == sorted(f"m-{number}" for number in range(400))
    assert runner.figures.handled == 400


def test_a_swallowed_deadlock_leaves_the_message_unhandled(mysql_shop: Shop) -> None:
    add_rows_to_fight_over(mysql_shop)

    @consumer("orders", group="payments", inbox=mysql_shop.engine, schema=mysql_shop.database.schema)
    def pay(session: Session, one: Delivery) -> None:
        session.add(Payment(id=int(one.body)))
        session.flush()
        become_a_deadlocks_victim(session, mysql_shop.engine)
        session.add(Payment(id=51))

    with pytest.raises(TransactionDoomed):
        pay.handle(delivery(50))

    assert not {50, 51} & set(mysql_shop.payments())
    assert marks(mysql_shop) == 0


def test_a_handler_may_publish_in_its_own_transaction(shop: Shop, watched: WatchedBroker) -> None:
    box = shop.box(watched, sender=NO_SENDER)

    @consumer("orders", group="payments", inbox=shop.engine, schema=shop.database.schema)
    def pay(session: Session, one: Delivery) -> None:
        box.publish("paid", one.body, session=session)

    pay.handle(delivery())
    pay.handle(delivery())

    assert shop.row_topics() == ["paid"]


def test_old_marks_are_purged_in_small_bites_and_young_ones_stay(shop: Shop) -> None:
    store = InboxStore(dialect=shop.engine.dialect, schema=shop.database.schema)
    with shop.engine.begin() as connection:
        for number in range(7):
            store.mark(connection, group=f"group-{number % 2}", message_id=f"m-{number}", topic="orders")
        inbox = shop.tables.inbox
        connection.execute(inbox.update().where(inbox.c.message_id < "m-5").values(handled_at_us=1))

    purged = []
    for _ in range(4):
        with shop.engine.begin() as connection:
            purged.append(store.purge(connection, older_than_us=60_000_000, limit=2))

    assert purged == [2, 2, 1, 0]
    with shop.engine.connect() as connection:
        known = [
            store.handled(connection, group=f"group-{n % 2}", message_id=f"m-{n}", topic="orders") for n in range(7)
        ]
    assert known == [False] * 5 + [True] * 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"topic": "../x"}, InvalidMessage),
        ({"group": ".."}, InvalidMessage),
        ({"workers": 0}, ConfigurationError),
        ({"prefetch": 0}, ConfigurationError),
        ({"invisible_ms": 0}, ConfigurationError),
        ({"inbox": "postgresql://h/d"}, ConfigurationError),
    ],
    ids=str,
)
def test_a_consumer_that_cannot_work_is_refused_where_it_is_written(
    arguments: dict[str, Any], error: type[Exception]
) -> None:
    options = {"topic": "orders", "group": "payments", **arguments}

    with pytest.raises(error):
        consumer(options.pop("topic"), **options)
