"""Async business functions and AsyncSessions: the same promises, on the drivers that people use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from broker_adapter.embedded import EmbeddedBroker
from outbox import Outbox
from outbox.migrate import upgrade
from outbox_core.common.errors import ConfigurationError, NoTransaction
from tests.fixtures.databases import Database
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS

ASYNC_DRIVERS = {"sqlite": "sqlite+aiosqlite", "mariadb": "mysql+asyncmy", "mysql": "mysql+asyncmy"}
Job = Callable[[Outbox], Awaitable[None]]


class Declined(Exception):
    """The business says no."""


@pytest.fixture
def bodies_after(database: Database, tmp_path: Path) -> Callable[[Job], list[str]]:
    """Runs a job on an Outbox over an async engine; returns the bodies that reached the broker, sorted."""
    upgrade(database.url, schema=database.schema)

    def run(job: Job) -> list[str]:
        broker = EmbeddedBroker(f"embedded:{tmp_path / 'broker'}")
        asyncio.run(_with_box(database, broker, job))
        bodies = sorted(delivery.body.decode() for delivery in broker.pull("t", "g"))
        broker.close()
        return bodies

    return run


async def _with_box(database: Database, broker: EmbeddedBroker, job: Job) -> None:
    async with _async_box(database, broker) as box:
        await job(box)


@asynccontextmanager
async def _async_box(database: Database, broker: EmbeddedBroker) -> AsyncIterator[Outbox]:
    url = make_url(database.url).set(drivername=ASYNC_DRIVERS[database.name])
    engine = create_async_engine(url)
    box = Outbox(engine, broker=broker, schema=database.schema, sender=BUSY_LIMITS)
    try:
        yield box
    finally:
        assert box.close()
        await engine.dispose()


def test_concurrent_async_functions_publish_each_in_its_own_transaction(
    bodies_after: Callable[[Job], list[str]],
) -> None:
    async def job(box: Outbox) -> None:
        @box.transactional
        async def book(session: AsyncSession, number: int) -> None:
            await session.execute(text("SELECT 1"))
            box.publish("t", f"trip {number}")
            await asyncio.sleep(0)
            if number % 2:
                raise Declined

        await asyncio.gather(*(book(number) for number in range(6)), return_exceptions=True)

    assert bodies_after(job) == ["trip 0", "trip 2", "trip 4"]


def test_a_savepoint_rolled_back_in_an_async_function_takes_its_messages_with_it(
    bodies_after: Callable[[Job], list[str]],
) -> None:
    async def job(box: Outbox) -> None:
        @box.transactional(propagation="nested")
        async def inner(session: AsyncSession) -> None:
            box.publish("t", "inner")
            raise Declined

        @box.transactional
        async def outer(session: AsyncSession) -> None:
            box.publish("t", "outer")
            with pytest.raises(Declined):
                await inner()

        await outer()

    assert bodies_after(job) == ["outer"]


def test_a_caller_that_brings_the_async_session_itself_is_told_not_to(bodies_after: Callable[[Job], list[str]]) -> None:
    async def job(box: Outbox) -> None:
        @box.transactional
        async def publish(session: AsyncSession) -> None:
            box.publish("topic", "never")

        async with AsyncSession(AsyncEngine(box.engine)) as session:
            with pytest.raises(TypeError, match="call it without one"):
                await publish(session)  # type: ignore[call-arg]

    assert bodies_after(job) == []


def test_requires_new_commits_although_the_async_function_around_it_rolls_back(
    bodies_after: Callable[[Job], list[str]], database: Database
) -> None:
    if database.name == "sqlite":
        pytest.skip("SQLite has one writer at a time: a second transaction would wait for the first for ever")

    async def job(box: Outbox) -> None:
        @box.transactional(propagation="requires_new")
        async def audit(session: AsyncSession) -> None:
            box.publish("t", "audit")

        @box.transactional
        async def outer(session: AsyncSession) -> None:
            box.publish("t", "outer")
            await audit()
            raise Declined

        with pytest.raises(Declined):
            await outer()

    assert bodies_after(job) == ["audit"]


def test_an_async_session_of_ones_own_publishes_when_it_is_passed(bodies_after: Callable[[Job], list[str]]) -> None:
    async def job(box: Outbox) -> None:
        async with AsyncSession(AsyncEngine(box.engine)) as session, session.begin():
            box.publish("t", "own", session=session)
        async with AsyncSession(AsyncEngine(box.engine)) as session:
            box.publish("t", "begun with it", session=session)
            await session.commit()
            box.publish("t", "not committed", session=session)

    assert bodies_after(job) == ["begun with it", "own"]


def test_a_task_that_outlives_the_transaction_cannot_publish_in_it(bodies_after: Callable[[Job], list[str]]) -> None:
    async def job(box: Outbox) -> None:
        committed = asyncio.Event()

        async def straggler() -> None:
            await committed.wait()
            with pytest.raises(NoTransaction):
                box.publish("t", "too late")

        @box.transactional
        async def book(session: AsyncSession) -> asyncio.Task[None]:
            box.publish("t", "in time")
            return asyncio.create_task(straggler())

        task = await book()
        committed.set()
        await task

    assert bodies_after(job) == ["in time"]


def test_plain_and_async_functions_do_not_join_each_other(bodies_after: Callable[[Job], list[str]]) -> None:
    async def job(box: Outbox) -> None:
        @box.transactional
        def plain(session: Session) -> None:
            box.publish("t", "never")

        @box.transactional
        async def book(session: AsyncSession) -> None:
            box.publish("t", "once")
            with pytest.raises(ConfigurationError, match="async def"):
                plain()

        await book()
        with pytest.raises(ConfigurationError, match="async engine"):
            plain()

    assert bodies_after(job) == ["once"]


def test_a_url_with_an_async_driver_will_do(database: Database) -> None:
    upgrade(database.url, schema=database.schema)
    url = make_url(database.url).set(drivername=ASYNC_DRIVERS[database.name])
    broker = RecordingBroker()

    async def run() -> None:
        box = Outbox(url, broker=broker, schema=database.schema)

        @box.transactional
        async def publish(session: AsyncSession) -> None:
            assert await session.scalar(text("SELECT 1")) == 1
            box.publish("topic", "")

        await publish()
        assert await asyncio.to_thread(box.close)
        await AsyncEngine(box.engine).dispose()

    asyncio.run(run())

    assert broker.topics == ["topic"]
