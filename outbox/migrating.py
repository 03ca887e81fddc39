"""Bringing the outbox tables up to date, by alembic.

For the `outbox db` command and for alembic trees of users' own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from alembic import command, context, op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL
from sqlalchemy.schema import CreateSchema

from outbox.database import MYSQL_DIALECTS, database_errors, open_engine
from outbox.placement import placement_for
from outbox.schema import message_table, message_table_names, schema_for


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
        return _upgrade_all(database, schema, tables=tables, revision=revision)
    engine = open_engine(database)
    try:
        with database_errors(engine.url), engine.begin() as connection:
            return _upgrade_all(connection, schema, tables=tables, revision=revision)
    finally:
        if engine is not database:
            engine.dispose()


def current(connection: Connection, *, schema: str | None = None) -> str | None:
    """The revision that the tables are at, or None where there are none."""
    actual = schema_for(connection.dialect, schema)
    options = {"version_table": _version_table(actual), "version_table_schema": actual}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def head() -> str | None:
    """The newest revision that this version of the code knows."""
    return ScriptDirectory.from_config(_config()).get_current_head()


def _upgrade_all(
    connection: Connection, schema: str | Sequence[str] | None, *, tables: int, revision: str
) -> str | None:
    placement = placement_for(connection.dialect, schema, tables)
    reached: str | None = None
    for name in dict.fromkeys(table.schema for table in placement.tables):
        reached = _upgrade(connection, schema=name, revision=revision)
        if tables > 1:
            _make_split_tables(connection, name, placement.names_in(name))
    return reached


def _make_split_tables(connection: Connection, schema: str | None, names: Sequence[str]) -> None:
    """Make those that are missing, alike to what the plain one is today."""
    there = set(message_table_names(connection, schema))
    for name in names:
        if name not in there:
            message_table(schema, name).create(connection)


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
    inside = Path(__file__).with_name("migrations")
    return inside if inside.is_dir() else Path(__file__).parent.parent / "migrations"


def _version_table(schema: str | None) -> str:
    return "alembic_version" if schema else "outbox_alembic_version"
