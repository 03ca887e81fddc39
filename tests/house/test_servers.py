"""What the tests' own servers promise the tests that lean on them."""

from __future__ import annotations

import contextlib

import pytest
from sqlalchemy import create_engine, text

from tests.fixtures.databases import Database
from tests.fixtures.local_server import LocalServer


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


def test_servers_are_as_durable_as_production(mysql_like: Database) -> None:
    engine = create_engine(mysql_like.url)

    with engine.connect() as connection:
        figures = connection.execute(
            text("SELECT @@innodb_flush_log_at_trx_commit, @@sync_binlog, @@log_bin, VERSION()")
        ).one()
    engine.dispose()

    assert tuple(figures)[:3] == (1, 1, 1)
    assert ("mariadb" in figures[3].lower()) == (mysql_like.name == "mariadb")


@pytest.mark.slow
def test_a_killed_server_comes_back_with_what_was_committed(mysql_like_server: LocalServer) -> None:
    with mysql_like_server.fresh_database() as database:
        engine = create_engine(database.url)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE thing (id INTEGER PRIMARY KEY)"))
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO thing VALUES (1)"))
        engine.dispose()

        mysql_like_server.kill9()
        mysql_like_server.restart()

        with engine.connect() as connection:
            assert connection.execute(text("SELECT id FROM thing")).scalars().all() == [1]
        engine.dispose()
