"""The sender of an Outbox on an AsyncEngine: its connections are made as those of the business are."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, insert, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from outbox import Outbox
from outbox.store.async_background import AsyncBackground
from outbox.store.database import background_engine, open_engine
from outbox_core import Message
from tests.fixtures.forks import FORKS
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, Payment, Shop

DRIVERS = ["asyncmy", "aiomysql"]
WAIT_SECONDS = 300
NOWHERE = {"host": "192.0.2.1", "port": 9, "username": "nobody", "password": "wrong"}
Connect = Callable[..., Awaitable[Any]]


def arguments(url: URL) -> dict[str, Any]:
    """What a driver for asyncio needs to reach a server."""
    return {"host": url.host, "port": url.port, "user": url.username, "password": url.password or ""}


def connect_of(driver: str) -> Connect:
    """The driver's own connect()."""
    connect: Connect = __import__(driver).connect
    return connect


def sends_and_settles(shop: Shop, engine: AsyncEngine) -> bool:
    """Whether a message that is committed on the engine is sent, and its row removed, in every way to close."""
    broker = RecordingBroker()

    async def job() -> None:
        box = Outbox(engine, broker=broker, schema=shop.database.schema, sender=BUSY_LIMITS)
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(insert(Payment).values(id=1, note=""))
            box.publish("paid", "grüße", key="ключ", session=session)
        assert box.close(timeout_ms=120_000)  # in the thread of a running loop: it needs none of its own
        assert box.close()
        await engine.dispose()

    asyncio.run(job())
    assert [one.key for one in broker.stored] == ["ключ"]
    return shop.rows() == []


@pytest.mark.parametrize("fork", FORKS)
def test_a_forked_child_sends_what_it_commits_on_an_async_engine_and_its_parent_goes_on(
    sqlite_shop: Shop, tmp_path: Path, fork: Callable[[], int]
) -> None:
    sending, go_on = threading.Event(), threading.Event()

    def hang(batch: Sequence[Message]) -> None:
        if batch[0].body == b"1":
            sending.set()
            assert go_on.wait(WAIT_SECONDS)

    broker = RecordingBroker(hang)
    engine = create_async_engine(make_url(sqlite_shop.database.url).set(drivername="sqlite+aiosqlite"))
    box = sqlite_shop.box(broker, engine=engine)
    commit(engine, box, 0)
    while sqlite_shop.rows():
        time.sleep(0.001)
    lasting = threading.enumerate()
    commit(engine, box, 1)
    assert sending.wait(WAIT_SECONDS)  # so that no transaction is open: no hook of a fork in C would wait for its end
    for thread in set(threading.enumerate()).difference(lasting):
        thread.join(WAIT_SECONDS)  # of aiosqlite: a lock that it takes as it ends would stay locked in a child

    child = fork()
    if child == 0:
        signal.alarm(WAIT_SECONDS)  # which ends a child that waits for a thread of its parent's
        try:
            commit(engine, box, 2)
            emptied = box.close()
            (tmp_path / "sent").write_text(f"{emptied} {[message.body for message in broker.stored]}")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    go_on.set()
    commit(engine, box, 3)

    assert (tmp_path / "sent").read_text() == "True [b'0', b'2']"
    assert box.close()
    assert [message.body for message in broker.stored] == [b"0", b"1", b"3"]
    assert sqlite_shop.payments() == [0, 1, 2, 3]
    assert sqlite_shop.rows() == []


def commit(engine: AsyncEngine, box: Outbox, number: int) -> None:
    """One committed payment and its message, in an event loop of its own, which leaves no connection open."""

    async def job() -> None:
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(insert(Payment).values(id=number, note=""))
            box.publish("paid", str(number), session=session)
        await engine.dispose()

    asyncio.run(job())


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_engine_of_an_async_url_lends_a_connection_again_and_replaces_one_that_its_server_has_ended(
    mysql_shop: Shop, driver: str
) -> None:
    engine = AsyncEngine(open_engine(make_url(mysql_shop.database.url).set(drivername=f"mysql+{driver}")))

    async def connection_id() -> int:
        async with engine.connect() as connection:
            return int(await connection.scalar(text("SELECT CONNECTION_ID()")))

    async def job() -> list[int]:
        ids = [await connection_id(), await connection_id()]
        mysql_shop.execute(f"KILL {ids[0]}")
        ids.append(await connection_id())
        await engine.dispose()
        return ids

    first, again, replaced = asyncio.run(job())

    assert again == first
    assert replaced != first


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_sender_keeps_an_async_engines_connect_args(mysql_shop: Shop, driver: str) -> None:
    url = make_url(mysql_shop.database.url)
    elsewhere = url.set(drivername=f"mysql+{driver}", **NOWHERE)

    engine = create_async_engine(elsewhere, connect_args=arguments(url))

    assert sends_and_settles(mysql_shop, engine)


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_sender_keeps_an_async_engines_creator(mysql_shop: Shop, driver: str) -> None:
    url = make_url(mysql_shop.database.url)
    loops: set[int] = set()

    async def creator() -> Any:
        loops.add(id(asyncio.get_running_loop()))
        return await connect_of(driver)(db=url.database, charset="utf8mb4", **arguments(url))

    engine = create_async_engine(url.set(drivername=f"mysql+{driver}", **NOWHERE), async_creator=creator)

    assert sends_and_settles(mysql_shop, engine)
    assert len(loops) == 2


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_sender_asks_an_async_engines_do_connect_listeners(mysql_shop: Shop, driver: str) -> None:
    url = make_url(mysql_shop.database.url)
    engine = create_async_engine(url.set(drivername=f"mysql+{driver}", **NOWHERE))

    @event.listens_for(engine.sync_engine, "do_connect")
    def provide_token(_dialect: object, _record: object, _args: object, named: dict[str, Any]) -> None:
        named.update(arguments(url))

    assert sends_and_settles(mysql_shop, engine)


def test_the_sender_uses_no_other_driver_on_sqlite(sqlite_shop: Shop) -> None:
    timeouts: list[float] = []
    url = sqlite_shop.database.url.replace("sqlite://", "sqlite+aiosqlite://")
    engine = create_async_engine(url, connect_args={"timeout": 7.5})
    event.listen(engine.sync_engine, "do_connect", lambda _d, _r, _a, named: timeouts.append(named["timeout"]))

    assert sends_and_settles(sqlite_shop, engine)
    assert timeouts == [7.5, 7.5]


def settings(shop: Shop, driver: str, names: list[str]) -> tuple[Any, ...]:
    """What background connections are set to, on an engine whose URL asks for latin1."""
    url = make_url(shop.database.url).set(drivername=f"mysql+{driver}", query={"charset": "latin1"})
    background = AsyncBackground(background_engine(open_engine(create_async_engine(url))))
    question = f"SELECT {', '.join('@@' + name for name in names)}"
    try:
        return background.transact(lambda connection: tuple(connection.exec_driver_sql(question).one()))
    finally:
        background.dispose()


@pytest.mark.parametrize("driver", DRIVERS)
def test_background_connections_of_an_async_engine_are_read_committed_and_wait_for_no_lock_for_long(
    mysql_shop: Shop, driver: str
) -> None:
    isolation = "tx_isolation" if mysql_shop.database.name == "mariadb" else "transaction_isolation"
    names = [isolation, "innodb_lock_wait_timeout", "lock_wait_timeout"]

    assert settings(mysql_shop, driver, names) == ("READ-COMMITTED", 5, 5)


def test_background_connections_of_aiomysql_speak_utf8mb4(mysql_shop: Shop) -> None:
    assert settings(mysql_shop, "aiomysql", ["character_set_client"]) == ("utf8mb4",)


@pytest.fixture
def background(sqlite_shop: Shop) -> AsyncBackground:
    """One on SQLite."""
    url = sqlite_shop.database.url.replace("sqlite://", "sqlite+aiosqlite://")
    return AsyncBackground(background_engine(open_engine(create_async_engine(url))))


def loops() -> int:
    """How many threads run an event loop for a background."""
    return [thread.name for thread in threading.enumerate()].count("outbox-event-loop")


def pay(background: AsyncBackground, number: int) -> None:
    background.transact(lambda connection: connection.execute(insert(Payment).values(id=number, note="")))


def test_what_fails_is_rolled_back_and_raised_on(sqlite_shop: Shop, background: AsyncBackground) -> None:
    pay(background, 1)
    with pytest.raises(IntegrityError):
        pay(background, 1)
    background.dispose()

    assert sqlite_shop.payments() == [1]


def test_its_thread_is_there_from_the_first_transaction_until_it_is_disposed_of(
    sqlite_shop: Shop, background: AsyncBackground
) -> None:
    seen = [loops()]
    for number in (1, 2):
        pay(background, number)
        seen.append(loops())
        background.dispose()
        background.dispose()
        seen.append(loops())

    assert seen == [0, 1, 0, 1, 0]
    assert sqlite_shop.payments() == [1, 2]


def test_a_transaction_that_runs_while_it_is_disposed_of_ends_well(
    sqlite_shop: Shop, background: AsyncBackground
) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def work(connection: Any) -> None:
        began.set()
        connection.execute(insert(Payment).values(id=1, note=""))

    def transact() -> None:
        background.transact(work)
        goes_on.set()

    thread = threading.Thread(target=transact)
    thread.start()
    assert began.wait(WAIT_SECONDS)
    background.dispose()
    thread.join(WAIT_SECONDS)

    assert goes_on.is_set()
    assert sqlite_shop.payments() == [1]
    background.dispose()
    assert loops() == 0


def test_a_thread_that_cannot_be_started_fails_its_transaction_and_the_next_one_tries_again(
    sqlite_shop: Shop, background: AsyncBackground, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            pay(background, 1)
    second = threading.Thread(target=pay, args=(background, 2), daemon=True)
    second.start()
    second.join(WAIT_SECONDS)

    assert not second.is_alive()
    assert sqlite_shop.payments() == [2]
    background.dispose()


def test_plain_engines_are_left_alone(sqlite_shop: Shop) -> None:
    second: Engine = background_engine(sqlite_shop.engine)

    assert second.pool is not sqlite_shop.engine.pool
    assert not second.dialect.is_async
    second.dispose()
