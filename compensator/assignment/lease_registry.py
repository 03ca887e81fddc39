"""The registry of compensators in a database: one instance's writes to the instance and lease tables, each in a short
transaction of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, Engine

from compensator.assignment.instance_registry_port import LeaseOptions
from compensator.assignment.lease_store import InstanceRow, LeaseStore
from outbox.store.database import database_errors
from outbox_core.assignment.even_assignment import Member, check_zone
from outbox_core.assignment.lease_decision import View
from outbox_core.messages.ids import new_token
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


class LeaseRegistry:
    """An InstanceRegistry. No step holds locks of another. Not thread-safe."""

    def __init__(
        self,
        *,
        engine: Engine,
        store: LeaseStore,
        zone: str | None = None,
        options: LeaseOptions | None = None,
        new_id: Callable[[], str] = new_token,
    ) -> None:
        """`engine`: READ COMMITTED, a pool of its own, short time-outs; see assignment_factory.lease_engine()."""
        check_zone(zone)
        self._engine = engine
        self._store = store
        self._zone = zone
        self._options = options or LeaseOptions()
        self._new_id = new_id
        self._instance = new_id()
        self._joined = False
        self._forget_after_us = self._options.forget_after_ms * 1000
        self._dead: tuple[str, ...] = ()

    @property
    def instance(self) -> str:
        """The id of this process's instance."""
        return self._instance

    @property
    def options(self) -> LeaseOptions:
        """How long leases last."""
        return self._options

    @property
    def joined(self) -> bool:
        """Whether this instance was ever registered: what failed before then is a wrong configuration."""
        return self._joined

    def renew(self) -> View:
        """See Registry.renew. Three statements, whatever the number of leases."""
        with self._connection() as connection:
            self._live_on(connection)
            with connection.begin():
                rows = self._store.instances(connection)
                leases = self._store.leases(connection)
        self._dead = tuple(row.id for row in rows if row.dead_for_us > self._forget_after_us)
        return View(me=self._instance, members=self._alive(rows), leases=leases)

    def purge(self) -> None:
        """Delete the rows of instances that renew() found to be dead for long."""
        if self._dead:
            with self._transaction() as connection:
                self._store.purge(connection, self._dead, older_than_us=self._forget_after_us)

    def add(self, names: Sequence[str]) -> None:
        """See SharedRegistry.add."""
        with self._transaction() as connection:
            self._store.add(connection, names)

    def take(self, names: Sequence[str]) -> set[str]:
        """See Registry.take."""
        with self._connection() as connection:
            with connection.begin():
                taken = self._store.take(connection, names, instance=self._instance)
            if taken == len(names):
                return set(names)
            with connection.begin():  # other instances may have taken some first
                return self._store.held(connection, names, instance=self._instance)

    def offer(self, names: Sequence[str]) -> None:
        """See SharedRegistry.offer."""
        with self._transaction() as connection:
            self._store.offer(connection, names, instance=self._instance)

    def keep(self, names: Sequence[str]) -> None:
        """See SharedRegistry.keep."""
        with self._transaction() as connection:
            self._store.keep(connection, names, instance=self._instance)

    def release(self, names: Sequence[str]) -> None:
        """See Registry.release."""
        with self._transaction() as connection:
            self._store.release(connection, names, instance=self._instance)

    def leave(self, names: Sequence[str]) -> None:
        """See Registry.leave."""
        if not self._joined:
            return
        if names:
            self.release(names)
        with self._transaction() as connection:
            self._store.withdraw(connection, self._instance)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def reset_after_fork(self) -> None:
        """Become a new instance in a forked child; connections and leases remain the parent's."""
        self._engine.dispose(close=False)
        self._instance = self._new_id()
        self._joined = False

    def _live_on(self, connection: Connection) -> None:
        lease_us = self._options.lease_ms * 1000
        with connection.begin():
            is_new = not self._store.renew(connection, self._instance, lease_us=lease_us)
            if is_new:
                self._store.join(connection, self._instance, zone=self._zone, lease_us=lease_us)
        if is_new or not self._joined:  # it may have joined by a COMMIT whose answer was lost
            self._joined = True
            logger.info("assignment_joined", extra={"instance": self._instance, "zone": self._zone})

    def _alive(self, rows: Sequence[InstanceRow]) -> dict[str, Member]:
        # This instance is alive, even if the database's clock was stepped since its row was written.
        return {row.id: Member(row.zone) for row in rows if row.dead_for_us < 0} | {self._instance: Member(self._zone)}

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        with database_errors(self._engine.url), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self._connection() as connection, connection.begin():
            yield connection
