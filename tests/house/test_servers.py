"""What the tests' own servers promise the tests that lean on them."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from tests.fixtures.databases import Database
from tests.fixtures.local_server import Durability, LocalServer
from tests.fixtures.ready_databases import ReadyDatabases
from tests.fixtures.servers import MYSQL_LIKE, local_server


@pytest.fixture(scope="module", params=MYSQL_LIKE)
def durable(request: pytest.FixtureRequest) -> Iterator[LocalServer]:
    """A server as tests get it to kill."""
    with local_server(request.param, Durability.FULL) as server:
        yield server


@pytest.fixture(params=MYSQL_LIKE)
def ready(request: pytest.FixtureRequest) -> Iterator[ReadyDatabases]:
    """Ready databases that no other test has."""
    with contextlib.closing(ReadyDatabases(request.getfixturevalue(f"shared_{request.param}"))) as made:
        yield made


def test_each_test_is_given_an_empty_database_of_its_own(database: Database) -> None:
    engine = create_engine(database.url)

    with contextlib.closing(engine.raw_connection()):
        pass
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE thing (id INTEGER PRIMARY KEY)"))
        connection.execute(text("INSERT INTO thing VALUES (1)"))

    with engine.connect() as connection:
        assert connection.execute(text("SELECT COUNT(*) FROM thing")).scalar_one() == 1
    engine.dispose()
    assert (database.schema is None) == (database.name == "sqlite")


def test_a_shared_server_is_of_the_kind_that_it_is_called(mysql_like: Database) -> None:
    engine = create_engine(mysql_like.url)

    with engine.connect() as connection:
        version = connection.execute(text("SELECT VERSION()")).scalar_one()
    engine.dispose()

    assert ("mariadb" in version.lower()) == (mysql_like.name == "mariadb")


def test_a_server_that_a_test_may_kill_is_as_durable_as_production(durable: LocalServer) -> None:
    (figures,) = durable.execute(
        "SELECT @@innodb_flush_log_at_trx_commit, @@sync_binlog, @@log_bin, @@innodb_doublewrite, @@innodb_flush_method"
    )

    assert figures[:3] == (1, 1, 1)
    assert figures[3] in {1, "ON"}
    assert figures[4] in {"fsync", "O_DIRECT"}


def test_a_server_that_starts_deletes_no_temporary_table_of_another(durable: LocalServer) -> None:
    ((folder,),) = durable.execute("SELECT @@tmpdir")
    table = Path(folder, "#sql-temptable-1-1-1.MAI")
    table.touch()

    with local_server(durable.name, Durability.NONE):
        assert table.exists()
    table.unlink()


def test_a_failed_test_is_told_that_its_server_has_crashed() -> None:
    with local_server("mariadb", Durability.NONE) as server:
        assert server.crash() is None
        os.kill(server.pid, signal.SIGSEGV)
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)

        assert "got signal 11" in str(server.crash())
        server.kill9()
        assert server.crash() is None


@pytest.mark.slow
def test_a_killed_server_comes_back_with_what_was_committed(durable: LocalServer) -> None:
    with durable.fresh_database() as database:
        engine = create_engine(database.url)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE thing (id INTEGER PRIMARY KEY)"))
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO thing VALUES (1)"))
        engine.dispose()

        durable.kill9()
        durable.restart()

        with engine.connect() as connection:
            assert connection.execute(text("SELECT id FROM thing")).scalars().all() == [1]
        engine.dispose()


def test_a_ready_database_comes_back_empty_to_the_next_test(ready: ReadyDatabases) -> None:
    with ready.lend(make_thing) as first, engine_of(first) as engine:
        execute(engine, "INSERT INTO thing VALUES (1)", f"INSERT INTO {first.schema}.other VALUES (2)")

    with ready.lend(make_thing) as second, engine_of(second) as engine:
        assert second == first
        assert rows(engine, "SELECT * FROM thing") == rows(engine, f"SELECT * FROM {second.schema}.other") == []


@pytest.mark.parametrize(
    "definition",
    [
        "ALTER TABLE thing ADD COLUMN more INTEGER",
        "CREATE TABLE stranger (id INTEGER)",
        "CREATE UNIQUE INDEX once_more ON thing (id)",
        "CREATE TRIGGER never BEFORE INSERT ON thing FOR EACH ROW SET NEW.id = NEW.id",
        "DROP TABLE thing",
        "RENAME TABLE thing TO something",
    ],
)
def test_a_database_that_a_test_defined_anew_is_dropped(ready: ReadyDatabases, definition: str) -> None:
    with ready.lend(make_thing) as first, engine_of(first) as engine:
        execute(engine, definition)

    with ready.lend(make_thing) as second, engine_of(second) as engine:
        assert second != first
        assert rows(engine, "SHOW TABLES") == [("thing",)]
    assert not ready.server.execute(f"SHOW DATABASES LIKE '{first.business}'")


def test_a_database_of_a_test_that_made_a_user_is_dropped(ready: ReadyDatabases) -> None:
    with ready.lend(make_thing) as first:
        user = f"stranger_{secrets.token_hex(4)}@'%'"
        ready.server.execute(f"CREATE USER {user}", f"DROP USER {user}")

    with ready.lend(make_thing) as second:
        assert second != first


@pytest.mark.slow
def test_a_database_that_a_connection_is_left_open_to_is_dropped_and_the_connection_ended(
    ready: ReadyDatabases,
) -> None:
    with contextlib.ExitStack() as stack:
        with ready.lend(make_thing) as first:
            connection = stack.enter_context(stack.enter_context(engine_of(first)).connect())
            connection.execute(text("INSERT INTO thing VALUES (1)"))

        with ready.lend(make_thing) as second:
            assert second != first
        with pytest.raises(DBAPIError):
            connection.execute(text("SELECT 1"))


def test_a_database_of_a_test_whose_thread_lives_on_is_dropped(ready: ReadyDatabases) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)

    with ready.lend(make_thing) as first:
        thread.start()

    with ready.lend(make_thing) as second:
        assert second != first
    ended.set()
    thread.join()


def make_thing(database: Database) -> None:
    """A table in each of the two schemas."""
    with engine_of(database) as engine:
        execute(
            engine,
            "CREATE TABLE thing (id INTEGER PRIMARY KEY)",
            f"CREATE SCHEMA {database.schema}",
            f"CREATE TABLE {database.schema}.other (id INTEGER PRIMARY KEY)",
        )


@contextlib.contextmanager
def engine_of(database: Database) -> Iterator[Engine]:
    """An engine on the database, for the length of a block."""
    engine = create_engine(database.url)
    try:
        yield engine
    finally:
        engine.dispose()


def execute(engine: Engine, *statements: str) -> None:
    """Run statements in a transaction."""
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def rows(engine: Engine, statement: str) -> list[tuple[Any, ...]]:
    """What a query finds."""
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(statement))]
