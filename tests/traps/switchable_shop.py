"""A shop on a server that may become read-only, and a user whom that concerns, unlike one with all privileges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.fixtures.local_server import LocalServer
from tests.outbox.shop import Shop, open_shop

USER = "app"


@contextmanager
def switchable_shop(server: LocalServer) -> Iterator[Shop]:
    """Open it, with the user's privileges on its tables; in the end the server takes writes again."""
    with server.fresh_database() as database, open_shop(database) as shop:
        server.execute(
            f"CREATE USER IF NOT EXISTS {USER}@'%'",
            f"GRANT ALL ON {shop.engine.url.database}.* TO {USER}@'%'",
            f"GRANT ALL ON {database.schema}.* TO {USER}@'%'",
        )
        try:
            yield shop
        finally:
            server.execute("SET GLOBAL read_only = 0")
