"""Handlers whose body does not run when they are called: none is taken as handled, by whatever calls it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Delivery, Inbox, NotTried, Outbox, OutboxError, Outcome, consumer
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.testing import ConsumerRun
from outbox_core.common.errors import ConfigurationError
from tests.outbox.shop import NO_SENDER, Shop
from tests.outbox.watched_broker import WatchedBroker, delivery, message

Running = Callable[..., ConsumerRunner]
ran: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_ran() -> Iterator[None]:
    ran.clear()
    yield
    assert ran == []


async def save(*_: Any) -> None:
    """What the handlers here forget to await."""
    ran.append("save")


def generator(*_: Any) -> Iterator[None]:
    """Runs when it is iterated."""
    ran.append("generator")
    yield


async def async_generator(*_: Any) -> AsyncIterator[None]:
    """Runs when it is iterated."""
    ran.append("async generator")
    yield


@contextmanager
def entered(*_: Any) -> Iterator[None]:
    """Runs when it is entered."""
    ran.append("entered")
    yield


@asynccontextmanager
async def entered_async(*_: Any) -> AsyncIterator[None]:
    """Runs when it is entered."""
    ran.append("entered async")
    yield


class AwaitedLater:
    """An awaitable that is no coroutine."""

    def __await__(self) -> Iterator[None]:
        ran.append("awaitable")
        yield


WORK: dict[str, Callable[..., object]] = {
    "coroutine": save,
    "generator": generator,
    "async generator": async_generator,
    "context manager": entered,
    "async context manager": entered_async,
    "awaitable": lambda *_: AwaitedLater(),
    "future": lambda *_: Future[None](),
}
UNFINISHED = pytest.mark.parametrize("work", WORK.values(), ids=WORK)


def plain(work: Callable[..., object]) -> Callable[..., object]:
    """A plain function, which returns the work."""

    def returned(*arguments: Any) -> object:
        return work(*arguments)

    return returned


def awaited(work: Callable[..., object]) -> Callable[..., object]:
    """An `async def`, which returns the work and has forgotten its await."""

    async def forgot(*arguments: Any) -> object:
        return work(*arguments)

    return forgot


SHAPES = pytest.mark.parametrize("shape", [plain, awaited])


@UNFINISHED
@SHAPES
@pytest.mark.parametrize("broadcast", [False, "earliest"])
def test_a_runner_acknowledges_no_work_that_has_yet_to_run(
    watched: WatchedBroker,
    running: Running,
    work: Callable[..., object],
    shape: Callable[..., Any],
    broadcast: Any,
) -> None:
    watched.repeat_nothing()
    watched.publish([message()])

    runner = running(consumer("orders", group="g", broadcast=broadcast)(with_one_parameter(shape(work), watched)))
    watched.wait_for(lambda: runner.figures.failed >= 1 if broadcast else len(watched.nacks) == 1)

    if not broadcast:
        assert "nobody awaits or runs" in watched.nacks[0]["reason"]
    assert (runner.figures.handled, watched.acked) == (0, 0)


def with_one_parameter(handler: Callable[..., Any], watched: WatchedBroker) -> Callable[..., Any]:
    """The handler; it wakes those who wait for what it did."""

    def sync(one: Delivery) -> object:
        watched.tell()
        return handler(one)

    async def called(one: Delivery) -> object:
        watched.tell()
        return await handler(one)

    return called if asyncio.iscoroutinefunction(handler) else sync


@UNFINISHED
def test_a_consumer_with_an_inbox_marks_nothing(shop: Shop, work: Callable[..., object]) -> None:
    made = consumer("orders", group="g", inbox=shop.engine, schema=shop.database.schema)(plain(work))

    with pytest.raises(ConfigurationError, match="nobody awaits or runs"):
        made.handle(delivery())

    assert marks(shop) == 0


@UNFINISHED
def test_an_async_consumer_with_an_inbox_marks_nothing(sqlite_shop: Shop, work: Callable[..., object]) -> None:
    async def run() -> None:
        engine = create_async_engine(async_url(sqlite_shop))
        with pytest.raises(ConfigurationError, match="nobody awaits or runs"):
            await consumer("orders", group="g", inbox=engine)(awaited(work)).handle_async(delivery())
        await engine.dispose()

    asyncio.run(run())

    assert marks(sqlite_shop) == 0


@UNFINISHED
@pytest.mark.parametrize("is_seen_before", [False, True])
def test_the_inbox_of_other_clients_marks_nothing(
    sqlite_shop: Shop, work: Callable[..., object], is_seen_before: bool
) -> None:
    inbox = Inbox(sqlite_shop.engine)

    with pytest.raises(ConfigurationError), Session(sqlite_shop.engine) as session, session.begin():
        inbox.handle(session, "m-1", "g", work if is_seen_before else plain(work), topic="orders")

    assert marks(sqlite_shop) == 0


@UNFINISHED
def test_the_inbox_of_other_async_clients_marks_nothing(sqlite_shop: Shop, work: Callable[..., object]) -> None:
    async def handle(handler: Callable[..., Any]) -> Outcome:
        async with AsyncSession(engine) as session, session.begin():
            return await inbox.handle_async(session, "m-1", "g", handler, topic="orders")

    async def run() -> None:
        with pytest.raises(ConfigurationError, match="nobody awaits or runs"):
            await handle(awaited(work))
        await engine.dispose()

    engine = create_async_engine(async_url(sqlite_shop))
    inbox = Inbox(engine)
    asyncio.run(run())

    assert marks(sqlite_shop) == 0


@UNFINISHED
@SHAPES
def test_the_test_run_raises_it_in_the_test(
    sqlite_shop: Shop, outbox_run: ConsumerRun, work: Callable[..., object], shape: Callable[..., Any]
) -> None:
    box: Outbox = sqlite_shop.box("http://127.0.0.1:9", sender=NO_SENDER)
    with box.begin():
        box.publish("orders", "1")

    with pytest.raises(ConfigurationError, match="nobody awaits or runs"):
        outbox_run([consumer("orders", group="g")(shape(work))])


@UNFINISHED
def test_the_test_run_in_a_transaction_raises_it_too(
    sqlite_shop: Shop, outbox_run: ConsumerRun, work: Callable[..., object]
) -> None:
    box: Outbox = sqlite_shop.box("http://127.0.0.1:9", sender=NO_SENDER)
    with box.begin():
        box.publish("orders", "1")
    handler = consumer("orders", group="g", inbox=sqlite_shop.engine)(plain(work))

    with sqlite_shop.engine.connect() as connection, connection.begin() as transaction:
        with pytest.raises(ConfigurationError, match="nobody awaits or runs"):
            outbox_run([handler], connection=connection)
        transaction.rollback()


@UNFINISHED
def test_the_test_run_in_an_async_transaction_raises_it_too(
    sqlite_shop: Shop, outbox_run: ConsumerRun, work: Callable[..., object]
) -> None:
    box: Outbox = sqlite_shop.box("http://127.0.0.1:9", sender=NO_SENDER)
    with box.begin():
        box.publish("orders", "1")

    async def run() -> None:
        engine = create_async_engine(async_url(sqlite_shop))
        handler = consumer("orders", group="g", inbox=engine)(awaited(work))
        async with engine.connect() as connection, connection.begin() as transaction:
            with pytest.raises(ConfigurationError, match="nobody awaits or runs"):
                await outbox_run.awaited([handler], connection=connection)
            await transaction.rollback()
        await engine.dispose()

    asyncio.run(run())


class GeneratorCall:
    """An object whose call is a generator's."""

    def __call__(self, *_: Any) -> Iterator[None]:
        ran.append("call")
        yield


class AsyncGeneratorCall:
    """The same, async."""

    async def __call__(self, *_: Any) -> AsyncIterator[None]:
        ran.append("call")
        yield


class Bound:
    """A class whose method is a generator."""

    def generator(self, *_: Any) -> Iterator[None]:
        ran.append("method")
        yield


@pytest.mark.parametrize(
    "handler",
    [
        generator, async_generator, entered, entered_async, GeneratorCall(), AsyncGeneratorCall(), Bound().generator,
        functools.partial(generator), functools.partial(functools.partial(GeneratorCall(), 1), 2),
    ],
)  # fmt: skip
def test_what_is_seen_to_be_a_generator_is_refused_where_it_is_decorated(handler: Any) -> None:
    with pytest.raises(ConfigurationError, match="is a generator: calling it would run nothing"):
        consumer("orders", group="g")(handler)


class AsyncCall:
    """An object whose call is awaited."""

    async def __call__(self, *_: Any) -> None:
        """Do nothing."""


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that knows nothing of `async def`."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


async def quietly(*_: Any) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    "handler", [AsyncCall(), functools.partial(AsyncCall()), functools.partial(functools.partial(quietly, 1))]
)
def test_an_async_call_below_objects_and_partials_is_awaited(handler: Any) -> None:
    made = consumer("orders", group="g")(handler)

    assert made.is_async
    assert asyncio.run(made.handle_async(delivery())) is Outcome.HANDLED


def test_an_async_function_under_a_plain_decorator_is_not_taken_as_handled() -> None:
    made = consumer("orders", group="g")(logged(save))

    with pytest.raises(ConfigurationError, match="await in an `async def`"):
        made.handle(delivery())


class Handler:
    """A class, not an object of it."""

    def __init__(self, *_: Any) -> None:
        """Handle nothing."""


@pytest.mark.parametrize(
    ("handler", "cure"),
    [
        (Handler, "decorate a function"),
        ("handle", "decorate a function"),
        (consumer("bills", group="h")(quietly), "name all topics in one @consumer"),
    ],
)
def test_what_is_no_function_is_refused_where_it_is_decorated(handler: Any, cure: str) -> None:
    with pytest.raises(ConfigurationError, match=cure):
        consumer("orders", group="g")(handler)


@pytest.mark.parametrize("returned", [None, 0, [], "text", object(), iter([1])])
def test_what_is_no_work_may_be_returned(returned: object) -> None:
    async def handler(_one: Delivery) -> object:
        return returned

    assert consumer("orders", group="g")(lambda _one: returned).handle(delivery()) is Outcome.HANDLED
    assert asyncio.run(consumer("orders", group="g")(handler).handle_async(delivery())) is Outcome.HANDLED


def not_tried(*_: Any) -> None:
    """What a handler raises that calls another consumer's handle()."""
    raise NotTried("the inbox is away")


async def not_tried_async(*_: Any) -> None:
    """The same, async."""
    raise NotTried("the inbox is away")


@pytest.mark.parametrize("handler", [not_tried, not_tried_async])
def test_not_tried_from_a_handler_uses_up_an_attempt(
    watched: WatchedBroker, running: Running, handler: Callable[..., Any]
) -> None:
    watched.repeat_nothing()
    watched.publish([message()])

    runner = running(consumer("orders", group="g")(handler))
    watched.wait_for(lambda: len(watched.nacks) == 1)

    assert watched.nacks[0]["counts"] is True
    assert "NotTried: the inbox is away" in watched.nacks[0]["reason"]
    assert runner.figures.failed == 1


def test_not_tried_from_a_handler_with_an_inbox_is_its_failure(sqlite_shop: Shop) -> None:
    made = consumer("orders", group="g", inbox=sqlite_shop.engine)(not_tried)

    with pytest.raises(OutboxError, match="the handler raised NotTried") as raised:
        made.handle(delivery())
    assert not isinstance(raised.value, NotTried)


def async_url(shop: Shop) -> str:
    """The shop's URL, for aiosqlite."""
    return shop.database.url.replace("sqlite://", "sqlite+aiosqlite://")


def marks(shop: Shop) -> int:
    """The marks of the shop's inbox."""
    with shop.engine.connect() as connection:
        return len(connection.execute(shop.tables.inbox.select()).all())
