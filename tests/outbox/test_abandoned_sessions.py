"""Sessions on a Connection with an open transaction that publish and end without a commit: whose transaction it is must
not commit their rows without their messages.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, insert
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from outbox import NoTransaction, Outbox
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop
from tests.outbox.test_async_connection_transactions import run

MODES = ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"]
OUTER_ROW = 7


def close(sessions: list[Session]) -> None:
    sessions.pop().close()


def close_its_transaction(sessions: list[Session]) -> None:
    transaction = sessions.pop().get_transaction()
    assert transaction is not None
    transaction.close()


def drop(sessions: list[Session]) -> None:
    seen = weakref.ref(sessions.pop())
    gc.collect()
    assert seen() is None


ENDS = [close, close_its_transaction, drop]
End = Callable[[list[Session]], None]


def pay_in(box: Outbox, session: Session, *, in_savepoint: bool = False) -> None:
    """A payment and its message, all but the commit; the savepoint is released."""
    with session.begin_nested() if in_savepoint else contextlib.nullcontext():
        session.add(Payment(id=1))
        session.flush()
        box.publish("paid.1", "", session=session)


@pytest.mark.parametrize("in_savepoint", [True, False])
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_an_outer_commit_behind_a_session_that_ended_without_one_leaves_no_message_behind(
    shop: Shop, broker: RecordingBroker, mode: Any, end: End, in_savepoint: bool
) -> None:
    box = shop.box(broker, sender=NO_SENDER)
    refusal = InvalidRequestError if mode == "control_fully" and end is not drop else NoTransaction

    with shop.engine.connect() as connection:
        outer = connection.begin()
        connection.execute(insert(Payment).values(id=OUTER_ROW, note=""))
        sessions = [Session(connection, join_transaction_mode=mode)]
        pay_in(box, sessions[0], in_savepoint=in_savepoint)
        end(sessions)
        with contextlib.nullcontext() if mode == "create_savepoint" and end is not drop else pytest.raises(refusal):
            outer.commit()

    assert (shop.payments(), shop.rows()) == ([OUTER_ROW] if mode == "create_savepoint" and end is not drop else [], [])


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_a_rollback_to_the_savepoint_around_a_session_without_a_commit_frees_the_outer_commit(
    shop: Shop, broker: RecordingBroker, mode: Any, end: End
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with shop.engine.connect() as connection:
        outer = connection.begin()
        connection.execute(insert(Payment).values(id=OUTER_ROW, note=""))
        connection.begin_nested()
        sessions = [Session(connection, join_transaction_mode=mode)]
        pay_in(box, sessions[0])
        end(sessions)
        while (savepoint := connection.get_nested_transaction()) is not None:  # a dropped Session leaves its own
            savepoint.rollback()
        outer.commit()

    assert (shop.payments(), shop.rows()) == ([OUTER_ROW], [])


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only"])
def test_the_end_of_the_outboxs_own_block_is_refused_behind_a_session_without_a_commit(
    shop: Shop, broker: RecordingBroker, mode: Any, end: End
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    def use_the_block() -> None:
        with box.begin() as connection:
            box.publish("outer", "")
            sessions = [Session(connection, join_transaction_mode=mode)]
            pay_in(box, sessions[0])
            end(sessions)

    with pytest.raises(NoTransaction, match="would leave messages behind"):
        use_the_block()

    assert (shop.payments(), shop.rows()) == ([], [])


@pytest.mark.parametrize("mode", MODES)
def test_a_rolled_back_outer_transaction_leaves_nothing_of_a_dropped_session_to_the_next(
    shop: Shop, broker: RecordingBroker, mode: Any
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with shop.engine.connect() as connection:
        outer = connection.begin()
        sessions = [Session(connection, join_transaction_mode=mode)]
        pay_in(box, sessions[0])
        drop(sessions)
        outer.rollback()
        connection.execute(insert(Payment).values(id=OUTER_ROW, note=""))
        connection.commit()

    assert (shop.payments(), shop.rows()) == ([OUTER_ROW], [])


def test_an_outer_commit_is_refused_while_a_session_without_a_statement_of_its_own_has_messages(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with shop.engine.connect() as connection:
        outer = connection.begin()
        connection.execute(insert(Payment).values(id=1, note=""))
        session = Session(connection)
        box.publish("paid.1", "", session=session)
        with pytest.raises(NoTransaction, match="would leave messages behind"):
            outer.commit()
        session.close()

    assert (shop.payments(), shop.rows()) == ([], [])


def test_a_session_without_a_statement_of_its_own_commits_with_its_connection(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with shop.engine.connect() as connection, connection.begin():
        connection.execute(insert(Payment).values(id=1, note=""))
        with Session(connection) as session:
            box.publish("paid.1", "", session=session)
            session.commit()

    assert (shop.payments(), shop.row_topics()) == ([1], ["paid.1"])


def test_a_session_that_published_before_its_first_statement_and_gave_up_frees_the_outer_commit(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with shop.engine.connect() as connection, connection.begin():
        connection.execute(insert(Payment).values(id=OUTER_ROW, note=""))
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            box.publish("paid.1", "", session=session)
            session.add(Payment(id=1))
            session.flush()

    assert (shop.payments(), shop.rows()) == ([OUTER_ROW], [])


@pytest.mark.parametrize("mode", MODES)
def test_an_async_outer_commit_is_refused_behind_a_session_that_was_closed(shop: Shop, mode: Any) -> None:
    async def job(box: Outbox, engine: AsyncEngine) -> None:
        async with engine.connect() as connection:
            outer = await connection.begin()
            session = AsyncSession(bind=connection, join_transaction_mode=mode)
            await session.execute(insert(Payment).values(id=1, note=""))
            box.publish("paid.1", "", session=session)
            await session.close()
            if mode == "create_savepoint":
                await outer.commit()
                return
            with pytest.raises((NoTransaction, InvalidRequestError)):
                await outer.commit()

    assert not any(run(shop, job))
    assert (shop.payments(), shop.rows()) == ([], [])


def test_a_connection_that_is_dropped_behind_a_committed_session_is_collected_with_its_transaction(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    engine = mysql_shop.other_engine(pool_size=1, max_overflow=0)
    box = mysql_shop.box(broker, engine=engine)

    def lose_a_connection() -> weakref.ref[Connection]:
        connection = engine.connect()
        connection.begin()
        with Session(connection) as session:
            pay_in(box, session)
            session.commit()
        return weakref.ref(connection)

    seen = lose_a_connection()
    gc.collect()
    with engine.begin() as connection:  # the pool has one, whose locks are free again
        connection.execute(insert(Payment).values(id=1, note=""))

    assert seen() is None
    assert box.close(timeout_ms=120_000)
    assert (mysql_shop.payments(), mysql_shop.rows(), broker.batches) == ([1], [], [])


@pytest.mark.parametrize("mode", MODES)
def test_a_session_and_its_connection_are_collected_together(shop: Shop, broker: RecordingBroker, mode: Any) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    def lose_both() -> tuple[weakref.ref[Session], weakref.ref[Connection]]:
        connection = shop.engine.connect()
        connection.begin()
        session = Session(connection, join_transaction_mode=mode)
        session.info["connection"] = connection
        with session.begin_nested():
            pay_in(box, session)
        return weakref.ref(session), weakref.ref(connection)

    seen_session, seen_connection = lose_both()
    gc.collect()

    assert (seen_session(), seen_connection()) == (None, None)
    assert (shop.payments(), shop.rows()) == ([], [])
