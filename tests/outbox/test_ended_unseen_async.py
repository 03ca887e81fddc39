"""AsyncSessions whose transaction ends where no statement's text says so, on each driver for asyncio."""

from __future__ import annotations

import contextlib

import pytest
from sqlalchemy import insert, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from outbox import NoTransaction, Outbox, TransactionDoomed
from tests.outbox.procedures import make_procedures
from tests.outbox.shop import Payment, Shop
from tests.outbox.test_async_connection_transactions import DRIVERS, pay, run

ENDING = ["CALL abandon()", "CALL settle_and_begin()", "CALL list_and_abandon()"]
SEVERAL = ["DELETE FROM payment WHERE id = 2; ROLLBACK", "SELECT 1; COMMIT"]


@pytest.mark.parametrize("statement", [*ENDING, *SEVERAL])
@pytest.mark.parametrize("is_first", [False, True], ids=["after the message", "before the message"])
def test_what_a_statement_ended_out_of_sight_is_not_committed(mysql_shop: Shop, statement: str, is_first: bool) -> None:
    make_procedures(mysql_shop)

    async def job(box: Outbox, engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            await session.execute(insert(Payment).values(id=1, note=""))
            if not is_first:
                box.publish("paid", "", session=session)
            await session.execute(text(statement))
            if is_first:
                box.publish("paid", "", session=session)
            with pytest.raises(NoTransaction, match="ended this transaction before"):
                await session.commit()
            await session.rollback()
            await pay(box, session, 2)
            await session.commit()

    assert run(mysql_shop, job) == [["paid.2"]] * len(DRIVERS[mysql_shop.database.name])


@pytest.mark.parametrize("statement", ["CALL good()", "CALL good_inside()", "UPDATE payment SET note = ';x'; SELECT 1"])
def test_what_ends_nothing_is_committed_with_its_message(mysql_shop: Shop, statement: str) -> None:
    make_procedures(mysql_shop)

    async def job(box: Outbox, engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            await pay(box, session, 1)
            await session.execute(text(statement))
            await session.commit()

    assert run(mysql_shop, job) == [["paid.1"]] * len(DRIVERS[mysql_shop.database.name])


def test_a_task_that_publishes_behind_what_a_raw_cursor_ended_is_refused_at_the_commit(sqlite_shop: Shop) -> None:
    async def job(box: Outbox, engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            await pay(box, session, 1)
            raw = await (await session.connection()).get_raw_connection()
            assert raw.driver_connection is not None
            await raw.driver_connection.execute("ROLLBACK")
            box.publish("again", "", session=session)
            await session.execute(insert(Payment).values(id=2, note=""))
            with pytest.raises(NoTransaction, match="went past SQLAlchemy"):
                await session.commit()

    assert run(sqlite_shop, job) == [[]]
    assert sqlite_shop.payments() == []


def test_what_sqlite_rolled_back_for_one_row_is_not_committed(sqlite_shop: Shop) -> None:
    async def job(box: Outbox, engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            await pay(box, session, 1)
            with contextlib.suppress(DBAPIError):
                await session.execute(text("INSERT OR ROLLBACK INTO payment VALUES (1, '')"))
            await session.execute(insert(Payment).values(id=2, note=""))
            with pytest.raises(TransactionDoomed):
                await session.commit()

    assert run(sqlite_shop, job) == [[]]
    assert sqlite_shop.payments() == []


def test_a_connection_that_was_switched_to_autocommit_is_replaced(mysql_shop: Shop) -> None:
    async def job(box: Outbox, engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            await session.execute(insert(Payment).values(id=1, note=""))
            await session.execute(text("SET autocommit = 1"))
            box.publish("paid", "", session=session)
            with pytest.raises(NoTransaction, match="SET autocommit ended this transaction before"):
                await session.commit()
        async with AsyncSession(engine) as session:
            await pay(box, session, 2)
            await session.commit()

    assert run(mysql_shop, job) == [["paid.2"]] * len(DRIVERS[mysql_shop.database.name])
