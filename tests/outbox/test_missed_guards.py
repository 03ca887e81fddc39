"""What must not depend on luck: guards that an error would keep from being put on, and state that outlives its
transaction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event, insert, select, text
from sqlalchemy.exc import DBAPIError, InvalidRequestError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from outbox import NoTransaction, Outbox
from outbox.store.database import error_code
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop
from tests.outbox.test_async_connection_transactions import run


class Unready(Exception):
    """A listener of the application fails."""


class OnceUnready:
    """A listener that raises the first time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        if self.calls == 1:
            raise Unready


class OwnSession(Session):
    """An application's class of Sessions."""


def commit_by_its_connection(session: Session) -> None:
    session.connection().commit()


def commit_by_a_statement(session: Session) -> None:
    session.execute(text("COMMIT"))


COMMITS = [commit_by_its_connection, commit_by_a_statement]


@contextlib.contextmanager
def heard(target: type[Session], listener: OnceUnready, *, insert: bool) -> Any:
    """An application's listener, before or behind those that are there."""
    event.listen(target, "after_begin", listener, insert=insert)
    try:
        yield
    finally:
        event.remove(target, "after_begin", listener)


@pytest.mark.parametrize("commit", COMMITS, ids=lambda commit: commit.__name__)
@pytest.mark.parametrize("place", ["last", "first"])
@pytest.mark.parametrize("target", [Session, OwnSession])
def test_a_listener_that_raised_once_keeps_no_guard_off(
    shop: Shop,
    broker: RecordingBroker,
    target: type[Session],
    place: str,
    commit: Callable[[Session], None],
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with heard(target, OnceUnready(), insert=place == "first"), OwnSession(shop.engine) as session:
        with pytest.raises(Unready):
            session.execute(select(Payment.id))
        session.execute(insert(Payment).values(id=1, note=""))
        box.publish("paid.1", "", session=session)
        with pytest.raises(NoTransaction, match=r"would (leave messages behind|end this transaction)"):
            commit(session)
        session.rollback()
        session.execute(insert(Payment).values(id=2, note=""))
        box.publish("paid.2", "", session=session)
        session.commit()

    assert (shop.payments(), shop.row_topics()) == ([2], ["paid.2"])


@pytest.mark.parametrize("commit", COMMITS, ids=lambda commit: commit.__name__)
@pytest.mark.parametrize("place", ["last", "first"])
def test_a_listener_that_raised_once_behind_a_publish_keeps_no_guard_off(
    shop: Shop, broker: RecordingBroker, place: str, commit: Callable[[Session], None]
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with heard(OwnSession, OnceUnready(), insert=place == "first"), OwnSession(shop.engine) as session:
        box.publish("paid.1", "", session=session)
        with pytest.raises(Unready):
            session.execute(select(Payment.id))
        session.execute(insert(Payment).values(id=1, note=""))
        with pytest.raises(NoTransaction, match=r"would (leave messages behind|end this transaction)"):
            commit(session)

    assert (shop.payments(), shop.rows()) == ([], [])


@pytest.mark.filterwarnings("ignore:nested transaction already deassociated from connection")
@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("published", ["before", "after"])
@pytest.mark.parametrize("place", ["last", "first"])
def test_a_listener_that_raised_once_in_a_savepoint_loses_no_message_of_a_row_that_stands(
    shop: Shop, broker: RecordingBroker, place: str, published: str, end: str
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    def end_below(session: Session) -> None:
        with heard(OwnSession, OnceUnready(), insert=place == "first"), session.begin_nested():
            if published == "before":
                box.publish("paid.2", "", session=session)
            with pytest.raises(Unready):
                session.execute(select(Payment.id))
            session.execute(insert(Payment).values(id=2, note=""))
            if published == "after":
                box.publish("paid.2", "", session=session)
            savepoint = session.connection().get_nested_transaction()
            getattr(savepoint, end)()

    with OwnSession(shop.engine) as session:
        session.execute(insert(Payment).values(id=1, note=""))
        with pytest.raises(InvalidRequestError, match="inactive"):
            end_below(session)
        if end == "commit":
            with pytest.raises(NoTransaction, match="savepoint of this session"):
                session.commit()
        else:
            session.commit()

    assert (shop.payments(), shop.rows()) == ([] if end == "commit" else [1], [])


@pytest.mark.filterwarnings("ignore:nested transaction already deassociated from connection")
@pytest.mark.parametrize("end", ["close", "rollback"])
@pytest.mark.parametrize("place", ["last", "first"])
def test_a_listener_that_raised_once_in_a_session_with_a_savepoint_of_its_own_loses_no_message_of_a_row_that_stands(
    shop: Shop, broker: RecordingBroker, place: str, end: str
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with shop.engine.connect() as connection, heard(OwnSession, OnceUnready(), insert=place == "first"):
        connection.begin()
        session = OwnSession(connection, join_transaction_mode="create_savepoint")
        with pytest.raises(Unready):
            session.execute(select(Payment.id))
        session.execute(insert(Payment).values(id=1, note=""))
        box.publish("paid.1", "", session=session)
        savepoint = connection.get_nested_transaction()
        assert savepoint is not None
        savepoint.commit()
        getattr(session, end)()
        with pytest.raises(NoTransaction, match="would leave messages behind"):
            connection.commit()

    assert (shop.payments(), shop.rows()) == ([], [])


@pytest.mark.parametrize("commit", COMMITS, ids=lambda commit: commit.__name__)
@pytest.mark.parametrize("published", ["before", "after"])
def test_a_write_lock_that_was_not_free_keeps_no_guard_off(
    sqlite_shop: Shop, broker: RecordingBroker, published: str, commit: Callable[[Session], None]
) -> None:
    engine = sqlite_shop.other_engine(connect_args={"timeout": 0})
    box = sqlite_shop.box(broker, engine=engine, sender=NO_SENDER)
    event.listen(engine, "connect", lambda driver_connection, _: driver_connection.execute("PRAGMA busy_timeout = 0"))

    with Session(engine) as session:
        session.begin()
        box.publish("paid.1", "", session=session)
        with sqlite_shop.engine.begin() as other:
            other.execute(insert(Payment).values(id=100, note=""))
            with pytest.raises(OperationalError, match="locked"):
                session.execute(select(Payment.id))
        session.execute(insert(Payment).values(id=1, note=""))
        if published == "after":
            box.publish("paid.2", "", session=session)
        with pytest.raises(NoTransaction, match=r"would (leave messages behind|end this transaction)"):
            commit(session)

    assert (sqlite_shop.payments(), sqlite_shop.rows()) == ([100], [])


def test_a_listener_of_an_async_session_that_raised_once_keeps_no_guard_off(shop: Shop) -> None:
    async def job(box: Outbox, engine: AsyncEngine) -> None:
        with heard(OwnSession, OnceUnready(), insert=True):
            await use(box, engine)

    async def use(box: Outbox, engine: AsyncEngine) -> None:
        async with AsyncSession(engine, sync_session_class=OwnSession) as session:
            with pytest.raises(Unready):
                await session.execute(select(Payment.id))
            await session.execute(insert(Payment).values(id=1, note=""))
            box.publish("paid.1", "", session=session)
            with pytest.raises(NoTransaction, match="would leave messages behind"):
                await (await session.connection()).commit()

    assert not any(run(shop, job))
    assert (shop.payments(), shop.rows()) == ([], [])


# -- what a transaction leaves to the next -----------------------------------------------------------------------------


@pytest.mark.parametrize("closes", ["connection", "transaction"])
def test_open_two_phases_that_are_closed_leave_nothing_to_the_next_transaction(
    mysql_shop: Shop, broker: RecordingBroker, closes: str
) -> None:
    engine = mysql_shop.other_engine(pool_size=1, max_overflow=0)
    box = mysql_shop.box(broker, engine=engine, sender=NO_SENDER)

    connection = engine.connect()
    transaction = connection.begin_twophase()
    connection.execute(insert(Payment).values(id=1, note=""))
    if closes == "transaction":
        transaction.close()
    connection.close()
    with Session(engine) as session:
        session.execute(text("CREATE TABLE early (id INT)"))
        session.execute(insert(Payment).values(id=2, note=""))
        box.publish("paid.2", "", session=session)
        session.commit()

    assert (mysql_shop.payments(), mysql_shop.row_topics()) == ([2], ["paid.2"])


def test_an_autocommit_option_that_was_refused_in_a_transaction_refuses_no_commit(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        session.execute(insert(Payment).values(id=1, note=""))
        with pytest.raises(InvalidRequestError):
            session.connection().execution_options(isolation_level="AUTOCOMMIT")
        box.publish("paid.1", "", session=session)
        session.commit()

    assert (shop.payments(), shop.row_topics()) == ([1], ["paid.1"])


def test_the_commit_of_a_killed_connection_says_what_the_server_said(mysql_shop: Shop, broker: RecordingBroker) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)

    with Session(mysql_shop.engine) as session:
        session.execute(insert(Payment).values(id=1, note=""))
        box.publish("paid.1", "", session=session)
        connection_id = session.scalar(text("SELECT CONNECTION_ID()"))
        mysql_shop.execute(f"KILL {connection_id}")
        with pytest.raises(DBAPIError) as caught:
            session.commit()
        session.rollback()

    assert error_code(caught.value) in {2006, 2013, 1927, 4031}
    assert (mysql_shop.payments(), mysql_shop.rows()) == ([], [])


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK", "END"])
def test_a_row_behind_a_first_statement_that_ends_the_transaction_on_sqlite_shares_the_way_of_its_message(
    sqlite_shop: Shop, broker: RecordingBroker, statement: str, commits: bool
) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    with Session(sqlite_shop.engine) as session:
        session.execute(text(statement))
        session.execute(text("CREATE TABLE early (id INT)"))
        session.add_all([Payment(id=1), Payment(id=2)])
        session.flush()
        box.publish("paid.1", "", session=session)
        session.commit() if commits else session.rollback()

    assert (sqlite_shop.payments(), sqlite_shop.row_topics()) == (([1, 2], ["paid.1"]) if commits else ([], []))


def test_a_message_behind_a_first_statement_that_ends_the_transaction_on_sqlite_is_committed_alone(
    sqlite_shop: Shop, broker: RecordingBroker
) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    with Session(sqlite_shop.engine) as session:
        session.execute(text("COMMIT"))
        box.publish("alone", "", session=session)
        session.commit()

    assert sqlite_shop.row_topics() == ["alone"]


def test_a_row_behind_a_commit_by_hand_on_sqlite_is_rolled_back_with_the_commit_that_is_refused(
    sqlite_shop: Shop, broker: RecordingBroker
) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    with Session(sqlite_shop.engine) as session:
        session.execute(insert(Payment).values(id=1, note=""))
        session.execute(text("COMMIT"))
        session.execute(insert(Payment).values(id=2, note=""))
        box.publish("paid.2", "", session=session)
        with pytest.raises(NoTransaction, match="COMMIT ended this transaction before"):
            session.commit()

    assert (sqlite_shop.payments(), sqlite_shop.rows()) == ([1], [])


def test_what_sqlite_runs_outside_of_a_transaction_alone_still_runs_behind_a_commit_by_hand(sqlite_shop: Shop) -> None:
    with Session(sqlite_shop.engine) as session:
        session.execute(text("COMMIT"))
        session.execute(text("VACUUM"))
        session.commit()

    assert sqlite_shop.payments() == []
