"""AsyncSessions whose transaction is ended below them, on each driver for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from outbox import Outbox
from outbox_core.common.errors import NoTransaction
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, Payment, Shop

Job = Callable[[Outbox, AsyncEngine], Awaitable[None]]
DRIVERS = {
    "sqlite": ["sqlite+aiosqlite"],
    "mariadb": ["mysql+asyncmy", "mysql+aiomysql"],
    "mysql": ["mysql+asyncmy", "mysql+aiomysql"],
}


def run(shop: Shop, job: Job) -> list[list[str]]:
    """Run the job on each driver that reaches the shop's database; returns what was sent with each."""
    sent: list[list[str]] = []
    for driver in DRIVERS[shop.database.name]:
        broker = RecordingBroker()
        url = f"{driver}://{shop.database.url.partition('://')[2]}"
        asyncio.run(_with_box(shop, url, broker, job))
        sent.append(broker.topics)
        assert shop.rows() == []
        shop.execute("DELETE FROM payment")
    return sent


async def _with_box(shop: Shop, url: str, broker: RecordingBroker, job: Job) -> None:
    engine = create_async_engine(url)
    box = Outbox(engine, broker=broker, schema=shop.database.schema, sender=BUSY_LIMITS)
    try:
        await job(box, engine)
        assert await asyncio.to_thread(box.close, timeout_ms=120_000)
    finally:
        box.close()
        await engine.dispose()


async def pay(box: Outbox, session: AsyncSession, number: int) -> None:
    """A payment and its message, all but the commit."""
    await session.execute(insert(Payment).values(id=number, note=""))
    box.publish(f"paid.{number}", "", session=session)


@pytest.mark.parametrize("commits", [True, False])
def test_a_held_back_message_goes_the_way_of_the_connections_transaction(shop: Shop, commits: bool) -> None:
    async def job(box: Outbox, engine: AsyncEngine) -> None:
        async with engine.connect() as connection:
            outer = await connection.begin()
            async with AsyncSession(binds={Payment: connection}) as session:
                await pay(box, session, 1)
                await session.commit()
            await (outer.commit() if commits else outer.rollback())

    assert run(shop, job) == [["paid.1"] if commits else []] * len(DRIVERS[shop.database.name])


def test_the_connection_of_an_async_session_with_messages_refuses_to_commit(shop: Shop) -> None:
    async def job(box: Outbox, engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            await pay(box, session, 1)
            connection = await session.connection()
            with pytest.raises(NoTransaction, match="would leave messages behind"):
                await connection.commit()
            await session.rollback()
            await pay(box, session, 2)
            await session.commit()

    assert run(shop, job) == [["paid.2"]] * len(DRIVERS[shop.database.name])


@pytest.mark.parametrize("statement", ["ROLLBACK", "COMMIT"])
def test_a_statement_that_ends_an_async_sessions_transaction_is_refused(shop: Shop, statement: str) -> None:
    async def job(box: Outbox, engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            await pay(box, session, 1)
            with pytest.raises(NoTransaction, match="would end this transaction"):
                await session.execute(text(statement))
            await session.commit()

    assert run(shop, job) == [["paid.1"]] * len(DRIVERS[shop.database.name])
