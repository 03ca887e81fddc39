"""The registry of compensators in a database: one instance's writes to the instance and lease tables, each in a short
transaction of its own.

LeaseStore, below, has all SQL of these tables; it opens no connection, commits nothing and decides nothing. Every write
names rows by primary key, in sorted order, and compares before it sets. At READ COMMITTED it locks exactly the rows
that it names, no gap. All times are the database's own.

A lease that is held has no end of its own (`until_us` is END_NEVER): it lasts as long as its holder's row in the
instance table is renewed, so that holding a thousand sources costs one row a beat, not a thousand. Its holder ends it
to offer the source to other instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Table,
    case,
    delete,
    exists,
    insert,
    null,
    select,
    update,
)
from sqlalchemy.engine import Dialect

from compensator.assignment.instance_registry_port import LeaseOptions
from outbox.store.database import database_errors
from outbox.store.databases.database_port import Write
from outbox.store.databases.supported import database_of
from outbox.store.schema import OutboxTables, outbox_tables
from outbox.store.table_placement import table_namespace
from outbox_core.assignment.even_assignment import Member, check_zone
from outbox_core.assignment.lease_decision import Lease, View
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


# -- the statements -------------------------------------------------------------------------------------------------

END_NEVER: Final = 2**63 - 1
PURGED_ROWS_MAX: Final = 100
_NO_ZONE: Final = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRow:
    """One row of the instance table; `dead_for_us` is how long ago it expired, negative while the instance is alive."""

    id: str
    zone: str | None
    dead_for_us: int


class LeaseStore:
    """The statements, for one dialect and schema. Stateless, so safe in any thread."""

    def __init__(self, *, dialect: Dialect, schema: str | None = None) -> None:
        self._schema = schema
        self._dialect = dialect
        self._database = database_of(dialect)
        self._now_us = self._database.now_us()

    @cached_property
    def _tables(self) -> OutboxTables:
        return outbox_tables(table_namespace(self._dialect, self._schema))

    @property
    def _instance(self) -> Table:
        return self._tables.instance

    @property
    def _lease(self) -> Table:
        return self._tables.lease

    # -- instances ---------------------------------------------------------------------------------------------------

    def renew(self, connection: Connection, instance: str, *, lease_us: int) -> bool:
        """Extend an instance's lease from now; False if it has no row."""
        own = self._instance.c.id == instance
        statement = update(self._instance).where(own).values(alive_until_us=self._now_us + lease_us)
        return self._write(connection, statement) == 1

    def join(self, connection: Connection, instance: str, *, zone: str | None, lease_us: int) -> None:
        """Insert a new instance's row."""
        values = {"id": instance, "zone": zone or _NO_ZONE}
        times = {"started_at_us": self._now_us, "alive_until_us": self._now_us + lease_us}
        connection.execute(insert(self._instance).values(**values, **times))

    def withdraw(self, connection: Connection, instance: str) -> None:
        """Delete an instance's row: its leases end with it."""
        self._write(connection, delete(self._instance).where(self._instance.c.id == instance))

    def instances(self, connection: Connection) -> list[InstanceRow]:
        """All instances, including dead ones. A plain read."""
        table = self._instance
        statement = select(table.c.id, table.c.zone, (self._now_us - table.c.alive_until_us).label("dead_for_us"))
        return [
            InstanceRow(id=row.id, zone=row.zone or None, dead_for_us=row.dead_for_us)
            for row in connection.execute(statement)
        ]

    def purge(self, connection: Connection, instances: Sequence[str], *, older_than_us: int) -> int:
        """Delete rows of instances that died longer ago than this; returns how many."""
        table = self._instance
        is_old = table.c.alive_until_us < self._now_us - older_than_us
        return self._write(connection, delete(table).where(table.c.id.in_(sorted(instances)[:PURGED_ROWS_MAX]), is_old))

    # -- leases ------------------------------------------------------------------------------------------------------

    def leases(self, connection: Connection) -> dict[str, Lease]:
        """All leases by source. A plain read."""
        table = self._lease
        ended = case((table.c.until_us <= self._now_us, 1), else_=0).label("ended")
        statement = select(table.c.source, table.c.instance, ended)
        return {row.source: Lease(holder=row.instance, ended=bool(row.ended)) for row in connection.execute(statement)}

    def add(self, connection: Connection, sources: Sequence[str]) -> None:
        """Insert rows for new sources, without holders; rows that another instance has inserted stay as they are."""
        statement = self._database.insert_missing(self._lease)
        rows = [{"source": name, "instance": None, "until_us": 0, "epoch": 0} for name in sources]
        connection.execute(statement, rows)

    def take(self, connection: Connection, sources: Sequence[str], *, instance: str) -> int:
        """Become the holder of those that are free now; returns how many."""
        free = (self._lease.c.until_us <= self._now_us) | ~self._holder_lives()
        values = {"instance": instance, "until_us": END_NEVER, "epoch": self._lease.c.epoch + 1}
        return self._change(connection, sources, free, values)

    def held(self, connection: Connection, sources: Sequence[str], *, instance: str) -> set[str]:
        """Those among `sources` that an instance holds. A plain read."""
        table = self._lease
        statement = select(table.c.source).where(table.c.source.in_(sources), table.c.instance == instance)
        return set(connection.scalars(statement))

    def keep(self, connection: Connection, sources: Sequence[str], *, instance: str) -> int:
        """Withdraw offers that no instance took; returns how many sources the holder still has."""
        return self._change(connection, sources, self._lease.c.instance == instance, {"until_us": END_NEVER})

    def offer(self, connection: Connection, sources: Sequence[str], *, instance: str) -> int:
        """End leases now, so that other instances may take them; the holder continues until then."""
        return self._change(connection, sources, self._lease.c.instance == instance, {"until_us": self._now_us})

    def release(self, connection: Connection, sources: Sequence[str], *, instance: str) -> int:
        """Release leases: they have no holder from now on."""
        values = {"instance": null(), "until_us": self._now_us}
        return self._change(connection, sources, self._lease.c.instance == instance, values)

    def _change(
        self, connection: Connection, sources: Sequence[str], guard: ColumnElement[bool], values: dict[str, Any]
    ) -> int:
        return self._write(
            connection, update(self._lease).where(self._lease.c.source.in_(sources), guard).values(**values)
        )

    def _write(self, connection: Connection, statement: Write) -> int:
        # By the primary key even in a table of a few rows: a full scan would wait for the rows that other beats lock.
        return connection.execute(self._database.by_primary_key(statement, self._dialect)).rowcount

    def _holder_lives(self) -> ColumnElement[bool]:
        # At READ COMMITTED this reads the instance table without a lock.
        instance = self._instance
        return exists().where(instance.c.id == self._lease.c.instance, instance.c.alive_until_us > self._now_us)
