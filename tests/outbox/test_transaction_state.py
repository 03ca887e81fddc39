"""What we know of a transaction, whatever the application does to its Session and Connection: no row goes without its
message, and nobody inherits a transaction from the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, NullPool, QueuePool, StaticPool, event, insert, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from outbox import NoTransaction, Outbox
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop
from tests.outbox.test_async_connection_transactions import DRIVERS


class Declined(Exception):
    """The business says no."""


def pay(box: Outbox, session: Session, number: int = 1) -> None:
    """A payment and its message, all but the commit."""
    session.add(Payment(id=number))
    session.flush()
    box.publish(f"paid.{number}", "", session=session)


def committed(shop: Shop) -> tuple[list[int], list[str]]:
    """The committed payments, and the topics of the committed messages."""
    return shop.payments(), shop.row_topics()


# -- the dictionaries of the application -------------------------------------------------------------------------------


def in_no_savepoint(box: Outbox, session: Session) -> None:
    pay(box, session)


def with_a_savepoint_released(box: Outbox, session: Session) -> None:
    pay(box, session)
    with session.begin_nested():
        session.add(Payment(id=2))


def with_a_savepoint_rolled_back(box: Outbox, session: Session) -> None:
    pay(box, session)
    with contextlib.suppress(Declined), session.begin_nested():
        raise Declined


def with_a_savepoint_rolled_back_behind_its_statements(box: Outbox, session: Session) -> None:
    pay(box, session)
    with contextlib.suppress(Declined), session.begin_nested():
        pay(box, session, 2)
        raise Declined


USES = [
    in_no_savepoint,
    with_a_savepoint_released,
    with_a_savepoint_rolled_back,
    with_a_savepoint_rolled_back_behind_its_statements,
]
FORGETFUL_EVENTS = [
    "after_begin", "after_commit", "after_flush", "after_rollback", "after_soft_rollback", "after_transaction_create",
    "after_transaction_end", "before_commit",
]  # fmt: skip


def forget(session: Session, *_: object) -> None:
    """What a listener of an application does to start afresh."""
    session.info.clear()


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("moment", FORGETFUL_EVENTS)
def test_a_listener_that_clears_the_sessions_info_loses_no_message(
    sqlite_shop: Shop, broker: RecordingBroker, moment: str, use: Callable[[Outbox, Session], None]
) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    with Session(sqlite_shop.engine) as session:
        event.listen(session, moment, forget)
        use(box, session)
        session.commit()

    assert sqlite_shop.row_topics() == ["paid.1"]
    assert 1 in sqlite_shop.payments()


def clear_info(session: Session) -> None:
    session.info.clear()


def replace_info(session: Session) -> None:
    session.info = {"tenant": 7}


def clear_connection_info(session: Session) -> None:
    session.connection().info.clear()


def clear_record_info(session: Session) -> None:
    info = session.connection().connection.record_info
    assert info is not None
    info.clear()


FORGETS = [clear_info, replace_info, clear_connection_info, clear_record_info]


@pytest.mark.parametrize("forgets", FORGETS, ids=lambda forgets: forgets.__name__)
def test_a_dictionary_that_is_emptied_before_the_commit_loses_no_message(
    shop: Shop, broker: RecordingBroker, forgets: Callable[[Session], None]
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        pay(box, session)
        forgets(session)
        session.commit()

    assert committed(shop) == ([1], ["paid.1"])


@pytest.mark.parametrize("forgets", FORGETS, ids=lambda forgets: forgets.__name__)
def test_a_dictionary_that_is_emptied_lets_no_connection_commit_without_its_messages(
    shop: Shop, broker: RecordingBroker, forgets: Callable[[Session], None]
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        pay(box, session)
        forgets(session)
        with pytest.raises(NoTransaction, match="would leave messages behind"):
            session.connection().commit()

    assert committed(shop) == ([], [])


@pytest.mark.parametrize("forgets", FORGETS, ids=lambda forgets: forgets.__name__)
def test_a_dictionary_that_is_emptied_in_a_savepoint_keeps_no_message_that_a_statement_rolled_back(
    shop: Shop, broker: RecordingBroker, forgets: Callable[[Session], None]
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        session.add(Payment(id=1))
        session.flush()
        session.execute(text("SAVEPOINT a"))
        box.publish("undone", "", session=session)
        forgets(session)
        session.execute(text("ROLLBACK TO SAVEPOINT a"))
        session.commit()

    assert committed(shop) == ([1], [])


def test_a_function_of_the_outbox_keeps_its_transaction_whatever_its_session_forgets(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    @box.transactional
    def book(session: Session) -> None:
        session.info.clear()
        session.execute(insert(Payment).values(id=1, note=""))
        session.connection().commit()

    with pytest.raises(NoTransaction, match="leave the block or the function"):
        book()

    assert committed(shop) == ([], [])


# -- a commit that is refused ------------------------------------------------------------------------------------------


def by_its_connection(session: Session) -> None:
    session.connection().commit()


def by_its_root_transaction(session: Session) -> None:
    transaction = session.connection().get_transaction()
    assert transaction is not None
    transaction.commit()


COMMITS = [by_its_connection, by_its_root_transaction]
SESSIONS: dict[str, Callable[[Engine], Session]] = {
    "engine": Session,
    "connection": lambda engine: Session(engine.connect()),
    "sessionmaker": lambda engine: sessionmaker(engine)(),
    "two phases": lambda engine: Session(engine, twophase=True),
}
POOLS: dict[str, dict[str, Any]] = {
    "queue": {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0},
    "null": {"poolclass": NullPool},
    "static": {"poolclass": StaticPool},
    "no reset": {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0, "pool_reset_on_return": None},
    "commit at reset": {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0, "pool_reset_on_return": "commit"},
}


def others_pay(engine: Engine) -> None:
    """Somebody else's transaction, by the next connection of the pool."""
    with engine.begin() as connection:
        connection.execute(insert(Payment).values(id=100, note=""))


@pytest.mark.parametrize("commits", COMMITS, ids=lambda commits: commits.__name__)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("opened", SESSIONS)
def test_who_gets_the_connection_of_a_refused_commit_commits_nothing_but_its_own(
    mysql_shop: Shop, broker: RecordingBroker, opened: str, pool: str, commits: Callable[[Session], None]
) -> None:
    engine = mysql_shop.other_engine(**POOLS[pool])
    box = mysql_shop.box(broker, engine=engine, sender=NO_SENDER)

    session = SESSIONS[opened](engine)
    pay(box, session)
    with pytest.raises(NoTransaction, match="would leave messages behind"):
        commits(session)
    session.close()
    if isinstance(session.bind, Connection):
        session.bind.close()
    others_pay(engine)

    assert committed(mysql_shop) == ([100], [])


@pytest.mark.parametrize("commits", COMMITS, ids=lambda commits: commits.__name__)
def test_the_next_transaction_on_sqlite_begins_behind_a_refused_commit(
    sqlite_shop: Shop, broker: RecordingBroker, commits: Callable[[Session], None]
) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    with Session(sqlite_shop.engine) as session:
        pay(box, session)
        with pytest.raises(NoTransaction, match="would leave messages behind"):
            commits(session)
    others_pay(sqlite_shop.engine)

    assert committed(sqlite_shop) == ([100], [])


def by_its_session(session: Session) -> None:
    session.commit()


def by_the_connection_around_it(session: Session) -> None:
    session.commit()
    assert isinstance(session.bind, Connection)
    session.bind.commit()


@pytest.mark.parametrize("pool", sorted(POOLS.keys() - {"static"}))  # SQLite's sender needs another connection
@pytest.mark.parametrize(
    ("opened", "commits"),
    [("engine", by_its_session), ("sessionmaker", by_its_session), ("connection", by_the_connection_around_it)],
)
def test_who_gets_the_connection_of_a_commit_that_the_database_refused_commits_nothing_but_its_own(
    sqlite_shop: Shop, broker: RecordingBroker, opened: str, commits: Callable[[Session], None], pool: str
) -> None:
    """SQLite keeps the transaction open where its COMMIT meets a deferred constraint."""
    sqlite_shop.execute(
        "CREATE TABLE refund (id INTEGER PRIMARY KEY, payment INTEGER REFERENCES payment DEFERRABLE INITIALLY DEFERRED)"
    )
    engine = sqlite_shop.other_engine(**POOLS[pool])
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys = ON"))
    box = sqlite_shop.box(broker, engine=engine)

    session = SESSIONS[opened](engine)
    if isinstance(session.bind, Connection):
        session.bind.begin()
    pay(box, session)
    session.execute(text("INSERT INTO refund VALUES (1, 404)"))
    with pytest.raises(IntegrityError, match="FOREIGN KEY"):
        commits(session)
    session.close()
    if isinstance(session.bind, Connection):
        session.bind.close()
    others_pay(engine)

    assert box.close()
    assert (committed(sqlite_shop), broker.stored) == (([100], []), [])


def test_a_session_that_is_kept_behind_its_refused_commit_is_in_nobodys_way(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    engine = mysql_shop.other_engine(pool_size=1, max_overflow=0)
    box = mysql_shop.box(broker, engine=engine, sender=NO_SENDER)

    kept = engine.connect()
    session = Session(kept)
    pay(box, session)
    with pytest.raises(NoTransaction, match="would leave messages behind"):
        kept.commit()
    kept.close()
    others_pay(engine)
    with pytest.raises(NoTransaction, match="by its Connection"):
        session.commit()
    session.close()

    assert committed(mysql_shop) == ([100], [])


def test_a_session_publishes_again_once_it_has_rolled_back_a_refused_commit(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        pay(box, session)
        with pytest.raises(NoTransaction, match="would leave messages behind"):
            session.connection().commit()
        with pytest.raises(NoTransaction, match="by its Connection"):
            box.publish("late", "", session=session)
        session.rollback()
        pay(box, session, 2)
        session.commit()

    assert committed(shop) == ([2], ["paid.2"])


def test_a_connection_of_two_phases_refuses_before_and_after_it_is_prepared(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    engine = mysql_shop.other_engine(pool_size=1, max_overflow=0)
    box = mysql_shop.box(broker, engine=engine, sender=NO_SENDER)

    for number, prepares in enumerate((True, False)):
        with engine.connect() as connection:
            outer = connection.begin_twophase()
            session = Session(connection)
            pay(box, session, number)
            if prepares:
                outer.prepare()
            with pytest.raises(NoTransaction, match="would leave messages behind"):
                outer.commit()
            session.close()
    others_pay(engine)

    assert committed(mysql_shop) == ([100], [])


# -- the same, async ---------------------------------------------------------------------------------------------------

AsyncCommit = Callable[[AsyncConnection], Awaitable[None]]


async def by_the_connection(connection: AsyncConnection) -> None:
    await connection.commit()


async def by_the_root_transaction(connection: AsyncConnection) -> None:
    transaction = connection.get_transaction()
    assert transaction is not None
    await transaction.commit()


@contextlib.asynccontextmanager
async def async_box(shop: Shop, driver: str, broker: RecordingBroker) -> Any:
    """An Outbox on an async engine with one connection."""
    url = f"{driver}://{shop.database.url.partition('://')[2]}"
    engine = create_async_engine(url, pool_size=1, max_overflow=0)
    box = Outbox(engine, broker=broker, schema=shop.database.schema, sender=NO_SENDER)
    try:
        yield box, engine
    finally:
        box.close()
        await engine.dispose()


@pytest.mark.parametrize("commits", [by_the_connection, by_the_root_transaction], ids=lambda commits: commits.__name__)
@pytest.mark.parametrize("forgets", [True, False])
def test_who_gets_the_async_connection_of_a_refused_commit_commits_nothing_but_its_own(
    shop: Shop, broker: RecordingBroker, forgets: bool, commits: AsyncCommit
) -> None:
    async def job(box: Outbox, engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            await session.execute(insert(Payment).values(id=1, note=""))
            box.publish("paid.1", "", session=session)
            connection = await session.connection()
            if forgets:
                session.info.clear()
                connection.info.clear()
            with pytest.raises(NoTransaction, match="would leave messages behind"):
                await commits(connection)
        async with engine.begin() as connection:
            await connection.execute(insert(Payment).values(id=100, note=""))

    async def run(driver: str) -> None:
        async with async_box(shop, driver, broker) as (box, engine):
            await job(box, engine)

    for driver in DRIVERS[shop.database.name]:
        asyncio.run(run(driver))
        assert committed(shop) == ([100], [])
        shop.execute("DELETE FROM payment")
