"""Traps of InnoDB's locks: what the obvious statements lock, and that ours lock less. L1 to L13 of docs/traps.md."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import pytest
from sqlalchemy import Connection, Engine, inspect
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.migrate import schema_upgrade
from outbox.store.archive_purge import ArchiveStore
from outbox.store.database import background_engine
from outbox.store.row import publish_row
from outbox.store.schema import outbox_tables
from outbox_core import Message
from tests.fixtures.databases import Database
from tests.outbox.innodb_locks import rows_locked, wait_for_lock_waits
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop, open_shop
from tests.traps.naive import (
    DICTIONARY_READS_MAX,
    WAIT_SECONDS,
    assert_fails,
    beside,
    insert,
    make_naive_outbox,
    rows_read,
    run,
    transaction,
    wait_for,
)

HOUR_US = 3_600_000_000
OURS = "a" * 32
LOCK_WAIT, DEADLOCK = 1205, 1213


def add_rows(
    shop: Shop, count: int, *, prefix: str = "due", lease_us: int = -HOUR_US, token: str = "d" * 32
) -> list[str]:
    """Rows of the message table, committed."""
    rows = [publish_row(Message(id=f"{prefix}-{number:05d}", topic="topic", body=b"x")) for number in range(count)]
    with shop.engine.begin() as connection:
        shop.store.insert(connection, rows, token=token, lease_us=lease_us)
    return [row.id for row in rows]


def test_naive_an_order_that_no_index_serves_locks_the_whole_backlog_and_starves_the_second_worker(
    mysql_shop: Shop,
) -> None:
    make_naive_outbox(mysql_shop, 500)
    claim = "SELECT id FROM naive WHERE status = 0 ORDER BY created_at LIMIT 10 FOR UPDATE SKIP LOCKED"

    with transaction(mysql_shop) as one, transaction(mysql_shop) as other:
        mine, theirs = run(one, claim), run(other, claim)
        locked = rows_locked(mysql_shop, one)

    assert (len(mine), len(theirs)) == (10, 0)
    assert locked >= 500


def test_two_claims_of_a_backlog_lock_their_own_rows_alone(mysql_shop: Shop) -> None:
    add_rows(mysql_shop, 500)
    background = background_engine(mysql_shop.engine)

    with background.connect() as one, background.connect() as other:
        first = mysql_shop.store.due_ids(one, limit=10)
        mysql_shop.store.claim(one, first, token=OURS, lease_us=HOUR_US)
        locked = rows_locked(mysql_shop, one)
        one.commit()
        second = mysql_shop.store.due_ids(other, limit=10)
    background.dispose()

    assert len(second) == 10
    assert not set(first) & set(second)
    assert locked <= 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        pytest.param("SELECT id FROM naive WHERE status = 0 AND due_at <= 500 LIMIT 10 FOR UPDATE", id="L3 empty scan"),
        pytest.param("DELETE FROM naive WHERE status = 1 AND due_at < 500", id="L4 purge by range"),
        pytest.param("DELETE FROM naive WHERE id = 999999", id="L6 acknowledgement of a row that is gone"),
    ],
)
def test_naive_background_work_at_repeatable_read_blocks_producers(mysql_shop: Shop, work: str) -> None:
    make_naive_outbox(mysql_shop)

    with transaction(mysql_shop) as background, transaction(mysql_shop) as producer:
        run(background, work)

        assert_fails(LOCK_WAIT, lambda: insert(producer))


def test_naive_two_workers_that_remove_what_is_gone_and_then_insert_deadlock(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop)

    with transaction(mysql_shop) as one, transaction(mysql_shop) as other:
        run(one, "SET SESSION innodb_lock_wait_timeout = 20")
        run(one, "DELETE FROM naive WHERE id = 999998")
        run(other, "DELETE FROM naive WHERE id = 999999")
        codes: list[int] = []

        def insert_here() -> None:
            try:
                insert(one)
            except Exception as error:
                codes.append(error.orig.args[0])  # type: ignore[attr-defined]

        waiting = threading.Thread(target=insert_here)
        waiting.start()
        wait_for_lock_waits(mysql_shop)
        try:
            insert(other)
        except Exception as error:
            codes.append(error.orig.args[0])  # type: ignore[attr-defined]
        other.rollback()
        waiting.join(WAIT_SECONDS)

    assert codes == [DEADLOCK]


def test_two_settles_of_rows_that_are_gone_and_two_producers_meet_no_lock(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)
    background = background_engine(mysql_shop.engine)

    with background.connect() as one, background.connect() as other:
        for connection in (one, other):
            mysql_shop.store.remove(connection, ["gone-1", "zzzz-2"], token=OURS)
        for number in range(2):
            with transaction(mysql_shop) as producer, Session(producer) as session:
                session.add(Payment(id=number))
                box.publish("topic", "", session=session)
                session.commit()
    background.dispose()


@pytest.mark.slow
def test_naive_a_delete_of_most_of_a_small_table_reads_it_whole_and_waits_for_a_strangers_row(
    mysql_shop: Shop,
) -> None:
    make_naive_outbox(mysql_shop, 20)
    mine = ", ".join(str(number) for number in range(1, 21))

    with transaction(mysql_shop) as producer, transaction(mysql_shop, "READ COMMITTED") as background:
        insert(producer)

        assert_fails(LOCK_WAIT, lambda: run(background, f"DELETE FROM naive WHERE id IN ({mine}) AND owner IS NULL"))


def remove_all(shop: Shop, connection: Connection, ids: list[str]) -> int:
    """Settle as sent."""
    return shop.store.remove(connection, ids, token=OURS)


def archive_and_remove_all(shop: Shop, connection: Connection, ids: list[str]) -> int:
    """Settle as sent, with evidence."""
    shop.store.archive(connection, ids, token=OURS, outcome="stored")
    return shop.store.remove(connection, ids, token=OURS)


def park_all(shop: Shop, connection: Connection, ids: list[str]) -> int:
    """Settle as refused."""
    return shop.store.park(connection, ids, token=OURS, error="refused")


@pytest.mark.parametrize("settle", [remove_all, archive_and_remove_all, park_all], ids=lambda act: act.__name__)
@pytest.mark.parametrize("count", [1, 5, 20, 200])
def test_a_settle_of_most_of_a_small_table_touches_its_own_rows_alone(
    mysql_shop: Shop, settle: Callable[[Shop, Connection, list[str]], int], count: int
) -> None:
    ids = add_rows(mysql_shop, count, token=OURS, lease_us=HOUR_US)
    background = background_engine(mysql_shop.engine)

    with transaction(mysql_shop) as producer, background.connect() as connection:
        run(connection, "SET SESSION innodb_lock_wait_timeout = 1")
        stranger = publish_row(Message(id="due-00000-stranger", topic="topic", body=b""))
        mysql_shop.store.insert(producer, [stranger], token="c" * 32, lease_us=HOUR_US)
        settled = settle(mysql_shop, connection, ids)
        connection.commit()
    background.dispose()

    assert settled == count


@pytest.mark.mariadb
def test_naive_a_list_of_one_pair_reads_the_whole_table_on_mariadb(mariadb: Database) -> None:
    with open_shop(mariadb) as shop:
        make_naive_outbox(shop, 500)
        shop.execute("ALTER TABLE naive DROP PRIMARY KEY, ADD PRIMARY KEY (due_at, id), ADD KEY (id)")

        with transaction(shop) as connection:
            before = rows_read(connection)
            run(connection, "DELETE FROM naive WHERE (due_at, id) IN ((1, 2))")
            read = rows_read(connection) - before

    assert read > 500


@pytest.mark.parametrize("count", [1, 2, 50])
def test_a_purge_reads_what_it_deletes_and_not_the_history(mysql_shop: Shop, count: int) -> None:
    archive = mysql_shop.tables.archive
    values = [
        {"sent_at_us": number, "id": f"m-{number:05d}", "kind": "publish", "topic": "topic", "body_sha256": "",
         "created_at_us": number, "attempts": 1, "outcome": "stored"}
        for number in range(2_000)
    ]  # fmt: skip
    with mysql_shop.engine.begin() as connection:
        connection.execute(archive.insert(), values)
    store = ArchiveStore(dialect=mysql_shop.engine.dialect, schema=mysql_shop.database.schema)
    background = background_engine(mysql_shop.engine)

    with background.connect() as connection:
        before = rows_read(connection)
        gone = store.purge(connection, older_than_us=0, limit=count)
        read = rows_read(connection) - before
        connection.rollback()
    background.dispose()

    assert gone == count
    assert read <= 6 * count + DICTIONARY_READS_MAX


def test_naive_a_number_compared_with_text_loses_the_index(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop, 500)
    mysql_shop.execute("CREATE INDEX ix_naive_owner ON naive (owner)")

    with transaction(mysql_shop) as connection:
        before = rows_read(connection)
        run(connection, "SELECT id FROM naive WHERE owner = 0 FOR UPDATE")
        as_number = rows_read(connection) - before
        run(connection, "SELECT id FROM naive WHERE owner = '0' FOR UPDATE")
        as_text = rows_read(connection) - before - as_number

    assert as_number >= 500
    assert as_text < 50


def test_a_look_for_due_rows_reads_what_it_returns_among_any_number_that_are_not_due(mysql_shop: Shop) -> None:
    add_rows(mysql_shop, 1_000, prefix="later", lease_us=HOUR_US)
    parked = add_rows(mysql_shop, 500, prefix="parked")
    with mysql_shop.engine.begin() as connection:
        mysql_shop.store.claim(connection, parked, token=OURS, lease_us=HOUR_US)
        mysql_shop.store.park(connection, parked, token=OURS, error="refused")
    add_rows(mysql_shop, 50)

    with mysql_shop.engine.connect() as connection:
        before = rows_read(connection)
        found = mysql_shop.store.due_ids(connection, limit=200)
        read = rows_read(connection) - before

    assert len(found) == 50
    assert read <= 50 + DICTIONARY_READS_MAX


@pytest.mark.slow
def test_naive_ddl_that_waits_for_a_reader_makes_every_producer_wait_behind_it(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop, 1)

    with transaction(mysql_shop) as reader:
        run(reader, "SELECT * FROM naive")
        with beside(mysql_shop.engine, "ALTER TABLE naive ADD COLUMN more INT"), transaction(mysql_shop) as producer:
            wait_for(
                mysql_shop,
                "SELECT 1 FROM information_schema.processlist WHERE state LIKE 'Waiting for table metadata lock'",
            )
            run(producer, "SET SESSION lock_wait_timeout = 1")

            assert_fails(LOCK_WAIT, lambda: insert(producer))
            reader.rollback()
            run(producer, "SET SESSION lock_wait_timeout = DEFAULT")


@pytest.mark.slow
def test_an_upgrade_that_waits_for_a_reader_lets_producers_through(
    mysql_like: Database, broker: RecordingBroker
) -> None:
    schema = mysql_like.schema
    with open_shop(mysql_like) as shop:
        # As an upgrade leaves it that was cut behind its first table: the next step alters that one.
        shop.execute(f"DROP INDEX ix_message_state_due ON {schema}.message")
        reached: list[str | None] = []
        upgrade = threading.Thread(
            target=lambda: reached.append(schema_upgrade.upgrade(mysql_like.url, schema=schema)), daemon=True
        )

        with transaction(shop) as reader:
            run(reader, f"SELECT id FROM {schema}.message")
            upgrade.start()
            wait_for(
                shop, "SELECT 1 FROM information_schema.processlist WHERE state LIKE 'Waiting for table metadata lock'"
            )
            for number in range(3):
                with transaction(shop) as producer:
                    run(producer, "SET SESSION lock_wait_timeout = 30")
                    run(
                        producer,
                        f"INSERT INTO {schema}.message (id, kind, state, due_at_us, attempts, topic, body, body_sha256,"
                        f" created_at_us) VALUES ('old-{number}', 'publish', 'pending', 1, 1, 'topic', '', '', 1)",
                    )
                    producer.commit()
                    run(producer, "SET SESSION lock_wait_timeout = DEFAULT")
        upgrade.join(300)

        assert reached == [schema_upgrade.head()]
        assert len(shop.rows()) == 3


def test_naive_ddl_in_a_transaction_commits_the_business_rows(mysql_shop: Shop) -> None:
    with transaction(mysql_shop) as connection:
        run(connection, "INSERT INTO payment (id, note) VALUES (1, '')")
        run(connection, "CREATE TABLE anything (id INT)")
        connection.rollback()

    assert mysql_shop.payments() == [1]


def test_no_column_of_ours_takes_its_number_from_a_counter_of_the_server(mysql_shop: Shop) -> None:
    # Counters leave holes and interleave (innodb_autoinc_lock_mode=2, Galera, group replication).
    tables = outbox_tables(mysql_shop.database.namespace).metadata.sorted_tables
    inspected = inspect(mysql_shop.engine)

    counted = [
        f"{table.name}.{column['name']}"
        for table in tables
        for column in inspected.get_columns(table.name, schema=mysql_shop.database.schema)
        if column.get("autoincrement") is True
    ]
    assert counted == []


@pytest.mark.slow
def test_claims_settles_purges_and_producers_side_by_side_never_deadlock(
    mysql_shop: Shop, broker: RecordingBroker, random_seed: int
) -> None:
    background = background_engine(mysql_shop.engine)
    box = mysql_shop.box(broker, sender=NO_SENDER, ordered={"ordered"})
    random = Random(random_seed)
    add_rows(mysql_shop, 200)

    errors = at_once(
        [partial(produce, mysql_shop, box, number, random) for number in range(3)]
        + [partial(settle_in_turns, mysql_shop, background, f"{number:032d}") for number in range(3)]
    )
    background.dispose()

    assert errors == []
    assert len(mysql_shop.payments()) == 75


def produce(shop: Shop, box: Outbox, worker: int, random: Random) -> None:
    """Transactions of a few messages each."""
    for number in range(25):
        with Session(shop.engine) as session, session.begin():
            session.add(Payment(id=worker * 1_000 + number))
            for _ in range(random.randrange(1, 5)):
                box.publish("topic", "", session=session)
            box.publish("ordered", "", key=f"key-{worker}", session=session)


def settle_in_turns(shop: Shop, background: Engine, token: str) -> None:
    """Claim, send half, put off half, purge."""
    store = shop.store
    archive = ArchiveStore(dialect=shop.engine.dialect, schema=shop.database.schema)
    for _ in range(25):
        with background.begin() as connection:
            ids = store.due_ids(connection, limit=20)
            if ids:
                store.claim(connection, ids, token=token, lease_us=HOUR_US)
        with background.begin() as connection:
            mine = [row.id for row in store.claimed(connection, ids, token=token)] if ids else []
            if mine:
                half = len(mine) // 2 + 1
                store.archive(connection, mine[:half], token=token, outcome="stored")
                store.remove(connection, mine[:half], token=token)
                store.reschedule(connection, mine[half:] or ["gone"], token=token, delay_us=0, error="down")
        with background.begin() as connection:
            archive.purge(connection, older_than_us=0, limit=10)


def at_once(acts: Sequence[Callable[[], None]]) -> list[BaseException]:
    """Run them in threads of their own; what they raised."""
    errors: list[BaseException] = []

    def guarded(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return errors
