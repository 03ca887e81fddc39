"""Every way of working with a plain Session or Connection, against a real broker: what commits reaches it, no more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from sqlalchemy import event, insert
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox import NoTransaction, Outbox
from tests.frameworks.reached import Reached
from tests.outbox.shop import Payment, Shop

Pay = Callable[[Session, int], None]


class Declined(Exception):
    """The business says no."""


@pytest.fixture
def box(shop: Shop, broker_url: str) -> Outbox:
    """An Outbox on a real broker."""
    return shop.box(broker_url)


@pytest.fixture
def pay(box: Outbox, topic: str) -> Pay:
    """One payment and its message."""

    def pay(session: Session, number: int) -> None:
        session.add(Payment(id=number))
        box.publish(topic, str(number), session=session)

    return pay


def check(shop: Shop, box: Outbox, reached: Reached, topic: str, *, paid: list[int]) -> None:
    """What was paid, in the database and at the broker; nothing waits."""
    assert box.close()
    assert shop.payments() == paid
    assert sorted(reached.bodies(topic), key=int) == [str(number) for number in paid]
    assert shop.rows() == []


def test_autobegin_explicit_begin_and_begin_blocks(
    shop: Shop, box: Outbox, pay: Pay, reached: Reached, topic: str
) -> None:
    with Session(shop.engine) as session:
        pay(session, 1)
        session.commit()
        session.begin()
        pay(session, 2)
        session.commit()
        with session.begin():
            pay(session, 3)
        with suppress(Declined), session.begin():
            pay(session, 4)
            raise Declined
        pay(session, 5)  # closed with its block, never committed
    with sessionmaker(shop.engine).begin() as session:
        pay(session, 6)

    check(shop, box, reached, topic, paid=[1, 2, 3, 6])


def test_a_session_is_used_again_after_rollbacks_of_all_kinds(
    shop: Shop, box: Outbox, pay: Pay, reached: Reached, topic: str
) -> None:
    with Session(shop.engine) as session:
        pay(session, 1)
        session.rollback()
        pay(session, 2)
        session.commit()
        pay(session, 2)
        with pytest.raises(Exception, match=r"(?i)duplicate|unique"):
            session.commit()
        session.rollback()
        pay(session, 3)
        session.commit()
        pay(session, 4)
        session.close()
        pay(session, 5)
        session.commit()
        pay(session, 6)
        session.reset()
        pay(session, 7)
        session.commit()

    check(shop, box, reached, topic, paid=[2, 3, 5, 7])


def test_an_expunged_session_still_publishes(shop: Shop, box: Outbox, pay: Pay, reached: Reached, topic: str) -> None:
    with Session(shop.engine) as session:
        pay(session, 1)
        session.flush()
        session.expunge_all()
        session.expire_all()
        session.commit()

    check(shop, box, reached, topic, paid=[1])


def test_bulk_statements_without_any_object_publish(shop: Shop, box: Outbox, reached: Reached, topic: str) -> None:
    with Session(shop.engine) as session:
        session.bulk_save_objects([Payment(id=1), Payment(id=2)])
        box.publish(topic, "1", session=session)
        box.publish(topic, "2", session=session)
        session.commit()
        session.bulk_insert_mappings(Payment.__mapper__, [{"id": 3, "note": ""}])
        box.publish(topic, "3", session=session)
        session.rollback()
        session.execute(insert(Payment), [{"id": number, "note": ""} for number in (4, 5)])
        for number in (4, 5):
            box.publish(topic, str(number), session=session)
        session.commit()

    check(shop, box, reached, topic, paid=[1, 2, 4, 5])


def test_a_scoped_session_of_each_thread_publishes_its_own(
    shop: Shop, box: Outbox, reached: Reached, topic: str
) -> None:
    scoped = scoped_session(sessionmaker(shop.engine))
    together = threading.Barrier(4)
    failed: list[BaseException] = []

    def work(first: int) -> None:
        try:
            together.wait()
            for number in range(first, first + 5):
                scoped.add(Payment(id=number))
                box.publish(topic, str(number), session=scoped)
                scoped.rollback() if number % 5 == 2 else scoped.commit()
            scoped.remove()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 5, 10, 15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failed == []
    check(shop, box, reached, topic, paid=[number for number in range(20) if number % 5 != 2])


def test_a_generator_that_commits_when_it_is_resumed_publishes_then(
    shop: Shop, box: Outbox, pay: Pay, reached: Reached, topic: str
) -> None:
    def dependency() -> Iterator[Session]:
        with Session(shop.engine) as session, session.begin():
            yield session

    committed, thrown, dropped = dependency(), dependency(), dependency()
    pay(next(committed), 1)
    next(committed, None)
    pay(next(thrown), 2)
    with pytest.raises(Declined):
        thrown.throw(Declined)
    pay(next(dropped), 3)
    dropped.close()

    check(shop, box, reached, topic, paid=[1])


def test_a_plain_connection_publishes_with_the_block_it_is_in(
    shop: Shop, box: Outbox, reached: Reached, topic: str
) -> None:
    with box.begin() as connection:
        connection.execute(insert(Payment).values(id=1, note=""))
        box.publish(topic, "1", session=connection)
        with connection.begin_nested() as savepoint:
            box.publish(topic, "2", session=connection)
            savepoint.rollback()
    with suppress(Declined), box.begin() as connection:
        box.publish(topic, "3", session=connection)
        raise Declined

    check(shop, box, reached, topic, paid=[1])


@contextmanager
def hook(target: object, name: str, hook: Callable[..., None]) -> Iterator[None]:
    """A listener of the user's own for the length of a block."""
    event.listen(target, name, hook)
    try:
        yield
    finally:
        event.remove(target, name, hook)


@pytest.mark.parametrize("where", ["session", "every session"])
def test_a_hook_of_the_users_that_raises_after_the_commit_loses_no_message(
    shop: Shop, box: Outbox, pay: Pay, reached: Reached, topic: str, where: str
) -> None:
    def raises(_session: Session) -> None:
        raise Declined

    with Session(shop.engine) as session:
        pay(session, 1)
        with hook(session if where == "session" else Session, "after_commit", raises), pytest.raises(Declined):
            session.commit()
        session.close()
        pay(session, 2)
        session.commit()

    check(shop, box, reached, topic, paid=[1, 2])


def test_a_hook_of_the_users_that_raises_before_the_commit_publishes_nothing(
    shop: Shop, box: Outbox, pay: Pay, reached: Reached, topic: str
) -> None:
    def raises(_session: Session) -> None:
        raise Declined

    with Session(shop.engine) as session:
        pay(session, 1)
        with hook(session, "before_commit", raises), pytest.raises(Declined):
            session.commit()
        session.rollback()
        pay(session, 2)
        session.commit()

    check(shop, box, reached, topic, paid=[2])


def test_publishing_behind_a_commit_or_a_rollback_is_refused_until_a_transaction_begins(
    shop: Shop, box: Outbox, pay: Pay, reached: Reached, topic: str
) -> None:
    with Session(shop.engine, autobegin=False) as session:
        with session.begin():
            pay(session, 1)
        with pytest.raises(NoTransaction, match=r"session\.begin\(\)"):
            box.publish(topic, "2", session=session)

    check(shop, box, reached, topic, paid=[1])


def test_a_two_phase_session_publishes_when_it_commits(
    mysql_shop: Shop, broker_url: str, reached: Reached, topic: str
) -> None:
    box = mysql_shop.box(broker_url)

    for number in (1, 2):
        with Session(mysql_shop.engine, twophase=True) as session:
            session.add(Payment(id=number))
            box.publish(topic, str(number), session=session)
            session.flush()
            session.prepare() if number == 1 else None
            session.commit() if number == 1 else session.rollback()

    check(mysql_shop, box, reached, topic, paid=[1])


def test_a_commit_that_a_hook_stopped_may_be_tried_again_and_publishes_once(
    shop: Shop, box: Outbox, pay: Pay, reached: Reached, topic: str
) -> None:
    failures = [Declined()]

    def raises_once(_session: Session) -> None:
        if failures:
            raise failures.pop()

    with Session(shop.engine) as session:
        pay(session, 1)
        with hook(session, "before_commit", raises_once):
            with pytest.raises(Declined):
                session.commit()
            session.commit()

    check(shop, box, reached, topic, paid=[1])


def test_a_hook_of_the_users_publishes_behind_the_commit_in_a_session_of_its_own(
    shop: Shop, box: Outbox, pay: Pay, reached: Reached, topic: str
) -> None:
    def follow_up(_session: Session) -> None:
        with Session(shop.other_engine()) as own, own.begin():
            pay(own, 2)

    with Session(shop.engine) as session:
        pay(session, 1)
        with hook(session, "after_commit", follow_up):
            session.commit()

    check(shop, box, reached, topic, paid=[1, 2])


def test_sessions_of_one_thread_that_overlap_keep_their_messages_apart(
    mysql_shop: Shop, broker_url: str, reached: Reached, topic: str
) -> None:
    box = mysql_shop.box(broker_url)
    sessions = [Session(mysql_shop.engine) for _ in range(4)]

    for round_ in range(3):
        for number, session in enumerate(sessions):
            session.add(Payment(id=10 * round_ + number))
            session.flush()
            box.publish(topic, str(10 * round_ + number), session=session)
        for number, session in enumerate(reversed(sessions)):
            session.commit() if number % 2 else session.rollback()
    for session in sessions:
        session.close()

    check(mysql_shop, box, reached, topic, paid=[0, 2, 10, 12, 20, 22])
