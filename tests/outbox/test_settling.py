"""Settling: what a broker has accepted is written to the table, also after the sender's connections were lost, or the
database refused for a while. So nothing is sent a second time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pymysql
import pytest
from sqlalchemy import Connection, Engine, create_engine, event, insert
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.store.database import background_engine
from outbox_core.runtime.logs import event_name
from tests.fixtures.local_server import LocalServer
from tests.outbox.deadlock import short_lock_waits
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, Payment, Shop
from tests.traps.switchable_shop import USER, switchable_shop

WAIT_SECONDS = 120
DRIVERS = ["aiomysql", "asyncmy"]
"""On engines that do not ping: SQLAlchemy 2.0.43 cannot ping them beside PyMySQL 1.2, and the outbox must."""
TOPICS = [pytest.param({"payments"}, id="ordered"), pytest.param(set[str](), id="unordered")]


def wait_until(condition: Callable[[], bool]) -> None:
    """Asks the database again and again: what the sender writes there tells nobody."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pay(shop: Shop, box: Outbox, number: int, *, engine: Engine | None = None) -> None:
    """One committed payment and its message."""
    with Session(engine or shop.engine) as session, session.begin():
        session.add(Payment(id=number))
        box.publish("payments", str(number), key="k", session=session)


def is_logged(caplog: pytest.LogCaptureFixture, name: str) -> bool:
    """Whether an event of this name was logged."""
    return name in [event_name(record) for record in list(caplog.records)]


def end_all_connections(shop: Shop) -> None:
    """End all connections to the shop's database, as the server does with those that were idle for too long."""
    url = make_url(shop.database.url)
    admin = pymysql.connect(host=url.host, port=url.port or 0, user=url.username, password=url.password or "")
    with admin, admin.cursor() as cursor:
        listed = "SELECT id FROM information_schema.processlist WHERE db = %s"
        cursor.execute(listed, (url.database,))
        for (connection_id,) in cursor.fetchall():
            cursor.execute(f"KILL {connection_id}")
        while cursor.execute(listed, (url.database,)):
            time.sleep(0.01)


@contextmanager
def ended_at(statement: str, *, times: int) -> Iterator[list[str]]:
    """The server ends the connection that runs a statement which begins so; the first ones, as many as `times`.

    Yields the ends so far.
    """
    ended: list[str] = []

    def end(connection: Connection, _cursor: Any, running: str, *_: Any) -> None:
        if running.startswith(statement) and len(ended) < times:
            ended.append(running)
            url = connection.engine.url
            admin = pymysql.connect(host=url.host, port=url.port or 0, user=url.username, password=url.password or "")
            with admin, admin.cursor() as cursor:
                [own] = connection.exec_driver_sql("SELECT CONNECTION_ID()").one()
                cursor.execute(f"KILL {own}")

    event.listen(Engine, "before_cursor_execute", end)
    try:
        yield ended
    finally:
        event.remove(Engine, "before_cursor_execute", end)


@pytest.mark.parametrize("ordered", TOPICS)
def test_a_sender_whose_idle_connections_the_server_has_ended_sends_each_message_once(
    mysql_shop: Shop, broker: RecordingBroker, ordered: set[str]
) -> None:
    engine = mysql_shop.other_engine()
    box = mysql_shop.box(broker, engine=engine, ordered=ordered)

    for number in range(3):
        pay(mysql_shop, box, number)
        wait_until(lambda: mysql_shop.rows() == [])
        end_all_connections(mysql_shop)

    assert [message.body for message in broker.stored] == [b"0", b"1", b"2"]
    assert [len(batch) for batch in broker.batches] == [1, 1, 1]
    assert mysql_shop.archived() == 3


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("ordered", TOPICS)
def test_an_async_sender_whose_idle_connections_the_server_has_ended_sends_each_message_once(
    mysql_shop: Shop, broker: RecordingBroker, driver: str, ordered: set[str]
) -> None:
    url = make_url(mysql_shop.database.url).set(drivername=f"mysql+{driver}")

    async def job() -> None:
        engine = create_async_engine(url)
        box = mysql_shop.box(broker, engine=engine, ordered=ordered)
        for number in range(3):
            async with AsyncSession(engine) as session, session.begin():
                await session.execute(insert(Payment).values(id=number, note=""))
                box.publish("payments", str(number), key="k", session=session)
            await asyncio.to_thread(wait_until, lambda: mysql_shop.rows() == [])
            await engine.dispose()
            await asyncio.to_thread(end_all_connections, mysql_shop)
        box.close()

    asyncio.run(job())

    assert [len(batch) for batch in broker.batches] == [1, 1, 1]
    assert mysql_shop.archived() == 3


def test_a_background_pool_replaces_a_connection_that_the_server_has_ended(mysql_shop: Shop) -> None:
    background = background_engine(mysql_shop.other_engine())
    mysql_shop.closing.callback(background.dispose)
    errors: list[object] = []
    event.listen(background, "handle_error", errors.append)

    for _ in range(3):
        with background.begin() as connection:
            connection.exec_driver_sql("SELECT 1")
        end_all_connections(mysql_shop)

    assert errors == []


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_settlement_whose_connection_is_lost_is_repeated(
    mysql_shop: Shop, broker: RecordingBroker, times: int
) -> None:
    with ended_at("DELETE", times=times) as ended:
        box = mysql_shop.box(broker)
        pay(mysql_shop, box, 1)
        wait_until(lambda: mysql_shop.rows() == [])

    assert len(ended) == times
    assert [len(batch) for batch in broker.batches] == [1]
    assert mysql_shop.archived() == 1


def test_a_send_for_which_the_order_could_not_be_read_is_repeated(mysql_shop: Shop, broker: RecordingBroker) -> None:
    queue = f"SELECT {mysql_shop.database.schema}.order_queue."
    with ended_at(queue, times=3) as ended:
        box = mysql_shop.box(broker, ordered={"payments"})
        pay(mysql_shop, box, 1)
        wait_until(lambda: mysql_shop.rows() == [])

    assert len(ended) == 3
    assert [len(batch) for batch in broker.batches] == [1]


def refused_while_hidden(shop: Shop) -> tuple[str, str]:
    """The statements that take the archive away, so that no settlement can be written, and that bring it back."""
    archive = f"{shop.database.schema}.archive" if shop.database.schema else "outbox_archive"
    hidden = f"{shop.database.schema}.hidden" if shop.database.schema else "hidden"
    return f"ALTER TABLE {archive} RENAME TO {hidden}", f"ALTER TABLE {hidden} RENAME TO {archive}"


def test_a_settlement_that_the_database_refused_is_repeated_beside_new_sends(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    broker = RecordingBroker()
    box = shop.box(broker)
    hide, bring_back = refused_while_hidden(shop)

    shop.execute(hide)
    pay(shop, box, 1)
    wait_until(lambda: is_logged(caplog, "send_not_settled"))
    pay(shop, box, 2)
    broker.wait_for(lambda it: len(it.stored) == 2)
    refused = len(shop.rows())
    shop.execute(bring_back)
    wait_until(lambda: shop.rows() == [])

    assert refused == 2
    assert [len(batch) for batch in broker.batches] == [1, 1]
    assert shop.archived() == 2


def test_a_settlement_that_waited_too_long_for_a_lock_is_repeated(
    mysql_shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """As of an operator's transaction that holds the rows (1205)."""
    holder = mysql_shop.closing.enter_context(mysql_shop.other_engine(isolation_level="READ COMMITTED").connect())

    def hold_the_row(_batch: object) -> None:
        holder.exec_driver_sql(f"UPDATE {mysql_shop.database.schema}.message SET last_error = 'held'")

    broker = RecordingBroker(hold_the_row)
    box = mysql_shop.box(broker)
    with short_lock_waits():
        pay(mysql_shop, box, 1)
        wait_until(lambda: is_logged(caplog, "send_not_settled"))
    holder.rollback()
    wait_until(lambda: mysql_shop.rows() == [])

    assert "1205" in caplog.text
    assert [len(batch) for batch in broker.batches] == [1]
    assert mysql_shop.archived() == 1


def test_a_settlement_on_a_server_that_became_read_only_is_repeated(
    mysql_like_of_module: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    """As a primary is for a while that is switched over (1290, 1836)."""
    with switchable_shop(mysql_like_of_module) as shop:
        engine = create_engine(make_url(shop.database.url).set(username=USER))
        shop.closing.callback(engine.dispose)
        broker = RecordingBroker(lambda _: mysql_like_of_module.execute("SET GLOBAL read_only = 1") and None)
        box = shop.box(broker, engine=engine)
        pay(shop, box, 1, engine=engine)
        wait_until(lambda: is_logged(caplog, "send_not_settled"))
        mysql_like_of_module.execute("SET GLOBAL read_only = 0")
        wait_until(lambda: shop.rows() == [])

        assert "read-only" in caplog.text
        assert [len(batch) for batch in broker.batches] == [1]
        assert shop.archived() == 1


def test_closing_repeats_a_settlement_that_the_database_refused(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    broker = RecordingBroker()
    box = shop.box(broker)
    hide, bring_back = refused_while_hidden(shop)
    shop.execute(hide)
    pay(shop, box, 1)

    closing = threading.Thread(target=box.close)
    closing.start()
    wait_until(lambda: is_logged(caplog, "send_not_settled"))
    shop.execute(bring_back)
    closing.join(WAIT_SECONDS)

    assert shop.rows() == []
    assert [len(batch) for batch in broker.batches] == [1]


def test_a_settlement_is_repeated_no_more_once_its_lease_is_over(
    sqlite_shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    broker = RecordingBroker()
    box = sqlite_shop.box(broker, sender=replace(BUSY_LIMITS, lease_ms=1_500, lease_margin_ms=1))
    hide, bring_back = refused_while_hidden(sqlite_shop)

    sqlite_shop.execute(hide)
    pay(sqlite_shop, box, 1)
    broker.wait_for(lambda it: len(it.stored) == 1)
    wait_until(lambda: is_logged(caplog, "settlements_given_up"))
    sqlite_shop.execute(bring_back)
    sqlite_shop.scan(broker).run()

    assert [len(batch) for batch in broker.batches] == [1, 1]
    assert sqlite_shop.rows() == []
