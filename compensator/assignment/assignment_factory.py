"""Opens a LeasedAssignment from the URL of a database or of ZooKeeper, with short time-outs. No logic."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Final

from sqlalchemy import Engine, event
from sqlalchemy.engine import URL

from compensator.assignment.instance_registry_port import LeaseOptions
from compensator.assignment.lease_registry import LeaseRegistry, LeaseStore
from compensator.assignment.source_assignment import LeasedAssignment
from outbox.store.database import background_engine, open_engine
from outbox.store.database_url import sync_url
from outbox.store.databases.supported import database_named, database_of
from outbox_core.common.errors import ConfigurationError, install_hint
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperAddress, ZooKeeperSecurity

ZOOKEEPER_LEASES: Final = "zookeeper://zk1:2181,zk2:2181,zk3:2181/outbox/compensators"
"""What the address of leases in ZooKeeper looks like."""
_MS: Final = 1000


def open_assignment(
    database: URL | str, *, schema: str | None = None, zone: str | None = None, options: LeaseOptions | None = None
) -> LeasedAssignment:
    """Returns an assignment by the leases in this database's outbox schema. No I/O until its first beat.

    All instances that share sources name the same database and schema here. Raises ConfigurationError.
    """
    lease_options = options or LeaseOptions()
    engine = lease_engine(database, wait_ms_max=lease_options.lease_ms // 3)
    store = LeaseStore(dialect=engine.dialect, schema=schema)
    return LeasedAssignment(LeaseRegistry(engine=engine, store=store, zone=zone, options=lease_options))


def open_zookeeper_assignment(
    url: str, *, zone: str | None = None, security: ZooKeeperSecurity | None = None, options: LeaseOptions | None = None
) -> LeasedAssignment:
    """Returns an assignment by the leases below this path in ZooKeeper. No I/O until its first beat.

    All instances that share sources name the same path. Raises ConfigurationError.
    """
    address = ZooKeeperAddress.parse(url, example=ZOOKEEPER_LEASES)
    if find_spec("kazoo") is None:
        raise ConfigurationError(
            "leases in ZooKeeper need the package 'kazoo', which comes with the extra 'zookeeper': "
            f"{install_hint('zookeeper')}"
        )
    from compensator.assignment.zookeeper_lease_registry import ZooKeeperLeaseRegistry
    from outbox_core.zookeeper.zookeeper_session import SessionOptions, ZooKeeperSession

    lease_options = options or LeaseOptions()
    session = SessionOptions(
        session_ms=lease_options.lease_ms,
        request_ms_max=lease_options.beat_ms,
        security=security or ZooKeeperSecurity(),
    )
    registry = ZooKeeperLeaseRegistry(
        address.root, connect=lambda: ZooKeeperSession(address, options=session), zone=zone, options=lease_options
    )
    return LeasedAssignment(registry)


def lease_engine(database: URL | str, *, wait_ms_max: int) -> Engine:
    """Returns an engine for beats: READ COMMITTED, a pool of its own, bounded waits for locks and the network.

    A beat that waited longer than a lease would lose all sources of this instance.
    """
    seconds = max(1, wait_ms_max // _MS)
    # The server must end a lock's wait first: if only the client gives up, its statement keeps waiting in the server.
    opened = open_engine(_with_timeouts(database, seconds + 1))
    background = background_engine(opened)
    opened.dispose()
    product = database_of(background.dialect)

    def bound_lock_waits(connection: Any, _record: object) -> None:
        product.bound_lock_waits(connection, seconds)

    event.listen(background, "connect", bound_lock_waits)
    return background


def _with_timeouts(database: URL | str, seconds: int) -> URL | str:
    url = sync_url(database)
    product = database_named(url.get_backend_name())
    return url.update_query_dict(product.timeout_options(url, connect_seconds=seconds, statement_seconds=seconds))
