"""Inbox in consumers of other brokers: the effect happens once, in the caller's transaction, whatever comes twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import func, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Inbox, InvalidMessage, NoTransaction, Outbox, Outcome, TransactionDoomed
from outbox_core.common.errors import ConfigurationError, NotSupported
from outbox_core.messages.broker_port import Capability
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.refused_topics import refuse_topics
from tests.outbox.shop import Payment, Shop

WAIT_SECONDS = 300


def inbox_of(shop: Shop) -> Inbox:
    return Inbox(shop.engine, schema=shop.database.schema)


def pay(session: Session) -> None:
    session.execute(insert(Payment).values(id=1, note=""))


def handle(shop: Shop, inbox: Inbox, message_id: str = "m-1", group: str = "g", topic: str = "orders") -> Outcome:
    with Session(shop.engine) as session, session.begin():
        return inbox.handle(session, message_id, group, pay, topic=topic)


def test_what_comes_twice_is_handled_once(shop: Shop) -> None:
    inbox = inbox_of(shop)

    outcomes = [handle(shop, inbox), handle(shop, inbox), handle(shop, inbox)]

    assert outcomes == [Outcome.HANDLED, Outcome.DEDUPLICATED, Outcome.DEDUPLICATED]
    assert shop.payments() == [1]


@pytest.mark.parametrize("other", [{"message_id": "m-2"}, {"group": "h"}, {"topic": "refunds"}], ids=str)
def test_another_id_group_or_topic_is_another_message(sqlite_shop: Shop, other: dict[str, str]) -> None:
    inbox = inbox_of(sqlite_shop)
    handle(sqlite_shop, inbox)
    sqlite_shop.execute("DELETE FROM payment")

    assert handle(sqlite_shop, inbox, **other) is Outcome.HANDLED
    assert sqlite_shop.payments() == [1]


def test_a_mark_that_the_database_refuses_for_another_reason_is_not_taken_for_a_duplicate(shop: Shop) -> None:
    """As where the business has put a rule on the table, of the topics that it knows for instance."""
    refuse_topics(shop, "inbox")

    with pytest.raises(IntegrityError):
        handle(shop, inbox_of(shop))

    assert shop.payments() == []


def test_the_words_of_a_trigger_are_not_read_as_another_databases_error(mysql_shop: Shop) -> None:
    inbox = mysql_shop.tables.inbox.fullname
    mysql_shop.execute(
        f"CREATE TRIGGER {inbox}_rule BEFORE INSERT ON {inbox} FOR EACH ROW "
        "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'UNIQUE constraint failed: a payment a day'"
    )

    with pytest.raises(DBAPIError, match="a payment a day"):
        handle(mysql_shop, inbox_of(mysql_shop))

    assert mysql_shop.payments() == []


def test_a_handler_that_fails_leaves_no_mark_and_no_effect(shop: Shop) -> None:
    inbox = inbox_of(shop)

    def fail(session: Session) -> None:
        pay(session)
        raise LookupError

    with pytest.raises(LookupError), Session(shop.engine) as session, session.begin():
        inbox.handle(session, "m-1", "g", fail, topic="orders")

    assert shop.payments() == []
    assert handle(shop, inbox) is Outcome.HANDLED
    assert shop.payments() == [1]


def test_a_duplicate_at_the_same_time_waits_and_is_dropped(mysql_shop: Shop) -> None:
    inbox, entered, go_on = inbox_of(mysql_shop), threading.Event(), threading.Event()

    def slow(session: Session) -> None:
        pay(session)
        session.flush()
        entered.set()
        assert go_on.wait(WAIT_SECONDS)

    def first() -> Outcome:
        with Session(mysql_shop.engine) as session, session.begin():
            return inbox.handle(session, "m-1", "g", slow, topic="orders")

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first)
        assert entered.wait(WAIT_SECONDS)
        other = pool.submit(handle, mysql_shop, inbox)
        go_on.set()

        assert (one.result(WAIT_SECONDS), other.result(WAIT_SECONDS)) == (Outcome.HANDLED, Outcome.DEDUPLICATED)
    assert mysql_shop.payments() == [1]


def test_a_session_without_a_transaction_is_refused(sqlite_shop: Shop) -> None:
    with Session(sqlite_shop.engine) as session, pytest.raises(NoTransaction, match="acknowledge"):
        inbox_of(sqlite_shop).handle(session, "m-1", "g", pay, topic="orders")


def test_a_session_in_autocommit_is_refused(mysql_shop: Shop) -> None:
    engine = mysql_shop.other_engine(isolation_level="AUTOCOMMIT")

    with Session(engine) as session, session.begin(), pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        inbox_of(mysql_shop).handle(session, "m-1", "g", pay, topic="orders")


@pytest.mark.parametrize(
    "parts", [("", "g", "t"), ("m" * 65, "g", "t"), ("m", "g/h", "t"), ("m", "g", "../t")], ids=str
)
def test_names_out_of_bounds_are_refused(sqlite_shop: Shop, parts: tuple[str, str, str]) -> None:
    with pytest.raises(InvalidMessage):
        handle(sqlite_shop, inbox_of(sqlite_shop), *parts)

    assert sqlite_shop.payments() == []


def test_an_async_handler_given_to_handle_is_refused_and_nothing_is_marked(sqlite_shop: Shop) -> None:
    inbox = inbox_of(sqlite_shop)

    async def later(_session: Session) -> None:
        raise AssertionError

    with (
        pytest.raises(ConfigurationError, match="handle_async"),
        Session(sqlite_shop.engine) as session,
        session.begin(),
    ):
        inbox.handle(session, "m-1", "g", later, topic="orders")

    assert handle(sqlite_shop, inbox) is Outcome.HANDLED


def test_an_async_handler_has_its_effect_once(sqlite_shop: Shop) -> None:
    async def pay_async(session: AsyncSession) -> None:
        await session.execute(insert(Payment).values(id=1, note=""))

    async def run() -> list[Outcome]:
        engine = create_async_engine(sqlite_shop.database.url.replace("sqlite://", "sqlite+aiosqlite://"))
        inbox = Inbox(engine)
        outcomes = []
        for _ in range(2):
            async with AsyncSession(engine) as session, session.begin():
                outcomes.append(await inbox.handle_async(session, "m-1", "g", pay_async, topic="orders"))
        with pytest.raises(NoTransaction):
            await inbox.handle_async(AsyncSession(engine), "m-1", "g", pay_async, topic="orders")
        await engine.dispose()
        return outcomes

    assert asyncio.run(run()) == [Outcome.HANDLED, Outcome.DEDUPLICATED]
    assert sqlite_shop.payments() == [1]


def test_an_error_that_the_handler_swallowed_and_that_ended_the_transaction_is_raised(mysql_shop: Shop) -> None:
    inbox = inbox_of(mysql_shop)

    def swallow(session: Session) -> None:
        pay(session)
        connection = session.connection()
        thread_id = connection.scalar(select(func.connection_id()))
        with mysql_shop.engine.connect() as killer:
            killer.execute(text(f"KILL {int(thread_id)}"))
        try:
            connection.execute(text("SELECT 1"))
        except Exception:  # what a careless handler does
            return

    with (
        pytest.raises((TransactionDoomed, NoTransaction)),
        Session(mysql_shop.engine) as session,
        session.begin(),
    ):
        inbox.handle(session, "m-1", "g", swallow, topic="orders")

    assert mysql_shop.payments() == []
    assert handle(mysql_shop, inbox) is Outcome.HANDLED


@pytest.mark.parametrize("end", [Session.rollback, Session.close], ids=["rollback", "close"])
def test_a_handler_that_undoes_its_mark_and_returns_is_not_taken_as_handled(
    shop: Shop, end: Callable[[Session], None]
) -> None:
    inbox = inbox_of(shop)

    def undo(session: Session) -> None:
        pay(session)
        end(session)

    with (
        pytest.raises(NoTransaction, match="rolled back or closed"),
        Session(shop.engine) as session,
        session.begin(),
    ):
        inbox.handle(session, "m-1", "g", undo, topic="orders")

    assert shop.payments() == []
    assert handle(shop, inbox) is Outcome.HANDLED


def test_a_handler_that_commits_has_handled(shop: Shop) -> None:
    inbox = inbox_of(shop)

    def commit(session: Session) -> None:
        pay(session)
        session.commit()

    with Session(shop.engine) as session, session.begin():
        assert inbox.handle(session, "m-1", "g", commit, topic="orders") is Outcome.HANDLED
    assert handle(shop, inbox) is Outcome.DEDUPLICATED


class NowOnly(RecordingBroker):
    """A broker that can neither delay nor cancel."""

    capabilities: frozenset[Capability] = frozenset()


def test_a_delay_and_a_cancel_that_the_broker_cannot_make_fail_the_business_call(sqlite_shop: Shop) -> None:
    box: Outbox = sqlite_shop.box(NowOnly())

    with Session(sqlite_shop.engine) as session, session.begin():
        with pytest.raises(NotSupported, match=r"\?delay="):
            box.publish("orders", "", delay=timedelta(hours=1), session=session)
        with pytest.raises(NotSupported, match="cancel"):
            box.cancel("m-1", session=session)
        box.publish("orders", "now", session=session)

    assert [row["body"] for row in sqlite_shop.rows()] in ([b"now"], [])
