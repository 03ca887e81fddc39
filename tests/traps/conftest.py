"""Fixtures of the traps: the shop, on the servers where the trap is."""

from __future__ import annotations

import pytest

from tests.outbox.shop import Shop
from tests.outbox.shop_fixtures import broker, embedded, fresh_mysql_shop, shop, sqlite_shop

__all__ = ["broker", "embedded", "fresh_mysql_shop", "shop", "sqlite_shop"]


@pytest.fixture
def mysql_shop(fresh_mysql_shop: Shop) -> Shop:
    """What is read and locked is counted here."""
    return fresh_mysql_shop
