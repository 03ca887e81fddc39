"""Transactions that lie: what commits half, what is lost without a word, and that ours fails whole. X1 to X11."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.store.database import background_engine, error_code
from outbox_core.common.errors import TransactionDoomed
from tests.fixtures.cutting_proxy import Moment, cutting_proxy
from tests.outbox.deadlock import add_rows_to_fight_over, become_a_deadlocks_victim
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop
from tests.traps.naive import assert_fails, insert, make_naive_outbox, run, transaction
from tests.traps.passes import compensate

MIB = 1024 * 1024


def naive_rows(shop: Shop) -> int:
    """How many messages the naive table has."""
    with shop.engine.connect() as connection:
        ((count,),) = run(connection, "SELECT COUNT(*) FROM naive")
    return int(str(count))


@pytest.mark.slow
def test_naive_a_lock_wait_of_the_message_that_is_swallowed_commits_the_business_without_it(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop)

    with transaction(mysql_shop) as blocker, transaction(mysql_shop) as business:
        run(blocker, "SELECT id FROM naive FOR UPDATE")
        run(business, "INSERT INTO payment (id, note) VALUES (1, '')")
        with contextlib.suppress(DBAPIError):  # "the message is not worth failing for"
            insert(business)
        business.commit()

    assert (mysql_shop.payments(), naive_rows(mysql_shop)) == ([1], 0)


def test_naive_a_deadlock_that_is_swallowed_commits_the_second_half(mysql_shop: Shop) -> None:
    add_rows_to_fight_over(mysql_shop)
    make_naive_outbox(mysql_shop)

    with Session(mysql_shop.engine) as session:
        session.add(Payment(id=50))
        session.flush()
        become_a_deadlocks_victim(session, mysql_shop.engine)
        insert(session.connection(), "payment 50 was made")
        session.commit()

    assert 50 not in mysql_shop.payments()
    assert naive_rows(mysql_shop) == 1  # a message about a payment that never was


def test_the_same_with_ours_fails_at_the_commit(mysql_shop: Shop, broker: RecordingBroker) -> None:
    add_rows_to_fight_over(mysql_shop)
    box = mysql_shop.box(broker, sender=NO_SENDER)

    with Session(mysql_shop.engine) as session:
        session.add(Payment(id=50))
        session.flush()
        become_a_deadlocks_victim(session, mysql_shop.engine)
        box.publish("payment.made", "50", session=session)
        with pytest.raises(TransactionDoomed):
            session.commit()
        session.rollback()

    assert 50 not in mysql_shop.payments()
    assert mysql_shop.rows() == []


def test_naive_a_payload_above_the_packet_costs_the_connection_and_the_business_transaction(mysql_shop: Shop) -> None:
    mysql_shop.execute("CREATE TABLE large (payload LONGBLOB)")
    with mysql_shop.engine.connect() as connection:
        ((limit,),) = run(connection, "SELECT @@max_allowed_packet")

    with mysql_shop.engine.connect() as connection:
        run(connection, "INSERT INTO payment (id, note) VALUES (1, '')")
        with pytest.raises(DBAPIError) as caught:
            connection.execute(text("INSERT INTO large VALUES (:payload)"), {"payload": b"x" * int(str(limit))})
        lost = connection.invalidated or error_code(caught.value) == 1153
        connection.rollback()

    assert lost
    assert mysql_shop.payments() == []


@pytest.mark.parametrize("moment", list(Moment))
def test_naive_an_error_out_of_commit_says_nothing_about_the_commit(mysql_shop: Shop, moment: Moment) -> None:
    with cutting_proxy(mysql_shop.database.url) as proxy:
        engine = proxy.engine()
        with Session(engine) as session:
            session.add(Payment(id=1))
            session.flush()
            proxy.arm(1, moment=moment)
            with pytest.raises(DBAPIError):
                session.commit()
        engine.dispose()

    assert proxy.cut_statement == "COMMIT"
    assert mysql_shop.payments() == ([1] if moment is Moment.AFTER else [])


@pytest.mark.parametrize("moment", list(Moment))
def test_a_commit_of_unknown_outcome_sends_nothing_at_once_and_then_what_the_table_says(
    mysql_shop: Shop, broker: RecordingBroker, moment: Moment
) -> None:
    with cutting_proxy(mysql_shop.database.url) as proxy:
        engine = proxy.engine()
        box = mysql_shop.box(broker, engine=engine)
        with Session(engine) as session:
            pay(box, session, 1)
            session.commit()
            pay(box, session, 2)
            proxy.arm(2, moment=moment)  # after the INSERT of the message
            with pytest.raises(DBAPIError):
                session.commit()
        box.close()
        at_once = broker.ids
        engine.dispose()
    compensate(mysql_shop, broker)

    assert proxy.cut_statement == "COMMIT"
    assert at_once == ["1"]
    assert broker.ids == [str(number) for number in mysql_shop.payments()]
    assert mysql_shop.payments() == ([1, 2] if moment is Moment.AFTER else [1])


def pay(box: Outbox, session: Session, number: int) -> None:
    """A payment and its message, all but the commit."""
    session.add(Payment(id=number))
    session.flush()
    box.publish("payment.made", "", message_id=str(number), session=session)


def test_naive_the_last_row_id_of_many_rows_is_not_the_id_of_each(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop)
    raw = mysql_shop.engine.raw_connection()
    rows = [(f"m{number}",) for number in range(3)]
    with contextlib.closing(raw), contextlib.closing(raw.cursor()) as cursor:
        cursor.executemany("INSERT INTO naive (message_id, status, due_at, created_at) VALUES (%s, 0, 1, 1)", rows)
        told = cursor.lastrowid
        cursor.execute("SELECT id FROM naive ORDER BY id")
        ids = [number for (number,) in cursor.fetchall()]

    assert [told] * 3 != ids


def test_a_message_has_its_id_before_anything_is_sent_to_the_server(mysql_shop: Shop, broker: RecordingBroker) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)
    seen: list[str] = []
    event.listen(mysql_shop.engine, "before_cursor_execute", lambda *call: seen.append(call[2]))

    with Session(mysql_shop.engine) as session:
        session.begin()
        ids = [box.publish("topic", "", session=session).id for _ in range(3)]
        before = list(seen)
        session.commit()

    assert before == []
    assert [row["id"] for row in mysql_shop.rows()] == ids


def test_naive_a_local_time_in_the_row_is_off_by_hours_in_another_session(mysql_shop: Shop) -> None:
    mysql_shop.execute("CREATE TABLE due (at DATETIME(6))")

    with mysql_shop.engine.begin() as connection:
        run(connection, "SET time_zone = '+13:00'")
        run(connection, "INSERT INTO due VALUES (NOW(6))")
        run(connection, "SET time_zone = '-11:00'")
        ((late,),) = run(connection, "SELECT TIMESTAMPDIFF(HOUR, NOW(6), at) FROM due")
        run(connection, "SET time_zone = DEFAULT")

    assert timedelta(hours=int(str(late))) > timedelta(hours=20)


def test_naive_a_table_without_transactions_keeps_the_message_of_a_business_that_rolled_back(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop)
    mysql_shop.execute("ALTER TABLE naive ENGINE = MyISAM")

    with mysql_shop.engine.connect() as connection:
        run(connection, "INSERT INTO payment (id, note) VALUES (1, '')")
        with contextlib.suppress(DBAPIError):  # MySQL refuses it by itself where GTIDs are on
            insert(connection)
        connection.rollback()

    gtids = mysql_shop.database.name == "mysql"
    assert (mysql_shop.payments(), naive_rows(mysql_shop)) == ([], 0 if gtids else 1)


def test_naive_autocommit_keeps_the_half_that_came_before_the_error(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop)
    engine = mysql_shop.other_engine(isolation_level="AUTOCOMMIT")

    with engine.begin() as connection:
        insert(connection)
        assert_fails(1146, lambda: run(connection, "INSERT INTO nowhere VALUES (1)"))
        connection.rollback()

    assert naive_rows(mysql_shop) == 1


def test_background_work_of_an_autocommit_engine_has_transactions_all_the_same(mysql_shop: Shop) -> None:
    engine = mysql_shop.other_engine(isolation_level="AUTOCOMMIT")
    background = background_engine(engine)

    with background.connect() as connection:
        run(connection, "INSERT INTO payment (id, note) VALUES (1, '')")
        connection.rollback()
    background.dispose()

    assert mysql_shop.payments() == []
