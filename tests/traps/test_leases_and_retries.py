"""Owners that come back, rows that hold up others, work that holds transactions open. F and R of docs/traps.md."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from random import Random

from sqlalchemy import event

from compensator.retention.retention import Retention, RetentionOptions
from outbox import RelayPolicy
from outbox.consumers.inbox_table import InboxStore
from outbox.delivery.relay import Relay
from outbox.store.archive_purge import ArchiveStore
from outbox.store.database import background_engine
from outbox.store.order_table import OrderStore
from outbox.store.schema import RowState
from outbox_core import Message
from tests.outbox.innodb_locks import open_transactions
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Payment, Shop
from tests.traps.naive import make_naive_outbox, rows_read, run, transaction
from tests.traps.passes import one_pass

HOUR_US = 3_600_000_000


def test_naive_an_owner_that_was_paused_overwrites_the_one_that_took_over(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop, 1)
    mysql_shop.execute("UPDATE naive SET owner = 'one'")
    # "one" is paused while it sends; its lease ends, "two" takes over, fails, and puts the row off.
    mysql_shop.execute("UPDATE naive SET owner = 'two'")

    with mysql_shop.engine.begin() as connection:
        run(connection, "UPDATE naive SET status = 1 WHERE id = 1")  # "one" comes back
        found = run(connection, "SELECT owner, status FROM naive")

    assert found == [("two", 1)]


def test_a_row_that_is_taken_over_in_the_middle_of_its_settle_has_one_entry_in_the_archive(shop: Shop) -> None:
    [row_id] = shop.add_due(1)
    background = background_engine(shop.engine)
    thieves = background_engine(shop.engine)
    store = shop.store
    with background.begin() as connection:
        store.claim(connection, [row_id], token="a" * 32, lease_us=HOUR_US)
        rows = store.claimed(connection, [row_id], token="a" * 32)

    def steal(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "archive" in statement and statement.startswith("INSERT") and stolen and not done:
            done.append(True)
            with thieves.begin() as thief:
                run(thief, f"UPDATE {shop.tables.message.fullname} SET due_at_us = 1")
                assert store.claim(thief, [row_id], token="b" * 32, lease_us=HOUR_US) == 1

    stolen = shop.database.name != "sqlite"  # there, nobody else writes while a transaction does
    done: list[bool] = []
    event.listen(background, "after_cursor_execute", steal)
    relay = Relay(engine=background, store=store, broker=RecordingBroker(), policy=RelayPolicy(), random=Random(1))
    report = relay.deliver(rows, token="a" * 32)

    assert report.stale == (1 if stolen else 0)
    assert shop.archived() == (0 if stolen else 1)
    assert len(shop.rows()) == (1 if stolen else 0)
    background.dispose()
    thieves.dispose()


def test_naive_a_workers_name_that_comes_again_is_no_fence(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop, 1)
    mysql_shop.execute("UPDATE naive SET owner = 'host-1'")
    mysql_shop.execute("UPDATE naive SET owner = 'host-1', due_at = 5")  # restarted, claims again

    with mysql_shop.engine.begin() as connection:
        late = connection.exec_driver_sql("UPDATE naive SET status = 1 WHERE id = 1 AND owner = 'host-1'").rowcount

    assert late == 1  # of the first life


def test_each_claim_has_a_token_of_its_own(shop: Shop) -> None:
    shop.add_due(3)
    tokens: list[str] = []

    def note(_batch: Sequence[Message]) -> None:
        tokens.extend({row["token"] for row in shop.rows()})
        shop.end_leases()
        broker.rule = note_again

    def note_again(_batch: Sequence[Message]) -> None:
        tokens.extend({row["token"] for row in shop.rows()})

    broker = RecordingBroker(note)
    broker.rejects = {}
    one_pass(shop, broker, engine=shop.engine)
    shop.add_due(1, prefix="more")
    one_pass(shop, broker, engine=shop.engine)

    assert len(tokens) == len(set(tokens)) >= 2
    assert "d" * 32 not in tokens


def test_naive_a_lock_by_name_is_gone_with_its_connection(mysql_shop: Shop) -> None:
    leader, other = mysql_shop.other_engine(), mysql_shop.other_engine()

    with leader.connect() as one, other.connect() as two:
        name = f"leader-{mysql_shop.database.schema}"
        run(one, f"SELECT GET_LOCK('{name}', 0)")
        refused = run(two, f"SELECT GET_LOCK('{name}', 0)")
        one.invalidate()  # a pooler that gives the connection to somebody else, or a network that drops it
        taken = run(two, f"SELECT GET_LOCK('{name}', 5)")
        one.rollback()

    assert (refused, taken) == ([(0,)], [(1,)])  # while the first leader still works


def test_naive_a_few_rows_that_always_fail_hold_up_all_behind_them(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop, 20)
    sent: list[object] = []

    for _ in range(10):
        with transaction(mysql_shop) as connection:
            batch = run(connection, "SELECT message_id FROM naive WHERE status = 0 ORDER BY id LIMIT 5")
            sent += [row for row in batch if str(row[0]) > "m00004"]  # the first five are never taken

    assert sent == []


def test_rows_that_always_fail_hold_up_nobody(shop: Shop) -> None:
    ids = shop.add_due(20)
    broker = RecordingBroker()
    broker.rejects = dict.fromkeys(ids[:5], "never")

    one_pass(shop, broker, engine=shop.engine, batch_rows=5)

    assert len(broker.ids) == 15
    assert {row["state"] for row in shop.rows()} == {RowState.PARKED}


def test_naive_a_purge_by_age_takes_what_was_never_sent(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop, 3)

    mysql_shop.execute("DELETE FROM naive WHERE created_at < 1000000")

    with mysql_shop.engine.connect() as connection:
        assert run(connection, "SELECT COUNT(*) FROM naive WHERE status = 0") == [(0,)]


def test_retention_takes_nothing_that_was_not_sent_however_old_it_is(shop: Shop) -> None:
    ids = shop.add_due(3)
    shop.execute(f"UPDATE {shop.tables.message.fullname} SET created_at_us = 1")
    background = background_engine(shop.engine)
    dialect, schema = shop.engine.dialect, shop.database.schema

    Retention(
        engine=background,
        archive=ArchiveStore(dialect=dialect, schema=schema),
        inbox=InboxStore(dialect=dialect, schema=schema),
        order=OrderStore(dialect=dialect, schema=schema),
        options=RetentionOptions(archive_days=0.0, inbox_days=0.0),
    ).run()
    background.dispose()

    assert [row["id"] for row in shop.rows()] == ids


def test_naive_a_count_of_the_backlog_reads_all_of_it_each_time(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop, 2_000)

    with transaction(mysql_shop) as connection:
        before = rows_read(connection)
        run(connection, "SELECT COUNT(*) FROM naive WHERE status = 0")
        read = rows_read(connection) - before

    assert read >= 2_000


def test_the_figures_of_the_backlog_read_no_more_than_their_bound(mysql_shop: Shop) -> None:
    mysql_shop.add_due(2_000)

    with mysql_shop.engine.connect() as connection:
        before = rows_read(connection)
        backlog = mysql_shop.store.backlog(connection, rows_max=100)
        read = rows_read(connection) - before

    assert (backlog.pending, backlog.due, backlog.retrying) == (100, 100, 0)
    assert read <= 1_000


def test_nothing_is_sent_inside_a_transaction_of_the_database(mysql_shop: Shop, broker: RecordingBroker) -> None:
    open_while_sending: list[int] = []

    def look(_batch: Sequence[Message]) -> None:
        open_while_sending.append(open_transactions(mysql_shop))

    mysql_shop.add_due(10)
    broker.rule = look
    box = mysql_shop.box(broker)

    @box.transactional
    def pay(session: object) -> None:
        with contextlib.suppress(AttributeError):
            session.add(Payment(id=1))  # type: ignore[attr-defined]
        box.publish("topic", "")

    pay()
    assert box.close(timeout_ms=120_000)
    one_pass(mysql_shop, broker, engine=mysql_shop.engine)

    assert len(broker.ids) == 11
    assert len(open_while_sending) >= 2
    assert set(open_while_sending) == {0}
