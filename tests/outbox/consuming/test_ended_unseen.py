"""Handlers whose transaction ends where no statement's text says so: effect and mark are there together, or neither."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import insert, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Delivery, Inbox, NoTransaction, NotTried, Outcome, TransactionDoomed, consumer
from outbox.consumers.consumer_decorator import CommittedByHandler
from tests.outbox.deadlock import add_rows_to_fight_over, become_a_deadlocks_victim, lock, rival
from tests.outbox.procedures import make_procedures
from tests.outbox.shop import Payment, Shop
from tests.outbox.test_async_connection_transactions import DRIVERS
from tests.outbox.watched_broker import WatchedBroker, delivery, message

Act = Callable[[Session], object]
Handle = Callable[[Shop, Act], object]


def statement(words: str) -> Act:
    def act(session: Session) -> None:
        with contextlib.suppress(DBAPIError):
            session.execute(text(words))

    return act


def prepared(session: Session) -> None:
    session.execute(text("PREPARE ending FROM 'ROLLBACK'"))
    session.execute(text("EXECUTE ending"))


def past_sqlalchemy(words: str) -> Act:
    def act(session: Session) -> None:
        with contextlib.closing(session.connection().connection.cursor()) as cursor:
            cursor.execute(words)

    return act


def inbox_handles(inbox: Inbox, session: Session) -> None:
    """Begin a transaction, and have a message handled in it."""
    session.begin()
    outcome = inbox.handle(session, "m-1", "g", lambda session: session.add(Payment(id=50)), topic="orders")
    assert outcome is Outcome.HANDLED


def lose(shop: Shop, session: Session) -> None:
    """Have the database roll the transaction back, and swallow its error."""
    if shop.database.name == "sqlite":
        statement("INSERT OR ROLLBACK INTO payment VALUES (1, '')")(session)
    else:
        become_a_deadlocks_victim(session, shop.engine)


def handled_by_a_consumer(shop: Shop, act: Act) -> object:
    """A handler that pays, does the act, and pays again where it can."""

    @consumer("orders", group="g", inbox=shop.engine, schema=shop.database.schema)
    def pay(session: Session, _delivery: Delivery) -> None:
        pay_around(session, act)

    return pay.handle(delivery())


def handled_by_an_inbox(shop: Shop, act: Act) -> object:
    """The same in a transaction of the caller's."""
    inbox = Inbox(shop.engine, schema=shop.database.schema)
    with Session(shop.engine) as session, session.begin():
        return inbox.handle(session, "m-1", "g", lambda session: pay_around(session, act), topic="orders")


def handled_by_a_task(shop: Shop, act: Act) -> object:
    """The same by an `async def`, on the first of the drivers; see `DRIVERS`."""
    return asyncio.run(handled_async(shop, act, DRIVERS[shop.database.name][0]))


def handled_by_another_task(shop: Shop, act: Act) -> object:
    """The same, on the last of the drivers."""
    return asyncio.run(handled_async(shop, act, DRIVERS[shop.database.name][-1]))


async def handled_async(shop: Shop, act: Act, driver: str) -> object:
    engine = create_async_engine(make_url(shop.database.url).set(drivername=driver))

    @consumer("orders", group="g", inbox=engine, schema=shop.database.schema)
    async def pay(session: AsyncSession, _delivery: Delivery) -> None:
        await session.run_sync(pay_around, act)

    try:
        return await pay.handle_async(delivery())
    finally:
        await engine.dispose()


def handled_by_an_inbox_of_a_task(shop: Shop, act: Act) -> object:
    async def run() -> object:
        engine = create_async_engine(make_url(shop.database.url).set(drivername=DRIVERS[shop.database.name][0]))
        inbox = Inbox(engine, schema=shop.database.schema)

        async def pay(session: AsyncSession) -> None:
            await session.run_sync(pay_around, act)

        try:
            async with AsyncSession(engine) as session, session.begin():
                return await inbox.handle_async(session, "m-1", "g", pay, topic="orders")
        finally:
            await engine.dispose()

    return asyncio.run(run())


def pay_around(session: Session, act: Act) -> None:
    session.execute(insert(Payment).values(id=1, note=""))
    act(session)
    session.execute(insert(Payment).values(id=2, note=""))


HANDLES: dict[str, Handle] = {
    "consumer": handled_by_a_consumer,
    "inbox": handled_by_an_inbox,
    "async consumer": handled_by_a_task,
    "async consumer, another driver": handled_by_another_task,
    "async inbox": handled_by_an_inbox_of_a_task,
}


@pytest.fixture(params=HANDLES)
def handle(request: pytest.FixtureRequest) -> Handle:
    """A way to handle a message once."""
    return HANDLES[request.param]


UNDOING: dict[str, Act] = {
    "procedure": statement("CALL abandon()"),
    "procedure that raises": statement("CALL abandon_loudly()"),
    "prepared": prepared,
}


@pytest.mark.parametrize("how", UNDOING)
def test_a_handler_whose_transaction_was_rolled_back_out_of_sight_is_not_taken_as_handled(
    mysql_shop: Shop, handle: Handle, how: str
) -> None:
    make_procedures(mysql_shop)

    with pytest.raises(NoTransaction, match="rolled back or closed"):
        handle(mysql_shop, UNDOING[how])
    assert mysql_shop.payments() == []

    outcomes = [handle(mysql_shop, statement("CALL good_inside()")), handle(mysql_shop, UNDOING[how])]
    assert outcomes == [Outcome.HANDLED, Outcome.DEDUPLICATED]
    assert mysql_shop.payments() == [1, 2]


def test_a_handler_whose_procedure_committed_has_handled(mysql_shop: Shop, handle: Handle) -> None:
    make_procedures(mysql_shop)

    outcomes = [handle(mysql_shop, statement("CALL settle()")) for _ in range(2)]

    assert outcomes == [Outcome.HANDLED, Outcome.DEDUPLICATED]
    assert mysql_shop.payments() == [1, 2, 50]


def test_a_handler_whose_procedure_is_its_last_act_is_asked_as_well(mysql_shop: Shop) -> None:
    make_procedures(mysql_shop)

    @consumer("orders", group="g", inbox=mysql_shop.engine, schema=mysql_shop.database.schema)
    def pay(session: Session, _delivery: Delivery) -> None:
        session.execute(text("CALL list_and_abandon()"))

    with pytest.raises(NoTransaction, match="CALL list_and_abandon ended this transaction"):
        pay.handle(delivery())


def test_a_deadlock_that_a_procedure_swallowed_leaves_the_message_unhandled(mysql_shop: Shop) -> None:
    add_rows_to_fight_over(mysql_shop)
    mysql_shop.execute(
        "CREATE PROCEDURE lose() BEGIN DECLARE CONTINUE HANDLER FOR SQLEXCEPTION BEGIN END;"
        " SELECT id FROM payment WHERE id = 2 FOR UPDATE; END"
    )

    @consumer("orders", group="g", inbox=mysql_shop.engine, schema=mysql_shop.database.schema)
    def pay(session: Session, _delivery: Delivery) -> None:
        lock(session.connection(), 1)
        session.execute(insert(Payment).values(id=50, note=""))
        with rival(mysql_shop.engine, first=2, then=1) as asks:
            asks.set()
            session.execute(text("CALL lose()"))
        session.execute(insert(Payment).values(id=51, note=""))

    with pytest.raises(NoTransaction, match="CALL lose ended this transaction"):
        pay.handle(delivery())
    assert not {50, 51} & set(mysql_shop.payments())


def test_what_a_raw_cursor_rolled_back_is_not_taken_as_handled(shop: Shop) -> None:
    with pytest.raises(NoTransaction, match="went past SQLAlchemy ended this transaction"):
        handled_by_a_consumer(shop, past_sqlalchemy("ROLLBACK"))

    assert shop.payments() == []
    assert handled_by_a_consumer(shop, lambda _: None) is Outcome.HANDLED
    assert shop.payments() == [1, 2]


def test_what_sqlite_rolled_back_for_one_row_is_not_taken_as_handled(sqlite_shop: Shop, handle: Handle) -> None:
    with pytest.raises(TransactionDoomed, match="rolled this transaction back earlier"):
        handle(sqlite_shop, statement("INSERT OR ROLLBACK INTO payment VALUES (1, '')"))
    assert sqlite_shop.payments() == []

    assert handle(sqlite_shop, statement("INSERT OR IGNORE INTO payment VALUES (1, '')")) is Outcome.HANDLED
    assert sqlite_shop.payments() == [1, 2]


def test_what_a_handler_commits_behind_a_swallowed_rollback_is_refused(shop: Shop) -> None:
    add_rows_to_fight_over(shop)

    @consumer("orders", group="g", inbox=shop.engine, schema=shop.database.schema)
    def pay(session: Session, _delivery: Delivery) -> None:
        lose(shop, session)
        session.execute(insert(Payment).values(id=51, note=""))
        session.commit()

    with pytest.raises(TransactionDoomed, match="rolled this transaction back earlier"):
        pay.handle(delivery())
    assert 51 not in shop.payments()


def test_what_a_caller_of_the_inbox_commits_behind_a_swallowed_rollback_is_refused(shop: Shop) -> None:
    add_rows_to_fight_over(shop)
    inbox = Inbox(shop.engine, schema=shop.database.schema)

    with Session(shop.engine) as session:
        inbox_handles(inbox, session)
        lose(shop, session)
        session.execute(insert(Payment).values(id=51, note=""))
        with pytest.raises(TransactionDoomed, match="rolled this transaction back earlier"):
            session.commit()
        session.rollback()
        assert not {50, 51} & set(shop.payments())

        with session.begin():
            outcome = inbox.handle(session, "m-1", "g", lambda session: session.add(Payment(id=50)), topic="orders")

    assert outcome is Outcome.HANDLED
    assert 50 in shop.payments()


def test_what_a_procedure_undid_behind_the_inbox_is_not_committed(mysql_shop: Shop) -> None:
    make_procedures(mysql_shop)
    inbox = Inbox(mysql_shop.engine, schema=mysql_shop.database.schema)

    with Session(mysql_shop.engine) as session:
        inbox_handles(inbox, session)
        session.execute(text("CALL abandon()"))
        session.execute(insert(Payment).values(id=51, note=""))
        with pytest.raises(NoTransaction, match="CALL abandon ended this transaction"):
            session.commit()

    assert mysql_shop.payments() == []


def test_what_a_handler_commits_behind_a_procedure_that_rolled_back_is_refused(mysql_shop: Shop) -> None:
    make_procedures(mysql_shop)

    @consumer("orders", group="g", inbox=mysql_shop.engine, schema=mysql_shop.database.schema)
    def pay(session: Session, _delivery: Delivery) -> None:
        session.execute(text("CALL abandon()"))
        session.execute(insert(Payment).values(id=51, note=""))
        session.commit()

    with pytest.raises(NoTransaction, match="CALL abandon ended this transaction"):
        pay.handle(delivery())
    assert mysql_shop.payments() == []


def test_what_a_caller_commits_behind_the_inbox_s_handler_whose_procedure_committed_stays(mysql_shop: Shop) -> None:
    make_procedures(mysql_shop)
    inbox = Inbox(mysql_shop.engine, schema=mysql_shop.database.schema)

    with Session(mysql_shop.engine) as session, session.begin():
        act = statement("CALL settle()")
        assert inbox.handle(session, "m-1", "g", act, topic="orders") is Outcome.HANDLED
        session.execute(insert(Payment).values(id=51, note=""))

    assert mysql_shop.payments() == [50, 51]


def test_a_runner_gives_back_what_a_procedure_undid(mysql_shop: Shop, watched: WatchedBroker, running: Any) -> None:
    make_procedures(mysql_shop)
    calls: list[str] = []

    @consumer("orders", group="g", inbox=mysql_shop.engine, schema=mysql_shop.database.schema)
    def pay(session: Session, got: Delivery) -> None:
        calls.append(got.id)
        session.add(Payment(id=int(got.body)))
        session.flush()
        if len(calls) == 1:
            session.execute(text("CALL abandon()"))

    watched.publish([message()])
    running(pay)
    watched.wait_for(lambda: watched.acked == 1)

    assert watched.nacks[0]["reason"].startswith("NoTransaction: CALL abandon ended this transaction")
    assert mysql_shop.payments() == [1]


# -- SET autocommit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["SET autocommit = 1", "SET @a = 1, autocommit = ON", "CALL switch()"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_handler_that_switches_to_autocommit_is_named_and_its_connection_is_replaced(
    mysql_shop: Shop, how: str, fails: bool
) -> None:
    mysql_shop.execute("CREATE PROCEDURE switch() SET autocommit = 1")
    engine = mysql_shop.other_engine(pool_size=1, max_overflow=0)
    bodies: list[bytes] = []

    @consumer("orders", group="g", inbox=engine, schema=mysql_shop.database.schema)
    def pay(session: Session, got: Delivery) -> None:
        bodies.append(got.body)
        session.add(Payment(id=int(got.body)))
        session.flush()
        if len(bodies) == 1:
            session.execute(text(how))
            if fails:
                raise LookupError("the mail server is out")

    with pytest.raises(CommittedByHandler, match="mail server" if fails else "SET autocommit|SET @a|CALL switch"):
        pay.handle(delivery())

    outcomes = [pay.handle(delivery()), pay.handle(delivery(2)), pay.handle(delivery(3))]
    assert outcomes == [Outcome.DEDUPLICATED, Outcome.HANDLED, Outcome.HANDLED]
    assert mysql_shop.payments() == [1, 2, 3]
    assert bodies == [b"1", b"2", b"3"]


def test_a_connection_that_came_in_autocommit_is_not_used_again(mysql_shop: Shop) -> None:
    engine = mysql_shop.other_engine(pool_size=1, max_overflow=0)
    with engine.connect() as connection:
        connection.connection.autocommit(True)  # type: ignore[attr-defined]

    @consumer("orders", group="g", inbox=engine, schema=mysql_shop.database.schema)
    def pay(session: Session, got: Delivery) -> None:
        session.add(Payment(id=int(got.body)))

    with pytest.raises(NotTried, match=r"AUTOCOMMIT.*the pool replaces it"):
        pay.handle(delivery())
    assert pay.handle(delivery()) is Outcome.HANDLED
    assert mysql_shop.payments() == [1]
