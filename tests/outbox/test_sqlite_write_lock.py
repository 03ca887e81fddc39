"""Which transactions take SQLite's write lock when they begin: those that the outbox opens, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, event, insert, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Outbox
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop

READ = select(Payment.id)


@pytest.fixture
def box(sqlite_shop: Shop, broker: RecordingBroker) -> Outbox:
    """An Outbox that sends nothing."""
    return sqlite_shop.box(broker, sender=NO_SENDER)


@pytest.fixture
def begun(sqlite_shop: Shop) -> Iterator[list[str]]:
    """How the transactions of the shop's engine began."""
    yield from _begun(sqlite_shop.engine)


def _begun(engine: Engine) -> Iterator[list[str]]:
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("BEGIN"):
            seen.append(statement)
        elif statement == "ROLLBACK":  # at once, to begin anew with the lock; those of SQLAlchemy are not statements
            assert seen.pop() == "BEGIN"

    event.listen(engine, "before_cursor_execute", note)
    yield seen
    event.remove(engine, "before_cursor_execute", note)


def test_readers_wait_for_nobody(sqlite_shop: Shop, box: Outbox) -> None:
    with sqlite_shop.engine.connect() as reader, Session(sqlite_shop.engine) as other_reader:
        before = reader.execute(READ).all()
        other_reader.execute(READ).all()
        with box.begin() as writer:
            writer.execute(insert(Payment).values(id=1, note=""))
            box.publish("paid", "")
            beside_the_writer = other_reader.execute(READ).all()
        still = reader.execute(READ).all()

    assert before == beside_the_writer == still == []
    assert sqlite_shop.payments() == [1]
    assert sqlite_shop.row_topics() == ["paid"]


def test_transactions_of_the_users_own_begin_as_those_of_sqlite_do(
    sqlite_shop: Shop, box: Outbox, begun: list[str]
) -> None:
    with sqlite_shop.engine.begin() as connection:
        connection.execute(insert(Payment).values(id=1, note=""))
    with Session(sqlite_shop.engine) as session:
        session.scalars(READ).all()

    assert begun == ["BEGIN", "BEGIN"]
    assert box.engine is sqlite_shop.engine


def test_transactions_that_the_outbox_opens_take_the_write_lock_first(
    sqlite_shop: Shop, box: Outbox, begun: list[str]
) -> None:
    with box.begin() as connection:
        connection.execute(READ).all()
    for propagation in ("required", "requires_new", "nested"):
        box.transactional(propagation=propagation)(lambda session: session.scalars(READ).all())()

    assert begun == ["BEGIN IMMEDIATE"] * 4


def test_a_session_that_publishes_first_takes_the_write_lock_and_the_next_transaction_does_not(
    sqlite_shop: Shop, box: Outbox, begun: list[str]
) -> None:
    with Session(sqlite_shop.engine) as session:
        box.publish("first", "", session=session)
        session.add(Payment(id=1))
        session.commit()
        session.scalars(READ).all()
        session.rollback()
        box.publish("rolled.back", "", session=session)
        session.rollback()
        session.scalars(READ).all()

    assert begun == ["BEGIN IMMEDIATE", "BEGIN", "BEGIN"]
    assert sqlite_shop.row_topics() == ["first"]


def test_a_session_that_read_first_publishes_where_nobody_wrote_since(
    sqlite_shop: Shop, box: Outbox, begun: list[str]
) -> None:
    with Session(sqlite_shop.engine) as session:
        session.scalars(READ).all()
        box.publish("paid", "", session=session)
        session.add(Payment(id=1))
        session.commit()

    assert begun == ["BEGIN"]
    assert sqlite_shop.row_topics() == ["paid"]


def test_a_session_that_read_before_somebody_wrote_is_told_so_at_once_and_may_run_again(
    sqlite_shop: Shop, box: Outbox
) -> None:
    def read_and_pay(number: int) -> None:
        with Session(sqlite_shop.engine) as session:
            session.scalars(READ).all()
            if number == 1:
                sqlite_shop.execute("INSERT INTO payment (id, note) VALUES (7, '')")
            session.add(Payment(id=number))
            box.publish(f"paid.{number}", "", session=session)
            session.commit()

    with pytest.raises(OperationalError, match="database is locked"):
        read_and_pay(1)
    read_and_pay(2)

    assert sqlite_shop.payments() == [2, 7]
    assert sqlite_shop.row_topics() == ["paid.2"]


def test_options_of_a_connection_of_the_users_stay_as_they_were(
    sqlite_shop: Shop, box: Outbox, begun: list[str]
) -> None:
    with sqlite_shop.engine.connect() as connection:
        with Session(connection) as session:
            box.publish("paid", "", session=session)
            session.commit()
        connection.execute(READ).all()
        options = dict(connection.get_execution_options())

    assert begun == ["BEGIN", "BEGIN"]
    assert options == {}
    assert sqlite_shop.row_topics() == ["paid"]


def test_async_functions_take_the_write_lock_first_and_async_readers_do_not(
    sqlite_shop: Shop, broker: RecordingBroker
) -> None:
    async def job() -> list[str]:
        engine = create_async_engine(sqlite_shop.database.url.replace("sqlite://", "sqlite+aiosqlite://"))
        box = Outbox(engine, broker=broker, sender=NO_SENDER)
        begun = next(watched := _begun(engine.sync_engine))

        @box.transactional
        async def pay(session: AsyncSession) -> None:
            await session.execute(READ)
            box.publish("paid", "")

        async with engine.connect() as reader:
            await reader.execute(text("SELECT id FROM payment"))
            await pay()
        next(watched, None)
        box.close()
        await engine.dispose()
        return begun

    assert asyncio.run(job()) == ["BEGIN", "BEGIN IMMEDIATE"]
    assert sqlite_shop.row_topics() == ["paid"]


def test_where_the_write_lock_is_not_free_in_time_the_session_stays_in_a_transaction(
    sqlite_shop: Shop, box: Outbox
) -> None:
    with sqlite_shop.engine.connect() as impatient:
        impatient.exec_driver_sql("PRAGMA busy_timeout = 1")
    rival = sqlite_shop.other_engine()

    with rival.connect() as writer, Session(sqlite_shop.engine) as session:
        writer.execute(insert(Payment).values(id=7, note=""))
        box.publish("paid", "", session=session)
        with pytest.raises(OperationalError, match="database is locked"):
            session.execute(READ)
        writer.rollback()
        session.add(Payment(id=1))
        session.flush()
        session.rollback()

    assert sqlite_shop.payments() == []
    assert sqlite_shop.row_topics() == []
