"""Handlers with an inbox: one that ends its transaction itself, by whatever way, and a deadlock at the mark."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Consumer, NotTried, Outcome, consumer
from outbox.consumers.consumer_decorator import CommittedByHandler
from outbox.store.table_placement import connect_once
from outbox_core import Delivery
from outbox_core.common.errors import NoTransaction
from outbox_core.runtime.logs import event_name
from tests.outbox.consuming.test_async import DRIVERS
from tests.outbox.innodb_locks import wait_for_lock_waits
from tests.outbox.shop import Payment, Shop
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker, delivery, message


def paying(shop: Shop, *, how: str) -> Consumer:
    """A consumer that pays and then fails, once it has committed, rolled back or neither."""

    @consumer("orders", group="g", inbox=shop.engine, schema=shop.database.schema)
    def pay(session: Session, one: Delivery) -> None:
        session.add(Payment(id=int(one.body)))
        session.flush()
        if how != "neither":
            getattr(session, how)()
        raise LookupError("the mail server is out")

    return pay


def test_a_handler_that_commits_and_then_fails_is_reported_and_not_taken_as_handled(shop: Shop) -> None:
    pay = paying(shop, how="commit")

    with pytest.raises(CommittedByHandler, match=r"committed its session and then failed .*mail server") as caught:
        pay.handle(delivery())

    assert isinstance(caught.value.__cause__, LookupError)
    assert shop.payments() == [1]


@pytest.mark.parametrize("how", ["rollback", "neither"])
def test_a_handler_that_fails_without_a_commit_fails_as_it_always_did(shop: Shop, how: str) -> None:
    pay = paying(shop, how=how)

    for _ in range(2):
        with pytest.raises(LookupError):
            pay.handle(delivery())

    assert shop.payments() == []


def test_a_handler_that_commits_and_goes_on_in_the_closed_transaction_is_reported(sqlite_shop: Shop) -> None:
    @consumer("orders", group="g", inbox=sqlite_shop.engine)
    def pay(session: Session, one: Delivery) -> None:
        session.commit()
        session.add(Payment(id=int(one.body)))
        session.flush()

    with pytest.raises(CommittedByHandler, match="InvalidRequestError"):
        pay.handle(delivery())


def leave(session: Session) -> None:
    with session:
        session.add(Payment(id=2))
        session.flush()


ENDS: dict[str, Callable[[Session], object]] = {
    "rollback": Session.rollback,
    "close": Session.close,
    "with session": leave,
    "statement": lambda session: session.execute(text("ROLLBACK")),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_handler_that_undoes_its_mark_and_returns_is_not_taken_as_handled(shop: Shop, how: str) -> None:
    calls: list[int] = []

    @consumer("orders", group="g", inbox=shop.engine, schema=shop.database.schema)
    def pay(session: Session, one: Delivery) -> None:
        calls.append(one.attempt)
        session.add(Payment(id=int(one.body)))
        session.flush()
        if len(calls) == 1:
            ENDS[how](session)

    with pytest.raises(NoTransaction, match="the handler returned, but its session was rolled back or closed"):
        pay.handle(delivery())
    assert shop.payments() == []

    assert [pay.handle(delivery()), pay.handle(delivery())] == [Outcome.HANDLED, Outcome.DEDUPLICATED]
    assert shop.payments() == [1]


def test_an_async_handler_that_closes_its_session_and_returns_is_not_taken_as_handled(shop: Shop) -> None:
    async def run() -> None:
        engine = create_async_engine(make_url(shop.database.url).set(drivername=DRIVERS[shop.database.name]))

        @consumer("orders", group="g", inbox=engine, schema=shop.database.schema)
        async def pay(session: AsyncSession, one: Delivery) -> None:
            async with session:
                session.add(Payment(id=int(one.body)))

        try:
            with pytest.raises(NoTransaction, match="rolled back or closed"):
                await pay.handle_async(delivery())
        finally:
            await engine.dispose()

    asyncio.run(run())
    assert shop.payments() == []


def test_a_runner_gives_back_what_a_handler_undid(sqlite_shop: Shop, watched: WatchedBroker, running: Any) -> None:
    watched.publish([message()])

    @consumer("orders", group="g", inbox=sqlite_shop.engine)
    def pay(session: Session, one: Delivery) -> None:
        session.add(Payment(id=int(one.body)))
        session.close()

    running(pay)
    watched.wait_for(lambda: bool(watched.nacks))

    assert watched.nacks[0]["reason"].startswith("NoTransaction: the handler returned, but its session")
    assert watched.acked == 0


def test_a_handler_that_commits_and_returns_has_handled(shop: Shop) -> None:
    @consumer("orders", group="g", inbox=shop.engine, schema=shop.database.schema)
    def pay(session: Session, one: Delivery) -> None:
        session.add(Payment(id=int(one.body)))
        session.commit()

    assert [pay.handle(delivery()), pay.handle(delivery())] == [Outcome.HANDLED, Outcome.DEDUPLICATED]
    assert shop.payments() == [1]


BELOW: dict[str, Callable[[Session], object]] = {
    "connection": lambda session: session.connection().commit(),
    "statement": lambda session: session.execute(text("COMMIT")),
    "implicitly": lambda session: session.execute(text("CREATE TABLE made_by_a_handler (id INT)")),
}


@pytest.mark.filterwarnings("ignore:transaction already deassociated from connection")
@pytest.mark.parametrize("how", BELOW)
def test_a_handler_that_commits_below_its_session_and_then_fails_is_reported(mysql_shop: Shop, how: str) -> None:
    @consumer("orders", group="g", inbox=mysql_shop.engine, schema=mysql_shop.database.schema)
    def pay(session: Session, one: Delivery) -> None:
        session.add(Payment(id=int(one.body)))
        session.flush()
        BELOW[how](session)
        raise LookupError("the mail server is out")

    with pytest.raises(CommittedByHandler, match="mail server"):
        pay.handle(delivery())

    assert mysql_shop.payments() == [1]


@pytest.mark.parametrize("how", ["statement", "implicitly"])
def test_what_a_handler_does_behind_a_commit_of_its_own_is_committed_when_it_returns(
    mysql_shop: Shop, how: str
) -> None:
    @consumer("orders", group="g", inbox=mysql_shop.engine, schema=mysql_shop.database.schema)
    def pay(session: Session, one: Delivery) -> None:
        BELOW[how](session)
        session.add(Payment(id=int(one.body)))

    assert [pay.handle(delivery()), pay.handle(delivery())] == [Outcome.HANDLED, Outcome.DEDUPLICATED]
    assert mysql_shop.payments() == [1]


def test_an_async_handler_that_commits_and_then_fails_is_reported(shop: Shop) -> None:
    async def run() -> None:
        engine = create_async_engine(make_url(shop.database.url).set(drivername=DRIVERS[shop.database.name]))

        @consumer("orders", group="g", inbox=engine, schema=shop.database.schema)
        async def pay(session: AsyncSession, one: Delivery) -> None:
            session.add(Payment(id=int(one.body)))
            await session.commit()
            raise LookupError

        try:
            with pytest.raises(CommittedByHandler):
                await pay.handle_async(delivery())
        finally:
            await engine.dispose()

    asyncio.run(run())


def test_a_runner_gives_the_delivery_back_with_that_reason(
    sqlite_shop: Shop, watched: WatchedBroker, running: Any, caplog: pytest.LogCaptureFixture
) -> None:
    watched.publish([message()])

    running(paying(sqlite_shop, how="commit"))
    watched.wait_for(lambda: bool(watched.nacks))

    assert watched.nacks[0]["reason"].startswith("CommittedByHandler: the handler committed its session")
    assert "handler_failed" in [event_name(record) for record in caplog.records]


def test_a_deadlock_at_the_mark_is_a_conflict_and_no_outage(mysql_shop: Shop) -> None:
    pay = consumer("orders", group="g", inbox=mysql_shop.engine, schema=mysql_shop.database.schema)(
        lambda session, one: session.add(Payment(id=int(one.body)))
    )
    assert pay.store is not None
    assert pay.engine is not None
    outcomes: list[object] = []

    def handle() -> None:
        try:
            outcomes.append(pay.handle(delivery()))
        except NotTried as error:
            outcomes.append(error)

    threads = [threading.Thread(target=handle) for _ in range(2)]
    with mysql_shop.other_engine().connect() as first:
        connect_once(pay.engine)
        pay.store.mark(first, group="g", message_id="m-1", topic="orders")
        for thread in threads:
            thread.start()
        # Both duplicates wait for a shared lock on the mark; once the first one rolls back both have it and want more.
        wait_for_lock_waits(mysql_shop, 2)
        first.rollback()
        for thread in threads:
            thread.join(WAIT_SECONDS)

    [victim] = [one for one in outcomes if isinstance(one, NotTried)]
    assert [one for one in outcomes if one is not victim] == [Outcome.HANDLED]
    assert "1213" in str(victim)
    assert victim.conflict
    assert mysql_shop.payments() == [1]
