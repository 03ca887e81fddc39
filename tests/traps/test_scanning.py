"""How rows are found: what a pointer, a snapshot and a coarse clock pass over, and that ours finds all. V1 to V3."""

from __future__ import annotations

import contextlib

from sqlalchemy.orm import Session

from outbox.store.database import background_engine
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop
from tests.traps.naive import insert, make_naive_outbox, run, transaction
from tests.traps.passes import compensate


def test_naive_reading_on_from_the_last_id_never_sees_what_committed_late(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop)

    with transaction(mysql_shop) as slow, transaction(mysql_shop) as quick:
        insert(slow, "first")
        insert(quick, "second")
        quick.commit()
        with mysql_shop.engine.connect() as reader:
            seen = run(reader, "SELECT id, message_id FROM naive WHERE id > 0 ORDER BY id")
        slow.commit()
    with mysql_shop.engine.connect() as reader:
        seen += run(reader, f"SELECT id, message_id FROM naive WHERE id > {seen[-1][0]} ORDER BY id")

    assert [message_id for _, message_id in seen] == ["second"]


def test_what_committed_late_is_sent_by_a_later_pass(mysql_shop: Shop, broker: RecordingBroker) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)

    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(mysql_shop.engine.connect())
        slow = connection.begin()
        with Session(connection) as joined:
            joined.add(Payment(id=1))
            box.publish("slow", "", session=joined)
            joined.commit()  # the rows are written; the transaction is the connection's, and open
        with Session(mysql_shop.engine) as quick, quick.begin():
            quick.add(Payment(id=2))
            box.publish("quick", "", session=quick)
        compensate_while_slow_is_open(mysql_shop, broker)
        first = list(broker.topics)
        slow.commit()
    compensate(mysql_shop, broker)

    assert first == ["quick"]
    assert broker.topics == ["quick", "slow"]


def compensate_while_slow_is_open(shop: Shop, broker: RecordingBroker) -> None:
    """A pass over what is committed."""
    with shop.engine.begin() as connection:
        ids = [row_id for (row_id,) in run(connection, f"SELECT id FROM {shop.database.schema}.message")]
        shown = ", ".join(f"'{row_id}'" for row_id in ids)
        run(
            connection,
            f"UPDATE {shop.database.schema}.message FORCE INDEX (PRIMARY) SET due_at_us = 1 WHERE id IN ({shown})",
        )
    shop.scan(broker).run()


def test_naive_a_scanner_that_keeps_its_snapshot_never_sees_new_rows(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop)

    with transaction(mysql_shop) as scanner, transaction(mysql_shop) as producer:
        counts = [run(scanner, "SELECT COUNT(*) FROM naive")]
        insert(producer)
        producer.commit()
        counts.append(run(scanner, "SELECT COUNT(*) FROM naive"))

    assert counts == [[(0,)], [(0,)]]


def test_background_connections_see_what_committed_since_even_in_one_transaction(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)
    background = background_engine(mysql_shop.engine)

    with background.connect() as scanner:
        before = mysql_shop.store.backlog(scanner).pending
        with Session(mysql_shop.engine) as session, session.begin():
            box.publish("topic", "", session=session)
        after = mysql_shop.store.backlog(scanner).pending
    background.dispose()

    assert (before, after) == (0, 1)


def test_naive_times_of_a_second_say_nothing_about_the_order_of_messages(mysql_shop: Shop) -> None:
    mysql_shop.execute(
        "CREATE TABLE coarse (id VARCHAR(64) PRIMARY KEY, created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP)"
    )
    with mysql_shop.engine.begin() as connection:
        run(connection, "SET timestamp = 1700000000")
        for message_id in ("c", "a", "b"):
            run(connection, f"INSERT INTO coarse (id) VALUES ('{message_id}')")
        run(connection, "SET timestamp = DEFAULT")
        found = run(connection, "SELECT id FROM coarse ORDER BY created_at, id")

    assert found == [("a",), ("b",), ("c",)]


def test_messages_of_one_moment_keep_the_order_in_which_they_were_published(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)
    given = ["c", "a", "b", "z", "d"]

    with Session(mysql_shop.engine) as session, session.begin():
        for message_id in given:
            box.publish("topic", "", message_id=message_id, session=session)
    with mysql_shop.engine.begin() as connection:  # the leases are over, in the order in which they would end
        run(connection, f"UPDATE {mysql_shop.database.schema}.message SET due_at_us = created_at_us - 1000000")
    mysql_shop.scan(broker).run()

    assert broker.ids == given
