"""What leases cost: statements a beat, rows locked, nobody's waiting. Counts, not times; on real InnoDB for locks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sqlalchemy import Connection, event, text

from compensator.assignment import LeasedAssignment, LeaseOptions
from compensator.assignment.lease_registry import LeaseStore
from tests.compensator.assignment.fleet import Fleet, names
from tests.outbox.innodb_locks import rows_locked
from tests.outbox.shop import Shop

SOURCES = 1_000
HELD_BY = "x" * 32


@pytest.fixture
def mysql_shop(fresh_mysql_shop: Shop) -> Shop:
    """What is read and locked is counted here."""
    return fresh_mysql_shop


def count(fleet: Fleet, number: int) -> list[str]:
    """From now on, the statements of one instance, by their first words; SQLite's BEGIN is the driver's elsewhere."""
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.startswith("BEGIN"):
            statements.append(statement.partition(" ")[0])

    event.listen(fleet.engine_of(number), "before_cursor_execute", note)
    return statements


@pytest.mark.parametrize("sources", [1, SOURCES])
def test_a_beat_costs_three_statements_and_writes_one_row_whatever_the_number_of_sources(
    fleet: Fleet, sources: int
) -> None:
    one = fleet.instance()
    one.beat(names(sources))
    before = fleet.leases()
    statements = count(fleet, 0)

    held = one.beat(names(sources))

    assert statements == ["UPDATE", "SELECT", "SELECT"]
    assert len(held) == sources
    assert fleet.leases() == before


@pytest.mark.parametrize("sources", [2, SOURCES])
def test_a_change_of_hands_costs_a_statement_a_kind_and_not_one_a_source(fleet: Fleet, sources: int) -> None:
    one, two = fleet.instance(), fleet.instance()
    statements = [count(fleet, 0), count(fleet, 1)]

    one.beat(names(sources))
    first = statements[0].copy()
    two.beat(names(sources))
    one.beat(names(sources))
    statements[1].clear()
    taken = two.beat(names(sources))

    assert first == ["UPDATE", "INSERT", "SELECT", "SELECT", "INSERT", "UPDATE"]
    assert statements[0][len(first) :] == ["UPDATE", "SELECT", "SELECT", "UPDATE"]
    assert statements[1] == ["UPDATE", "SELECT", "SELECT", "UPDATE"]
    assert len(taken) == sources // 2


def test_ten_instances_share_a_thousand_sources_evenly_in_a_few_beats(fleet: Fleet) -> None:
    instances = [fleet.instance() for _ in range(10)]

    found = fleet.settle(instances, names(SOURCES), beats=3)
    dead, *living = instances
    fleet.die(dead)
    after = [one.beat(names(SOURCES)) for one in living]

    assert sorted(len(held) for held in found) == [100] * 10
    assert len(set().union(*found)) == SOURCES
    assert sorted(len(held) for held in after) == [111] * 8 + [112]
    assert len(set().union(*after)) == SOURCES
    assert all(kept <= now for kept, now in zip(found[1:], after, strict=True))


def take(store: LeaseStore, connection: Connection, sources: Sequence[str]) -> int:
    """Take free ones."""
    return store.take(connection, sources, instance=HELD_BY)


def keep(store: LeaseStore, connection: Connection, sources: Sequence[str]) -> int:
    """Take back offers."""
    return store.keep(connection, sources, instance=HELD_BY)


def offer(store: LeaseStore, connection: Connection, sources: Sequence[str]) -> int:
    """End leases."""
    return store.offer(connection, sources, instance=HELD_BY)


def release(store: LeaseStore, connection: Connection, sources: Sequence[str]) -> int:
    """Give leases up."""
    return store.release(connection, sources, instance=HELD_BY)


@pytest.mark.parametrize("change", [take, keep, offer, release], ids=lambda change: change.__name__)
def test_a_change_locks_the_rows_that_it_names_and_neither_others_nor_gaps(
    mysql_fleet: Fleet, change: Callable[[LeaseStore, Connection, Sequence[str]], int]
) -> None:
    one = mysql_fleet.instance()
    one.beat(names(SOURCES))
    if change is take:
        mysql_fleet.die(one)
    else:
        table = mysql_fleet.shop.tables.lease.fullname
        mysql_fleet.shop.execute(f"UPDATE {table} SET instance = '{HELD_BY}'")
    store, engine = mysql_fleet.store(), mysql_fleet.engine_of(0)
    wanted = [source.name for source in names(SOURCES)[100:200]]

    with engine.connect() as connection, engine.connect() as other:
        changed = change(store, connection, [*wanted, "source-0150x", "zzz"])
        locked = rows_locked(mysql_fleet.shop, connection)
        store.add(other, ["a-first", "source-0150y", "zzz-last"])
        store.take(other, [source.name for source in names(SOURCES)[:100]], instance="y" * 32)
        other.rollback()
        connection.rollback()

    assert changed == len(wanted)
    assert locked == len(wanted)


def test_locks_are_as_few_where_all_rows_change(mysql_fleet: Fleet) -> None:
    one = mysql_fleet.instance()
    one.beat(names(SOURCES))
    mysql_fleet.die(one)

    with mysql_fleet.engine_of(0).connect() as connection:
        changed = take(mysql_fleet.store(), connection, [source.name for source in names(SOURCES)])
        locked = rows_locked(mysql_fleet.shop, connection)
        connection.rollback()

    assert (changed, locked) == (SOURCES, SOURCES)


@pytest.mark.parametrize("change", [take, keep, offer, release], ids=lambda change: change.__name__)
def test_in_a_table_of_a_few_rows_nobody_waits_for_the_row_of_another(
    mysql_fleet: Fleet, change: Callable[[LeaseStore, Connection, Sequence[str]], int]
) -> None:
    one = mysql_fleet.instance(options=LeaseOptions(beat_ms=10_000, lease_ms=60_000))
    one.beat(names(3))
    lease, instance = mysql_fleet.shop.tables.lease.fullname, mysql_fleet.shop.tables.instance.fullname
    if change is not take:
        mysql_fleet.shop.execute(f"UPDATE {lease} SET instance = '{HELD_BY}'")
    mysql_fleet.shop.execute(f"DELETE FROM {instance}")
    store, engine = mysql_fleet.store(), mysql_fleet.engine_of(0)
    writes: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(("UPDATE", "DELETE")):
            writes.append(statement)

    event.listen(engine, "before_cursor_execute", note)

    with engine.begin() as connection:
        for name in ("dead-1", "dead-2"):
            store.join(connection, name, zone=None, lease_us=-1)
    with engine.connect() as stranger, engine.connect() as connection:
        store.join(stranger, "stranger", zone=None, lease_us=1)
        stranger.execute(text(f"UPDATE {lease} FORCE INDEX (PRIMARY) SET epoch = 9 WHERE source = 'source-0001'"))
        changed = change(store, connection, ["source-0000", "source-0002"])
        store.join(connection, "me", zone=None, lease_us=1)
        renewed = store.renew(connection, "me", lease_us=1)
        purged = store.purge(connection, ["dead-1", "dead-2"], older_than_us=0)
        store.withdraw(connection, "me")
        connection.rollback()
        stranger.rollback()

    assert (changed, renewed, purged) == (2, True, 2)
    assert len(writes) == 5
    assert all("FORCE INDEX (PRIMARY)" in write for write in writes)


def test_a_beat_waits_for_nobody_who_reads_and_holds_up_nobody_who_beats(mysql_fleet: Fleet) -> None:
    one, two = mysql_fleet.instance(), mysql_fleet.instance()
    mysql_fleet.settle([one, two], names(10))

    def in_the_middle(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE") and "compensator_instance" in statement:
            assert len(LeasedAssignment.beat(two, names(10))) == 5
            assert two.failed_beats == 0

    event.listen(mysql_fleet.engine_of(0), "after_cursor_execute", in_the_middle)

    assert len(one.beat(names(10))) == 5
    assert one.failed_beats == 0
