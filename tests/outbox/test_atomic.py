"""Guarantees 1 and 3: a message is published if and only if its transaction commits, whatever opens a transaction."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import suppress

import pytest
from sqlalchemy import Connection, insert, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox import NoTransaction
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop


class PaymentFailed(Exception):
    """The business's own error."""


def test_a_commit_sends_the_message_and_removes_its_row(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)

    @box.transactional
    def pay(session: Session, number: int) -> str:
        session.add(Payment(id=number))
        return box.publish("payment.completed", {"number": number}, key="k", headers={"trace": "t"}).id

    message_id = pay(1)

    broker.wait_for(lambda it: it.ids == [message_id])
    assert box.close()
    assert shop.payments() == [1]
    assert shop.rows() == []
    assert shop.archived() == 1
    [sent] = broker.stored
    assert (sent.body, sent.key) == (b'{"number":1}', "k")
    assert sent.headers == {"trace": "t", "content-type": "application/json"}


def test_an_exception_rolls_back_business_and_message_and_is_raised_on(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)

    @box.transactional
    def pay(session: Session) -> None:
        session.add(Payment(id=1))
        session.flush()
        box.publish("payment.completed", "1")
        raise PaymentFailed

    with pytest.raises(PaymentFailed):
        pay()

    box.close()
    assert (shop.payments(), shop.rows(), broker.batches) == ([], [], [])


def test_a_session_is_usable_again_after_a_rollback_and_forgets_what_was_published(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        session.add(Payment(id=1))
        box.publish("rolled.back", "1", session=session)
        session.rollback()
        session.add(Payment(id=2))
        box.publish("committed", "2", session=session)
        session.commit()
        session.add(Payment(id=3))
        box.publish("committed.next", "3", session=session)
        session.commit()

    assert shop.payments() == [2, 3]
    assert shop.row_topics() == ["committed", "committed.next"]


def test_closing_a_session_without_a_commit_publishes_nothing(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)

    with Session(shop.engine) as session:
        session.add(Payment(id=1))
        box.publish("never", "1", session=session)

    box.close()
    assert (shop.payments(), shop.rows(), broker.batches) == ([], [], [])


def test_a_savepoint_that_is_rolled_back_takes_its_messages_and_no_others(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session, session.begin():
        box.publish("before", "", session=session)
        with suppress(PaymentFailed), session.begin_nested():
            session.add(Payment(id=1))
            box.publish("inside", "", session=session)
            raise PaymentFailed
        with session.begin_nested():
            session.add(Payment(id=2))
            box.publish("sibling", "", session=session)
        box.publish("after", "", session=session)

    assert shop.payments() == [2]
    assert shop.row_topics() == ["before", "sibling", "after"]


def test_a_released_savepoint_goes_down_with_the_savepoint_around_it(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session, session.begin():
        with suppress(PaymentFailed), session.begin_nested():
            with session.begin_nested():
                session.add(Payment(id=1))
                box.publish("released", "", session=session)
            with session.begin_nested():
                box.publish("released.too", "", session=session)
            raise PaymentFailed
        box.publish("kept", "", session=session)

    assert shop.payments() == []
    assert shop.row_topics() == ["kept"]


def test_a_released_savepoint_goes_down_with_its_transaction(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)

    with Session(shop.engine) as session:
        with session.begin_nested():
            session.add(Payment(id=1))
            box.publish("released", "", session=session)
        session.rollback()

    box.close()
    assert (shop.payments(), shop.rows(), broker.batches) == ([], [], [])


def test_the_release_of_a_savepoint_sends_nothing_before_the_commit(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)
    sent_early: list[object] = []

    with Session(shop.engine) as session, session.begin():
        with session.begin_nested():
            box.publish("topic", "", session=session)
        sent_early += list(session.execute(text(f"SELECT id FROM {shop.tables.message.fullname}")))
        sent_early += broker.batches

    broker.wait_for(lambda it: it.topics == ["topic"])
    assert sent_early == []


def test_a_savepoint_of_a_plain_connection_takes_its_messages_too(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with box.begin() as connection:
        box.publish("before", "", session=connection)
        with suppress(PaymentFailed), connection.begin_nested():
            connection.execute(insert(Payment).values(id=1, note=""))
            box.publish("inside", "", session=connection)
            with connection.begin_nested():
                box.publish("released.inside", "")
            raise PaymentFailed
        with connection.begin_nested():
            connection.execute(insert(Payment).values(id=2, note=""))
            box.publish("sibling", "", session=connection)

    assert shop.payments() == [2]
    assert shop.row_topics() == ["before", "sibling"]


def test_a_savepoint_made_below_the_session_takes_its_messages_too(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session, session.begin():
        with suppress(PaymentFailed), session.connection().begin_nested():
            session.execute(insert(Payment).values(id=1, note=""))
            box.publish("inside", "", session=session)
            raise PaymentFailed
        box.publish("after", "", session=session)

    assert shop.payments() == []
    assert shop.row_topics() == ["after"]


def test_a_commit_with_a_savepoint_still_open_publishes_all_of_it(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        box_root = session.begin()
        box.publish("root", "", session=session)
        session.begin_nested()
        session.add(Payment(id=1))
        box.publish("open.savepoint", "", session=session)
        session.commit()
        assert not box_root.is_active

    assert shop.payments() == [1]
    assert shop.row_topics() == ["root", "open.savepoint"]


@pytest.mark.parametrize("savepoints", [1, 2])
@pytest.mark.parametrize("numbers", [[], [1]], ids=["no statement", "a statement"])
def test_a_block_that_ends_with_savepoints_still_open_publishes_all_of_it(
    shop: Shop, broker: RecordingBroker, savepoints: int, numbers: list[int]
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        with session.begin():
            box.publish("root", "", session=session)
            for _ in range(savepoints):
                session.begin_nested()
            session.add_all(Payment(id=number) for number in numbers)
            box.publish("open.savepoint", "", session=session)
        with session.begin():
            box.publish("next", "", session=session)

    assert shop.payments() == numbers
    assert sorted(shop.row_topics()) == ["next", "open.savepoint", "root"]


def test_a_function_that_joins_may_begin_a_savepoint_of_its_own(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    @box.transactional
    def inner(session: Session) -> None:
        box.publish("inner.joined", "")
        savepoint = session.begin_nested()
        session.add(Payment(id=2))
        session.flush()
        box.publish("inner.savepoint", "")
        savepoint.rollback()

    @box.transactional
    def outer(session: Session) -> None:
        session.add(Payment(id=1))
        box.publish("outer", "")
        inner()

    outer()

    assert shop.payments() == [1]
    assert shop.row_topics() == ["outer", "inner.joined"]


def test_a_function_that_joins_rolls_back_with_the_one_that_opened(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)

    @box.transactional
    def inner(session: Session) -> None:
        session.add(Payment(id=2))
        box.publish("inner", "")

    @box.transactional
    def outer(_session: Session) -> None:
        inner()
        raise PaymentFailed

    with pytest.raises(PaymentFailed):
        outer()

    box.close()
    assert (shop.payments(), shop.rows(), broker.batches) == ([], [], [])


def test_a_nested_function_that_fails_takes_its_messages_and_leaves_the_outer_ones(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    @box.transactional(propagation="nested")
    def inner(session: Session, number: int) -> None:
        session.add(Payment(id=number))
        box.publish(f"inner.{number}", "")
        if number == 2:
            raise PaymentFailed

    @box.transactional
    def outer(session: Session) -> None:
        session.add(Payment(id=1))
        box.publish("outer", "")
        with pytest.raises(PaymentFailed):
            inner(2)
        inner(3)

    outer()

    assert shop.payments() == [1, 3]
    assert shop.row_topics() == ["outer", "inner.3"]


def test_requires_new_survives_the_rollback_of_the_outer_transaction(mysql_shop: Shop, broker: RecordingBroker) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)

    @box.transactional(propagation="requires_new")
    def audit(session: Session) -> None:
        session.add(Payment(id=2))
        box.publish("audit", "")

    @box.transactional
    def outer(session: Session) -> None:
        session.add(Payment(id=1))
        session.flush()
        box.publish("outer.before", "")
        audit()
        box.publish("outer.after", "")
        raise PaymentFailed

    with pytest.raises(PaymentFailed):
        outer()

    assert mysql_shop.payments() == [2]
    assert mysql_shop.row_topics() == ["audit"]


def test_the_outer_transaction_survives_the_rollback_of_requires_new(mysql_shop: Shop, broker: RecordingBroker) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)

    @box.transactional(propagation="requires_new")
    def audit(session: Session) -> None:
        session.add(Payment(id=2))
        box.publish("audit", "")
        raise PaymentFailed

    @box.transactional
    def outer(session: Session) -> None:
        session.add(Payment(id=1))
        session.flush()
        with pytest.raises(PaymentFailed):
            audit()
        box.publish("outer", "")

    outer()

    assert mysql_shop.payments() == [1]
    assert mysql_shop.row_topics() == ["outer"]


def test_a_connection_publishes_when_its_block_ends_and_not_when_it_fails(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with box.begin() as connection:
        connection.execute(insert(Payment).values(id=1, note=""))
        box.publish("named", "", session=connection)
        box.publish("found", "")
    with suppress(PaymentFailed), box.begin() as failing:
        failing.execute(insert(Payment).values(id=2, note=""))
        box.publish("never", "", session=failing)
        raise PaymentFailed

    assert shop.payments() == [1]
    assert shop.row_topics() == ["named", "found"]


def test_a_connection_that_the_outbox_did_not_open_is_refused(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    box = sqlite_shop.box(broker)

    with (
        sqlite_shop.engine.begin() as connection,
        pytest.raises(NoTransaction, match=r"with box\.begin\(\) as connection"),
    ):
        box.publish("topic", "", session=connection)


def test_a_scoped_session_is_taken_for_the_session_behind_it(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)
    sessions = scoped_session(sessionmaker(shop.engine))

    sessions.add(Payment(id=1))
    box.publish("topic", "", session=sessions)
    sessions.commit()
    sessions.remove()

    assert shop.payments() == [1]
    assert shop.row_topics() == ["topic"]


def test_autobegin_counts_as_a_transaction_and_a_session_that_may_not_autobegin_has_none(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine, autobegin=False) as fresh, pytest.raises(NoTransaction, match="belong to a transaction"):
        box.publish("too.early", "", session=fresh)
    with Session(shop.engine) as session:
        session.add(Payment(id=1))
        box.publish("topic", "", session=session)
        session.commit()

    assert shop.row_topics() == ["topic"]


def test_two_outboxes_publish_in_one_session_each_to_its_own_broker(shop: Shop) -> None:
    first, second = RecordingBroker(), RecordingBroker()
    one, two = shop.box(first), shop.box(second)

    with Session(shop.engine) as session, session.begin():
        one.publish("one", "", session=session)
        two.publish("two", "", session=session)

    first.wait_for(lambda it: it.topics == ["one"])
    second.wait_for(lambda it: it.topics == ["two"])
    assert one.close()
    assert two.close()
    assert shop.rows() == []


def test_sessions_held_by_generators_keep_their_messages_apart(mysql_shop: Shop, broker: RecordingBroker) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)

    def held(name: str, *, fails: bool) -> object:
        with box.begin() as connection:
            yield connection
            box.publish(f"{name}.second", "", session=connection)
            if fails:
                raise PaymentFailed

    kept, lost = held("kept", fails=False), held("lost", fails=True)
    kept_connection, lost_connection = next(kept), next(lost)
    box.publish("lost.first", "", session=lost_connection)
    box.publish("kept.first", "", session=kept_connection)
    next(kept, None)
    with pytest.raises(PaymentFailed):
        next(lost)

    assert mysql_shop.row_topics() == ["kept.first", "kept.second"]


def test_messages_of_one_transaction_keep_their_order(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)

    with Session(shop.engine) as session, session.begin():
        expected = [box.publish("topic", str(number), session=session).id for number in range(250)]

    broker.wait_for(lambda it: len(it.stored) == 250)
    assert broker.ids == expected


def test_messages_of_one_transaction_keep_their_order_when_the_compensator_sends_them(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)
    with Session(shop.engine) as session, session.begin():
        expected = [box.publish("topic", str(number), session=session).id for number in range(250)]
    message = shop.tables.message.fullname
    shop.execute(f"UPDATE {message} SET due_at_us = due_at_us - 3600000000")  # the leases end, in their order

    shop.scan(broker, batch_rows=100).run()

    assert broker.ids == expected


def test_a_block_that_ends_in_another_context_than_it_began_in_commits_as_usual(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    def dependency() -> Iterator[Connection]:
        with box.begin() as connection:
            yield connection

    held = dependency()
    connection = contextvars.copy_context().run(next, held)
    box.publish("topic", "", session=connection)
    contextvars.copy_context().run(next, held, None)

    assert shop.row_topics() == ["topic"]
