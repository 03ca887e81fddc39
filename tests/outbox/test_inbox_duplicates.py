"""Concurrent duplicates: however many workers have the same message, its effect happens once. Threads and processes."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import Engine, event, func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Consumer, Outcome, consumer, still_held
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.consumers.inbox_table import InboxStore
from outbox.testing import AdvancingClock
from outbox_core import Delivery, ExtendStatus
from outbox_core.common.errors import OutboxError
from outbox_core.runtime.logs import event_name
from tests.broker_adapter.redis.redis_server import wait_until
from tests.fixtures.fork_server import Program, environment, fork_server
from tests.outbox.innodb_locks import wait_for_lock_waits
from tests.outbox.shop import Payment, Shop
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker, delivery, message

RIVAL = "tests.outbox.consuming.rival_consumer"
MESSAGES = 30
INVISIBLE_MS = 60_000
ISOLATION = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
TRIES_MAX = 50


@pytest.fixture
def ahead() -> AdvancingClock:
    """The watched broker's clock: it runs, and can be put forward."""
    return AdvancingClock()


@pytest.fixture
def watched(tmp_path: Path, ahead: AdvancingClock) -> Iterator[WatchedBroker]:
    """A broker to watch."""
    broker = WatchedBroker(tmp_path / "watched", clock=ahead)
    yield broker
    broker.close()


def paying(shop: Shop, engine: Engine, before: Callable[[], object] = lambda: None) -> Consumer:
    """A consumer whose effect is a payment, and not its own alone: all share a counter."""

    @consumer("orders", group="payments", inbox=engine, schema=shop.database.schema)
    def pay(session: Session, one: Delivery) -> None:
        before()
        session.add(Payment(id=int(one.body)))
        session.flush()
        session.execute(text("UPDATE payment SET note = note + 1 WHERE id = -1"))

    return pay


def marks(shop: Shop) -> int:
    with shop.engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(shop.tables.inbox)) or 0


def until_settled(pay: Consumer, one: Delivery, outcomes: list[object]) -> None:
    """Redeliver until it is handled, by this consumer or by another one."""
    for _ in range(TRIES_MAX):
        try:
            outcomes.append(pay.handle(one))
        except (OutboxError, DBAPIError) as error:
            outcomes.append(type(error).__name__)
        else:
            return


@pytest.mark.parametrize("isolation", ISOLATION)
def test_threads_with_the_same_messages_have_each_effect_once(mysql_shop: Shop, isolation: str) -> None:
    engine = mysql_shop.other_engine(isolation_level=isolation, pool_size=4)
    mysql_shop.execute("INSERT INTO payment (id, note) VALUES (-1, '0')")
    together = threading.Barrier(4)
    pay = paying(mysql_shop, engine)
    outcomes: list[object] = []

    def work() -> None:
        for number in range(MESSAGES):
            together.wait(WAIT_SECONDS)
            until_settled(pay, delivery(number), outcomes)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT_SECONDS)

    assert mysql_shop.payments() == [-1, *range(MESSAGES)]
    with Session(mysql_shop.engine) as session:
        assert session.get_one(Payment, -1).note == str(MESSAGES)
    assert outcomes.count(Outcome.HANDLED) == MESSAGES
    assert outcomes.count(Outcome.DEDUPLICATED) == 3 * MESSAGES
    assert marks(mysql_shop) == MESSAGES


@pytest.mark.processes
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_processes_with_the_same_messages_have_each_effect_once(mysql_shop: Shop, isolation: str) -> None:
    assert_rivals_share(mysql_shop, isolation)


@pytest.mark.processes
def test_processes_on_sqlite_have_each_effect_once(sqlite_shop: Shop) -> None:
    assert_rivals_share(sqlite_shop, "default")


def assert_rivals_share(shop: Shop, isolation: str) -> None:
    """Three processes with the same messages, begun together."""
    arguments = [shop.database.url, shop.database.schema or "", isolation, str(MESSAGES)]
    with ExitStack() as running:
        rivals = [
            running.enter_context(fork_server().start(
                RIVAL, *arguments, str(seed), env=environment(), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            ))
            for seed in range(3)
        ]  # fmt: skip
        ready = [rival.stdout.readline() for rival in rivals if rival.stdout]
        assert ready == ["ready\n"] * 3, rivals[0].communicate(timeout=WAIT_SECONDS)
        told = [start_and_wait(rival) for rival in together(rivals)]

    print(told)
    assert [out.endswith(" 0\n") for out in told] == [True] * 3
    assert sum(out.count("'handled'") for out in told) >= 1
    assert shop.payments() == list(range(MESSAGES))
    assert marks(shop) == MESSAGES


def together(rivals: list[Program]) -> list[Program]:
    """Let all begin."""
    for rival in rivals:
        assert rival.stdin is not None
        rival.stdin.write("go\n")
        rival.stdin.flush()
    return rivals


def start_and_wait(rival: Program) -> str:
    """What it told in the end."""
    out, err = rival.communicate(timeout=3 * WAIT_SECONDS)
    assert rival.returncode == 0, err
    return out


def test_many_who_wait_for_one_that_fails_settle_without_a_second_effect(mysql_shop: Shop) -> None:
    # When the first one rolls back, all who wait for its mark get a shared lock and ask for an exclusive one: a
    # deadlock by design of InnoDB, which redelivery undoes.
    first_is_in, go_on = threading.Event(), threading.Event()
    outcomes: list[object] = []

    def fail_at_first() -> None:
        if not first_is_in.is_set():
            first_is_in.set()
            go_on.wait(WAIT_SECONDS)
            raise OutboxError("the first one fails")

    mysql_shop.execute("INSERT INTO payment (id, note) VALUES (-1, '0')")
    pay = paying(mysql_shop, mysql_shop.other_engine(pool_size=6), fail_at_first)
    threads = [threading.Thread(target=until_settled, args=(pay, delivery(), outcomes)) for _ in range(6)]
    threads[0].start()
    assert first_is_in.wait(WAIT_SECONDS)
    for thread in threads[1:]:
        thread.start()
    wait_for_lock_waits(mysql_shop, 5)
    go_on.set()
    for thread in threads:
        thread.join(2 * WAIT_SECONDS)

    assert mysql_shop.payments() == [-1, 1]
    assert (outcomes.count(Outcome.HANDLED), outcomes.count(Outcome.DEDUPLICATED)) == (1, 5)
    assert marks(mysql_shop) == 1


def test_a_handler_whose_message_was_handed_out_again_is_told_and_only_one_commits(
    shop: Shop, watched: WatchedBroker, ahead: AdvancingClock, caplog: pytest.LogCaptureFixture
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    told: list[bool] = []

    @consumer("orders", group="payments", inbox=shop.engine, schema=shop.database.schema, invisible_ms=INVISIBLE_MS)
    def pay(session: Session, one: Delivery) -> None:
        session.add(Payment(id=int(one.body)))
        session.flush()
        if not inside.is_set():
            inside.set()
            go_on.wait(WAIT_SECONDS)
            told.append(still_held())

    watched.publish([message()])
    with ConsumerRunner([pay], broker=watched, clock=ahead) as first:
        assert inside.wait(WAIT_SECONDS)
        watched.admin.seek("orders", "payments", to_offset=0)  # the receipt is stale, the message to be had again
        with ConsumerRunner([pay], broker=watched, clock=ahead) as second:
            watched.wait_for(lambda: watched.pulled == 2)
            watched.wait_while_time_passes(lambda: [ExtendStatus.STALE] in watched.extends, ahead, INVISIBLE_MS // 2)
            # The broker has refused to extend it, but the consumer may not have read the answer yet.
            assert wait_until(lambda: "receipt_lost" in [event_name(record) for record in caplog.records])
            go_on.set()
            watched.wait_for(lambda: watched.acked == 2)

    assert told == [False]
    assert shop.payments() == [1]
    assert (first.figures.handled, second.figures.deduplicated) == (1, 1)


def test_marks_are_kept_for_their_time_and_no_longer_beside_consumers_at_work(mysql_shop: Shop) -> None:
    # Purging old marks at READ COMMITTED, as the compensator does, waits for no consumer, and no consumer for it.
    store = InboxStore(dialect=mysql_shop.engine.dialect, schema=mysql_shop.database.schema)
    purging = mysql_shop.other_engine(isolation_level="READ COMMITTED")
    inbox = mysql_shop.tables.inbox
    with mysql_shop.engine.begin() as connection:
        for number in range(20):
            store.mark(connection, group="payments", message_id=f"m-{number}", topic="orders")
        connection.execute(inbox.update().where(inbox.c.message_id < "m-15").values(handled_at_us=1))
        old = connection.scalar(select(func.count()).select_from(inbox).where(inbox.c.handled_at_us == 1)) or 0

    with mysql_shop.engine.begin() as at_work:
        at_work.execute(text("SET SESSION innodb_lock_wait_timeout = 1"))
        assert store.mark(at_work, group="payments", message_id="m-new", topic="orders")
        with purging.begin() as connection:
            connection.execute(text("SET SESSION innodb_lock_wait_timeout = 1"))
            removed = store.purge(connection, older_than_us=60_000_000, limit=100)
            assert store.mark(at_work, group="payments", message_id="m-newer", topic="orders")

    assert removed == old > 0
    assert marks(mysql_shop) == 20 - old + 2


def test_a_message_that_comes_back_after_its_mark_was_purged_is_handled_again(sqlite_shop: Shop) -> None:
    # Hence: keep marks longer than any redelivery or redrive may take.
    handled: list[str] = []
    pay = consumer("orders", group="payments", inbox=sqlite_shop.engine)(lambda _s, one: handled.append(one.id))
    store = InboxStore(dialect=sqlite_shop.engine.dialect)

    pay.handle(delivery())
    with sqlite_shop.engine.begin() as connection:
        purged = store.purge(connection, older_than_us=-60_000_000, limit=10)
    pay.handle(delivery())

    assert (purged, handled) == (1, ["m-1", "m-1"])


@pytest.mark.slow
def test_a_mark_that_waits_in_vain_uses_up_no_attempt_and_holds_up_no_other_message(
    mysql_shop: Shop, watched: WatchedBroker
) -> None:
    engine = mysql_shop.other_engine()
    event.listen(engine, "connect", lambda raw, _: raw.query("SET SESSION innodb_lock_wait_timeout = 1"))
    attempts: dict[str, int] = {}

    @consumer("orders", group="payments", inbox=engine, schema=mysql_shop.database.schema)
    def pay(_session: Session, one: Delivery) -> None:
        attempts[one.id] = one.attempt

    store = InboxStore(dialect=mysql_shop.engine.dialect, schema=mysql_shop.database.schema)
    watched.publish([message(number) for number in range(3)])
    with mysql_shop.engine.connect() as rival, rival.begin() as undecided:
        store.mark(rival, group="payments", message_id="m-0", topic="orders")
        with ConsumerRunner([pay], broker=watched) as runner:
            watched.wait_for(lambda: watched.acked == 2 and bool(watched.nacks))
            undecided.rollback()
            watched.wait_for(lambda: watched.acked == 3)

    assert attempts == {"m-0": 1, "m-1": 1, "m-2": 1}
    assert {nack["counts"] for nack in watched.nacks} == {False}
    assert (runner.figures.handled, runner.figures.failed) == (3, 0)
    assert runner.figures.handed_back == len(watched.nacks)  # the one that waited, and none of its neighbours
