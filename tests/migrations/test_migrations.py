"""`upgrade` makes exactly the tables of outbox.store.schema, however it is called; what goes wrong is one line."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command, op
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Engine, event, inspect, text
from sqlalchemy.engine import make_url

from outbox.migrate import schema_upgrade
from outbox.store.database import open_engine
from outbox.store.schema import outbox_tables
from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable
from outbox_core.common.table_namespace import TableNamespace
from tests.fixtures.databases import Database
from tests.fixtures.fork_server import environment, fork_server


@contextlib.contextmanager
def opened(database: Database) -> Iterator[Engine]:
    """An engine, disposed of at the end."""
    engine = open_engine(database.url)
    try:
        yield engine
    finally:
        engine.dispose()


def differences(connection: Connection, namespace: TableNamespace) -> list[object]:
    """What alembic's autogenerate would change; the version table is alembic's own."""
    context = MigrationContext.configure(
        connection,
        opts={
            "include_schemas": True,
            "compare_type": True,
            "compare_server_default": True,
            "include_name": lambda name, kind, _parents: kind != "schema" or name == namespace.schema,
            "include_object": lambda thing, name, kind, *_: not (kind == "table" and "alembic_version" in name),
        },
    )
    return compare_metadata(context, outbox_tables(namespace).metadata)


def outbox(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as people do."""
    return fork_server().run("outbox", *arguments, env=environment(COLUMNS="200"))


def schema_arguments(database: Database) -> list[str]:
    """The schema, where there is one."""
    return ["--schema", database.schema] if database.schema else []


def test_upgrade_makes_exactly_the_tables_that_the_code_knows(database: Database) -> None:
    revision = schema_upgrade.upgrade(database.url, schema=database.schema)

    with opened(database) as engine, engine.connect() as connection:
        assert differences(connection, database.namespace) == []
        assert schema_upgrade.current(connection, schema=database.schema) == revision == schema_upgrade.head()


def run_by_hand(engine: Engine, script: str) -> None:
    """Run a script as the database's own client does."""
    lines = [line for line in script.splitlines() if not line.startswith("--")]
    with engine.begin() as connection:
        for statement in "\n".join(lines).split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement.replace("%", "%%") if engine.name != "sqlite" else statement)


def test_the_printed_statements_make_exactly_the_tables_that_the_code_knows(database: Database) -> None:
    printed = outbox("db", "upgrade", "--sql", "--url", database.url, *schema_arguments(database))

    assert (printed.returncode, printed.stderr) == (0, "")
    with opened(database) as engine:
        run_by_hand(engine, printed.stdout)
        with engine.connect() as connection:
            assert differences(connection, database.namespace) == []
    checked = outbox("db", "current", "--url", database.url, *schema_arguments(database))
    assert (checked.returncode, checked.stdout.strip()) == (0, schema_upgrade.head())
    assert schema_upgrade.upgrade(database.url, schema=database.schema) == schema_upgrade.head()


def test_the_printed_statements_have_every_table_of_a_split_and_the_schemas_owner(mysql_like: Database) -> None:
    schema = str(mysql_like.schema)
    script = schema_upgrade.upgrade_statements(mysql_like.url, schema=schema, tables=3, owner="shop")

    with opened(mysql_like) as engine:
        run_by_hand(engine, script)
        with engine.connect() as connection:
            names = inspect(connection).get_table_names(schema=schema)
            owner = connection.exec_driver_sql(f"SELECT owner, LENGTH(id) FROM {schema}.identity").one()
    assert {"message", "message_0000", "message_0001", "message_0002"} <= set(names)
    assert tuple(owner) == ("shop", 32)


def test_two_databases_made_by_one_script_are_told_apart(tmp_path: Path) -> None:
    script = schema_upgrade.upgrade_statements("sqlite:///shop.db")
    ids = set()

    for name in ("one", "two"):
        engine = open_engine(f"sqlite:///{tmp_path / name}.db")
        run_by_hand(engine, script)
        with engine.connect() as connection:
            ids.add(connection.exec_driver_sql("SELECT id FROM outbox_identity").scalar_one())
        engine.dispose()

    assert len(ids) == 2


def test_printing_connects_to_nothing_and_prints_no_password(tmp_path: Path) -> None:
    script = schema_upgrade.upgrade_statements("mysql+pymysql://root:hunter2@127.0.0.1:1/shop")

    assert "CREATE TABLE shop.outbox_message (" in script
    assert "hunter2" not in script
    for arguments, says in (
        ({"schema": "outbox"}, "nobody has said yet to whom the schema outbox belongs"),
        ({"owner": "shop"}, "the business's own database is nobody else's"),
    ):
        url = "mysql+pymysql://127.0.0.1:1/" if "schema" in arguments else "mysql+pymysql://127.0.0.1:1/shop"
        with pytest.raises(ConfigurationError, match=says):
            schema_upgrade.upgrade_statements(url, **arguments)


def test_the_comparison_would_see_a_difference(database: Database) -> None:
    schema_upgrade.upgrade(database.url, schema=database.schema)

    with opened(database) as engine:
        schema = database.schema
        index = "ix_message_state_due" if schema else "ix_outbox_message_state_due"
        table = f"{schema}.message" if schema else "outbox_message"
        with engine.begin() as connection:
            connection.execute(text(f"DROP INDEX {index} ON {table}" if schema else f"DROP INDEX {index}"))
        with engine.connect() as connection:
            assert [change[0] for change in differences(connection, database.namespace)] == ["add_index"]


def test_mysql_columns_are_as_exact_as_the_code_needs(mysql_like: Database) -> None:
    schema_upgrade.upgrade(mysql_like.url, schema=mysql_like.schema)

    with opened(mysql_like) as engine, engine.connect() as connection:
        found = connection.execute(
            text(
                "SELECT table_name, column_name, column_type, collation_name FROM information_schema.columns "
                "WHERE table_schema = :schema AND table_name IN ('message', 'archive', 'inbox')"
            ),
            {"schema": mysql_like.schema},
        ).all()
        engines = connection.scalars(
            text("SELECT DISTINCT engine FROM information_schema.tables WHERE table_schema = :schema"),
            {"schema": mysql_like.schema},
        ).all()

    columns = {(row[0], row[1]): (row[2], row[3]) for row in found}
    assert columns["message", "id"] == ("varchar(64)", "ascii_bin")
    assert columns["message", "body"] == ("longblob", None)
    assert columns["message", "message_key"] == ("varchar(1024)", "utf8mb4_bin")
    assert columns["message", "headers"] == ("mediumtext", "utf8mb4_bin")
    assert not [name for name, (_, collation) in columns.items() if collation not in {None, "ascii_bin", "utf8mb4_bin"}]
    assert engines == ["InnoDB"]


def test_the_inbox_has_the_key_and_the_index_that_the_code_knows(database: Database) -> None:
    """Alembic's comparison looks at no primary key."""
    schema_upgrade.upgrade(database.url, schema=database.schema)
    inbox = outbox_tables(database.namespace).inbox

    with opened(database) as engine:
        inspector = inspect(engine)
        key = inspector.get_pk_constraint(inbox.name, schema=inbox.schema)["constrained_columns"]
        indexes = [index["column_names"] for index in inspector.get_indexes(inbox.name, schema=inbox.schema)]

    assert key == [column.name for column in inbox.primary_key.columns] == ["consumer_group", "topic", "message_id"]
    assert indexes == [["handled_at_us"]]


@pytest.mark.parametrize("missing", [[], ["identity"], ["compensator_lease", "order_queue"]], ids=" ".join)
def test_an_upgrade_that_was_cut_goes_on_where_it_stopped_and_keeps_the_rows(
    database: Database, missing: list[str]
) -> None:
    schema_upgrade.upgrade(database.url, schema=database.schema)
    namespace, tables = database.namespace, outbox_tables(database.namespace)
    with opened(database) as engine:
        with engine.begin() as connection:
            connection.execute(
                tables.inbox.insert().values(consumer_group="g", message_id="m", topic="t", handled_at_us=1)
            )
            in_schema = f"{namespace.schema}." if namespace.schema else ""
            for name in [*(namespace.named(one) for one in missing), "outbox_alembic_version"]:
                connection.execute(text(f"DROP TABLE {in_schema}{name}"))

        assert schema_upgrade.upgrade(engine, schema=database.schema) == schema_upgrade.head()

        with engine.connect() as connection:
            assert differences(connection, namespace) == []
            assert len(connection.execute(tables.inbox.select()).all()) == 1
            assert len(connection.execute(tables.identity.select()).all()) == 1


def test_a_downgrade_drops_every_table_and_the_upgrade_may_follow_again(database: Database) -> None:
    schema_upgrade.upgrade(database.url, schema=database.schema)
    with opened(database) as engine:
        config = schema_upgrade.alembic_config()
        with engine.begin() as connection:
            config.attributes.update(connection=connection, namespace=database.namespace)
            command.downgrade(config, "base")

        left = inspect(engine).get_table_names(schema=database.namespace.schema)
        reached = schema_upgrade.upgrade(engine, schema=database.schema)

        assert (left, reached) == (["outbox_alembic_version"], schema_upgrade.head())
        with engine.connect() as connection:
            assert differences(connection, database.namespace) == []


def test_upgrade_again_changes_nothing_and_keeps_the_rows(database: Database) -> None:
    schema_upgrade.upgrade(database.url, schema=database.schema)
    with opened(database) as engine:
        inbox = outbox_tables(database.namespace).inbox
        with engine.begin() as connection:
            connection.execute(inbox.insert().values(consumer_group="g", message_id="m", topic="t", handled_at_us=1))

        schema_upgrade.upgrade(engine, schema=database.schema)
        schema_upgrade.upgrade(database.url, schema=database.schema)

        with engine.connect() as connection:
            assert len(connection.execute(inbox.select()).all()) == 1


def test_upgrade_works_on_a_connection_of_the_callers(database: Database) -> None:
    with opened(database) as engine:
        with engine.begin() as connection:
            schema_upgrade.upgrade(connection, schema=database.schema)
            assert not connection.closed

        with engine.connect() as connection:
            assert differences(connection, database.namespace) == []


USERS_ENV = """
from alembic import context
connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=None)
with context.begin_transaction():
    context.run_migrations()
"""
USERS_REVISION = """
import sqlalchemy as sa
from alembic import context, op
from outbox.migrate.schema_upgrade import upgrade as upgrade_outbox

revision, down_revision = "shop1", None

def upgrade():
    op.create_table("payment", sa.Column("id", sa.Integer, primary_key=True))
    upgrade_outbox(op.get_bind(), schema=context.config.attributes["schema"])
    op.create_table("refund", sa.Column("id", sa.Integer, primary_key=True))
"""


def test_upgrade_works_from_a_revision_of_the_users_own_tree(database: Database, tmp_path: Path) -> None:
    tree = tmp_path / "shop_migrations"
    (tree / "versions").mkdir(parents=True)
    (tree / "env.py").write_text(USERS_ENV)
    (tree / "versions" / "shop1_all.py").write_text(USERS_REVISION)
    config = Config()
    config.set_main_option("script_location", str(tree))
    config.set_main_option("path_separator", "os")

    with opened(database) as engine:
        with engine.begin() as connection:
            config.attributes.update(connection=connection, schema=database.schema)
            command.upgrade(config, "head")

        with engine.connect() as connection:
            names = set(inspect(connection).get_table_names())
            assert {"payment", "refund", "alembic_version"} <= names
            assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "shop1"
            assert schema_upgrade.current(connection, schema=database.schema) == schema_upgrade.head()
            assert [change for change in differences(connection, database.namespace) if "outbox" in str(change)] == []


def test_a_database_that_was_never_upgraded_has_no_revision(database: Database) -> None:
    with opened(database) as engine, engine.connect() as connection:
        assert schema_upgrade.current(connection, schema=database.schema) is None


def test_errors_of_upgrade_name_the_cure(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnavailable, match="check host, port"):
        schema_upgrade.upgrade("mysql+pymysql://root@127.0.0.1:1/shop")
    with pytest.raises(DatabaseUnavailable, match="unable to open database file"):
        schema_upgrade.upgrade(f"sqlite:///{tmp_path}/no/such/folder/shop.db")
    with pytest.raises(ConfigurationError, match="use one like mysql"):
        schema_upgrade.upgrade("not a url")
    with pytest.raises(ConfigurationError, match="not on postgresql"):
        schema_upgrade.upgrade("postgresql+psycopg://h/d")


@pytest.mark.processes
def test_the_command_makes_the_tables_and_says_where_they_are(database: Database) -> None:
    arguments = ["--url", database.url, *schema_arguments(database)]

    before = outbox("db", "current", *arguments)
    upgraded = outbox("db", "upgrade", *arguments)
    after = outbox("db", "current", *arguments)

    assert (before.returncode, before.stdout.strip()) == (1, "none")
    assert (upgraded.returncode, upgraded.stderr) == (0, "")
    assert upgraded.stdout.strip() == f"the outbox tables are at revision {schema_upgrade.head()}"
    assert (after.returncode, after.stdout.strip()) == (0, schema_upgrade.head())


@pytest.mark.processes
def test_the_commands_take_the_url_of_an_asynchronous_service(database: Database) -> None:
    drivers = {"sqlite": "sqlite+aiosqlite", "mariadb": "mysql+aiomysql", "mysql": "mysql+asyncmy"}
    url = make_url(database.url).set(drivername=drivers[database.name]).render_as_string(hide_password=False)
    arguments = ["--url", url, *schema_arguments(database)]

    assert schema_upgrade.upgrade(url, schema=database.schema) == schema_upgrade.head()
    commands = ["db", "upgrade"], ["db", "current"], ["messages", "list"], ["status"]
    done = [outbox(*one, *arguments) for one in commands]

    assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * len(commands)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("url", "status", "says"),
    [
        ("mysql+pymysql://root:hunter2@127.0.0.1:1/shop", 1, r"cannot reach the database .*check host, port"),
        ("mysql+pymysql:///", 1, r"cannot reach the database"),
        ("shop.db", 2, r"not a database URL that can work"),
        ("mysql+nothing://h/d", 2, r"not a database URL that can work"),
        ("oracle+nothing://h/d", 2, r"runs on MySQL, MariaDB and SQLite, not on oracle"),
        ("postgresql+psycopg://h/d", 2, r"runs on MySQL, MariaDB and SQLite, not on postgresql"),
    ],
)
def test_a_url_that_cannot_work_is_one_line_with_the_cure_and_no_stack_trace(url: str, status: int, says: str) -> None:
    for sub_command in ("upgrade", "current"):
        done = outbox("db", sub_command, "--url", url)

        assert done.returncode == status, done.stderr
        assert re.match(rf"error: .*{says}", done.stderr)
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""
        assert "hunter2" not in done.stderr


@pytest.mark.parametrize("dialect", ["mysql", "sqlite"])
def test_an_upgrade_in_alembics_offline_mode_is_refused_with_the_cure(dialect: str) -> None:
    offline = MigrationContext.configure(dialect_name=dialect, opts={"as_sql": True})

    with Operations.context(offline), pytest.raises(ConfigurationError, match="without --sql"):
        schema_upgrade.upgrade(op.get_bind())


@pytest.mark.processes
def test_a_missing_url_is_a_usage_error() -> None:
    done = outbox("db", "upgrade")

    assert done.returncode == 2
    assert "--url" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_upgrade_reports_the_error_that_happened_at_once(mysql_like: Database) -> None:
    """A view in the way of an index: no lock, and no other upgrade's work, so nothing to try again."""
    schema_upgrade.upgrade(mysql_like.url, schema=mysql_like.schema)
    with opened(mysql_like) as engine, engine.begin() as connection:
        for statement in (
            "RENAME TABLE {s}.archive TO {s}.other",
            "CREATE VIEW {s}.archive AS SELECT * FROM {s}.other",
            "DROP TABLE {s}.outbox_alembic_version",
        ):
            connection.execute(text(statement.replace("{s}", str(mysql_like.schema))))

        with pytest.raises(DatabaseUnavailable, match=r"archive' is not (of type 'BASE|BASE) TABLE") as raised:
            schema_upgrade.upgrade(mysql_like.url, schema=mysql_like.schema)

    assert "open transaction" not in str(raised.value)
    assert "another upgrade" not in str(raised.value)


def test_an_upgrade_whose_connection_is_killed_reports_that(mysql_like: Database) -> None:
    with opened(mysql_like) as engine, opened(mysql_like) as other:

        @event.listens_for(engine, "before_cursor_execute")
        def kill(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
            if statement.lstrip().startswith("CREATE INDEX"):
                number = connection.connection.driver_connection.thread_id()  # type: ignore[union-attr]
                with other.connect() as killer:
                    killer.exec_driver_sql(f"KILL {number}")

        with pytest.raises(DatabaseUnavailable, match="cannot reach the database") as raised:
            schema_upgrade.upgrade(engine, schema=mysql_like.schema)

    assert "open transaction" not in str(raised.value)


def test_an_upgrade_of_a_locked_sqlite_file_reports_that(sqlite: Database) -> None:
    with opened(sqlite) as engine, opened(sqlite) as holder:
        event.listen(engine, "connect", lambda connection, _record: connection.execute("PRAGMA busy_timeout = 0"))
        with holder.connect() as other:
            other.exec_driver_sql("CREATE TABLE payment (id INT)")
            with pytest.raises(DatabaseUnavailable, match="database is locked"):
                schema_upgrade.upgrade(engine)
