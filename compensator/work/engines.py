"""The database engines of one database instance, shared by all its sources. The statements are elsewhere."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import URL

from outbox.store.database import background_engine, open_engine
from outbox.store.database_url import sync_url
from outbox.store.databases.supported import database_named, database_of

STATEMENT_SECONDS_MAX: Final = 60
"""A server that does not answer for so long is dead; our longest statement deletes 200 rows by primary key."""
CONNECT_SECONDS_MAX: Final = 5
READS_RECYCLE_SECONDS: Final = 60
"""After so long a connection that only reads is replaced: no error shows it that its server is no longer the primary,
and rows of the new primary that it cannot see would never be due."""


class InstanceEngines:
    """Two engines on one database instance: `work`, READ COMMITTED; and `reads`, which reads outside transactions.

    No I/O until they are used. Time-outs bound the wait for a server that does not answer.
    """

    def __init__(self, database: URL | str, *, reads_recycle_seconds: int = READS_RECYCLE_SECONDS) -> None:
        """Raises ConfigurationError for an invalid URL."""
        opened = open_engine(_bounded(database))
        self.work = background_engine(opened)
        self.reads = autocommit_engine(self.work, recycle_seconds=reads_recycle_seconds)
        opened.dispose()

    def close(self) -> None:
        """Close the connections that are not in use."""
        self.reads.dispose()
        self.work.dispose()


def autocommit_engine(engine: Engine, *, recycle_seconds: int = READS_RECYCLE_SECONDS) -> Engine:
    """Returns an engine for single plain reads, each in one round trip: without BEGIN, COMMIT or ROLLBACK.

    Connections older than `recycle_seconds` are replaced. On SQLite such a read takes no lock for which a producer
    waits.
    """
    database = database_of(engine.dialect)
    reads = create_engine(
        engine.url,
        isolation_level="AUTOCOMMIT",
        skip_autocommit_rollback=True,
        pool_reset_on_return=None,
        pool_pre_ping=database.pings,
        pool_recycle=recycle_seconds,
    )
    database.pin_connections(reads)
    return reads


def _bounded(database: URL | str) -> URL | str:
    url = sync_url(database)
    bounds = database_named(url.get_backend_name()).timeout_options(
        url, connect_seconds=CONNECT_SECONDS_MAX, statement_seconds=STATEMENT_SECONDS_MAX
    )
    return url.update_query_dict({name: bound for name, bound in bounds.items() if name not in url.query})
