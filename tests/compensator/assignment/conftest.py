"""What the tests of assignment start from: a schema with the tables, and instances on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compensator.assignment.fleet import Fleet
from tests.fixtures.zookeeper_server import running_zookeeper
from tests.outbox.shop import Shop
from tests.outbox.shop_fixtures import fresh_mysql_shop, mysql_shop, shop, sqlite_shop

__all__ = [
    "fleet",
    "fresh_mysql_shop",
    "mysql_fleet",
    "mysql_shop",
    "running_zookeeper",
    "shop",
    "sqlite_fleet",
    "sqlite_shop",
]


@pytest.fixture
def fleet(shop: Shop) -> Iterator[Fleet]:
    """Instances on SQLite, MariaDB and MySQL."""
    opened = Fleet(shop)
    yield opened
    opened.close()


@pytest.fixture
def mysql_fleet(mysql_shop: Shop) -> Iterator[Fleet]:
    """Instances on MariaDB and MySQL."""
    opened = Fleet(mysql_shop)
    yield opened
    opened.close()


@pytest.fixture
def sqlite_fleet(sqlite_shop: Shop) -> Iterator[Fleet]:
    """Instances on SQLite alone, for what no server changes."""
    opened = Fleet(sqlite_shop)
    yield opened
    opened.close()
