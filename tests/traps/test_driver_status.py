"""What each driver of MySQL and MariaDB tells of a transaction that ends out of sight: only a savepoint never errs.

The outbox reads the status of PyMySQL and aiomysql, and not asyncmy's, which stays at "in a transaction". Where a new
version of a driver fails here, see whether its status can be relied on (transaction_status in
outbox/store/databases/mysql.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from outbox.store.database import error_code
from tests.outbox.procedures import make_procedures
from tests.outbox.shop import Shop

IN_TRANSACTION = 1
STATUS: dict[str, Callable[[Any], bool]] = {
    "pymysql": lambda driver: bool(driver.server_status & IN_TRANSACTION),
    "aiomysql": lambda driver: driver.get_transaction_status(),
    "asyncmy": lambda driver: driver.get_transaction_status(),
}
INSERT = "INSERT INTO payment VALUES (1, '')"

Steps = Callable[[Connection], Any]


def told(shop: Shop, driver: str, steps: Steps) -> Any:
    """What these steps find on a connection of this driver."""
    make_procedures(shop)
    url = make_url(shop.database.url).set(drivername=f"mysql+{driver}")
    if driver == "pymysql":
        engine = create_engine(url)
        shop.closing.callback(engine.dispose)
        with engine.connect() as connection:
            return steps(connection)

    async def run() -> Any:
        async_engine = create_async_engine(url)
        try:
            async with async_engine.connect() as connection:
                return await connection.run_sync(steps)
        finally:
            await async_engine.dispose()

    return asyncio.run(run())


def status_behind(driver: str, *statements: str) -> Steps:
    """The driver's status behind each statement, its rows read."""

    def steps(connection: Connection) -> list[bool]:
        found = []
        for statement in statements:
            with connection.exec_driver_sql(statement) as result:
                if result.returns_rows:
                    result.all()
            found.append(STATUS[driver](connection.connection.driver_connection))
        return found

    return steps


@pytest.mark.parametrize("driver", STATUS)
@pytest.mark.parametrize("procedure", ["abandon", "settle"])
def test_a_procedure_that_ended_the_transaction_shows_in_the_status_of_all_but_asyncmy(
    mysql_shop: Shop, driver: str, procedure: str
) -> None:
    statements = [INSERT, f"CALL {procedure}()"]

    assert told(mysql_shop, driver, status_behind(driver, *statements)) == [True, driver == "asyncmy"]


@pytest.mark.parametrize("driver", STATUS)
def test_a_procedure_that_has_begun_another_transaction_shows_in_no_status(mysql_shop: Shop, driver: str) -> None:
    statements = [INSERT, "CALL settle_and_begin()"]

    assert told(mysql_shop, driver, status_behind(driver, *statements)) == [True, True]


@pytest.mark.parametrize("driver", STATUS)
def test_an_answer_with_rows_changes_no_status(mysql_shop: Shop, driver: str) -> None:
    statements = [INSERT, "ANALYZE TABLE payment"]  # which commits

    assert told(mysql_shop, driver, status_behind(driver, *statements)) == [True, True]


@pytest.mark.parametrize("driver", STATUS)
@pytest.mark.parametrize(
    ("procedure", "code"), [("abandon", 1305), ("settle", 1305), ("settle_and_begin", 1305), ("good", None)]
)
def test_a_savepoint_goes_with_its_transaction_on_every_driver(
    mysql_shop: Shop, driver: str, procedure: str, code: int | None
) -> None:
    def steps(connection: Connection) -> int | None:
        for statement in (INSERT, "SAVEPOINT here", f"CALL {procedure}()"):
            connection.exec_driver_sql(statement).close()
        try:
            connection.exec_driver_sql("RELEASE SAVEPOINT here")
        except DBAPIError as error:
            return error_code(error)
        return None

    assert told(mysql_shop, driver, steps) == code
