"""Savepoints of a Session that end below it: no row may stand without its message, and no message without its row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from outbox import NoTransaction, Outbox
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop
from tests.outbox.test_async_connection_transactions import pay as pay_async
from tests.outbox.test_async_connection_transactions import run

# Of SQLAlchemy, where a block rolls back a savepoint that its Connection has ended.
pytestmark = pytest.mark.filterwarnings("ignore:nested transaction already deassociated from connection")


class Declined(Exception):
    """The business says no."""


def pay(box: Outbox, session: Session, number: int) -> None:
    """A payment and its message, all but the commit."""
    session.add(Payment(id=number))
    session.flush()
    box.publish(f"paid.{number}", "", session=session)


def end_below(box: Outbox, session: Session, end: str, number: int) -> None:
    """A savepoint of the Session with a payment, which the Connection ends; the Session's own end of it fails."""
    with session.begin_nested():
        pay(box, session, number)
        savepoint = session.connection().get_nested_transaction()
        getattr(savepoint, end)()


def nothing_raised() -> None:
    """The block ends as it should."""


def declined() -> None:
    raise Declined


ENDING = ["CREATE TABLE other (id INT)", "COMMIT", "TRUNCATE payment", "ROLLBACK"]
BLOCK_ENDS = [nothing_raised, declined]


@pytest.mark.parametrize("block_end", BLOCK_ENDS, ids=lambda block_end: block_end.__name__)
@pytest.mark.parametrize("writes_before", [True, False])
@pytest.mark.parametrize("statement", ENDING)
def test_a_statement_that_ends_the_transaction_in_a_savepoint_fails_the_commit(
    mysql_shop: Shop,
    broker: RecordingBroker,
    statement: str,
    writes_before: bool,
    block_end: Callable[[], None],
) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)

    with Session(mysql_shop.engine) as session:
        with contextlib.suppress(DBAPIError, Declined), session.begin_nested():
            if writes_before:
                session.add(Payment(id=1))
                session.flush()
            session.execute(text(statement))
            pay(box, session, 2)
            block_end()
        with pytest.raises(NoTransaction, match=r"ended this transaction before|savepoint of this session"):
            session.commit()
        session.rollback()

    assert 2 not in mysql_shop.payments()
    assert mysql_shop.rows() == []


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK"])
def test_a_statement_that_ends_the_transaction_in_a_savepoint_on_sqlite_refuses_what_is_published_behind_it(
    sqlite_shop: Shop, broker: RecordingBroker, statement: str
) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    with Session(sqlite_shop.engine) as session:
        with contextlib.suppress(DBAPIError), session.begin_nested():
            session.execute(text(statement))
            box.publish("paid.1", "", session=session)
        with pytest.raises(NoTransaction):
            session.commit()
        session.rollback()

    assert (sqlite_shop.payments(), sqlite_shop.rows()) == ([], [])


def test_what_is_published_in_a_savepoint_that_its_connection_rolled_back_is_refused(
    shop: Shop, broker: RecordingBroker
) -> None:
    """The row would be in the transaction around it, and the end of the block would take the message alone."""
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        savepoint = session.begin_nested()
        session.connection().get_nested_transaction().rollback()  # type: ignore[union-attr]
        with pytest.raises(NoTransaction, match="a savepoint of it, was rolled back by its Connection"):
            box.publish("paid.1", "", session=session)
        with contextlib.suppress(InvalidRequestError):
            savepoint.commit()
        session.rollback()
        pay(box, session, 2)
        session.commit()

    assert (shop.payments(), shop.row_topics()) == ([2], ["paid.2"])


def test_a_session_whose_own_savepoint_its_connection_rolled_back_commits_no_message_published_before_it(
    shop: Shop, broker: RecordingBroker
) -> None:
    """Published before its first statement, and so before the savepoint that was rolled back."""
    box = shop.box(broker, sender=NO_SENDER)

    with shop.engine.connect() as connection, connection.begin():
        connection.begin_nested()
        session = Session(connection)
        box.publish("paid.1", "", session=session)
        session.execute(text("INSERT INTO payment (id, note) VALUES (1, '')"))
        connection.get_nested_transaction().rollback()  # type: ignore[union-attr]
        with pytest.raises(NoTransaction, match="was rolled back by its Connection"):
            session.commit()
        session.rollback()

    assert (shop.payments(), shop.row_topics()) == ([], [])


def test_a_savepoint_behind_a_rollback_by_hand_on_sqlite_is_not_a_transaction_of_its_own(
    sqlite_shop: Shop, broker: RecordingBroker
) -> None:
    """SQLite begins a transaction with a SAVEPOINT that is outside one, and commits it with its RELEASE."""
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    with Session(sqlite_shop.engine) as session:
        session.execute(text("ROLLBACK"))
        with session.begin_nested():
            pay(box, session, 1)
        payments_meanwhile = sqlite_shop.payments()
        session.commit()

    assert payments_meanwhile == []
    assert (sqlite_shop.payments(), sqlite_shop.row_topics()) == ([1], ["paid.1"])


@pytest.mark.parametrize("left", ["a message", "nothing"])
def test_a_savepoint_that_its_connection_released_below_the_session_fails_the_commit(
    shop: Shop, broker: RecordingBroker, left: str
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        if left == "a message":
            pay(box, session, 1)
        with pytest.raises(InvalidRequestError, match="inactive"):
            end_below(box, session, "commit", 2)
        with pytest.raises(NoTransaction, match="savepoint of this session"):
            session.commit()
        session.rollback()

    assert (shop.payments(), shop.rows()) == ([], [])


def test_a_savepoint_that_its_connection_rolled_back_below_the_session_takes_its_messages(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        pay(box, session, 1)
        with pytest.raises(InvalidRequestError, match="inactive"):
            end_below(box, session, "rollback", 2)
        session.commit()

    assert (shop.payments(), shop.row_topics()) == ([1], ["paid.1"])


def rolled_back(session: Session) -> None:
    savepoint = session.get_nested_transaction()
    assert savepoint is not None
    savepoint.rollback()


def closed(session: Session) -> None:
    savepoint = session.get_nested_transaction()
    assert savepoint is not None
    savepoint.close()


@pytest.mark.parametrize("end", [rolled_back, closed], ids=lambda end: end.__name__)
@pytest.mark.parametrize("publishes", ["before its first statement", "behind its first statement", "alone"])
def test_a_savepoint_that_ends_without_a_release_takes_its_messages_and_no_others(
    shop: Shop, broker: RecordingBroker, publishes: str, end: Callable[[Session], None]
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        pay(box, session, 1)
        session.begin_nested()
        if publishes != "behind its first statement":
            box.publish("paid.2", "", session=session)
        if publishes != "alone":
            pay(box, session, 3)
        end(session)
        pay(box, session, 4)
        session.commit()

    assert (shop.payments(), shop.row_topics()) == ([1, 4], ["paid.1", "paid.4"])


def test_a_message_that_a_rollback_took_holds_up_no_commit_of_the_connection(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        session.add(Payment(id=1))
        session.flush()
        with contextlib.suppress(Declined), session.begin_nested():
            pay(box, session, 2)
            raise Declined
        session.connection().commit()
        session.close()

    assert (shop.payments(), shop.rows()) == ([1], [])


def test_a_session_that_gave_up_its_messages_cannot_commit_what_followed_the_end_of_its_transaction(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)

    with Session(mysql_shop.engine) as session:
        with contextlib.suppress(Declined), session.begin_nested():
            pay(box, session, 1)
            raise Declined
        session.add(Payment(id=2))
        session.flush()
        session.execute(text("COMMIT"))
        session.add(Payment(id=3))
        with pytest.raises(NoTransaction, match="COMMIT ended this transaction before"):
            session.commit()
        session.rollback()

    assert (mysql_shop.payments(), mysql_shop.rows()) == ([2], [])


@pytest.mark.parametrize("mode", ["conditional_savepoint", "create_savepoint"])
def test_a_savepoint_below_a_session_on_a_connection_is_no_different(
    shop: Shop, broker: RecordingBroker, mode: Any
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with shop.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            with pytest.raises(InvalidRequestError, match="inactive"):
                end_below(box, session, "commit", 1)
            with pytest.raises(NoTransaction, match="savepoint of this session"):
                session.commit()
        if mode == "create_savepoint":
            outer.commit()
        else:
            with pytest.raises(NoTransaction, match="would leave messages behind"):
                outer.commit()

    assert (shop.payments(), shop.rows()) == ([], [])


@pytest.mark.parametrize("mode", ["rollback_only", "control_fully"])
def test_a_savepoint_of_the_connection_that_was_rolled_back_before_refuses_nothing_of_a_session_behind_it(
    shop: Shop, broker: RecordingBroker, mode: Any
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with shop.engine.connect() as connection:
        connection.begin()
        outer = connection.begin_nested()
        connection.begin_nested().rollback()
        with Session(connection, join_transaction_mode=mode) as session:
            pay(box, session, 1)
            session.commit()
        if mode == "rollback_only":
            outer.commit()
        connection.commit()

    assert (shop.payments(), shop.row_topics()) == ([1], ["paid.1"])


@pytest.mark.parametrize("ends_outer", ["commit", "rollback"])
@pytest.mark.parametrize("published", ["before", "after"])
def test_a_session_that_is_closed_behind_a_savepoint_of_its_connection_that_was_rolled_back_loses_no_message(
    shop: Shop, broker: RecordingBroker, published: str, ends_outer: str
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with shop.engine.connect() as connection:
        connection.begin()
        outer = connection.begin_nested()
        session = Session(connection, join_transaction_mode="rollback_only")
        if published == "before":
            box.publish("paid.1", "", session=session)
        connection.begin_nested().rollback()
        session.execute(insert(Payment).values(id=1, note=""))
        if published == "after":
            box.publish("paid.1", "", session=session)
        session.close()
        getattr(outer, ends_outer)()
        if ends_outer == "commit":
            with pytest.raises(NoTransaction, match="would leave messages behind"):
                connection.commit()
        else:
            connection.commit()

    assert (shop.payments(), shop.rows()) == ([], [])


async def end_below_async(box: Outbox, session: AsyncSession) -> None:
    async with session.begin_nested():
        await pay_async(box, session, 1)
        savepoint = (await session.connection()).get_nested_transaction()
        assert savepoint is not None
        await savepoint.commit()


def test_a_savepoint_of_an_async_session_that_its_connection_released_fails_the_commit(shop: Shop) -> None:
    async def job(box: Outbox, engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            with pytest.raises(InvalidRequestError, match="inactive"):
                await end_below_async(box, session)
            with pytest.raises(NoTransaction, match="savepoint of this session"):
                await session.commit()

    assert not any(run(shop, job))
    assert (shop.payments(), shop.rows()) == ([], [])


@pytest.mark.parametrize("others", ["another session", "its connection", "a statement"])
def test_a_row_that_was_not_flushed_when_others_rolled_back_a_savepoint_is_not_committed_without_its_message(
    shop: Shop, broker: RecordingBroker, others: str
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with shop.engine.connect() as connection:
        connection.begin()
        other = Session(connection, join_transaction_mode="create_savepoint")
        session = Session(connection, join_transaction_mode="rollback_only")
        if others == "another session":
            other.execute(text("SELECT 1"))
        elif others == "its connection":
            savepoint = connection.begin_nested()
        else:
            connection.execute(text("SAVEPOINT here"))
        session.add(Payment(id=1))
        box.publish("paid.1", "", session=session)
        if others == "another session":
            other.rollback()
        elif others == "its connection":
            savepoint.rollback()
        else:
            connection.execute(text("ROLLBACK TO SAVEPOINT here"))
        with pytest.raises(NoTransaction, match="had changes to flush"):
            session.commit()
        session.close()
        other.close()
        with contextlib.suppress(NoTransaction):
            connection.commit()

    assert (shop.payments(), shop.rows()) == ([], [])
