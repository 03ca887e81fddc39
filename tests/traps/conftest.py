"""Fixtures of the traps: the shop, on the servers where the trap is."""

from __future__ import annotations

from tests.outbox.shop_fixtures import broker, embedded, mysql_shop, shop, sqlite_shop

__all__ = ["broker", "embedded", "mysql_shop", "shop", "sqlite_shop"]
