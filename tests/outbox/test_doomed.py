"""Transactions that the database ends behind the caller's back, and tables that are not there."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, insert, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from outbox import Outbox, SchemaMissing
from outbox.store.database import error_code
from outbox.store.row import publish_row
from outbox_core import Message
from outbox_core.common.errors import TransactionDoomed
from tests.fixtures.databases import Database
from tests.fixtures.local_server import Durability, LocalServer
from tests.fixtures.servers import MYSQL_LIKE, local_server
from tests.outbox.deadlock import WAIT_SECONDS, add_rows_to_fight_over, become_a_deadlocks_victim, lock, rival
from tests.outbox.innodb_locks import wait_for_lock_waits
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop, open_shop


@pytest.fixture(scope="module", params=MYSQL_LIKE)
def own_server(request: pytest.FixtureRequest) -> Iterator[LocalServer]:
    """A server to restart, which ends the whole transaction where a lock wait times out."""
    with local_server(request.param, Durability.FULL, "--innodb-rollback-on-timeout=ON") as server:
        yield server


@pytest.fixture
def busy_shop(mysql_shop: Shop) -> Shop:
    """With rows to fight over."""
    add_rows_to_fight_over(mysql_shop)
    return mysql_shop


@pytest.mark.parametrize("published", ["before", "after"])
def test_a_swallowed_deadlock_fails_the_commit_and_nothing_of_the_transaction_stays(
    busy_shop: Shop, broker: RecordingBroker, published: str
) -> None:
    box = busy_shop.box(broker)

    with Session(busy_shop.engine) as session:
        session.add(Payment(id=50))
        session.flush()
        if published == "before":
            box.publish("half", "", session=session)
        become_a_deadlocks_victim(session, busy_shop.engine)
        if published == "after":
            box.publish("half", "", session=session)
        session.add(Payment(id=51))
        with pytest.raises(TransactionDoomed, match="run the whole transaction again") as refused:
            session.commit()
        session.rollback()

    assert refused.value.retryable
    assert not {50, 51} & set(busy_shop.payments())
    assert (busy_shop.rows(), broker.batches) == ([], [])


@pytest.mark.parametrize(
    ("then", "in_savepoint"),
    # A commit in a savepoint does not come to the outbox: SQLAlchemy says that the savepoint is invalid.
    [("commit", False), ("publish", False), ("publish", True), ("flush", False), ("flush", True)],
)
def test_a_swallowed_loss_of_the_connection_says_that_a_retry_can_help(
    mysql_shop: Shop, broker: RecordingBroker, then: str, in_savepoint: bool
) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)

    def go_on(session: Session) -> None:
        if then == "publish":
            box.publish("paid.2", "", session=session)
        session.add(Payment(id=2))
        session.commit() if then == "commit" else session.flush()

    with Session(mysql_shop.engine) as session:
        session.execute(insert(Payment).values(id=1, note=""))
        box.publish("paid.1", "", session=session)
        if in_savepoint:
            session.begin_nested()
        connection_id = session.scalar(text("SELECT CONNECTION_ID()"))
        mysql_shop.execute(f"KILL {connection_id}")
        with pytest.raises(OperationalError):
            session.execute(insert(Payment).values(id=3, note=""))
        with pytest.raises(TransactionDoomed, match="run the whole transaction again"):
            go_on(session)
        session.rollback()
        session.rollback()

    assert (mysql_shop.payments(), mysql_shop.rows()) == ([], [])


def test_a_doomed_transaction_on_an_engine_of_the_business_is_refused_as_well(
    busy_shop: Shop, broker: RecordingBroker
) -> None:
    box = busy_shop.box(broker)
    other = busy_shop.other_engine()

    with Session(other) as session:
        session.begin()
        box.publish("half", "", session=session)
        become_a_deadlocks_victim(session, busy_shop.engine)
        with pytest.raises(TransactionDoomed):
            session.commit()
        session.rollback()

    assert (busy_shop.rows(), broker.batches) == ([], [])


def test_a_session_may_be_used_again_after_a_doomed_transaction(busy_shop: Shop, broker: RecordingBroker) -> None:
    box = busy_shop.box(broker, sender=NO_SENDER)

    with Session(busy_shop.engine) as session:
        become_a_deadlocks_victim(session, busy_shop.engine)
        session.rollback()
        session.add(Payment(id=50))
        box.publish("again", "", session=session)
        session.commit()

    assert 50 in busy_shop.payments()
    assert busy_shop.row_topics() == ["again"]


def swallow_a_lock_wait(session: Session, engine: Engine) -> None:
    """Wait for a row until the server gives up, and swallow the error."""
    session.execute(text("SET SESSION innodb_lock_wait_timeout = 1"))
    with rival(engine, first=2, then=2), pytest.raises(OperationalError) as caught:
        lock(session.connection(), 2)
    assert error_code(caught.value) == 1205


@pytest.mark.slow
def test_a_swallowed_lock_wait_dooms_nothing_where_the_server_ends_only_the_statement(
    busy_shop: Shop, broker: RecordingBroker
) -> None:
    box = busy_shop.box(broker, sender=NO_SENDER)

    with Session(busy_shop.engine) as session:
        session.add(Payment(id=50))
        session.flush()
        swallow_a_lock_wait(session, busy_shop.engine)
        box.publish("whole", "", session=session)
        session.commit()

    assert 50 in busy_shop.payments()
    assert busy_shop.row_topics() == ["whole"]


@pytest.mark.slow
def test_a_swallowed_lock_wait_dooms_the_transaction_where_the_server_ends_it_all(
    own_server: LocalServer, broker: RecordingBroker
) -> None:
    with own_server.fresh_database() as database, open_shop(database) as shop:
        shop.execute("INSERT INTO payment (id, note) VALUES (1, ''), (2, '')")
        box = shop.box(broker)
        with Session(shop.engine) as session:
            session.add(Payment(id=50))
            session.flush()
            swallow_a_lock_wait(session, shop.engine)
            box.publish("half", "", session=session)
            with pytest.raises(TransactionDoomed):
                session.commit()
            session.rollback()

        assert (shop.payments(), shop.rows()) == ([1, 2], [])


@pytest.mark.mariadb
def test_a_swallowed_snapshot_conflict_dooms_the_transaction(mariadb: Database, broker: RecordingBroker) -> None:
    # innodb_snapshot_isolation, which MariaDB has on from 11.6.2: the server ends the whole transaction with 1020.
    with open_shop(mariadb) as shop:
        shop.execute("INSERT INTO payment (id, note) VALUES (1, '')")
        box = shop.box(broker)
        with Session(shop.engine) as session:
            session.execute(text("SET SESSION innodb_snapshot_isolation = ON"))
            session.add(Payment(id=50))
            session.flush()
            session.execute(text("SELECT * FROM payment"))
            shop.execute("UPDATE payment SET note = 'changed' WHERE id = 1")
            with pytest.raises(OperationalError) as caught:
                session.execute(text("UPDATE payment SET note = 'mine' WHERE id = 1"))
            box.publish("half", "", session=session)
            session.add(Payment(id=51))
            with pytest.raises(TransactionDoomed):
                session.commit()
            session.rollback()

        assert error_code(caught.value) == 1020
        assert (shop.payments(), shop.rows()) == ([1], [])


@pytest.mark.parametrize("swallowed", ["inside", "outside"])
def test_a_deadlock_inside_a_savepoint_dooms_the_whole_transaction(
    busy_shop: Shop, broker: RecordingBroker, swallowed: str
) -> None:
    box = busy_shop.box(broker)

    with Session(busy_shop.engine) as session:
        session.add(Payment(id=50))
        session.flush()
        box.publish("half", "", session=session)
        with contextlib.suppress(DBAPIError), session.begin_nested():
            become_a_deadlocks_victim(session, busy_shop.engine)
            if swallowed == "outside":
                lock(session.connection(), 1)
                raise_again(session)
        with pytest.raises(Exception, match=r"(?i)rolled back|rollback|rolled this transaction back"):
            commit_more(session)
        session.rollback()

    assert not {50, 51} & set(busy_shop.payments())
    assert (busy_shop.rows(), broker.batches) == ([], [])


def raise_again(session: Session) -> None:
    """An error inside the savepoint, as the deadlock itself would be."""
    session.execute(text("SELECT * FROM nowhere"))


def commit_more(session: Session) -> None:
    """What careless code does next."""
    session.add(Payment(id=51))
    session.commit()


def nowait(connection: Connection, _shop: Shop) -> None:
    """Ask for a row that somebody holds, and do not wait."""
    connection.execute(text("SELECT id FROM payment WHERE id = 2 FOR UPDATE NOWAIT"))


def killed_while_it_waits(connection: Connection, shop: Shop) -> None:
    """Ask for a row that somebody holds, and have the query killed."""
    connection_id = connection.scalar(text("SELECT CONNECTION_ID()"))

    def kill() -> None:
        wait_for_lock_waits(shop)
        shop.execute(f"KILL QUERY {connection_id}")

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        lock(connection, 2)
    finally:
        killer.join(WAIT_SECONDS)


@pytest.mark.parametrize("end", [killed_while_it_waits, nowait], ids=lambda end: end.__name__)
def test_an_error_that_ends_the_statement_alone_dooms_nothing(
    busy_shop: Shop, broker: RecordingBroker, end: Callable[[Connection, Shop], None]
) -> None:
    box = busy_shop.box(broker, sender=NO_SENDER)

    with Session(busy_shop.engine) as session:
        session.add(Payment(id=50))
        session.flush()
        connection = session.connection()
        with rival(busy_shop.engine, first=2, then=2), pytest.raises(DBAPIError) as caught:
            end(connection, busy_shop)
        box.publish("whole", "", session=session)
        session.commit()

    assert error_code(caught.value) in {1317, 3572, 1205}  # MariaDB calls NOWAIT a lock wait that timed out
    assert 50 in busy_shop.payments()
    assert busy_shop.row_topics() == ["whole"]


@pytest.mark.slow
def test_a_server_that_restarts_in_a_transaction_that_swallows_it_fails_the_commit(
    own_server: LocalServer, broker: RecordingBroker
) -> None:
    with own_server.fresh_database() as database, open_shop(database) as shop:
        box = shop.box(broker, sender=NO_SENDER)
        with Session(shop.engine) as session:
            session.add(Payment(id=50))
            session.flush()
            box.publish("half", "", session=session)
            own_server.restart()
            with pytest.raises(DBAPIError):
                session.execute(text("SELECT 1"))
            with pytest.raises(Exception, match=r"(?i)rolled back|rollback|rolled this transaction back"):
                session.commit()
            session.rollback()
            session.add(Payment(id=51))
            box.publish("whole", "", session=session)
            session.commit()

        assert shop.payments() == [51]
        assert shop.row_topics() == ["whole"]


@pytest.mark.slow
def test_a_lock_wait_at_the_insert_fails_every_commit_until_the_rollback(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)
    row = publish_row(Message(id="order-1", topic="rival", body=b""))

    with mysql_shop.engine.connect() as rival, Session(mysql_shop.engine) as session:
        mysql_shop.store.insert(rival, [row], token="c" * 32, lease_us=1)
        session.execute(text("SET SESSION innodb_lock_wait_timeout = 1"))
        session.add(Payment(id=50))
        box.publish("topic", "", message_id="order-1", session=session)
        with pytest.raises(OperationalError) as caught:
            session.commit()
        rival.rollback()
        with pytest.raises(OperationalError) as caught_again:
            session.commit()
        session.rollback()
        session.add(Payment(id=51))
        box.publish("topic", "", message_id="order-1", session=session)
        session.commit()

    assert [error_code(error.value) for error in (caught, caught_again)] == [1205, 1205]
    assert mysql_shop.payments() == [51]
    assert mysql_shop.row_topics() == ["topic"]


def test_a_connection_that_was_lost_and_swallowed_fails_the_commit(busy_shop: Shop, broker: RecordingBroker) -> None:
    box = busy_shop.box(broker)

    with Session(busy_shop.engine) as session:
        session.add(Payment(id=50))
        session.flush()
        box.publish("half", "", session=session)
        connection_id = session.scalar(text("SELECT CONNECTION_ID()"))
        busy_shop.execute(f"KILL {connection_id}")
        with pytest.raises(DBAPIError):
            session.execute(text("SELECT 1"))
        with pytest.raises(Exception, match=r"(?i)rolled back|rollback|rolled this transaction back"):
            session.commit()
        session.rollback()

    assert 50 not in busy_shop.payments()
    assert (busy_shop.rows(), broker.batches) == ([], [])


class Business:
    """What a business function works on."""


def lose_the_connection(engine: Engine, seen: list[weakref.ref[Business]]) -> None:
    """A business function whose transaction ends with its connection."""
    business = Business()
    seen.append(weakref.ref(business))
    with Session(engine) as session, session.begin() as _transaction:
        raw: Any = session.connection().connection.driver_connection
        raw.close()
        session.execute(text("SELECT 1"))


def test_a_transaction_that_was_lost_is_not_kept_with_what_its_function_had(
    sqlite_shop: Shop, broker: RecordingBroker
) -> None:
    sqlite_shop.box(broker)
    seen: list[weakref.ref[Business]] = []

    for _ in range(3):
        with pytest.raises(DBAPIError):
            lose_the_connection(sqlite_shop.engine, seen)
    gc.collect()

    assert [one() for one in seen] == [None] * 3


def test_missing_tables_are_said_with_the_command_that_makes_them(database: Database, broker: RecordingBroker) -> None:
    box = Outbox(database.url, broker=broker, schema=database.schema)

    with contextlib.closing(box), Session(box.engine) as session:
        session.begin()
        box.publish("topic", "", session=session)
        with pytest.raises(SchemaMissing, match="outbox db upgrade"):
            session.commit()
        session.rollback()

    box.engine.dispose()
    assert broker.batches == []
