"""Publishing from inside SQLAlchemy's own events, and Sessions on a Connection whose transaction is somebody else's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.events import ConnectionEvents
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from outbox import NoTransaction
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop

CONNECTION_EVENTS = sorted(name for name, made in vars(ConnectionEvents).items() if callable(made) and name[0] != "_")


class PaymentFailed(Exception):
    """The business's own error."""


def test_what_a_flush_publishes_at_the_commit_is_in_the_commit(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        event.listen(session, "before_flush", lambda it, *_: box.publish("flushed", "", session=it))
        session.add(Payment(id=1))
        session.commit()

    assert shop.payments() == [1]
    assert shop.row_topics() == ["flushed"]


def test_what_a_flush_publishes_joins_what_was_published_before_it(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:

        def on_insert(_mapper: object, _connection: object, payment: Payment) -> None:
            box.publish(f"inserted.{payment.id}", "", session=session)

        event.listen(Payment, "after_insert", on_insert)
        try:
            session.add(Payment(id=1))
            box.publish("before", "", session=session)
            session.commit()
        finally:
            event.remove(Payment, "after_insert", on_insert)

    assert shop.row_topics() == ["before", "inserted.1"]


def test_a_flush_that_makes_more_to_flush_is_heard_to_its_end(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    with Session(sqlite_shop.engine) as session:

        def add_another(it: Session, _context: object) -> None:
            made = len(box_topics)
            box_topics.append(box.publish(f"flush.{made}", "", session=it).topic)
            if made < 2:
                it.add(Payment(id=10 + made))

        box_topics: list[str] = []
        event.listen(session, "after_flush_postexec", add_another)
        session.add(Payment(id=1))
        session.commit()

    assert sqlite_shop.payments() == [1, 10, 11]
    assert sqlite_shop.row_topics() == ["flush.0", "flush.1", "flush.2"]


@pytest.mark.parametrize("moment", ["before_commit", "after_commit", "after_rollback"])
def test_publishing_too_late_is_refused_and_never_swallowed(
    sqlite_shop: Shop, broker: RecordingBroker, moment: str
) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)
    refused: list[NoTransaction] = []

    def publish_late(session: Session) -> None:
        try:
            box.publish("late", "", session=session)
        except NoTransaction as error:
            refused.append(error)

    with Session(sqlite_shop.engine) as session:
        event.listen(session, moment, publish_late)
        session.add(Payment(id=1))
        session.flush()
        session.rollback() if moment == "after_rollback" else session.commit()
        session.add(Payment(id=2))
        box.publish("next", "", session=session)
        event.remove(session, moment, publish_late)
        session.commit()

    assert [str(one) for one in refused] == [
        "this transaction is committing or over; publish before the commit, in the transaction's own task"
    ]
    assert sqlite_shop.row_topics() == ["next"]


def test_nothing_is_sent_while_the_connection_of_the_session_has_a_transaction_open(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker)

    with shop.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection) as session:
            session.add(Payment(id=1))
            box.publish("topic", "", session=session)
            session.commit()
        box.close()
        sent_before_the_commit = list(broker.batches)
        outer.commit()

    assert sent_before_the_commit == []
    assert shop.payments() == [1]
    assert shop.row_topics() == ["topic"]
    shop.end_leases()
    shop.scan(broker).run()
    assert broker.topics == ["topic"]


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"])
def test_the_rollback_of_the_outer_transaction_takes_the_message(
    shop: Shop, broker: RecordingBroker, mode: str
) -> None:
    box = shop.box(broker)

    with shop.engine.connect() as connection:
        outer = connection.begin()
        savepoint = connection.begin_nested()
        with Session(connection, join_transaction_mode=mode) as session:
            session.add(Payment(id=1))
            box.publish("topic", "", session=session)
            session.commit()
        if savepoint.is_active:
            savepoint.rollback()
        if mode == "control_fully":
            outer.close()
        else:
            outer.commit()

    box.close()
    assert broker.batches == []
    assert [topic for topic in shop.row_topics() if not shop.payments()] == []


def test_a_session_on_a_connection_without_a_transaction_sends_at_its_commit(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker)

    with shop.engine.connect() as connection, Session(connection) as session:
        session.add(Payment(id=1))
        box.publish("topic", "", session=session)
        session.commit()

    broker.wait_for(lambda it: it.topics == ["topic"])
    assert box.close()
    assert shop.rows() == []


def test_a_failed_flush_leaves_nothing_to_publish(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)
    shop.execute("INSERT INTO payment (id, note) VALUES (1, '')")

    with Session(shop.engine) as session:
        session.add(Payment(id=1))
        box.publish("lost", "", session=session)
        with pytest.raises(Exception, match=r"(?i)duplicate|unique"):
            session.flush()
        with pytest.raises(NoTransaction):
            box.publish("lost.too", "", session=session)
        session.rollback()
        session.add(Payment(id=2))
        box.publish("kept", "", session=session)
        session.commit()

    assert shop.row_topics() == ["kept"]


def test_a_flush_that_fails_in_a_savepoint_takes_what_was_published_in_it(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)
    shop.execute("INSERT INTO payment (id, note) VALUES (1, '')")

    with Session(shop.engine) as session, session.begin():
        box.publish("before", "", session=session)
        with suppress(IntegrityError), session.begin_nested():
            box.publish("inside", "", session=session)  # the savepoint's first statement comes with the flush
            with session.begin_nested():
                box.publish("released.inside", "", session=session)
            session.add(Payment(id=1))
            session.flush()
        session.add(Payment(id=2))
        box.publish("after", "", session=session)

    assert shop.payments() == [1, 2]
    assert shop.row_topics() == ["before", "after"]


def test_publishing_behind_a_flush_that_failed_in_a_savepoint_is_refused_until_its_block_ends(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)
    shop.execute("INSERT INTO payment (id, note) VALUES (1, '')")

    with Session(shop.engine) as session, session.begin():
        with session.begin_nested():
            session.add(Payment(id=1))
            with suppress(IntegrityError):
                session.flush()
            with pytest.raises(NoTransaction, match="savepoint is rolled back"):
                box.publish("lost", "", session=session)
        with session.begin_nested():
            session.add(Payment(id=2))
            box.publish("kept", "", session=session)

    assert shop.payments() == [1, 2]
    assert shop.row_topics() == ["kept"]


def test_the_rows_go_where_the_business_writes_when_its_classes_are_bound_to_another_engine(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)
    other = mysql_shop.other_engine()
    connections: set[object] = set()

    with Session(binds={Payment: other}) as session:
        event.listen(session, "after_begin", lambda _session, _transaction, connection: connections.add(connection))
        session.add(Payment(id=1))
        box.publish("topic", "", session=session)
        session.commit()

    assert len(connections) == 1, "two connections are two transactions"
    assert mysql_shop.payments() == [1]
    assert mysql_shop.row_topics() == ["topic"]


def test_no_statement_of_the_process_pays_for_our_listening(mysql_shop: Shop, broker: RecordingBroker) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)

    with Session(mysql_shop.engine) as session, session.begin(), session.begin_nested():
        box.publish("in.savepoint", "", session=session)

    # With a listener to any of these, SQLAlchemy runs its event machinery for each statement: 7.5 us of them.
    assert [name for name in CONNECTION_EVENTS if list(getattr(mysql_shop.engine.dispatch, name))] == []


def test_a_commit_pays_for_our_watching_once_however_much_was_published(
    sqlite_shop: Shop, broker: RecordingBroker
) -> None:
    box, dialect = sqlite_shop.box(broker, sender=NO_SENDER), sqlite_shop.engine.dialect
    watched = dialect.do_commit, dialect.do_rollback

    for _ in range(2):
        sqlite_shop.box(broker, sender=NO_SENDER)
        with Session(sqlite_shop.engine) as session, session.begin():
            box.publish("topic", "", session=session)

    assert (dialect.do_commit, dialect.do_rollback) == watched


def test_a_listener_of_the_class_or_of_the_engine_is_among_those_that_are_listed(mysql_shop: Shop) -> None:
    with heard(mysql_shop.engine, "savepoint"), heard(Engine, "rollback"):
        found = [name for name in CONNECTION_EVENTS if list(getattr(mysql_shop.engine.dispatch, name))]

    assert found == ["rollback", "savepoint"]


@contextmanager
def heard(target: Engine | type[Engine], name: str) -> Iterator[None]:
    """Somebody listens to an event for the time being."""
    event.listen(target, name, nothing)
    try:
        yield
    finally:
        event.remove(target, name, nothing)


def nothing(*_: object) -> None:
    """A listener that does nothing."""
