"""Messages split over many tables and schemas by the CRC32 of their keys."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import closing

import pytest
from sqlalchemy import create_engine, event, func, select, text
from sqlalchemy.orm import Session

from outbox import Outbox, RelayPolicy
from outbox.delivery.relay import Relay
from outbox.migrate import schema_upgrade
from outbox.store.database import background_engine
from outbox.store.message_table import MessageStore
from outbox.store.schema import message_table, message_table_names
from outbox.store.table_placement import Placement
from outbox_core.common.errors import ConfigurationError
from outbox_core.common.table_namespace import TableNamespace
from tests.fixtures.command_line import outbox
from tests.fixtures.databases import Database
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, NO_SENDER, Shop


@pytest.fixture
def schemas(mysql_like: Database) -> Iterator[list[str]]:
    """The names of two more schemas, dropped at the end."""
    names = [f"{mysql_like.schema}_{number}" for number in range(2)]
    yield names
    engine = create_engine(mysql_like.url)
    with engine.begin() as connection:
        for name in names:
            connection.execute(text(f"DROP DATABASE IF EXISTS {name}"))
    engine.dispose()


@pytest.mark.parametrize("first", [0, 1])
def test_two_outboxes_of_one_session_are_written_in_one_order_whichever_published_first(
    mysql_like: Database, schemas: list[str], first: int
) -> None:
    for name in schemas:
        schema_upgrade.upgrade(mysql_like.url, schema=name)
    engine = create_engine(mysql_like.url)
    boxes = [
        Outbox(engine, broker=RecordingBroker(), schema=name, sender=NO_SENDER, ordered={"ordered"}) for name in schemas
    ]
    written: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def record(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        written.extend(name for name in schemas if f"{name}." in statement.replace("`", "") and name not in written)

    with Session(engine) as session, session.begin():
        for box in (boxes[first], boxes[1 - first]):
            box.publish("ordered", b"x", key="k", session=session)
    for box in boxes:
        box.close()
    engine.dispose()

    assert written == schemas


def test_a_keys_table_is_its_crc32_over_the_number_of_tables(mysql_shop: Shop) -> None:
    namespaces = [TableNamespace(f"s{number}") for number in range(8)]
    placement = Placement(
        mysql_shop.engine.dialect, schemas=[namespace.schema for namespace in namespaces], tables=1024
    )

    with mysql_shop.engine.connect():
        table = placement.tables[placement.number("order-4711")]

    number = zlib.crc32(b"order-4711") % 1024
    assert (table.schema, table.name) == (f"s{number // 128}", f"message_{number:04d}")
    assert len(placement.names_in(namespaces[7])) == 128


@pytest.mark.parametrize(("schemas", "tables"), [(["a"], 0), (["a"], 1025), (["a", "b"], 3), (["a", "a"], 2), ([], 1)])
def test_tables_that_cannot_be_shared_out_evenly_are_refused(schemas: list[str], tables: int) -> None:
    with pytest.raises(ConfigurationError):
        Placement(create_engine("mysql+pymysql://").dialect, schemas=schemas, tables=tables)


def test_sqlite_has_one_message_table(sqlite_shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="SQLite has one message table"):
        Outbox(sqlite_shop.engine, broker=RecordingBroker(), tables=8)


def test_messages_are_spread_over_the_tables_sent_at_once_and_removed(mysql_like: Database, schemas: list[str]) -> None:
    schema_upgrade.upgrade(mysql_like.url, schema=schemas, tables=16)
    broker = RecordingBroker()
    box = Outbox(mysql_like.url, broker=broker, schema=schemas, tables=16, sender=BUSY_LIMITS, ordered={"ordered"})
    seen: set[tuple[str | None, str]] = set()

    with closing(box.engine.connect()) as connection:
        for number in range(20):

            @box.transactional
            def work(session: object, number: int = number) -> None:
                for part in range(5):
                    box.publish("plain", f"{number}.{part}", key=f"{number}.{part}")
                    box.publish("ordered", str(number * 5 + part), key="one")
                box.publish("plain", "without a key")

            work()
        box.close()
        left = sum(
            connection.scalar(select(func.count()).select_from(message_table(table.schema, table.name))) or 0
            for table in box.placement.tables
        )
        seen = {
            (schema, name) for schema in schemas for name in message_table_names(connection, TableNamespace(schema))
        }

    assert left == 0
    assert len(seen) == 18, "sixteen tables and a plain one in each schema"
    assert len({message.id for message in broker.stored}) == len(broker.stored) == 220
    assert [int(one.body) for one in broker.stored if one.topic == "ordered"] == list(range(100))
    box.engine.dispose()


def test_a_row_is_settled_in_the_table_that_it_stands_in(mysql_like: Database, schemas: list[str]) -> None:
    schema_upgrade.upgrade(mysql_like.url, schema=schemas, tables=4)
    broker = RecordingBroker()
    box = Outbox(mysql_like.url, broker=broker, schema=schemas, tables=4, sender=NO_SENDER)

    @box.transactional
    def work(_session: object) -> None:
        for number in range(40):
            box.publish("plain", str(number), key=str(number))

    work()
    background = background_engine(box.engine)
    for table in box.placement.tables:
        store = MessageStore(dialect=background.dialect, schema=table.schema, table=table.name)
        relay = Relay(
            engine=background, store=store, broker=broker, policy=RelayPolicy(), random=__import__("random").Random(1)
        )
        with background.begin() as connection:
            connection.execute(text(f"UPDATE {table.schema}.{table.name} SET due_at_us = 1"))
            ids = store.due_ids(connection, limit=100)
            store.claim(connection, ids, token="t", lease_us=1_000_000)
            rows = store.claimed(connection, ids, token="t")
        report = relay.deliver(rows, token="t")
        assert report.accepted == len(rows)
        assert report.stale == 0
    background.dispose()
    box.close()
    box.engine.dispose()

    assert sorted(int(message.body) for message in broker.stored) == list(range(40))


def test_db_upgrade_makes_the_tables_of_a_split_and_may_run_again(mysql_like: Database, schemas: list[str]) -> None:
    options = ["--url", str(mysql_like.url), "--schema", schemas[0], "--schema", schemas[1], "--tables", "8"]

    first = outbox("db", "upgrade", *options)
    again = outbox("db", "upgrade", *options[:-1], "16")

    assert first.returncode == again.returncode == 0
    engine = create_engine(mysql_like.url)
    with engine.connect() as connection:
        names = [message_table_names(connection, TableNamespace(schema)) for schema in schemas]
    engine.dispose()
    assert names[0] == ["message", *(f"message_{number:04d}" for number in range(8))]
    assert names[1] == ["message", *(f"message_{number:04d}" for number in (*range(4, 8), *range(8, 16)))]
