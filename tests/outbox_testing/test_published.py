"""`published`: what a test's transactions committed, whatever way they work, and nothing of what they did not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import ANY

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox import Outbox, connect
from outbox.testing import PublishedMessages, capture_published
from tests.outbox.shop import NO_SENDER, Payment, Shop

ROOT = Path(__file__).parents[2]
NOBODY_THERE = "http://127.0.0.1:9"


class Declined(Exception):
    """The business says no."""


@pytest.fixture
def box(sqlite_shop: Shop) -> Outbox:
    """An Outbox that sends nothing: what is captured here was not sent."""
    return sqlite_shop.box(NOBODY_THERE, sender=NO_SENDER)


def test_a_commit_is_heard_of_at_once_and_a_rollback_never(shop: Shop, published: PublishedMessages) -> None:
    box = shop.box(NOBODY_THERE, sender=NO_SENDER)

    @box.transactional
    def pay(session: Session, order_id: int, *, declined: bool = False) -> None:
        session.add(Payment(id=order_id))
        box.publish("payment.completed", {"order_id": order_id}, key=str(order_id))
        if declined:
            raise Declined

    pay(1)
    with pytest.raises(Declined):
        pay(2, declined=True)
    pay(3)

    assert published == [("payment.completed", {"order_id": 1}), ("payment.completed", {"order_id": 3}, "3")]
    assert published.bodies("payment.completed") == [{"order_id": 1}, {"order_id": 3}]


def test_nothing_is_heard_of_before_the_commit(box: Outbox, published: PublishedMessages) -> None:
    with Session(box.engine) as session, session.begin():
        box.publish("t", "1", session=session)
        with session.begin_nested():
            box.publish("t", "2", session=session)

        assert published == []

    assert published.bodies() == [b"1", b"2"]


def test_a_savepoint_rolled_back_takes_its_messages(box: Outbox, published: PublishedMessages) -> None:
    with Session(box.engine) as session, session.begin():
        box.publish("kept", "", session=session)
        savepoint = session.begin_nested()
        box.publish("lost", "", session=session)
        savepoint.rollback()

    assert published.topics == ["kept"]


def test_a_commit_with_a_savepoint_still_open_is_heard_of_once(shop: Shop, published: PublishedMessages) -> None:
    box = shop.box(NOBODY_THERE, sender=NO_SENDER)

    with Session(shop.engine) as session:
        session.add(Payment(id=1))
        box.publish("outside", "", session=session)
        session.begin_nested()
        box.publish("inside", "", session=session)
        session.commit()

    assert published.topics == ["outside", "inside"]


@pytest.mark.parametrize("mode", ["create_savepoint", "conditional_savepoint", "rollback_only"])
def test_a_session_joined_into_a_transaction_that_is_rolled_back_in_the_end_is_heard_of_at_its_own_commit(
    shop: Shop, published: PublishedMessages, mode: str
) -> None:
    box = shop.box(NOBODY_THERE)

    with shop.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            session.add(Payment(id=1))
            box.publish("payment.completed", {"order_id": 1}, session=session)
            session.commit()
            heard_at_the_commit = list(published)
            session.add(Payment(id=2))
            box.publish("payment.completed", {"order_id": 2}, session=session)
            session.rollback()
        outer.rollback()

    assert heard_at_the_commit == [("payment.completed", {"order_id": 1})]
    assert published == heard_at_the_commit
    assert shop.payments() == []
    assert shop.rows() == []


def test_every_way_of_working_is_heard_of(shop: Shop, published: PublishedMessages) -> None:
    box = shop.box(NOBODY_THERE, sender=NO_SENDER)
    scoped = scoped_session(sessionmaker(shop.engine))

    with sessionmaker(shop.engine).begin() as session:
        box.publish("sessionmaker", "", session=session)
    box_session = scoped()
    box_session.add(Payment(id=1))
    box.publish("scoped", "", session=scoped)
    scoped.commit()
    scoped.remove()
    with box.begin() as connection:
        box.publish("connection", "", session=connection)
    thread = threading.Thread(target=box.transactional(lambda session: box.publish("thread", "")))
    thread.start()
    thread.join()

    assert published.topics == ["sessionmaker", "scoped", "connection", "thread"]


def test_async_functions_are_heard_of(sqlite_shop: Shop, published: PublishedMessages) -> None:
    async def job() -> None:
        engine = create_async_engine(sqlite_shop.database.url.replace("sqlite://", "sqlite+aiosqlite://"))
        with Outbox(engine, broker=NOBODY_THERE, sender=NO_SENDER) as box:

            @box.transactional
            async def book(session: AsyncSession, number: int) -> None:
                box.publish("booked", {"number": number})
                await asyncio.sleep(0)
                if number % 2:
                    raise Declined

            await asyncio.gather(*(book(number) for number in range(4)), return_exceptions=True)
        await engine.dispose()

    asyncio.run(job())

    assert sorted(published.bodies("booked"), key=str) == [{"number": 0}, {"number": 2}]


def test_an_outbox_made_before_and_two_outboxes_are_heard_of(sqlite_shop: Shop) -> None:
    one = sqlite_shop.box(NOBODY_THERE, sender=NO_SENDER)
    two = sqlite_shop.box(NOBODY_THERE, sender=NO_SENDER)

    with capture_published() as published, Session(sqlite_shop.engine) as session, session.begin():
        one.publish("one", "", session=session)
        two.publish("two", "", session=session)
    with Session(sqlite_shop.engine) as session, session.begin():
        one.publish("later", "", session=session)

    assert published.topics == ["one", "two"]


def test_captures_inside_one_another_hear_each_their_own(box: Outbox, published: PublishedMessages) -> None:
    @box.transactional
    def publish(session: Session, topic: str) -> None:
        box.publish(topic, "")

    publish("before")
    with capture_published() as inner:
        publish("inside")

    assert published.topics == ["before", "inside"]
    assert inner.topics == ["inside"]


def test_a_hook_of_the_users_that_raises_behind_the_commit_hides_nothing(
    sqlite_shop: Shop, box: Outbox, published: PublishedMessages
) -> None:
    def raises(_session: Session) -> None:
        raise Declined

    with Session(sqlite_shop.engine) as session:
        event.listen(session, "after_commit", raises)
        session.begin()
        box.publish("t", "1", session=session)
        with pytest.raises(Declined):
            session.commit()

    assert published == [("t", "1")]


def test_a_cancel_is_heard_of(box: Outbox, published: PublishedMessages) -> None:
    @box.transactional
    def plan(session: Session) -> None:
        message = box.publish("reminder", {}, delay=timedelta(hours=2))
        box.cancel(message.id)

    plan()

    assert published.canceled == [published.one("reminder").id]


def test_the_real_sender_goes_on_as_ever(shop: Shop, published: PublishedMessages) -> None:
    broker = connect("memory:")
    box = shop.box(broker)
    box.transactional(lambda session: box.publish("t", "sent"))()

    assert published == [("t", "sent")]
    assert [one.body for one in broker.pull("t", "g", wait_ms=60_000)] == [b"sent"]
    assert box.close()
    assert shop.rows() == []
    broker.close()


# -- looking at it --------------------------------------------------------------------------------------------------


@dataclass
class Order:
    """Something that publish() writes as JSON."""

    id: int
    at: datetime


def test_a_body_is_compared_as_it_was_published(box: Outbox, published: PublishedMessages) -> None:
    order = Order(7, datetime(2027, 1, 1, tzinfo=UTC))

    @box.transactional
    def publish(session: Session) -> None:
        box.publish("json", order)
        box.publish("json", {"tuple": (1, 2), "id": 5})
        box.publish("text", "grüß")
        box.publish("bytes", b"\xff", headers={"content-type": "application/x-protobuf"}, key="k")

    publish()

    assert published == [
        ("json", order), ("json", {"tuple": [1, 2], "id": ANY}), ("text", "grüß"), ("bytes", b"\xff"),
    ]  # fmt: skip
    assert published[1] == ("json", {"id": 5, "tuple": (1, 2)})
    assert published != [("json", order)]
    assert published[2] != ("text", "gruss")
    assert published[3] == ("bytes", b"\xff", "k")
    assert published[3] != ("bytes", b"\xff", "other")
    assert published.one("bytes").headers == {"content-type": "application/x-protobuf"}


@pytest.mark.parametrize(
    ("content_type", "seen"),
    [
        ("application/json; charset=utf-8", {"n": 1}), ("application/cloudevents+json", {"n": 1}),
        ("Application/JSON", {"n": 1}), ("text/plain", b'{"n": 1}'),
    ],
)  # fmt: skip
def test_a_body_is_decoded_where_its_content_type_says_json(
    box: Outbox, published: PublishedMessages, content_type: str, seen: object
) -> None:
    box.transactional(lambda session: box.publish("t", b'{"n": 1}', headers={"Content-Type": content_type}))()
    box.transactional(lambda session: box.publish("t", b"{no", headers={"Content-Type": content_type}))()

    assert published.bodies() == [seen, b"{no"]


def test_one_finds_the_only_message_and_else_says_what_there_is(box: Outbox, published: PublishedMessages) -> None:
    @box.transactional
    def publish(session: Session) -> None:
        box.publish("a", {"n": 1}, key="x")
        box.publish("a", {"n": 2}, key="y", deliver_at=datetime(2027, 1, 1, tzinfo=UTC))

    publish()

    assert published.one(key="y").body == {"n": 2}
    assert published.one("a", key="y").deliver_at == datetime(2027, 1, 1, tzinfo=UTC)
    with pytest.raises(
        AssertionError, match=r"one message on a was expected, 2 were published.*\{'n': 1\}.*2027-01-01"
    ):
        published.one("a")
    with pytest.raises(AssertionError, match=r"on b with the key 'z' was expected, 0 were"):
        published.one("b", key="z")


def test_it_is_a_sequence_that_can_be_cleared(box: Outbox, published: PublishedMessages) -> None:
    publish = box.transactional(lambda session, topic: box.publish(topic, topic))
    publish("set-up")
    published.clear()
    publish("a")
    publish("b")

    on_a = published.on("a")
    publish("a")

    assert (len(published), published[0].topic, published[-1].topic) == (3, "a", "a")
    assert [one.topic for one in published[1:]] == ["b", "a"]
    assert len(on_a) == 1
    assert not published.on("nothing")
    assert published[0] in published
    assert len(set(published)) == 3


def test_what_a_thread_publishes_that_nobody_joins_can_be_waited_for(box: Outbox, published: PublishedMessages) -> None:
    publish = box.transactional(lambda session, number: box.publish("t", str(number)))
    go_on = threading.Event()

    def work() -> None:
        publish(1)
        go_on.wait()
        publish(2)

    thread = threading.Thread(target=work)
    thread.start()
    first = published.wait_for("t", timeout_seconds=300)
    go_on.set()
    both = published.wait_for(count=2, timeout_seconds=300)
    thread.join()

    assert (first[:1], both) == ([("t", "1")], [("t", "1"), ("t", "2")])
    with pytest.raises(AssertionError, match=r"3 were expected on t; published was: \[<published 't', b'1'>"):
        published.wait_for("t", count=3, timeout_seconds=0)


FIRST_OUTBOX_INSIDE = """
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.migrate.schema_upgrade import upgrade
from outbox.testing import capture_published

engine = create_engine("sqlite:///shop.db")
upgrade(engine)
with capture_published() as published:
    box = Outbox(engine, broker="memory:")
    with Session(engine) as session, session.begin():
        box.publish("t", "1", session=session)
    box.close()
engine.dispose()
assert published.topics == ["t"], published
"""


@pytest.mark.processes
def test_the_first_outbox_of_a_process_may_be_made_while_it_is_listened_to(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FIRST_OUTBOX_INSIDE],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert (run.returncode, run.stderr) == (0, "")
