"""From a database URL to a LeasedAssignment: an engine that never waits long, the tables, the instance. No logic."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Engine, event
from sqlalchemy.engine import URL

from compensator.assignment.lease_store import LeaseStore
from compensator.assignment.leased_assignment import LeasedAssignment, LeaseOptions
from outbox.store.database import MYSQL_DIALECTS, background_engine, open_engine
from outbox.store.database_url import sync_url

_MS: Final = 1000


def open_assignment(
    database: URL | str, *, schema: str | None = None, zone: str | None = None, options: LeaseOptions | None = None
) -> LeasedAssignment:
    """An assignment by the leases in this database's outbox schema. No I/O until its first beat.

    All instances that share sources name the same database and schema here. Raises ConfigurationError.
    """
    chosen = options or LeaseOptions()
    engine = lease_engine(database, wait_ms_max=chosen.lease_ms // 3)
    store = LeaseStore(dialect=engine.dialect, schema=schema)
    return LeasedAssignment(engine=engine, store=store, zone=zone, options=chosen)


def lease_engine(database: URL | str, *, wait_ms_max: int) -> Engine:
    """An engine for beats: READ COMMITTED, a pool of its own, and no wait for locks or the network beyond a bound.

    A beat that waited longer than a lease would cost this instance everything that it holds.
    """
    seconds = max(1, wait_ms_max // _MS)
    # A lock's wait ends first, by the server: a client that gives up alone leaves its statement waiting there.
    first = open_engine(_with_timeouts(database, seconds + 1))
    second = background_engine(first)
    first.dispose()
    if second.dialect.name in MYSQL_DIALECTS:

        def bound_lock_waits(connection: Any, _record: object) -> None:
            with connection.cursor() as cursor:
                cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {seconds}")
            connection.commit()

        event.listen(second, "connect", bound_lock_waits)
    return second


def _with_timeouts(database: URL | str, seconds: int) -> URL | str:
    url = sync_url(database)
    bounds = {name: str(seconds) for name in ("connect_timeout", "read_timeout", "write_timeout")}
    return url.update_query_dict(bounds) if url.get_driver_name() == "pymysql" else url
