"""The revision that puts the topic into the inbox's primary key: rows, repeats, and what writes meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, event, inspect, text

from outbox.consumers.inbox_table import InboxStore
from outbox.migrate import schema_upgrade
from outbox.store.database import open_engine
from outbox.store.schema import outbox_tables
from tests.fixtures.databases import Database

KEY = ["consumer_group", "topic", "message_id"]
INDEX = [["handled_at_us"]]


@contextmanager
def opened(database: Database) -> Iterator[Engine]:
    engine = open_engine(database.url)
    try:
        yield engine
    finally:
        engine.dispose()


def place(database: Database) -> tuple[str, str | None]:
    """The inbox's name, and its schema."""
    return ("inbox", database.schema) if database.schema else ("outbox_inbox", None)


def key_of(engine: Engine, database: Database) -> list[str]:
    name, schema = place(database)
    return list(inspect(engine).get_pk_constraint(name, schema=schema)["constrained_columns"])


def indexes_of(engine: Engine, database: Database) -> list[list[str | None]]:
    name, schema = place(database)
    return [one["column_names"] for one in inspect(engine).get_indexes(name, schema=schema)]


def mark(connection: Connection, database: Database, message_id: str, topic: str) -> bool:
    store = InboxStore(dialect=connection.dialect, schema=database.schema)
    return store.mark(connection, group="g", message_id=message_id, topic=topic)


def marks(engine: Engine, database: Database) -> set[tuple[str, str]]:
    inbox = outbox_tables(database.place).inbox
    with engine.connect() as connection:
        return {(one.topic, one.message_id) for one in connection.execute(inbox.select())}


def test_marks_of_before_are_kept_and_still_turn_their_messages_away(database: Database) -> None:
    schema_upgrade.upgrade(database.url, schema=database.schema, revision="0002")
    with opened(database) as engine:
        assert key_of(engine, database) == ["consumer_group", "message_id"]
        with engine.begin() as connection:
            assert mark(connection, database, "m-1", "orders")

        schema_upgrade.upgrade(engine, schema=database.schema)

        assert (key_of(engine, database), indexes_of(engine, database)) == (KEY, INDEX)
        with engine.begin() as connection:
            assert not mark(connection, database, "m-1", "orders")
        with engine.begin() as connection:
            assert mark(connection, database, "m-1", "payments")
        assert marks(engine, database) == {("orders", "m-1"), ("payments", "m-1")}


def test_the_tables_that_are_made_at_once_have_the_key_of_those_that_are_upgraded(database: Database) -> None:
    schema_upgrade.upgrade(database.url, schema=database.schema)

    with opened(database) as engine:
        assert (
            [one.name for one in outbox_tables(database.place).inbox.primary_key.columns]
            == KEY
            == key_of(engine, database)
        )
        assert indexes_of(engine, database) == INDEX


def test_a_downgrade_keeps_one_mark_of_each_id_and_the_upgrade_may_follow_again(database: Database) -> None:
    schema_upgrade.upgrade(database.url, schema=database.schema)
    with opened(database) as engine:
        with engine.begin() as connection:
            for topic, message_id in (("a", "m-1"), ("b", "m-1"), ("b", "m-2")):
                assert mark(connection, database, message_id, topic)

        with engine.begin() as connection:
            command.downgrade(_config(connection, database), "0002")
        before = key_of(engine, database), marks(engine, database)
        schema_upgrade.upgrade(engine, schema=database.schema)

        assert before == (["consumer_group", "message_id"], {("a", "m-1"), ("b", "m-2")})
        assert (key_of(engine, database), marks(engine, database)) == (KEY, before[1])


def test_an_upgrade_that_was_cut_before_it_was_noted_runs_again(database: Database) -> None:
    schema_upgrade.upgrade(database.url, schema=database.schema)
    with opened(database) as engine:
        with engine.begin() as connection:
            assert mark(connection, database, "m-1", "orders")
            versions = f"{database.schema}.outbox_alembic_version" if database.schema else "outbox_alembic_version"
            connection.execute(text(f"UPDATE {versions} SET version_num = '0002'"))
            if database.schema is None:
                connection.execute(text("CREATE TABLE outbox_inbox_copy (consumer_group VARCHAR(255))"))

        assert schema_upgrade.upgrade(engine, schema=database.schema) == schema_upgrade.head()

        assert (key_of(engine, database), marks(engine, database)) == (KEY, {("orders", "m-1")})


def test_a_copy_that_an_upgrade_left_behind_is_made_anew_on_sqlite(sqlite: Database) -> None:
    schema_upgrade.upgrade(sqlite.url, revision="0002")
    with opened(sqlite) as engine:
        with engine.begin() as connection:
            assert mark(connection, sqlite, "m-1", "orders")
            connection.execute(text("CREATE TABLE outbox_inbox_copy (consumer_group VARCHAR(255))"))

        schema_upgrade.upgrade(engine)

        assert (key_of(engine, sqlite), marks(engine, sqlite)) == (KEY, {("orders", "m-1")})
        assert not inspect(engine).has_table("outbox_inbox_copy")


def test_the_key_is_changed_without_keeping_consumers_from_their_marks(mysql_like: Database) -> None:
    schema_upgrade.upgrade(mysql_like.url, schema=mysql_like.schema, revision="0002")
    statements: list[str] = []
    with opened(mysql_like) as engine:
        event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
        schema_upgrade.upgrade(engine, schema=mysql_like.schema)

    assert [one for one in statements if "PRIMARY KEY" in one and "LOCK=NONE" in one]


def _config(connection: Connection, database: Database) -> Config:
    config = schema_upgrade.alembic_config()
    config.attributes["connection"] = connection
    config.attributes["place"] = database.place
    return config
