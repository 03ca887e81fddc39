"""AsyncSessions on each driver for asyncio that people use: what commits reaches the broker, the rest never."""

from __future__ import annotations

import asyncio
import gc
import itertools
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session

from outbox import Outbox
from tests.frameworks.reached import Reached
from tests.outbox.shop import BUSY_LIMITS, Payment, Shop

WAITS = 40


DRIVERS = {
    "sqlite": ["sqlite+aiosqlite"],
    "mariadb": ["mysql+asyncmy", "mysql+aiomysql"],
    "mysql": ["mysql+asyncmy", "mysql+aiomysql"],
}


def async_urls(shop: Shop) -> list[str]:
    """The shop's database by each driver that can reach it."""
    return [f"{driver}://{shop.database.url.partition('://')[2]}" for driver in DRIVERS[shop.database.name]]


def test_async_sessions_of_every_kind_send_what_they_commit(
    shop: Shop, broker_url: str, reached: Reached, topic: str
) -> None:
    for number, url in enumerate(async_urls(shop)):
        first = 10 * number

        asyncio.run(work(shop, url, broker_url, topic, first))

        assert reached.bodies(topic) == [f"grüße {first + 1}", f"grüße {first + 3}", f"grüße {first + 5}"]
        assert [paid for paid in shop.payments() if paid > first] == [first + 1, first + 3, first + 5]
        assert shop.rows() == []


async def work(shop: Shop, url: str, broker_url: str, topic: str, first: int) -> None:
    engine = create_async_engine(url)
    box = Outbox(engine, broker=broker_url, schema=shop.database.schema, sender=BUSY_LIMITS)
    try:
        await pay_in_every_way(box, engine, topic, first)
        assert await asyncio.to_thread(box.close)
    finally:
        box.close()
        await engine.dispose()


async def pay_in_every_way(box: Outbox, engine: AsyncEngine, topic: str, first: int) -> None:
    sessions = async_sessionmaker(engine)
    scoped = async_scoped_session(sessions, scopefunc=asyncio.current_task)

    async def pay(session: AsyncSession, number: int) -> None:
        await session.execute(insert(Payment).values(id=number, note=""))
        box.publish(topic, f"grüße {number}", key=f"ключ-{number}", session=session)

    async with sessions.begin() as session:
        await pay(session, first + 1)
    async with AsyncSession(engine) as session:
        await pay(session, first + 2)
        await session.rollback()
        await pay(session, first + 3)  # autobegun anew in the same session
        await session.commit()
        await pay(session, first + 4)  # closed without a commit
    async with scoped() as session:
        await pay(session, first + 5)
        await session.commit()
    await scoped.remove()


# SQLAlchemy cannot await the close of a connection whose task was cancelled: it drops it, and the collector closes it.
# aiosqlite and, from Python 3.13, sqlite3 warn of that.
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
@pytest.mark.filterwarnings("ignore:.*was deleted before being closed:ResourceWarning")
def test_tasks_cancelled_anywhere_leave_a_message_with_every_row_and_no_other(
    shop: Shop, broker_url: str, reached: Reached, topic: str
) -> None:
    url = async_urls(shop)[0]

    asyncio.run(cancel_some(shop, url, broker_url, topic))
    gc.collect()  # here, and not in a test whose filters let none of these warnings pass
    shop.end_leases()
    shop.scan(reached.broker).run()

    paid = shop.payments()
    assert 0 < len(paid) < 2 * WAITS
    assert sorted(reached.bodies(topic), key=int) == [str(number) for number in paid]
    assert shop.rows() == []


async def cancel_some(shop: Shop, url: str, broker_url: str, topic: str) -> None:
    """Each task is cancelled at another of its waits: for a connection, a statement, its commit, or never."""
    engine = create_async_engine(url, pool_size=2)
    box = Outbox(engine, broker=broker_url, schema=shop.database.schema, sender=BUSY_LIMITS)

    @box.transactional
    async def pay(session: AsyncSession, number: int) -> None:
        await session.execute(insert(Payment).values(id=number, note=""))
        box.publish(topic, str(number))

    async def pay_cancelled(number: int) -> None:
        await cancelled_at(pay(number), number % WAITS)

    try:
        for number in range(2 * WAITS):
            await asyncio.gather(asyncio.create_task(pay_cancelled(number)), return_exceptions=True)
        assert await asyncio.to_thread(box.close)
    finally:
        box.close()
        await engine.dispose()


@types.coroutine
def cancelled_at(coroutine: Coroutine[Any, Any, None], wait: int) -> Generator[Any, Any, None]:
    """Await a coroutine; the task that does is cancelled while it waits for the so-manieth time."""
    step: Callable[[], Any] = partial(coroutine.send, None)
    for count in itertools.count():
        try:
            awaited = step()
        except StopIteration:
            return
        task = asyncio.current_task()
        if count == wait and task is not None:
            asyncio.get_running_loop().call_soon(task.cancel)
        try:
            step = partial(coroutine.send, (yield awaited))
        except BaseException as error:
            step = partial(coroutine.throw, error)


def test_plain_code_that_an_async_session_runs_publishes_in_it(
    sqlite_shop: Shop, broker_url: str, reached: Reached, topic: str
) -> None:
    async def job() -> None:
        engine = create_async_engine(sqlite_shop.database.url.replace("sqlite://", "sqlite+aiosqlite://"))
        box = Outbox(engine, broker=broker_url, sender=BUSY_LIMITS)

        def plain(session: Session, number: int) -> None:
            session.add(Payment(id=number))
            box.publish(topic, str(number), session=session)

        async with AsyncSession(engine) as session:
            await session.run_sync(plain, 1)
            await session.commit()
            await session.run_sync(plain, 2)
            await session.rollback()
        assert await asyncio.to_thread(box.close)
        await engine.dispose()

    asyncio.run(job())

    assert reached.bodies(topic) == ["1"]
    assert sqlite_shop.payments() == [1]
    assert sqlite_shop.rows() == []
