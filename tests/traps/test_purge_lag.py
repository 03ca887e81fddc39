"""Traps of InnoDB's purge: what an open transaction makes of deleted rows. R17 of docs/traps.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Connection

from compensator.work.source import Source
from outbox_core import ManualClock
from tests.compensator.serving import HOUR_US, gates_of, source_of, turns_of
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop
from tests.traps.naive import rows_read, run, transaction

DELETED = 3_000
FEW = 500
"""Pages that are read on the way to an entry and for the dictionary are a few dozen; other tests may read some."""


@pytest.fixture
def source(mysql_shop: Shop, broker: RecordingBroker, clock: ManualClock) -> Iterator[Source]:
    """The shop as a source, on a clock that stands still."""
    gates = gates_of(clock)
    made, engines = source_of(mysql_shop, broker, gates=gates, clock=clock)
    yield made
    engines.close()


@pytest.fixture
def old_transaction(mysql_shop: Shop, source: Source) -> Iterator[Connection]:
    """A business transaction that has read and written and is still open; the source was looked at before."""
    with transaction(mysql_shop) as connection:
        source.poll()
        run(connection, "INSERT INTO payment (id, note) VALUES (1, '')")
        run(connection, f"SELECT COUNT(*) FROM {mysql_shop.tables.message.fullname}")
        yield connection


def drain(shop: Shop, source: Source, clock: ManualClock) -> None:
    """Rows that have been due for an hour are sent and deleted, by turns."""
    for first in range(0, DELETED, 1_000):
        shop.add_due(1_000, prefix=f"old-{first}", due_for_us=HOUR_US)
    clock.advance(60_000)
    turns = turns_of(source, clock=clock, batch_rows=1_000)
    while turns.take(going_on=lambda: True).report.claimed:
        pass


def pages_read(shop: Shop, act: Callable[[], object]) -> int:
    """How many pages of its cache InnoDB reads for something; the least of some, since the server has other clients."""
    figures = []
    with shop.engine.connect() as connection:
        for _ in range(5):
            before = _pages(connection)
            act()
            figures.append(_pages(connection) - before)
    return min(figures)


def _pages(connection: Connection) -> int:
    ((_, figure),) = run(connection, "SHOW GLOBAL STATUS LIKE 'Innodb_buffer_pool_read_requests'")
    return int(str(figure))


@pytest.mark.usefixtures("old_transaction")
def test_naive_a_walk_from_the_front_steps_over_all_that_was_deleted_since_an_open_transaction_began(
    mysql_shop: Shop, source: Source, clock: ManualClock
) -> None:
    drain(mysql_shop, source, clock)

    with mysql_shop.engine.connect() as connection:
        read = pages_read(mysql_shop, lambda: mysql_shop.store.due_rows(connection, limit=1))

    assert mysql_shop.rows() == []
    assert read >= DELETED


@pytest.mark.usefixtures("old_transaction")
def test_looks_and_batches_go_on_where_the_last_one_ended_whatever_was_deleted_before(
    mysql_shop: Shop, source: Source, clock: ManualClock
) -> None:
    drain(mysql_shop, source, clock)
    source.poll()

    idle = pages_read(mysql_shop, source.poll)
    ids = mysql_shop.add_due(5)
    [found] = source.poll().due
    with mysql_shop.engine.connect() as connection:
        due = mysql_shop.store.due_rows(connection, limit=2, from_us=found.due_at_us)
        batch = pages_read(
            mysql_shop, lambda: mysql_shop.store.due_rows(connection, limit=200, from_us=due.last_due_us)
        )

    assert [row.id for row in due.rows] == ids[:2]
    assert idle < FEW
    assert batch < FEW


def test_the_walk_is_a_range_of_the_index_with_both_ends_however_few_rows_there_are(mysql_shop: Shop) -> None:
    mysql_shop.add_due(20, prefix="before", due_for_us=HOUR_US)
    mysql_shop.add_due(20, prefix="after", due_for_us=-HOUR_US)
    mysql_shop.add_due(3, prefix="due")

    with mysql_shop.engine.connect() as connection:
        from_us = mysql_shop.rows()[0]["created_at_us"] - HOUR_US // 2
        mysql_shop.store.due_rows(connection, limit=1, from_us=from_us)  # the server reads the table's definition
        before = rows_read(connection)
        due = mysql_shop.store.due_rows(connection, limit=200, from_us=from_us)
        read = rows_read(connection) - before

    assert [row.id for row in due.rows] == [f"due-{number:04d}" for number in range(3)]
    assert read <= 3 + 4
