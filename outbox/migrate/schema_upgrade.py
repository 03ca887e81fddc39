"""Creates and upgrades the outbox tables with alembic.

For the command `outbox db`, and for users' own alembic trees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Final, TextIO

from alembic import command, context, op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import ClauseElement, Connection, Engine, inspect, or_, update
from sqlalchemy.engine import URL, Dialect
from sqlalchemy.engine.mock import MockConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateIndex, CreateSchema, CreateTable
from sqlalchemy.sql import quoted_name

from outbox.alembic import is_of_outbox
from outbox.store.database import (
    background_engine,
    database_errors,
    open_engine,
    writing_engine,
)
from outbox.store.database_identity import SchemaOwner, owner_of, refuse_stranger, stranger_refused
from outbox.store.database_url import sync_url
from outbox.store.databases.database_port import Failure
from outbox.store.databases.supported import database_of, failure_of
from outbox.store.schema import message_table, outbox_tables
from outbox.store.table_placement import (
    is_left_beside,
    is_schema_alone,
    placement_for,
    table_namespace,
    tables_in,
    tables_missing,
    unconnected_dialect,
)
from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable
from outbox_core.common.table_namespace import VERSION_TABLE, TableNamespace
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

LOCK_WAIT_SECONDS: Final = 1
LOCK_REST_SECONDS: Final = 1.0
LOCK_TRIES_MAX: Final = 60
_REVISION_MOVED: Final = "expected to match one row"


def upgrade(
    database: Engine | Connection | MockConnection | URL | str | None,
    *,
    schema: str | Sequence[str] | None = None,
    tables: int = 1,
    owner: str | None = None,
    is_shared: bool = False,
    revision: str = "head",
) -> str | None:
    """Create or upgrade the tables; returns their revision afterwards. Idempotent.

    `schema` and `tables` are those of Outbox: without a schema the tables are made in the database that the connection
    is in, among the business's own. With several tables, the tables that messages are split into are created in
    addition to the one that is not split. Tables of an earlier split stay, and are served until they are empty.
    A named schema belongs to the business's database that first upgrades it, or to `owner`, whoever owned it before;
    another one is refused, here and wherever it uses the schema, unless `is_shared` records that they share it.
    A Connection is used unchanged: call this from a revision of your own alembic tree with `op.get_bind()`.
    Raises DatabaseUnavailable or ConfigurationError with the cure.
    """
    if database is None or isinstance(database, MockConnection):  # `op.get_bind()` in alembic's offline mode
        raise ConfigurationError(
            "the outbox tables are upgraded on a connection, since each step asks what is there: run your revision "
            "without --sql, or `outbox db upgrade` before it; `outbox db upgrade --sql` prints the statements for a "
            "database without them"
        )
    wanted_owner = SchemaOwner(owner, is_shared=is_shared)
    if isinstance(database, Connection):
        return _upgrade_all(database, schema=schema, tables=tables, wanted_owner=wanted_owner, revision=revision)
    engine = open_engine(database if isinstance(database, Engine) else sync_url(database))
    # The connections of an engine of theirs keep their session variables, as all of the business's.
    background = writing_engine(engine) if engine is database else background_engine(engine)
    try:
        with database_errors(engine.url):
            return _retry_while_locked(
                background,
                partial(_upgrade_all, schema=schema, tables=tables, wanted_owner=wanted_owner, revision=revision),
            )
    finally:
        if engine is not database:
            background.dispose()
            engine.dispose()


def upgrade_statements(
    database: URL | str,
    *,
    schema: str | Sequence[str] | None = None,
    tables: int = 1,
    owner: str | None = None,
    is_shared: bool = False,
) -> str:
    """Returns the statements that upgrade() runs where there are no outbox tables yet, for somebody else to run.

    The arguments are those of upgrade(). Connects to nothing: the URL says which database it is, so a schema of its own
    belongs to the database that the URL names. Raises ConfigurationError.
    """
    url = sync_url(database)
    dialect = unconnected_dialect(url)
    placement = placement_for(dialect, schema, tables)
    script = StringIO()
    for namespace in placement.namespaces:
        if namespace.schema is not None and not namespace.prefix:
            _write(script, dialect, CreateSchema(namespace.schema, if_not_exists=True))
        config = alembic_config(script)
        config.attributes["url"] = url.set(password=None)
        config.attributes["namespace"] = _quoted(namespace)
        command.upgrade(config, "head", sql=True)
        _write_owner(script, dialect, namespace, owner=SchemaOwner(owner, is_shared=is_shared), business=url.database)
        for name in placement.names_in(namespace) if placement.is_split else ():
            table = message_table(namespace.schema, name)
            _write(script, dialect, CreateTable(table))
            for index in table.indexes:
                _write(script, dialect, CreateIndex(index))
    return script.getvalue()


def current(connection: Connection, *, schema: str | None = None) -> str | None:
    """Returns the tables' revision; None if there are no tables."""
    namespace = table_namespace(connection.dialect, schema)
    options = {"version_table": VERSION_TABLE, "version_table_schema": namespace.schema}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def head() -> str | None:
    """Returns the newest revision that this version of the code knows."""
    return ScriptDirectory.from_config(alembic_config()).get_current_head()


def alembic_config(output: TextIO | None = None) -> Config:
    """Returns alembic's settings for the revisions of the outbox tables; `output`: where it writes statements."""
    config = Config(output_buffer=output)
    config.set_main_option("script_location", str(_location()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _retry_while_locked(engine: Engine, upgrade_once: Callable[[Connection], str | None]) -> str | None:
    """Retry until no open transaction locks a table: each attempt waits LOCK_WAIT_SECONDS at most.

    An ALTER that waits for a table makes every later INSERT wait for it. A short wait, repeated, lets them through in
    between; steps that an attempt has completed are skipped by the next one, and so are those of another process that
    upgrades the same tables: of two that found a step undone, one fails in it.
    """
    resting, database = threading.Event(), database_of(engine.dialect)
    last_error: DBAPIError | CommandError | None = None
    for _ in range(LOCK_TRIES_MAX):
        try:
            with engine.begin() as connection, database.short_table_waits(connection, LOCK_WAIT_SECONDS):
                return upgrade_once(connection)
        except (DBAPIError, CommandError) as error:
            last_error = error
            if _is_of_another_upgrade(error):
                logger.info("upgrade_beside_another", extra={"error": str(error).partition("\n")[0]})
            elif isinstance(error, CommandError):
                raise ConfigurationError(
                    f"this release does not know a revision of the outbox tables ({error}): upgrade with the newest "
                    "release that has used them; tables from before the first release must be made anew"
                ) from error
            elif failure_of(error.orig) is Failure.LOCK_WAIT_TIMEOUT:
                logger.warning("upgrade_waits_for_table", extra={"error": str(error.orig)})
            else:
                raise
        resting.wait(LOCK_REST_SECONDS)
    if last_error is not None and _is_of_another_upgrade(last_error):
        raise DatabaseUnavailable(
            f"another upgrade was in the way for {LOCK_TRIES_MAX} tries ({str(last_error).partition(chr(10))[0]}); see "
            "that no other one runs, and run it again: it goes on where it stopped"
        ) from last_error
    raise DatabaseUnavailable(
        f"an open transaction kept holding an outbox table for {LOCK_TRIES_MAX} tries; find it in "
        f"{database.open_transactions}, end it, and run the upgrade again: it goes on where it stopped"
    )


def _is_of_another_upgrade(error: DBAPIError | CommandError) -> bool:
    """Returns whether another process has done this step since it was found undone, or is doing it."""
    if isinstance(error, CommandError):
        return _REVISION_MOVED in str(error)
    return failure_of(error.orig) in {Failure.ALTERED_BESIDE, Failure.DUPLICATE_KEY}


def _upgrade_all(
    connection: Connection, *, schema: str | Sequence[str] | None, tables: int, wanted_owner: SchemaOwner, revision: str
) -> str | None:
    placement = placement_for(connection.dialect, schema, tables)
    # All refusals come before the first DDL: each of its statements commits by itself.
    for namespace in placement.namespaces:
        _refuse_foreign_tables(connection, namespace, placement.names_in(namespace))
    for name in placement.schemas:
        is_beside = current(connection, schema=name) is None and is_left_beside(connection, name)
        if is_beside or is_schema_alone(connection, name):
            raise tables_missing(connection, name)
    for namespace in placement.namespaces:
        _refuse_without_owner(connection, namespace, wanted_owner=wanted_owner)
    reached: str | None = None
    for namespace in placement.namespaces:
        reached = _upgrade(connection, namespace, revision=revision)
        _record_owner(connection, namespace, wanted_owner=wanted_owner)
        if placement.is_split:
            _make_split_tables(connection, namespace, placement.names_in(namespace))
    return reached


def _refuse_foreign_tables(connection: Connection, namespace: TableNamespace, message_tables: Sequence[str]) -> None:
    """Raise ConfigurationError for a table of the business's that has a name of ours, before anything is changed."""
    inspector = inspect(connection)
    outbox_names = {table.name for table in outbox_tables(namespace).metadata.sorted_tables} | {*message_tables}
    for name in sorted(outbox_names & tables_in(connection, namespace.schema)):
        if not is_of_outbox(name, [column["name"] for column in inspector.get_columns(name, schema=namespace.schema)]):
            full_name = name if namespace.schema is None else f"{namespace.schema}.{name}"
            raise ConfigurationError(
                f"the table {full_name} has a name of the outbox's and is not the outbox's, so nothing was changed; "
                "rename it, or give the outbox a schema of its own (schema=, --schema)"
            )


def _refuse_without_owner(connection: Connection, namespace: TableNamespace, *, wanted_owner: SchemaOwner) -> None:
    """Raise ConfigurationError for another's schema, and for one of which nobody would know whose it is."""
    if namespace.schema is None or namespace.prefix:
        if wanted_owner != SchemaOwner():
            raise _owner_of_the_business()
        return
    if wanted_owner != SchemaOwner():
        return
    recorded, business = owner_of(connection, namespace), connection.dialect.default_schema_name
    if not recorded.admits(business):
        raise stranger_refused(namespace, owner=recorded, business=business)
    if recorded.name is None and not recorded.is_shared and not business:
        raise _nobodys(namespace)


def _owner_of_the_business() -> ConfigurationError:
    return ConfigurationError(
        "owner and shared are said of a schema of its own (schema=, --schema): the business's own database is nobody "
        "else's"
    )


def _nobodys(namespace: TableNamespace) -> ConfigurationError:
    return ConfigurationError(
        f"nobody has said yet to whom the schema {namespace.schema} belongs, and the connection is in no database: "
        "name the business's database in the URL, or as its owner (owner=, --owner), or let several services share it "
        "(is_shared=True, --shared)"
    )


def _record_owner(connection: Connection, namespace: TableNamespace, *, wanted_owner: SchemaOwner) -> None:
    """Record what is wanted, or by default the connection's database, if nobody has recorded one."""
    identity = outbox_tables(namespace).identity
    if (
        namespace.schema is None
        or namespace.prefix
        or not inspect(connection).has_table(identity.name, schema=namespace.schema)
    ):
        return
    # Looked at first: an UPDATE that changes nothing waits for producers, whose SERIALIZABLE transactions lock what
    # they read.
    recorded, business = owner_of(connection, namespace), connection.dialect.default_schema_name
    if wanted_owner.name is not None:
        if (recorded.name, recorded.is_shared) != (wanted_owner.name, wanted_owner.is_shared):
            new_owner = {"owner": wanted_owner.name, "is_shared": wanted_owner.is_shared}
            connection.execute(update(identity).where(identity.c.number == 1).values(new_owner))
        return
    if recorded.name is None and business:
        # Of two services that upgrade side by side the second one waits for the first here, and then finds its owner.
        # The look above may have taken a snapshot that does not show it, so another transaction has to look again.
        is_free = or_(identity.c.owner.is_(None), identity.c.owner == business)
        set_owner = update(identity).where(identity.c.number == 1, is_free).values(owner=business)
        if connection.execute(set_owner).rowcount == 0 and not wanted_owner.is_shared:
            raise DatabaseUnavailable(
                f"another upgrade has just recorded to whom the schema {namespace.schema} belongs: run this one again, "
                "which tells you"
            )
    if wanted_owner.is_shared and not recorded.is_shared:
        connection.execute(update(identity).where(identity.c.number == 1).values(is_shared=True))
    refuse_stranger(connection, connection.dialect, namespace.schema)


def _make_split_tables(connection: Connection, namespace: TableNamespace, names: Sequence[str]) -> None:
    """Create those that are missing, or have no index yet, like the current definition of the one that is not split."""
    for name in names:
        table = message_table(namespace.schema, name)
        table.create(connection, checkfirst=True)
        for index in table.indexes:
            index.create(connection, checkfirst=True)


def _upgrade(connection: Connection, namespace: TableNamespace, *, revision: str) -> str | None:
    if namespace.schema is not None and not namespace.prefix:
        connection.execute(CreateSchema(namespace.schema, if_not_exists=True))
    config = alembic_config()
    config.attributes["connection"] = connection
    config.attributes["namespace"] = _quoted(namespace)
    with _inside_another_run():
        command.upgrade(config, revision)
    return current(connection, schema=namespace.schema)


def _quoted(namespace: TableNamespace) -> TableNamespace:
    """Returns it for alembic, which would take a dot in a plain str for one between names."""
    schema = None if namespace.schema is None else quoted_name(namespace.schema, quote=None)
    return replace(namespace, schema=schema)


def _write_owner(
    script: TextIO, dialect: Dialect, namespace: TableNamespace, *, owner: SchemaOwner, business: str | None
) -> None:
    """Write the statement that records whose schema it is. Raises ConfigurationError where upgrade() would."""
    if namespace.schema is None or namespace.prefix:
        if owner != SchemaOwner():
            raise _owner_of_the_business()
        return
    name = owner.name or business
    if not name and not owner.is_shared:
        raise _nobodys(namespace)
    identity = outbox_tables(namespace).identity
    recorded = update(identity).where(identity.c.number == 1).values(owner=name, is_shared=owner.is_shared)
    _write(script, dialect, recorded)


def _write(script: TextIO, dialect: Dialect, statement: ClauseElement) -> None:
    compiled = statement.compile(dialect=dialect, compile_kwargs={"literal_binds": True})
    script.write(f"{str(compiled).strip()};\n\n")


@contextmanager
def _inside_another_run() -> Iterator[None]:
    """Restore alembic's globals for an outer run: alembic removes `alembic.op` and `alembic.context` at a run's end.

    There is an outer run if upgrade() was called from a revision of a user's own tree.
    """
    outer = [getattr(module, "_proxy", None) for module in (op, context)]
    try:
        yield
    finally:
        for proxy in outer:
            if proxy is not None:
                proxy._install_proxy()  # noqa: SLF001 - alembic has no public way; a test runs it


def _location() -> Path:
    """Returns the folder of the revisions: inside this package in a wheel, next to it in a checkout."""
    inside = Path(__file__).parents[1] / "migrations"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "migrations"
