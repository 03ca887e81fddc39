"""Bringing the outbox tables up to date, by alembic.

For the `outbox db` command and for alembic trees of users' own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from alembic import command, context, op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateSchema

from outbox.alembic import VERSION_TABLE
from outbox.store.database import (
    LOCK_WAIT_TIMEOUT,
    MYSQL_DIALECTS,
    database_errors,
    error_code,
    open_engine,
    writing_engine,
)
from outbox.store.schema import message_table, schema_for
from outbox.store.table_placement import placement_for
from outbox_core.common.errors import DatabaseUnavailable

logger: logging.Logger = logging.getLogger(__name__)

LOCK_WAIT_SECONDS: Final = 1
LOCK_REST_SECONDS: Final = 1.0
LOCK_TRIES_MAX: Final = 60


def upgrade(
    database: Engine | Connection | URL | str,
    *,
    schema: str | Sequence[str] | None = None,
    tables: int = 1,
    revision: str = "head",
) -> str | None:
    """Make or upgrade the tables; returns the revision that they are at afterwards. Idempotent.

    `schema` and `tables` as Outbox has them: with several, the message tables that messages are split over are made
    beside the plain one. Tables of an earlier split stay, and are served until they are empty.
    A Connection is used as it is: call this from a revision of your own alembic tree with `op.get_bind()`.
    Raises DatabaseUnavailable or ConfigurationError with the cure.
    """
    if isinstance(database, Connection):
        return _upgrade_all(database, schema=schema, tables=tables, revision=revision)
    engine = open_engine(database)
    try:
        with database_errors(engine.url):
            return _patiently(engine, partial(_upgrade_all, schema=schema, tables=tables, revision=revision))
    finally:
        if engine is not database:
            engine.dispose()


def current(connection: Connection, *, schema: str | None = None) -> str | None:
    """The revision that the tables are at, or None where there are none."""
    actual = schema_for(connection.dialect, schema)
    options = {"version_table": VERSION_TABLE, "version_table_schema": actual}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def head() -> str | None:
    """The newest revision that this version of the code knows."""
    return ScriptDirectory.from_config(_config()).get_current_head()


def _patiently(engine: Engine, upgrade_once: Callable[[Connection], str | None]) -> str | None:
    """Try until no open transaction holds a table: each try waits LOCK_WAIT_SECONDS at most.

    An ALTER that waits for a table makes every later INSERT wait behind it. Given up soon and tried again, it lets them
    through in between; what a try has done, the next one finds done.
    """
    resting = threading.Event()
    for _ in range(LOCK_TRIES_MAX):
        try:
            with writing_engine(engine).begin() as connection, _short_lock_waits(connection):
                return upgrade_once(connection)
        except DBAPIError as error:
            if error_code(error) != LOCK_WAIT_TIMEOUT:
                raise
            logger.warning("upgrade_waits_for_a_table", extra={"error": str(error.orig)})
        resting.wait(LOCK_REST_SECONDS)
    raise DatabaseUnavailable(
        f"an open transaction kept holding an outbox table for {LOCK_TRIES_MAX} tries; find it in "
        "information_schema.innodb_trx, end it, and run the upgrade again: it goes on where it stopped"
    )


@contextmanager
def _short_lock_waits(connection: Connection) -> Iterator[None]:
    """The session waits for tables no longer than LOCK_WAIT_SECONDS; what it was set to comes back at the end."""
    if connection.dialect.name not in MYSQL_DIALECTS:
        yield
        return
    before = connection.exec_driver_sql("SELECT @@SESSION.lock_wait_timeout").scalar_one()
    connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {LOCK_WAIT_SECONDS:d}")
    try:
        yield
    finally:
        if not connection.invalidated:
            connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {before:d}")


def _upgrade_all(
    connection: Connection, *, schema: str | Sequence[str] | None, tables: int, revision: str
) -> str | None:
    placement = placement_for(connection.dialect, schema, tables)
    reached: str | None = None
    for name in dict.fromkeys(table.schema for table in placement.tables):
        reached = _upgrade(connection, schema=name, revision=revision)
        if tables > 1:
            _make_split_tables(connection, name, placement.names_in(name))
    return reached


def _make_split_tables(connection: Connection, schema: str | None, names: Sequence[str]) -> None:
    """Make those that are missing, or have got no index yet, alike to what the plain one is today."""
    for name in names:
        table = message_table(schema, name)
        table.create(connection, checkfirst=True)
        for index in table.indexes:
            index.create(connection, checkfirst=True)


def _upgrade(connection: Connection, *, schema: str | None, revision: str) -> str | None:
    if schema is not None and connection.dialect.name in MYSQL_DIALECTS:
        connection.execute(CreateSchema(schema, if_not_exists=True))
    config = _config()
    config.attributes["connection"] = connection
    config.attributes["schema"] = schema
    with _inside_another_run():
        command.upgrade(config, revision)
    return current(connection, schema=schema)


@contextmanager
def _inside_another_run() -> Iterator[None]:
    """Alembic keeps `alembic.op` and `alembic.context` as globals and takes them away at the end of a run.

    Where this one was called from a revision of a user's own tree, they are given back to that run.
    """
    outer = [getattr(module, "_proxy", None) for module in (op, context)]
    try:
        yield
    finally:
        for proxy in outer:
            if proxy is not None:
                proxy._install_proxy()  # noqa: SLF001 - alembic has no public way; a test runs it


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_location()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _location() -> Path:
    """The revisions: inside this package in a wheel, beside it in a checkout."""
    inside = Path(__file__).parents[1] / "migrations"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "migrations"
