"""`outbox_run`: consumers run on what a test published, in its own thread, until nothing is due."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Delivery, Outbox, RetryLater, consumer
from outbox.testing import AdvancingClock, ConsumerRun, MemoryBroker, PublishedMessages
from outbox.testing.capture import Capture
from outbox_core.common.errors import ConfigurationError, NoTransaction
from outbox_core.messages.timing_port import Timer
from tests.outbox.shop import NO_SENDER, Payment, Shop

NOBODY_THERE = "http://127.0.0.1:9"
Publish = Callable[..., None]


class Broken(Exception):
    """A handler's own error."""


@pytest.fixture
def box(sqlite_shop: Shop) -> Outbox:
    """An Outbox whose broker is not there."""
    return sqlite_shop.box(NOBODY_THERE, sender=NO_SENDER)


@pytest.fixture
def publish(box: Outbox) -> Publish:
    """Publish in a transaction of its own."""
    return box.transactional(lambda session, topic, body, **options: box.publish(topic, body, **options))


def test_consumers_get_what_was_committed_and_what_consumers_publish_until_nothing_is_left(
    shop: Shop, published: PublishedMessages, outbox_run: ConsumerRun
) -> None:
    box = shop.box(NOBODY_THERE, sender=NO_SENDER)
    threads: set[int] = set()

    @consumer("order.placed", group="billing", inbox=shop.engine, schema=shop.database.schema)
    def bill(session: Session, delivery: Delivery) -> None:
        session.add(Payment(id=delivery.json()["id"]))
        box.publish("order.paid", delivery.json(), session=session)
        threads.add(threading.get_ident())

    shipped: list[int] = []

    @consumer("order.paid", group="shipping")
    def ship(delivery: Delivery) -> None:
        shipped.append(delivery.json()["id"])

    for number in (1, 2):
        box.transactional(lambda session, number: box.publish("order.placed", {"id": number}))(number)

    report = outbox_run([ship, bill])
    again = outbox_run([ship, bill])

    assert shipped == [1, 2]
    assert shop.payments() == [1, 2]
    assert (report.handled, again.handled) == (4, 0)
    assert published.topics == ["order.placed", "order.placed", "order.paid", "order.paid"]
    assert threads == {threading.get_ident()}


def test_what_a_handler_raises_is_raised_in_the_test_and_its_message_is_due_again(
    sqlite_shop: Shop, publish: Publish, outbox_run: ConsumerRun
) -> None:
    attempts: list[int] = []

    @consumer("t", group="g", inbox=sqlite_shop.engine)
    def handle(session: Session, delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        session.add(Payment(id=1))
        if len(attempts) == 1:
            raise Broken

    publish("t", "x")
    with pytest.raises(Broken):
        outbox_run([handle])
    rolled_back = sqlite_shop.payments()
    outbox_run([handle])

    assert rolled_back == []
    assert sqlite_shop.payments() == [1]
    assert attempts == [1, 2]


def test_what_is_for_later_is_delivered_once_the_clock_is_put_forward(
    publish: Publish, outbox_run: ConsumerRun, outbox_clock: AdvancingClock
) -> None:
    got: list[bytes] = []
    handle = consumer("reminder", group="g")(lambda delivery: got.append(delivery.body))
    publish("reminder", "in two hours", delay=timedelta(hours=2))

    before = outbox_run([handle]).handled
    outbox_clock.advance(timedelta(hours=2))
    after = outbox_run([handle]).handled

    assert (before, after, got) == (0, 1, [b"in two hours"])


def test_a_canceled_message_is_not_delivered(
    box: Outbox, outbox_run: ConsumerRun, outbox_clock: AdvancingClock
) -> None:
    got: list[bytes] = []
    handle = consumer("reminder", group="g")(lambda delivery: got.append(delivery.body))
    plan = box.transactional(lambda session: box.publish("reminder", "x", delay=timedelta(hours=2)).id)
    box.transactional(lambda session, message_id: box.cancel(message_id))(plan())

    outbox_clock.advance(timedelta(hours=3))

    assert outbox_run([handle]).handled == 0
    assert got == []


def test_a_broadcast_consumer_gets_every_message_whoever_bears_its_name(
    publish: Publish, outbox_run: ConsumerRun
) -> None:
    got: list[tuple[str, bytes]] = []
    consumers = [
        consumer("price", group="cache", broadcast=True)(lambda delivery: got.append(("one", delivery.body))),
        consumer("price", group="cache", broadcast=True)(lambda delivery: got.append(("other", delivery.body))),
        consumer("price", group="cache")(lambda delivery: got.append(("group", delivery.body))),
    ]

    publish("price", "1")
    first = outbox_run(consumers)
    publish("price", "2")
    outbox_run(consumers)

    assert first.handled == 3
    assert sorted(got) == [(name, body) for name in ("group", "one", "other") for body in (b"1", b"2")]


class NoTimers:
    """A timing store that keeps nothing."""

    def add(self, timers: Sequence[Timer], *, only_missing: bool = False) -> int:
        """Add none."""
        return 0

    def close(self) -> None:
        """Nothing to let go of."""


@pytest.mark.parametrize("in_one", [True, False])
def test_a_message_that_is_withdrawn_from_its_table_is_not_delivered(
    shop: Shop,
    outbox_run: ConsumerRun,
    outbox_clock: AdvancingClock,
    published: PublishedMessages,
    in_one: bool,
) -> None:
    box = shop.box(NOBODY_THERE, sender=NO_SENDER, timing=NoTimers())
    got: list[bytes] = []
    handle = consumer("reminder", group="g")(lambda delivery: got.append(delivery.body))

    with Session(shop.engine) as session:
        message = box.publish("reminder", "x", delay=timedelta(hours=2), session=session)
        if not in_one:
            session.commit()
        box.cancel(message.id, session=session)
        session.commit()
    outbox_clock.advance(timedelta(hours=3))

    assert published.canceled == [message.id]
    assert outbox_run([handle]).handled == 0
    assert got == []


def test_retry_later_is_no_error_and_comes_again_after_its_delay(
    publish: Publish, outbox_run: ConsumerRun, outbox_clock: AdvancingClock
) -> None:
    attempts: list[int] = []

    @consumer("t", group="g")
    def handle(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if delivery.attempt == 1:
            raise RetryLater(delay_ms=60_000)

    publish("t", "x")
    first = outbox_run([handle])
    outbox_clock.advance(timedelta(minutes=1))
    second = outbox_run([handle])

    assert (first.put_off, first.handled, second.handled) == (1, 0, 1)
    assert attempts == [1, 2]


def test_what_the_sender_has_sent_as_well_is_delivered_once(
    shop: Shop, outbox_broker: MemoryBroker, outbox_run: ConsumerRun
) -> None:
    box = shop.box(outbox_broker)
    got: list[bytes] = []
    handle = consumer("t", group="g")(lambda delivery: got.append(delivery.body))
    box.transactional(lambda session: box.publish("t", "once"))()
    assert box.close()

    outbox_run([handle])

    assert got == [b"once"]


def test_handlers_work_inside_the_transaction_that_the_test_rolls_back(
    shop: Shop, outbox_run: ConsumerRun, published: PublishedMessages
) -> None:
    box = shop.box(NOBODY_THERE)
    seen: list[int] = []

    @consumer("order.placed", group="billing", inbox=shop.engine, schema=shop.database.schema)
    def bill(session: Session, delivery: Delivery) -> None:
        seen.extend(payment.id for payment in session.query(Payment))
        session.add(Payment(id=2))
        box.publish("order.paid", "", session=session)

    with shop.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            session.add(Payment(id=1))
            box.publish("order.placed", "", session=session)
            session.commit()
        outbox_run([bill], connection=connection)
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            inside = sorted(payment.id for payment in session.query(Payment))
        outer.rollback()

    assert (seen, inside) == ([1], [1, 2])
    assert published.topics == ["order.placed", "order.paid"]
    assert shop.payments() == []


def test_a_handler_that_closes_its_session_fails_there_too(
    shop: Shop, outbox_run: ConsumerRun, published: PublishedMessages
) -> None:
    box = shop.box(NOBODY_THERE)

    @consumer("order.placed", group="billing", inbox=shop.engine, schema=shop.database.schema)
    def bill(session: Session, delivery: Delivery) -> None:
        session.add(Payment(id=2))
        session.close()

    with shop.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            box.publish("order.placed", "", session=session)
            session.commit()
        with pytest.raises(NoTransaction, match="rolled back or closed"):
            outbox_run([bill], connection=connection)
        outer.rollback()


def test_async_handlers_run_from_a_plain_test_and_from_an_async_one(
    sqlite_shop: Shop, publish: Publish, outbox_run: ConsumerRun
) -> None:
    url = sqlite_shop.database.url.replace("sqlite://", "sqlite+aiosqlite://")
    engine = create_async_engine(url)

    @consumer("t", group="g", inbox=engine)
    async def handle(session: AsyncSession, delivery: Delivery) -> None:
        session.add(Payment(id=int(delivery.body)))

    plain: list[bytes] = []
    note = consumer("t", group="plain")(lambda delivery: plain.append(delivery.body))

    async def job() -> int:
        with pytest.raises(ConfigurationError, match="await outbox_run"):
            outbox_run([handle])
        report = await outbox_run.awaited([handle, note])
        await engine.dispose()
        return report.handled

    publish("t", "1")
    from_plain = outbox_run([handle]).handled
    publish("t", "2")
    from_async = asyncio.run(job())

    assert (from_plain, from_async) == (1, 3)
    assert sqlite_shop.payments() == [1, 2]
    assert plain == [b"1", b"2"]


def test_async_handlers_work_inside_the_transaction_that_the_test_rolls_back(
    shop: Shop, outbox_run: ConsumerRun
) -> None:
    database = shop.database
    driver = {"sqlite": "sqlite+aiosqlite://", "mariadb": "mysql+asyncmy://", "mysql": "mysql+asyncmy://"}
    url = driver[database.name] + database.url.partition("://")[2]

    async def job() -> list[int]:
        engine = create_async_engine(url)
        box = Outbox(engine, broker=NOBODY_THERE, schema=database.schema, sender=NO_SENDER)

        @consumer("t", group="g", inbox=engine, schema=database.schema)
        async def handle(session: AsyncSession, delivery: Delivery) -> None:
            session.add(Payment(id=2))

        async with engine.connect() as connection:
            outer = await connection.begin()
            async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
                session.add(Payment(id=1))
                box.publish("t", "x", session=session)
                await session.commit()
            await outbox_run.awaited([handle], connection=connection)
            async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
                inside = sorted(await session.run_sync(lambda it: [one.id for one in it.query(Payment)]))
            await outer.rollback()
        box.close()
        await engine.dispose()
        return inside

    assert asyncio.run(job()) == [1, 2]
    assert shop.payments() == []


def test_a_handler_that_publishes_to_its_own_topic_for_ever_is_told(
    box: Outbox, publish: Publish, outbox_capture: Capture, outbox_broker: MemoryBroker
) -> None:
    outbox_run = ConsumerRun(capture=outbox_capture, broker=outbox_broker, deliveries_max=20)
    handle = consumer("t", group="g")(lambda delivery: publish("t", "again"))
    publish("t", "first")

    with pytest.raises(AssertionError, match="its own topic"):
        outbox_run([handle])
