"""A commit() in which a statement of ours failed, and a second commit() of the same Session: some of the rows may be in
the tables, so nothing of the transaction is committed until it is rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import delete, insert, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from outbox import NoTransaction, Outbox
from outbox_core.common.errors import OutboxError
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop
from tests.outbox.test_async_connection_transactions import run
from tests.outbox.test_timed_messages import KeptTimers, publish

ANY = "*"
FLAG_ROW = 999
MANY = 150
HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class Case:
    """What is published, and the statement of ours that fails: the INSERT of the row `refused` into `table`."""

    publish: Callable[[Outbox, Session, str], None]
    table: str = "message"
    refused: str = "last"
    is_timed: bool = False


def publish_one(box: Outbox, session: Session, _scheduled: str) -> None:
    box.publish("plain", "", message_id="last", session=session)


def publish_many(box: Outbox, session: Session, _scheduled: str) -> None:
    for number in range(MANY):
        box.publish("plain", "", message_id=f"m{number}", session=session)
    publish_one(box, session, "")


def publish_ordered(box: Outbox, session: Session, _scheduled: str) -> None:
    for message_id in ("first", "last"):
        box.publish("ordered", "", key="k", message_id=message_id, session=session)


def publish_later(box: Outbox, session: Session, _scheduled: str) -> None:
    box.publish("plain", "", delay=HOUR, message_id="last", session=session)


def cancel(box: Outbox, session: Session, scheduled: str) -> None:
    box.publish("plain", "", message_id="first", session=session)
    box.cancel(scheduled, session=session)


CASES = {
    "one message": Case(publish_one),
    "many messages": Case(publish_many),
    "ordered messages": Case(publish_ordered),
    "their place in the order": Case(publish_ordered, table="order_queue", refused=ANY),
    "a delay": Case(publish_later),
    "a scheduled message": Case(publish_later, is_timed=True),
    "a cancel": Case(cancel, refused=ANY),
    "a withdrawal": Case(cancel, table="archive", refused=ANY, is_timed=True),
}


@contextmanager
def refusing(shop: Shop, case: Case) -> Iterator[None]:
    """The database refuses a row of this table while the Session's transaction says so."""
    table = getattr(shop.tables, case.table)
    schema = "" if table.schema is None else f"{table.schema}."
    of_id = "1 = 1" if case.table == "order_queue" else None
    if shop.database.name == "sqlite":
        matches = of_id or "NEW.id = note"
        body = (
            f"WHEN EXISTS (SELECT 1 FROM payment WHERE id = {FLAG_ROW} AND (note = '{ANY}' OR {matches})) "
            "BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )
    else:
        matches = of_id or "HEX(NEW.id) = HEX(@refused)"
        body = (
            f"FOR EACH ROW IF @refused = '{ANY}' OR (@refused IS NOT NULL AND {matches}) THEN "
            "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'refused'; END IF"
        )
    shop.execute(f"CREATE TRIGGER {schema}refusing BEFORE INSERT ON {table.fullname} {body}")
    try:
        yield
    finally:
        shop.execute(f"DROP TRIGGER {schema}refusing")


def refuse(shop: Shop, session: Session, refused: str) -> None:
    if shop.database.name == "sqlite":
        session.execute(insert(Payment).values(id=FLAG_ROW, note=refused))
    else:
        session.execute(text("SET @refused = :refused"), {"refused": refused})


def allow(shop: Shop, session: Session) -> None:
    if shop.database.name == "sqlite":
        session.execute(delete(Payment).where(Payment.id == FLAG_ROW))
    else:
        session.execute(text("SET @refused = NULL"))


def shown(error: BaseException) -> str:
    return str(error).splitlines()[0]


@pytest.mark.parametrize("name", CASES)
def test_every_commit_behind_a_failed_one_raises_its_error_until_the_rollback(
    shop: Shop, broker: RecordingBroker, name: str
) -> None:
    case = CASES[name]
    options: dict[str, Any] = {"timing": KeptTimers()} if case.is_timed else {}
    box = shop.box(broker, sender=NO_SENDER, ordered={"ordered"}, **options)
    scheduled = publish(box, delay=HOUR).id
    rows_before = shop.row_topics()

    with refusing(shop, case), Session(shop.engine) as session:
        refuse(shop, session, case.refused)
        session.add(Payment(id=1))
        case.publish(box, session, scheduled)
        errors = []
        for _ in range(3):
            with pytest.raises((DBAPIError, OutboxError)) as caught:
                session.commit()
            errors.append(caught.value)
            allow(shop, session)
        rows_between = shop.row_topics()
        session.rollback()
        allow(shop, session)
        session.add(Payment(id=2))
        box.publish("whole", "", session=session)
        session.commit()

    assert [type(error) for error in errors] == [type(errors[0])] * 3
    assert [shown(error) for error in errors] == [shown(errors[0])] * 3
    assert rows_between == rows_before
    assert shop.payments() == [2]
    assert shop.row_topics() == [*rows_before, "whole"]


def test_a_connection_cannot_commit_behind_a_failed_commit_of_its_session(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with refusing(shop, CASES["many messages"]), Session(shop.engine) as session:
        refuse(shop, session, "last")
        session.add(Payment(id=1))
        publish_many(box, session, "")
        with pytest.raises((DBAPIError, OutboxError)):
            session.commit()
        with pytest.raises(NoTransaction, match="would leave messages behind"):
            session.connection().commit()

    assert (shop.payments(), shop.rows()) == ([], [])


def test_every_commit_of_an_async_session_behind_a_failed_one_raises_its_error(shop: Shop) -> None:
    errors: list[str] = []

    async def job(box: Outbox, engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session:
            await session.run_sync(lambda it: refuse(shop, it, "last"))
            session.add(Payment(id=1))
            publish_many(box, session.sync_session, "")
            for _ in range(2):
                with pytest.raises((DBAPIError, OutboxError)) as caught:
                    await session.commit()
                errors.append(shown(caught.value))
                await session.run_sync(lambda it: allow(shop, it))

    with refusing(shop, CASES["many messages"]):
        assert not any(run(shop, job))

    assert errors[::2] == errors[1::2]
    assert (shop.payments(), shop.rows()) == ([], [])
