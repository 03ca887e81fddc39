"""Engines on SQLite that begin transactions in ways of their own, as SQLAlchemy's and Python's manuals show."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, insert, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Inbox, Outbox
from outbox_core.common.errors import ConfigurationError
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, NO_SENDER, Payment, Shop

needs_autocommit = pytest.mark.skipif(
    not hasattr(sqlite3, "LEGACY_TRANSACTION_CONTROL"), reason="sqlite3 has `autocommit` since Python 3.12"
)
Options = dict[str, Any]


def begin_by_hand(engine: Engine, how: str) -> None:
    """The recipe of SQLAlchemy's manual: the driver begins nothing, and an event does."""

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(how)


def run_journeys(shop: Shop, engine: Engine) -> None:
    """Commits, rollbacks, savepoints, an inbox and a sender: each has what was committed, and nothing else."""
    broker = RecordingBroker()
    box = Outbox(engine, broker=broker, sender=BUSY_LIMITS)
    shop.closing.callback(box.close, timeout_ms=5_000)
    with Session(engine) as session:
        session.add(Payment(id=1))
        session.flush()
        box.publish("rolled.back", "", session=session)
        session.rollback()
    with Session(engine) as session, session.begin():
        session.execute(select(Payment.id)).all()
        session.add(Payment(id=2))
        with session.begin_nested() as inner:
            session.add(Payment(id=3))
            box.publish("inner", "", session=session)
            session.flush()
            inner.rollback()
        box.publish("committed", "", session=session)
    with box.begin() as connection:
        connection.execute(insert(Payment).values(id=4, note=""))
        box.publish("begun", "")
    with Session(engine) as session, session.begin():
        Inbox(engine).handle(session, "m", "group", lambda own: own.add(Payment(id=5)), topic="t")
    assert box.close()

    assert shop.payments() == [2, 4, 5]
    assert sorted(message.topic for message in broker.stored) == ["begun", "committed"]
    assert shop.rows() == []


@pytest.mark.parametrize("how", ["BEGIN", "BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_an_engine_that_begins_by_the_manual_s_recipe_works(sqlite_shop: Shop, how: str) -> None:
    engine = sqlite_shop.other_engine()
    begin_by_hand(engine, how)

    run_journeys(sqlite_shop, engine)


def test_an_engine_that_has_connected_before_works(sqlite_shop: Shop) -> None:
    engine = sqlite_shop.other_engine(pool_size=1, max_overflow=0)
    begin_by_hand(engine, "BEGIN")
    with engine.connect() as connection:
        connection.execute(select(Payment.id)).all()

    run_journeys(sqlite_shop, engine)


def test_a_recipe_that_comes_behind_the_outbox_is_refused_in_words(sqlite_shop: Shop) -> None:
    engine = sqlite_shop.other_engine()
    Outbox(engine, broker=RecordingBroker(), sender=NO_SENDER)
    begin_by_hand(engine, "BEGIN")

    with pytest.raises(ConfigurationError, match="before the Outbox"), Session(engine) as session:
        session.connection()


def test_an_async_engine_that_begins_by_the_recipe_works(sqlite_shop: Shop) -> None:
    async def run() -> None:
        engine = create_async_engine(sqlite_shop.database.url.replace("sqlite:", "sqlite+aiosqlite:"))
        begin_by_hand(engine.sync_engine, "BEGIN")
        box = Outbox(engine, broker=RecordingBroker(), sender=NO_SENDER)
        async with AsyncSession(engine) as session, session.begin():
            session.add(Payment(id=1))
            box.publish("committed", "", session=session)
        async with AsyncSession(engine) as session:
            session.add(Payment(id=2))
            box.publish("rolled.back", "", session=session)
            await session.rollback()
        box.close()
        await engine.dispose()

    asyncio.run(run())

    assert (sqlite_shop.payments(), sqlite_shop.row_topics()) == ([1], ["committed"])


def by_arguments(shop: Shop, options: Options) -> Engine:
    return shop.other_engine(connect_args=options)


def connected_before(shop: Shop, options: Options) -> Engine:
    engine = shop.other_engine(connect_args=options, pool_size=1, max_overflow=0)
    with engine.connect() as connection:
        connection.execute(select(Payment.id)).all()
    return engine


@needs_autocommit
@pytest.mark.parametrize("autocommit", [True, False])
@pytest.mark.parametrize("connect", [by_arguments, connected_before])
def test_an_engine_with_the_driver_s_autocommit_works(
    sqlite_shop: Shop, connect: Callable[[Shop, Options], Engine], autocommit: bool
) -> None:
    run_journeys(sqlite_shop, connect(sqlite_shop, {"autocommit": autocommit}))


@needs_autocommit
@pytest.mark.parametrize("autocommit", [True, False])
def test_an_async_engine_with_the_driver_s_autocommit_works(sqlite_shop: Shop, autocommit: bool) -> None:
    async def run() -> None:
        url = sqlite_shop.database.url.replace("sqlite:", "sqlite+aiosqlite:")
        engine = create_async_engine(url, connect_args={"autocommit": autocommit})
        box = Outbox(engine, broker=RecordingBroker(), sender=NO_SENDER)
        async with AsyncSession(engine) as session, session.begin():
            session.add(Payment(id=1))
            box.publish("committed", "", session=session)
        async with AsyncSession(engine) as session:
            session.add(Payment(id=2))
            box.publish("rolled.back", "", session=session)
            await session.flush()
            await session.rollback()
        box.close()
        await engine.dispose()

    asyncio.run(run())

    assert (sqlite_shop.payments(), sqlite_shop.row_topics()) == ([1], ["committed"])
