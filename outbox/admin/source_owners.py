"""Reads how compensators share sources, from the instance and lease tables of one schema. Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, inspect, select
from sqlalchemy.engine import Dialect

from outbox.store.databases.supported import database_of
from outbox.store.schema import outbox_tables
from outbox.store.table_placement import table_namespace

INSTANCES_MAX: Final = 1_000
SOURCES_MAX: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceShare:
    """A live compensator: its zone, its age, and the number of sources that it serves."""

    id: str
    zone: str | None
    age_us: int
    sources: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOwners:
    """The live compensators, those with the most sources first, and the sources that none of them serves."""

    instances: tuple[InstanceShare, ...]
    unserved: tuple[str, ...]


def read_sharing(connection: Connection, *, dialect: Dialect, schema: str | None) -> SourceOwners | None:
    """Returns the shares; None if no compensator has ever used leases here. Reads without locks."""
    namespace = table_namespace(dialect, schema)
    tables = outbox_tables(namespace)
    if not inspect(connection).has_table(tables.lease.name, schema=namespace.schema):  # of an upgrade that was cut
        return None
    leases = connection.execute(select(tables.lease.c.source, tables.lease.c.instance).limit(SOURCES_MAX)).all()
    columns = tables.instance.c
    now = database_of(dialect).now_us()
    living = connection.execute(
        select(columns.id, columns.zone, (now - columns.started_at_us).label("age_us"))
        .where(columns.alive_until_us > now)
        .limit(INSTANCES_MAX)
    ).all()
    if not leases and not living:
        return None
    sources_by_instance = dict.fromkeys((row.id for row in living), 0)
    unserved = []
    for lease in leases:
        if lease.instance in sources_by_instance:
            sources_by_instance[lease.instance] += 1
        else:
            unserved.append(lease.source)
    shares = [
        InstanceShare(id=row.id, zone=row.zone or None, age_us=row.age_us, sources=sources_by_instance[row.id])
        for row in living
    ]
    return SourceOwners(
        instances=tuple(sorted(shares, key=lambda share: (-share.sources, share.id))), unserved=tuple(sorted(unserved))
    )
