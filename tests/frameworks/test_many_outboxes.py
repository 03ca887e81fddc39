"""Several engines and Outboxes in one process: each message goes where its own Outbox sends it, and only there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox_core.common.errors import ConfigurationError
from tests.fixtures.databases import Server, sqlite_database
from tests.frameworks.reached import Reached
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Payment, Shop, open_shop


@pytest.fixture(params=["mariadb and sqlite", "mysql and mariadb", "mariadb twice"])
def two_shops(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Shop, Shop]]:
    """Two shops on two databases."""
    with contextlib.ExitStack() as stack:
        kinds = {"mariadb twice": ["mariadb", "mariadb"]}.get(request.param) or request.param.split(" and ")
        shops = []
        for kind in kinds:
            if kind == "sqlite":
                database = sqlite_database(tmp_path)
            else:
                server: Server = request.getfixturevalue(f"shared_{kind}")
                database = stack.enter_context(server.fresh_database())
            shops.append(stack.enter_context(open_shop(database)))
        yield shops[0], shops[1]


def pay(box: Outbox, shop: Shop, topic: str, number: int, *, commit: bool = True) -> None:
    with Session(shop.engine) as session:
        session.add(Payment(id=number))
        box.publish(topic, str(number), session=session)
        session.commit() if commit else session.rollback()


def test_two_outboxes_on_two_databases_send_each_what_its_own_commits(
    two_shops: tuple[Shop, Shop], broker_url: str, reached: Reached, topic: str
) -> None:
    one, two = two_shops
    to_broker, recorder = one.box(broker_url), RecordingBroker()
    to_recorder = two.box(recorder)

    for number in range(10):
        pay(to_broker, one, topic, number, commit=number % 3 > 0)
        pay(to_recorder, two, topic, 100 + number, commit=number % 2 > 0)

    assert to_broker.close()
    assert to_recorder.close()
    assert reached.bodies(topic) == [str(number) for number in range(10) if number % 3]
    assert [int(one.body) for one in recorder.stored] == [100 + number for number in range(10) if number % 2]
    assert one.payments() == [number for number in range(10) if number % 3]
    assert two.payments() == [100 + number for number in range(10) if number % 2]
    assert one.rows() == two.rows() == []


def test_transactional_functions_of_two_outboxes_inside_one_another_commit_each_by_itself(
    two_shops: tuple[Shop, Shop], broker_url: str, reached: Reached, topic: str
) -> None:
    one, two = two_shops
    outer_box, recorder = one.box(broker_url), RecordingBroker()
    inner_box = two.box(recorder)

    @inner_box.transactional
    def inner(session: Session, number: int) -> None:
        session.add(Payment(id=number))
        inner_box.publish(topic, f"inner {number}")
        outer_box.publish(topic, f"outer {number}, from inside")

    @outer_box.transactional
    def outer(session: Session, number: int) -> None:
        session.add(Payment(id=number))
        inner(number)
        outer_box.publish(topic, f"outer {number}")
        if number == 2:
            raise LookupError

    outer(1)
    with contextlib.suppress(LookupError):
        outer(2)

    assert outer_box.close()
    assert inner_box.close()
    assert reached.bodies(topic) == ["outer 1, from inside", "outer 1"]
    assert [one.body for one in recorder.stored] == [b"inner 1", b"inner 2"]
    assert (one.payments(), two.payments()) == ([1], [1, 2])


def test_a_function_of_two_outboxes_gets_a_session_of_each(two_shops: tuple[Shop, Shop]) -> None:
    one, two = two_shops
    first, second = RecordingBroker(), RecordingBroker()
    first_box, second_box = one.box(first), two.box(second)

    @second_box.transactional
    @first_box.transactional
    def pay(session: Session, other: Session, number: int) -> None:
        session.add(Payment(id=number))
        other.add(Payment(id=10 + number))
        first_box.publish("first", str(number))
        second_box.publish("second", str(number))
        if number == 2:
            raise LookupError

    pay(1)
    with contextlib.suppress(LookupError):
        pay(2)

    assert first_box.close()
    assert second_box.close()
    assert ([one.topic for one in first.stored], [one.topic for one in second.stored]) == (["first"], ["second"])
    assert (one.payments(), two.payments()) == ([1], [11])


@pytest.mark.parametrize("two_shops", ["mariadb and sqlite"], indirect=True)
def test_a_coroutine_of_two_outboxes_is_awaited_by_both(two_shops: tuple[Shop, Shop]) -> None:
    async def run() -> list[tuple[str, list[str]]]:
        engines = [
            create_async_engine(make_url(shop.database.url).set(drivername=driver))
            for shop, driver in zip(two_shops, ("mysql+aiomysql", "sqlite+aiosqlite"), strict=True)
        ]
        brokers = [RecordingBroker(), RecordingBroker()]
        boxes = [
            shop.box(broker, engine=engine) for shop, broker, engine in zip(two_shops, brokers, engines, strict=True)
        ]

        @boxes[1].transactional
        @boxes[0].transactional
        async def pay(session: AsyncSession, other: AsyncSession, number: int) -> None:
            session.add(Payment(id=number))
            other.add(Payment(id=number))
            for place, box in enumerate(boxes):
                box.publish(f"box.{place}", str(number))

        await pay(1)
        for box in boxes:
            assert await asyncio.to_thread(box.close)
        for engine in engines:
            await engine.dispose()
        return [(str(place), broker.topics) for place, broker in enumerate(brokers)]

    assert asyncio.run(run()) == [("0", ["box.0"]), ("1", ["box.1"])]
    assert [shop.payments() for shop in two_shops] == [[1], [1]]


@pytest.mark.parametrize("two_shops", ["mariadb and sqlite", "mysql and mariadb"], indirect=True)
def test_a_session_on_another_server_is_refused_and_leaves_nothing(two_shops: tuple[Shop, Shop]) -> None:
    one, two = two_shops
    box = one.box(RecordingBroker())

    with Session(two.engine) as session:
        session.add(Payment(id=1))
        box.publish("t", "lost", session=session)
        with pytest.raises(ConfigurationError, match="another database"):
            session.commit()

    assert two.payments() == []
    assert one.rows() == two.rows() == []


@pytest.mark.parametrize("two_shops", ["mariadb twice"], indirect=True)
def test_a_session_on_another_database_of_the_same_server_is_one_transaction_with_the_message(
    two_shops: tuple[Shop, Shop], broker_url: str, reached: Reached, topic: str
) -> None:
    one, two = two_shops
    box = one.box(broker_url)

    pay(box, two, topic, 1)
    pay(box, two, topic, 2, commit=False)

    assert box.close()
    assert reached.bodies(topic) == ["1"]
    assert (one.payments(), two.payments()) == ([], [1])
    assert one.rows() == two.rows() == []


def test_two_outboxes_on_one_database_send_what_each_published_and_one_may_be_closed(
    shop: Shop, broker_url: str, reached: Reached, topic: str
) -> None:
    one, recorder = shop.box(broker_url), RecordingBroker()
    two = shop.box(recorder, engine=shop.other_engine())

    with Session(shop.engine) as session, session.begin():
        session.add(Payment(id=1))
        one.publish(topic, "one", session=session)
        two.publish(topic, "two", session=session)
    assert one.close()
    with Session(shop.engine) as session, session.begin():
        two.publish(topic, "two again", session=session)

    assert two.close()
    assert reached.bodies(topic) == ["one"]
    assert [message.body for message in recorder.stored] == [b"two", b"two again"]
    assert shop.rows() == []


def test_one_outbox_serves_sessions_of_several_engines_on_its_database(
    shop: Shop, broker_url: str, reached: Reached, topic: str
) -> None:
    box = shop.box(broker_url)
    other = shop.other_engine()

    for number, engine in enumerate((shop.engine, other, shop.engine)):
        with Session(engine) as session, session.begin():
            session.add(Payment(id=number))
            box.publish(topic, str(number), session=session)

    assert box.close()
    assert sorted(reached.bodies(topic)) == ["0", "1", "2"]
    assert shop.payments() == [0, 1, 2]
    assert shop.rows() == []
