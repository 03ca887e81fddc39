"""Two upgrades of one database at once, as where each pod of a deployment begins with one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from outbox.migrate import schema_upgrade
from outbox.store.database import open_engine
from outbox_core.common.errors import ConfigurationError
from tests.fixtures.databases import Database
from tests.migrations.test_migrations import differences

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def upgraded_by_another(database: Database, *, before: str) -> Iterator[Engine]:
    """An engine that lets another upgrade run as a whole right before its first statement that begins like this."""
    engine = open_engine(database.url)
    statements: list[str] = []

    def upgrade(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        is_first = not any(one.startswith(before) for one in statements)
        statements.append(statement.lstrip())
        if is_first and statements[-1].startswith(before):
            schema_upgrade.upgrade(database.url, schema=database.schema)

    event.listen(engine, "before_cursor_execute", upgrade)
    try:
        yield engine
    finally:
        engine.dispose()
    assert any(one.startswith(before) for one in statements), "no other upgrade ran"


@pytest.mark.slow
def test_an_upgrade_goes_on_where_another_one_has_done_its_next_step(mysql_like: Database) -> None:
    goes_on(mysql_like, before="CREATE INDEX")


@pytest.mark.slow
@pytest.mark.parametrize("before", ["CREATE TABLE", "INSERT"])
def test_an_upgrade_goes_on_where_another_one_has_created_its_table_or_row(mariadb: Database, before: str) -> None:
    # On MySQL the look for the table or row keeps the other upgrade, which runs in this thread, from creating it or the
    # schema.
    goes_on(mariadb, before=before)


def goes_on(database: Database, *, before: str) -> None:
    with upgraded_by_another(database, before=before) as engine:
        reached = schema_upgrade.upgrade(engine, schema=database.schema)
        with engine.connect() as connection:
            left = differences(connection, database.namespace)

    assert reached == schema_upgrade.head()
    assert left == []


LATER_REVISION = """
import sqlalchemy as sa
from alembic import context
from outbox.migrate import idempotent_ddl

revision, down_revision = "0002", "0001"

def upgrade():
    namespace = context.config.attributes["namespace"]
    idempotent_ddl.add_column(f"{namespace.prefix}message", sa.Column("note", sa.Integer), schema=namespace.schema)
"""
UPGRADE_OF_A_LATER_RELEASE = """
import sys
from outbox.migrate import schema_upgrade
from outbox_core.common.errors import ConfigurationError
from tests.fixtures.databases import Database
from tests.migrations.test_upgrades_side_by_side import upgraded_by_another

name, url, schema, before = sys.argv[1:]
with upgraded_by_another(Database(name=name, url=url, schema=schema), before=before) as engine:
    print(schema_upgrade.upgrade(engine, schema=schema))
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("before", ["ALTER TABLE", "UPDATE"])
def test_an_upgrade_of_a_later_release_goes_on_where_another_one_has_done_its_next_step(
    mysql_like: Database, tmp_path: Path, before: str
) -> None:
    schema_upgrade.upgrade(mysql_like.url, schema=mysql_like.schema)
    for package in ("outbox", "outbox_core"):
        (tmp_path / package).symlink_to(ROOT / package)
    shutil.copytree(ROOT / "migrations", tmp_path / "migrations")
    (tmp_path / "migrations/versions/0002_later.py").write_text(LATER_REVISION)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    arguments = [mysql_like.name, mysql_like.url, str(mysql_like.schema), before]

    done = subprocess.run(
        [sys.executable, "-c", UPGRADE_OF_A_LATER_RELEASE, *arguments],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=environment,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (0, "0002\n"), done.stderr


def test_an_unknown_revision_is_not_tried_again(sqlite: Database) -> None:
    with pytest.raises(ConfigurationError, match=r"does not know a revision .*Can't locate revision .*newest release"):
        schema_upgrade.upgrade(sqlite.url, revision="none")
