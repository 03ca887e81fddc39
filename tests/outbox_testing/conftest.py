"""What the tests of outbox.testing start from: the shop. Its own fixtures come by the plugin, as users have them."""

from tests.outbox.shop_fixtures import mysql_shop, shop, sqlite_shop

__all__ = ["mysql_shop", "shop", "sqlite_shop"]
