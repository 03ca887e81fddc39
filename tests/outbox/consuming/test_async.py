"""Handlers that are `async def`: the same promises, on an AsyncEngine or without an inbox."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from sqlalchemy import Engine, func, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from outbox import Consumer, NotTried, Outcome, RetryLater, Telemetry, consumer, still_held
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.telemetry.tracing import OpenTelemetryTracing
from outbox_core import Delivery
from outbox_core.common.errors import ConfigurationError, TransactionDoomed
from tests.outbox.deadlock import add_rows_to_fight_over, rival
from tests.outbox.shop import Payment, Shop
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker, delivery, message

Running = Callable[..., ConsumerRunner]
DRIVERS = {"sqlite": "sqlite+aiosqlite", "mariadb": "mysql+asyncmy", "mysql": "mysql+aiomysql"}


def async_engine(shop: Shop) -> AsyncEngine:
    """An AsyncEngine on the shop's database."""
    return create_async_engine(make_url(shop.database.url).set(drivername=DRIVERS[shop.database.name]))


def paying(shop: Shop, engine: AsyncEngine | str, **options: Any) -> Consumer:
    """A consumer whose effect is a payment."""

    @consumer("orders", group="payments", inbox=engine, schema=shop.database.schema, **options)
    async def pay(session: AsyncSession, one: Delivery) -> None:
        session.add(Payment(id=int(one.body)))
        await session.flush()
        if one.body == b"13":
            raise RuntimeError("not this one")

    return pay


def marks(shop: Shop) -> int:
    with shop.engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(shop.tables.inbox)) or 0


def test_an_effect_happens_once_and_a_failure_leaves_nothing(shop: Shop) -> None:
    async def run() -> list[object]:
        engine = async_engine(shop)
        pay = paying(shop, engine)
        outcomes: list[object] = [await pay.handle_async(delivery()) for _ in range(2)]
        with pytest.raises(RuntimeError):
            await pay.handle_async(delivery(13))
        await engine.dispose()
        return outcomes

    outcomes = asyncio.run(run())

    assert outcomes == [Outcome.HANDLED, Outcome.DEDUPLICATED]
    assert shop.payments() == [1]
    assert marks(shop) == 1


def test_a_runner_awaits_handlers_and_leaves_no_connection_behind(
    shop: Shop, watched: WatchedBroker, running: Running
) -> None:
    engine = async_engine(shop)
    watched.publish([message(number) for number in range(1, 12)])

    runner = running(paying(shop, engine, workers=3, prefetch=2))
    watched.wait_for(lambda: watched.acked == 11)

    assert runner.stop(timeout_seconds=WAIT_SECONDS)
    assert shop.payments() == list(range(1, 12))
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert engine.pool.checkedin() == 0  # type: ignore[attr-defined]


def test_an_inbox_may_be_named_by_an_asynchronous_url(
    sqlite_shop: Shop, watched: WatchedBroker, running: Running
) -> None:
    url = make_url(sqlite_shop.database.url).set(drivername="sqlite+aiosqlite").render_as_string()
    watched.publish([message()])

    running(paying(sqlite_shop, url))
    watched.wait_for(lambda: watched.acked == 1)

    assert sqlite_shop.payments() == [1]


def test_without_an_inbox_a_handler_gets_the_delivery_alone(watched: WatchedBroker, running: Running) -> None:
    handled: list[tuple[str, bool, str]] = []

    @consumer("orders", group="g")
    async def handle(one: Delivery) -> None:
        await asyncio.sleep(0)
        if one.attempt == 1 and one.id == "m-2":
            raise RetryLater(delay_ms=0)
        handled.append((one.id, still_held(), threading.current_thread().name))

    watched.publish([message(1), message(2)])
    runner = running(handle)
    watched.wait_for(lambda: watched.acked == 2)

    assert handled == [("m-1", True, "consumer-event-loop"), ("m-2", True, "consumer-event-loop")]
    assert runner.figures.failed == 1


def test_workers_await_side_by_side(watched: WatchedBroker, running: Running) -> None:
    inside: list[str] = []
    together = asyncio.Event()

    @consumer("orders", group="g", workers=4, prefetch=1)
    async def handle(one: Delivery) -> None:
        inside.append(one.id)
        if len(inside) == 4:
            together.set()
        await together.wait()

    watched.publish([message(number) for number in range(4)])
    running(handle)
    watched.wait_for(lambda: watched.acked == 4)


def test_a_handler_that_is_cancelled_has_failed(watched: WatchedBroker, running: Running) -> None:
    @consumer("orders", group="g")
    async def handle(one: Delivery) -> None:
        if one.id == "m-1":
            raise asyncio.CancelledError

    watched.repeat_nothing()
    watched.publish([message(1), message(2)])
    running(handle)
    watched.wait_for(lambda: watched.acked == 1 and len(watched.nacks) == 1)

    assert watched.nacks[0]["reason"].startswith("CancelledError")


def test_the_process_span_is_current_in_a_coroutine(watched: WatchedBroker, running: Running) -> None:
    seen: list[trace.SpanContext] = []

    @consumer("orders", group="g")
    async def handle(_one: Delivery) -> None:
        await asyncio.sleep(0)
        seen.append(trace.get_current_span().get_span_context())

    provider = TracerProvider(shutdown_on_exit=False)
    watched.publish([message()])
    running(handle, telemetry=Telemetry(tracing=OpenTelemetryTracing(provider=provider)))
    watched.wait_for(lambda: watched.acked == 1)

    assert seen[0].is_valid


@pytest.mark.parametrize("driver", ["mysql+asyncmy", "mysql+aiomysql"])
def test_a_swallowed_deadlock_leaves_the_message_unhandled(mysql_shop: Shop, driver: str) -> None:
    add_rows_to_fight_over(mysql_shop)

    async def run() -> None:
        engine = create_async_engine(make_url(mysql_shop.database.url).set(drivername=driver))

        @consumer("orders", group="payments", inbox=engine, schema=mysql_shop.database.schema)
        async def pay(session: AsyncSession, one: Delivery) -> None:
            session.add(Payment(id=int(one.body)))
            await session.flush()
            await lose_a_deadlock(session, mysql_shop.engine)
            session.add(Payment(id=51))

        with pytest.raises(TransactionDoomed):
            await pay.handle_async(delivery(50))
        await engine.dispose()

    asyncio.run(run())

    assert not {50, 51} & set(mysql_shop.payments())
    assert marks(mysql_shop) == 0


async def lose_a_deadlock(session: AsyncSession, engine: Engine) -> None:
    """Deadlock with a rival, lose, and swallow the error."""
    await session.execute(text("SELECT id FROM payment WHERE id = 1 FOR UPDATE"))
    with rival(engine, first=2, then=1) as asks:
        asks.set()
        with pytest.raises(DBAPIError):
            await session.execute(text("SELECT id FROM payment WHERE id = 2 FOR UPDATE"))


def test_an_inbox_that_cannot_be_asked_uses_up_no_attempt(sqlite_shop: Shop) -> None:
    sqlite_shop.execute(f"DROP TABLE {sqlite_shop.tables.inbox.name}")

    async def run() -> None:
        engine = async_engine(sqlite_shop)
        with pytest.raises(NotTried, match="outbox db upgrade"):
            await paying(sqlite_shop, engine).handle_async(delivery())
        await engine.dispose()

    asyncio.run(run())


# -- handlers that cannot work -----------------------------------------------------------------------------------------


class Awaitable:
    """An object whose call is a coroutine."""

    async def __call__(self, _one: Delivery) -> None:
        """Do nothing."""


async def nothing(*_: Any) -> None:
    """Do nothing."""


def generator(*_: Any) -> Any:
    """Never runs."""
    yield


async def async_generator(*_: Any) -> AsyncIterator[None]:
    """Never runs either."""
    yield


def test_what_is_awaited_is_known_of_functions_partials_and_objects() -> None:
    made = [consumer("orders", group="g")(one) for one in (nothing, functools.partial(nothing, 1), Awaitable())]

    assert [one.is_async for one in made] == [True, True, True]


@pytest.mark.parametrize("function", [generator, async_generator])
def test_a_generator_is_refused_since_nothing_of_it_would_run(function: Any) -> None:
    with pytest.raises(ConfigurationError, match="generator"):
        consumer("orders", group="g")(function)


def test_a_coroutine_function_needs_an_async_inbox_and_a_plain_one_a_plain_inbox(sqlite_shop: Shop) -> None:
    engine = async_engine(sqlite_shop)

    with pytest.raises(ConfigurationError, match="create_async_engine"):
        consumer("orders", group="g", inbox=sqlite_shop.engine)(nothing)
    with pytest.raises(ConfigurationError, match="async def"):
        consumer("orders", group="g", inbox=engine)(lambda _session, _one: None)


def test_a_handler_that_cannot_be_called_is_refused_before_it_makes_dead_letters(sqlite_shop: Shop) -> None:
    with_inbox = consumer("orders", group="g", inbox=sqlite_shop.engine)

    with pytest.raises(ConfigurationError, match=r"is called as .*\(session, delivery\) with an inbox: too many"):
        with_inbox(lambda _delivery: None)
    with pytest.raises(ConfigurationError, match=r"is called as .*\(delivery\) without an inbox: missing a required"):
        consumer("orders", group="g")(lambda _session, _delivery: None)

    assert with_inbox(lambda _session, _delivery, _more=1: None)
    assert consumer("orders", group="g")(print)


def test_a_plain_function_that_returns_a_coroutine_has_not_handled_anything(sqlite_shop: Shop) -> None:
    with_inbox = consumer("orders", group="g", inbox=sqlite_shop.engine)(lambda _session, _one: nothing())
    without = consumer("orders", group="g")(lambda _one: nothing())

    for made in (with_inbox, without):
        with pytest.raises(ConfigurationError, match="awaitable"):
            made.handle(delivery())
    assert marks(sqlite_shop) == 0


def test_handle_says_what_to_await(watched: WatchedBroker) -> None:
    with pytest.raises(ConfigurationError, match="await handle_async"):
        consumer("orders", group="g")(nothing).handle(delivery())
