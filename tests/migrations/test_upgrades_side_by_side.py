"""Two upgrades of one database at once, as where each pod of a deployment begins with one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from alembic.util import CommandError
from sqlalchemy import Engine, event

from outbox.migrate import schema_upgrade
from outbox.store.database import open_engine
from tests.fixtures.databases import Database
from tests.migrations.test_migrations import differences


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
@pytest.mark.parametrize(
    ("begun", "before"), [(None, "CREATE INDEX"), (None, "INSERT"), ("0001", "ALTER TABLE"), ("0001", "UPDATE")]
)
def test_an_upgrade_goes_on_where_another_one_has_done_its_next_step(
    mysql_like: Database, begun: str | None, before: str
) -> None:
    if begun is not None:
        schema_upgrade.upgrade(mysql_like.url, schema=mysql_like.schema, revision=begun)

    with upgraded_by_another(mysql_like, before=before) as engine:
        reached = schema_upgrade.upgrade(engine, schema=mysql_like.schema)
        with engine.connect() as connection:
            left = differences(connection, mysql_like.place)

    assert reached == schema_upgrade.head()
    assert left == []


@pytest.mark.slow
def test_an_upgrade_goes_on_where_another_one_has_created_its_table(mariadb: Database) -> None:
    # On MySQL the look for the table keeps the other upgrade, which runs in this thread, from creating it.
    with upgraded_by_another(mariadb, before="CREATE TABLE") as engine:
        reached = schema_upgrade.upgrade(engine, schema=mariadb.schema)

    assert reached == schema_upgrade.head()


def test_an_unknown_revision_is_not_tried_again(sqlite: Database) -> None:
    with pytest.raises(CommandError, match="Can't locate revision"):
        schema_upgrade.upgrade(sqlite.url, revision="none")
