"""The database engines of one instance, shared by all sources on it. Not what is asked of them."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import URL

from outbox.store.database import MYSQL_DIALECTS, background_engine, open_engine
from outbox.store.database_url import sync_url

STATEMENT_SECONDS_MAX: Final = 60
"""No answer for so long is a dead server; the longest statement of ours reads and deletes 200 rows by primary key."""
CONNECT_SECONDS_MAX: Final = 5


class InstanceEngines:
    """Two engines on one instance: `work`, READ COMMITTED; and `looks`, which asks without opening a transaction.

    No I/O until they are used. A server that does not answer costs a bounded time.
    """

    def __init__(self, database: URL | str) -> None:
        """Raises ConfigurationError for a URL that cannot work."""
        first = open_engine(_bounded(database))
        self.work = background_engine(first)
        self.looks = looking_engine(self.work)
        first.dispose()

    def close(self) -> None:
        """Close the connections that nobody has."""
        self.looks.dispose()
        self.work.dispose()


def looking_engine(engine: Engine) -> Engine:
    """An engine for single plain reads, each in one round trip: no BEGIN, COMMIT or ROLLBACK around it.

    On SQLite such a read takes no lock that a producer waits for.
    """
    return create_engine(
        engine.url,
        isolation_level="AUTOCOMMIT",
        skip_autocommit_rollback=True,
        pool_reset_on_return=None,
        pool_pre_ping=engine.dialect.name in MYSQL_DIALECTS,
    )


def _bounded(database: URL | str) -> URL | str:
    url = sync_url(database)
    if url.get_driver_name() != "pymysql":
        return url
    bounds = {
        "connect_timeout": CONNECT_SECONDS_MAX,
        "read_timeout": STATEMENT_SECONDS_MAX,
        "write_timeout": STATEMENT_SECONDS_MAX,
    }
    return url.update_query_dict({name: str(value) for name, value in bounds.items() if name not in url.query})
