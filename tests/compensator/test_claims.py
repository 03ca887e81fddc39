"""How rows are claimed: what is locked, who waits, and who may settle. On real InnoDB where locks are meant."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sqlalchemy import Connection, event, select, text
from sqlalchemy.orm import Session

from compensator.core.batch_totals import BatchTotals
from outbox import Outbox, SenderLimits
from outbox.store.databases.supported import database_of
from outbox.store.message_table import MessageStore
from outbox_core import ManualClock, Message
from outbox_core.common.errors import BrokerUnavailable
from tests.outbox.innodb_locks import rows_locked
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop

HOUR_US = 3_600_000_000
LEASE_MS = 60_000
WAIT_SECONDS = 300
OURS, THEIRS = "a" * 32, "b" * 32


@pytest.fixture
def mysql_shop(fresh_mysql_shop: Shop) -> Shop:
    """What is read and locked is counted here."""
    return fresh_mysql_shop


def background_connection(shop: Shop) -> Connection:
    """As background work has them: READ COMMITTED. Closed by the caller."""
    return shop.background_engine().connect()


def test_a_claim_of_a_hundred_among_thousands_locks_a_hundred_rows(mysql_shop: Shop) -> None:
    mysql_shop.add_due(5_000)

    with background_connection(mysql_shop) as connection:
        ids = mysql_shop.store.due_ids(connection, limit=100)
        connection.rollback()
        claimed = mysql_shop.store.claim(connection, ids, token=OURS, lease_us=HOUR_US)
        locked = rows_locked(mysql_shop, connection)
        connection.rollback()

    assert claimed == 100
    assert 100 <= locked <= 220  # the row's own lock, and for some the secondary index's


def test_lists_of_any_length_are_asked_for_by_statements_of_a_few_lengths(sqlite_shop: Shop) -> None:
    ids, statements = sqlite_shop.add_due(2_300), set[str]()
    engine = sqlite_shop.background_engine()
    event.listen(engine, "before_cursor_execute", lambda *it: statements.add(it[2]))

    with engine.connect() as connection:
        found = [
            {row.id for row in sqlite_shop.store.claimed(connection, ids[:count], token="d" * 32)}
            for count in (1_001, 1_234, 2_300)
        ]

    assert found == [set(ids[:1_001]), set(ids[:1_234]), set(ids)]
    assert len([one for one in statements if one.startswith("SELECT")]) == 2


def test_background_connections_are_read_committed_and_those_of_the_business_stay_as_they_were(
    mysql_shop: Shop,
) -> None:
    with background_connection(mysql_shop) as background, mysql_shop.engine.connect() as business:
        levels = (background.get_isolation_level(), business.get_isolation_level())

    assert levels == ("READ COMMITTED", "REPEATABLE READ")


def claim_all(store: MessageStore, connection: Connection) -> None:
    """A claim that reaches the end of what is due."""
    store.claim(connection, store.due_ids(connection, limit=200), token=OURS, lease_us=HOUR_US)


def find_nothing(store: MessageStore, connection: Connection) -> None:
    """A claim of rows that are not there any more, after a look that found nothing."""
    store.due_ids(connection, limit=200)
    store.claim(connection, ["gone-1", "zzzz-2"], token=OURS, lease_us=HOUR_US)


def settle(store: MessageStore, connection: Connection) -> None:
    """All ways to settle, of rows that are ours, that are not ours and that are not there."""
    ids = [*store.due_ids(connection, limit=10), "0000", "zzzz"]
    store.claim(connection, ids, token=OURS, lease_us=HOUR_US)
    for token in (OURS, THEIRS):
        store.archive(connection, ids[:3], token=token, outcome="stored")
        store.remove(connection, ids[:3], token=token)
        store.reschedule(connection, ids[3:6], token=token, delay_us=HOUR_US, error="down")
        store.park(connection, ids[6:], token=token, error="refused")


@pytest.mark.parametrize("work", [claim_all, find_nothing, settle], ids=lambda work: work.__name__)
def test_a_producer_never_waits_for_background_work(
    mysql_shop: Shop, broker: RecordingBroker, work: Callable[[MessageStore, Connection], None]
) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)
    if work is not find_nothing:
        mysql_shop.add_due(20)

    with background_connection(mysql_shop) as connection:
        work(mysql_shop.store, connection)
        for number, message_id in enumerate(["0000-first", "m-0005-between", "zzzz-last", None]):
            with Session(mysql_shop.engine) as session, session.begin():
                session.execute(text("SET SESSION innodb_lock_wait_timeout = 1"))
                session.add(Payment(id=number))
                box.publish("topic", "", message_id=message_id, session=session)
        connection.rollback()

    assert mysql_shop.payments() == [0, 1, 2, 3]


def test_two_passes_side_by_side_deliver_each_row_once(shop: Shop) -> None:
    ids = shop.add_due(600)
    both_have_a_batch = threading.Barrier(2)
    waited: set[int] = set()

    def rule(_batch: Sequence[Message]) -> None:
        if threading.get_ident() not in waited:
            waited.add(threading.get_ident())
            both_have_a_batch.wait(WAIT_SECONDS)

    broker = RecordingBroker(rule)
    reports: list[BatchTotals] = []
    scans = [shop.scan(broker, batch_rows=50) for _ in range(2)]
    threads = [threading.Thread(target=lambda scan=scan: reports.append(scan.run())) for scan in scans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)

    assert len(waited) == 2
    assert sum(report.accepted for report in reports) == 600
    assert sorted(broker.ids) == ids
    assert broker.duplicates == []
    assert shop.rows() == []


@pytest.mark.parametrize("outcome", ["accepted", "put off", "rejected"])
def test_a_paused_owner_changes_nothing_once_another_has_taken_over(shop: Shop, outcome: str) -> None:
    [row_id] = shop.add_due(1)

    def pause(_batch: Sequence[Message]) -> None:
        shop.end_leases()
        with background_connection(shop) as connection, connection.begin():
            assert shop.store.claim(connection, [row_id], token=THEIRS, lease_us=HOUR_US) == 1
        if outcome == "put off":
            raise BrokerUnavailable("down")

    broker = RecordingBroker(pause)
    if outcome == "rejected":
        broker.rejects[row_id] = "never"

    report = shop.scan(broker).run()

    [row] = shop.rows()
    assert (row["token"], row["state"], row["last_error"], row["attempts"]) == (THEIRS, "pending", None, 3)
    assert report.stale == 1
    assert shop.archived() == 0


def test_a_row_that_somebody_claimed_first_is_left_to_them(shop: Shop) -> None:
    ids = shop.add_due(3)

    with background_connection(shop) as connection, connection.begin():
        assert shop.store.claim(connection, ids[:2], token=THEIRS, lease_us=HOUR_US) == 2
        assert shop.store.claim(connection, ids, token=OURS, lease_us=HOUR_US) == 1
        ours = shop.store.claimed(connection, ids, token=OURS)

    assert [row.id for row in ours] == ids[2:]


def test_a_pass_sends_no_more_of_a_batch_whose_lease_is_over(shop: Shop) -> None:
    others = iter([shop.scan])

    def take_over_once(_batch: Sequence[Message]) -> None:
        for scan in others:
            clock.advance(LEASE_MS)
            shop.end_leases()
            assert scan(broker).run().accepted == 2

    clock, broker = ManualClock(), RecordingBroker(take_over_once)
    box = shop.box(broker, ordered={"topic"}, sender=NO_SENDER)
    with box.begin():
        first, second = [box.publish("topic", "", key="k").id for _ in range(2)]
    shop.end_leases()

    report = shop.scan(broker, lease_ms=LEASE_MS, clock=clock).run()

    assert (broker.ids, broker.duplicates) == ([first, second], [first])
    assert (report.accepted, report.held, report.stale) == (1, 1, 2)
    assert shop.rows() == []


def test_a_batch_that_an_adapter_failed_is_not_sent_in_parts_once_its_lease_is_over(shop: Shop) -> None:
    others = iter([shop.scan])

    def fail_late(_batch: Sequence[Message]) -> None:
        for scan in others:
            clock.advance(LEASE_MS)
            shop.end_leases()
            assert scan(broker).run().accepted == 2
            raise RuntimeError("an adapter's defect")

    clock, broker = ManualClock(), RecordingBroker(fail_late)
    ids = shop.add_due(2)

    report = shop.scan(broker, lease_ms=LEASE_MS, clock=clock).run()

    assert (sorted(broker.ids), broker.duplicates) == (ids, [])
    assert (report.accepted, report.held, report.stale) == (0, 2, 2)
    assert shop.rows() == []


def test_the_compensator_leaves_a_fresh_row_to_its_sender_until_the_lease_ends(shop: Shop) -> None:
    broker = RecordingBroker()
    publish_one(shop, shop.box(broker, sender=NO_SENDER))

    early = shop.scan(broker).run()
    shop.end_leases()
    late = shop.scan(broker).run()

    assert (early.claimed, late.claimed, late.accepted) == (0, 1, 1)


def publish_one(shop: Shop, box: Outbox) -> None:
    """One committed message."""
    with Session(shop.engine) as session, session.begin():
        box.publish("topic", "", session=session)


@pytest.mark.parametrize("app_clock_ms", [0, 4_000_000_000_000])
def test_a_lease_is_counted_by_the_databases_clock_and_not_by_the_applications(
    shop: Shop, broker: RecordingBroker, app_clock_ms: int
) -> None:
    limits = SenderLimits(queue_rows_max=0, lease_ms=60_000, lease_margin_ms=0)
    box = shop.box(broker, sender=limits, clock=ManualClock(app_clock_ms))

    before_us = database_now_us(shop)
    publish_one(shop, box)
    after_us = database_now_us(shop)

    [row] = shop.rows()
    assert before_us + 60_000_000 <= row["due_at_us"] <= after_us + 60_000_000
    assert before_us <= row["created_at_us"] <= after_us


def database_now_us(shop: Shop) -> int:
    """The database's clock as the store reads it."""
    with shop.engine.connect() as connection:
        return int(connection.scalar(select(database_of(shop.engine.dialect).now_us())) or 0)


@pytest.mark.parametrize("zone", ["-11:00", "+00:00", "+13:00"])
def test_time_zones_of_sessions_change_no_lease(mysql_shop: Shop, broker: RecordingBroker, zone: str) -> None:
    engine = mysql_shop.other_engine()
    event.listen(engine, "connect", lambda raw, _: raw.query(f"SET time_zone = '{zone}'"))
    box = mysql_shop.box(broker, engine=engine, sender=NO_SENDER)

    with Session(engine) as session, session.begin():
        box.publish("topic", "", session=session)

    [row] = mysql_shop.rows()
    assert abs(row["created_at_us"] - database_now_us(mysql_shop)) < 60_000_000
    assert mysql_shop.scan(broker).run().claimed == 0


def test_a_pass_takes_over_when_the_databases_clock_says_so(mysql_shop: Shop, broker: RecordingBroker) -> None:
    publish_one(mysql_shop, mysql_shop.box(broker, sender=NO_SENDER))
    engine = mysql_shop.background_engine()
    an_hour_later = database_now_us(mysql_shop) // 1_000_000 + 3_600

    @event.listens_for(engine.pool, "checkout")
    def shift(raw: Any, *_: object) -> None:
        raw.query(f"SET timestamp = {an_hour_later}")

    assert mysql_shop.scan(broker, engine=engine).run().accepted == 1
