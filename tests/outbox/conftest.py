"""What the SDK's tests start from."""

from tests.outbox.shop_fixtures import broker, embedded, fresh_mysql_shop, mysql_shop, shop, sqlite_shop

__all__ = ["broker", "embedded", "fresh_mysql_shop", "mysql_shop", "shop", "sqlite_shop"]
