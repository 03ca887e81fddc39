"""One statement says which tables have due rows. It reads an index entry a table, however long the backlog is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sqlalchemy import Connection, update

from compensator.work.due_tables import DueTables
from outbox.store.bounded_counts import RETRYING_ATTEMPTS
from outbox.store.message_table import MessageStore
from outbox.store.row import publish_row
from outbox_core import Message
from tests.compensator.serving import Asked, split
from tests.outbox.shop import Shop

SECOND_US = 1_000_000


@pytest.fixture
def mysql_shop(fresh_mysql_shop: Shop) -> Shop:
    """What is read and locked is counted here."""
    return fresh_mysql_shop


def due_tables(shop: Shop, tables: Sequence[str]) -> DueTables:
    """Over these tables of the shop."""
    return DueTables(dialect=shop.engine.dialect, schema=shop.tables.metadata.schema, tables=tables)


def add_row(shop: Shop, table: str | None, *, due_in_us: int) -> None:
    """One row, due so much later than now."""
    store = MessageStore(dialect=shop.engine.dialect, schema=shop.database.schema, table=table)
    row = publish_row(Message(id=f"{due_in_us}", topic="topic", body=b""))
    with shop.engine.begin() as connection:
        store.insert(connection, [row], token="d" * 32, lease_us=due_in_us)


def test_a_table_without_pending_rows_is_not_named(shop: Shop) -> None:
    [row_id] = shop.add_due(1)
    tables = due_tables(shop, [shop.store.table.name])

    with shop.engine.connect() as connection:
        before = tables.poll(connection).due
        connection.rollback()
        with connection.begin():
            shop.store.park(connection, [row_id], token="d" * 32, error="refused")
        parked = tables.poll(connection).due

    assert [one.table for one in before] == [shop.store.table.name]
    assert before[0].due_in_us < 0
    assert parked == []


def test_a_look_sees_in_how_long_the_next_row_falls_due(shop: Shop) -> None:
    add_row(shop, None, due_in_us=20 * SECOND_US)

    with shop.engine.connect() as connection:
        [found] = due_tables(shop, [shop.store.table.name]).poll(connection).due

    assert 0 < found.due_in_us <= 20 * SECOND_US


def test_the_table_that_waits_longest_comes_first(mysql_shop: Shop) -> None:
    names = split(mysql_shop, range(3))
    for name, due_in_us in zip(names, [-5 * SECOND_US, 60 * SECOND_US, -50 * SECOND_US], strict=True):
        add_row(mysql_shop, name, due_in_us=due_in_us)

    with mysql_shop.engine.connect() as connection:
        found = due_tables(mysql_shop, [*names, "message"]).poll(connection).due

    assert [one.table for one in found] == [names[2], names[0], names[1]]


def test_many_tables_are_one_statement(mysql_shop: Shop) -> None:
    names = split(mysql_shop, range(50))
    add_row(mysql_shop, names[37], due_in_us=-SECOND_US)
    tables = due_tables(mysql_shop, names)

    asked = Asked(mysql_shop.engine)
    with mysql_shop.engine.connect() as connection:
        found = tables.poll(connection).due

    assert [one.table for one in found] == [names[37]]
    assert len(asked.statements) == 1


def test_a_look_reads_no_more_of_a_long_backlog_than_of_a_short_one(mysql_shop: Shop) -> None:
    names = split(mysql_shop, range(4))
    tables = due_tables(mysql_shop, names)
    for name in names:
        mysql_shop.add_due(10, table=name)
    with mysql_shop.engine.connect() as connection:
        tables.poll(connection)  # what is read once of the dictionary is not the look's

        short = rows_read(connection, tables)
        for name in names:
            mysql_shop.add_due(5_000, prefix="more", table=name)
        connection.rollback()
        long = rows_read(connection, tables)

    assert short == long
    assert long <= 2 * len(names)


def rows_read(connection: Connection, tables: DueTables) -> int:
    """How many index entries and rows InnoDB read for a look, by the session's own counters."""
    asked = "SHOW SESSION STATUS WHERE variable_name LIKE 'Handler_read%%'"
    before = sum(int(value) for _, value in connection.exec_driver_sql(asked))
    tables.poll(connection)
    after = sum(int(value) for _, value in connection.exec_driver_sql(asked))
    noise = sum(int(value) for _, value in connection.exec_driver_sql(asked)) - after
    return after - before - noise


def test_counts_are_by_state_and_stop_at_their_bound(shop: Shop) -> None:
    ids = shop.add_due(30)
    tables = due_tables(shop, [shop.store.table.name])
    with shop.engine.begin() as connection:
        shop.store.park(connection, ids[:7], token="d" * 32, error="refused")

    with shop.engine.connect() as connection:
        [exact] = tables.count(connection, rows_max=1_000)
        [bounded] = tables.count(connection, rows_max=5)

    assert (exact.pending, exact.parked) == (23, 7)
    assert (bounded.pending, bounded.parked) == (5, 5)


@pytest.mark.parametrize("index", ["ix_message_state_due", "made_by_hand"])
def test_retrying_rows_are_counted_among_those_that_fall_due_first(fresh_mysql_shop: Shop, index: str) -> None:
    shop = fresh_mysql_shop
    retrying = shop.add_due(8)
    changed = set_attempts(shop, retrying[:7], RETRYING_ATTEMPTS) + set_attempts(
        shop, retrying[7:], RETRYING_ATTEMPTS - 1
    )
    for number in range(20):
        add_row(shop, None, due_in_us=(number + 1) * 60 * SECOND_US)
    if index == "made_by_hand":
        shop.execute(f"ALTER TABLE {shop.tables.message.fullname} RENAME INDEX ix_message_state_due TO {index}")
    tables = due_tables(shop, [shop.store.table.name])

    with shop.engine.connect() as connection:
        [counts] = tables.count(connection, rows_max=10)
        [few] = tables.count(connection, rows_max=3)
        backlog = shop.store.backlog(connection, rows_max=10)

    assert changed == 8
    assert (counts.pending, counts.retrying, few.retrying) == (10, 7, 3)
    assert (backlog.pending, backlog.retrying) == (10, 7)


def set_attempts(shop: Shop, ids: Sequence[str], attempts: int) -> int:
    """Let these rows have been tried so often; returns how many changed."""
    message = shop.tables.message
    with shop.engine.begin() as connection:
        return connection.execute(update(message).where(message.c.id.in_(ids)).values(attempts=attempts)).rowcount
