"""A named schema belongs to one business's database; another one uses it only where sharing it is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from compensator.core.config import load
from compensator.entry.composition import wire
from outbox import Inbox, NotTried, Outbox, consumer
from outbox.migrate import upgrade
from outbox.store.database_identity import SchemaOwner
from outbox_core import SystemClock
from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable
from tests.fixtures.command_line import outbox
from tests.fixtures.databases import Database
from tests.fixtures.local_server import Durability
from tests.fixtures.servers import local_server
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER
from tests.outbox.watched_broker import delivery

MINE, THEIRS = "belongs to the database {0}", "this service is in {0}_test"


@dataclass(frozen=True, slots=True)
class Two:
    """Two services of one server: the owner of the schema, and a stranger."""

    owner: str
    stranger: str
    schema: str
    business: str

    def owners(self) -> list[tuple[Any, ...]]:
        """What is recorded."""
        return self.ask(f"SELECT owner, is_shared FROM {self.schema}.identity")

    def ask(self, question: str) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        engine = create_engine(self.owner)
        with engine.begin() as connection:
            result = connection.execute(text(question))
            found = [tuple(row) for row in result] if result.returns_rows else []
        engine.dispose()
        return found


@pytest.fixture
def two(mysql_like: Database) -> Iterator[Two]:
    """A database with a schema of its own, and another one beside it: its tests', for instance."""
    url = make_url(mysql_like.url)
    other = url.set(database=f"{url.database}_test").render_as_string(hide_password=False)
    found = Two(mysql_like.url, other, str(mysql_like.schema), str(url.database))
    found.ask(f"CREATE DATABASE {found.business}_test")
    yield found
    found.ask(f"DROP DATABASE {found.business}_test")


def publish(url: str, schema: str) -> None:
    engine = create_engine(url)
    try:
        with Session(engine) as session, session.begin():
            Outbox(engine, broker=RecordingBroker(), schema=schema, sender=NO_SENDER).publish("t", "", session=session)
    finally:
        engine.dispose()


def publish_async(url: str, schema: str) -> None:
    async def run() -> None:
        engine = create_async_engine(make_url(url).set(drivername="mysql+asyncmy"))
        box = Outbox(engine, broker=RecordingBroker(), schema=schema, sender=NO_SENDER)
        try:
            async with AsyncSession(engine) as session, session.begin():
                box.publish("t", "", session=session)
        finally:
            box.close()
            await engine.dispose()

    asyncio.run(run())


def publish_to_the_second_of_two(url: str, schema: str) -> None:
    """The first schema is the stranger's own; the key's row is in it, and the other one is refused as well."""
    engine = create_engine(url)
    try:
        upgrade(engine, schema=f"{schema}_own", tables=2)
        box = Outbox(engine, broker=RecordingBroker(), schema=[f"{schema}_own", schema], tables=2, sender=NO_SENDER)
        with Session(engine) as session, session.begin():
            box.publish("t", "", key="a" if box.placement.number("a") == 0 else "b", session=session)
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DROP DATABASE {schema}_own"))
        engine.dispose()


def handle(url: str, schema: str) -> None:
    engine = create_engine(url)
    try:
        with Session(engine) as session, session.begin():
            Inbox(engine, schema=schema).handle(session, "m", "group", lambda _session: None, topic="t")
    finally:
        engine.dispose()


def consume(url: str, schema: str) -> None:
    engine = create_engine(url)

    @consumer("orders", group="group", inbox=engine, schema=schema)
    def on_message(_session: Session, _delivery: object) -> None:
        """Has no effect."""

    try:
        on_message.handle(delivery())
    except NotTried as error:
        raise error.__cause__ or error from error
    finally:
        engine.dispose()


def compensate(url: str, schema: str) -> None:
    database = {"url": url, "schemas": [schema]}
    parts = wire(load({"database": database, "broker": {"url": "memory://"}}, file=None), clock=SystemClock())
    try:
        parts.sources[0].poll()
    finally:
        parts.close()


def command(*arguments: str) -> Callable[[str, str], None]:
    def run(url: str, schema: str) -> None:
        outbox(*arguments, "--url", url, "--schema", schema).raise_error()

    return run


USES = [
    pytest.param(publish, id="publish"),
    pytest.param(publish_async, id="publish in an async session"),
    pytest.param(handle, id="inbox"),
    pytest.param(consume, id="consumer"),
    pytest.param(compensate, id="compensator"),
    pytest.param(command("status"), id="status"),
    pytest.param(command("messages", "list"), id="messages"),
    pytest.param(command("db", "upgrade"), id="db upgrade"),
]


@pytest.mark.parametrize("use", [*USES, pytest.param(publish_to_the_second_of_two, id="publish to two schemas")])
def test_a_stranger_is_refused_with_both_names_and_the_cures(two: Two, use: Callable[[str, str], None]) -> None:
    upgrade(two.owner, schema=two.schema, tables=2)

    with pytest.raises(ConfigurationError, match=MINE.format(two.business)) as refused:
        use(two.stranger, two.schema)

    assert THEIRS.format(two.business) in str(refused.value)
    assert f"outbox db upgrade --schema {two.schema} --shared" in str(refused.value)
    assert f"give {two.business}_test a place of its own" in str(refused.value)
    for table in ("message", "message_0000", "message_0001", "inbox"):
        assert two.ask(f"SELECT * FROM {two.schema}.{table}") == []


def test_of_two_that_upgrade_side_by_side_the_second_one_is_refused(two: Two) -> None:
    upgrade(two.owner, schema=two.schema)
    two.ask(f"UPDATE {two.schema}.identity SET owner = NULL")
    engine = create_engine(two.stranger)
    was_faster: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def upgrade_first(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE") and not was_faster:
            was_faster.append(statement)
            upgrade(two.owner, schema=two.schema)

    with pytest.raises(DatabaseUnavailable, match="run this one again"):
        upgrade(engine, schema=two.schema)
    with pytest.raises(ConfigurationError, match=MINE.format(two.business)):
        upgrade(engine, schema=two.schema)
    engine.dispose()

    assert (two.owners(), len(was_faster)) == ([(two.business, 0)], 1)


@pytest.mark.parametrize("use", USES)
def test_the_owner_is_not_refused(two: Two, use: Callable[[str, str], None]) -> None:
    upgrade(two.owner, schema=two.schema)

    use(two.owner, two.schema)


@pytest.mark.parametrize("use", USES)
def test_a_schema_that_is_shared_on_purpose_serves_both(two: Two, use: Callable[[str, str], None]) -> None:
    upgrade(two.owner, schema=two.schema)
    command("db", "upgrade", "--shared")(two.stranger, two.schema)

    use(two.owner, two.schema)
    two.ask(f"DELETE FROM {two.schema}.inbox")
    use(two.stranger, two.schema)

    assert two.owners() == [(two.business, 1)]


def test_sharing_and_the_owner_outlast_a_later_upgrade(two: Two) -> None:
    upgrade(two.owner, schema=two.schema, is_shared=True)
    upgrade(two.owner, schema=two.schema)
    upgrade(two.stranger, schema=two.schema)

    assert two.owners() == [(two.business, 1)]


def test_a_place_of_its_own_is_the_other_cure(two: Two) -> None:
    upgrade(two.owner, schema=two.schema)
    upgrade(two.stranger)
    engine = create_engine(two.stranger)
    with Session(engine) as session, session.begin():
        Outbox(engine, broker=RecordingBroker(), sender=NO_SENDER).publish("t", "", session=session)
    engine.dispose()

    assert two.ask(f"SELECT topic FROM {two.business}_test.outbox_message") == [("t",)]


def test_a_copy_under_another_name_becomes_its_service_s_own(two: Two) -> None:
    """Business and schema were restored elsewhere, the business under another name."""
    upgrade(two.owner, schema=two.schema, is_shared=True)
    command("db", "upgrade", "--owner", f"{two.business}_test")(two.stranger, two.schema)

    publish(two.stranger, two.schema)
    with pytest.raises(ConfigurationError, match=f"belongs to the database {two.business}_test"):
        publish(two.owner, two.schema)
    assert two.owners() == [(f"{two.business}_test", 0)]


@pytest.mark.parametrize("cut", ["UPDATE {0}.identity SET owner = NULL", "DROP TABLE {0}.identity"])
def test_tables_whose_upgrade_was_cut_have_an_owner_from_their_next_upgrade_on(two: Two, cut: str) -> None:
    upgrade(two.owner, schema=two.schema)
    two.ask(cut.format(two.schema))
    two.ask(f"DELETE FROM {two.schema}.outbox_alembic_version")
    publish(two.stranger, two.schema)  # nobody has said yet whose they are

    upgrade(two.owner, schema=two.schema)

    assert two.owners() == [(two.business, 0)]
    with pytest.raises(ConfigurationError, match=MINE.format(two.business)):
        publish(two.stranger, two.schema)


@pytest.mark.parametrize(
    ("options", "recorded"),
    [(["--owner", "shop"], ("shop", 0)), (["--shared"], (None, 1)), (["--owner", "shop", "--shared"], ("shop", 1))],
    ids=["owner", "shared", "both"],
)
def test_an_upgrade_that_is_in_no_database_says_whose_the_schema_is(
    two: Two, options: list[str], recorded: tuple[Any, ...]
) -> None:
    nowhere = make_url(two.owner).set(database="").render_as_string(hide_password=False)
    with pytest.raises(ConfigurationError, match=r"--owner.*--shared"):
        upgrade(nowhere, schema=two.schema)
    assert two.ask(f"SHOW DATABASES LIKE '{two.schema}'") == []

    command("db", "upgrade", *options)(nowhere, two.schema)
    upgrade(nowhere, schema=two.schema)

    assert two.owners() == [recorded]


@pytest.mark.parametrize("use", [compensate, command("status"), command("messages", "list")])
def test_a_compensator_that_is_in_no_database_is_no_stranger(two: Two, use: Callable[[str, str], None]) -> None:
    upgrade(two.owner, schema=two.schema)

    use(make_url(two.owner).set(database="").render_as_string(hide_password=False), two.schema)


@pytest.mark.parametrize("options", [{"owner": "shop"}, {"is_shared": True}], ids=["owner", "shared"])
def test_the_business_s_own_database_has_no_other_owner(two: Two, sqlite: Database, options: dict[str, Any]) -> None:
    for url in (two.owner, sqlite.url):
        with pytest.raises(ConfigurationError, match="nobody else's"):
            upgrade(url, **options)


def test_an_owner_is_asked_for_once_and_in_the_default_place_never(two: Two) -> None:
    upgrade(two.owner, schema=two.schema)
    upgrade(two.owner)
    asked: list[str] = []

    @event.listens_for(Engine, "before_cursor_execute")
    def record(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        asked.extend([statement] if "is_shared" in statement else [])

    engine = create_engine(two.owner)
    try:
        for schema in (two.schema, None):
            box = Outbox(engine, broker=RecordingBroker(), schema=schema, sender=NO_SENDER)
            inbox = Inbox(engine, schema=schema)
            for number in range(3):
                with Session(engine) as session, session.begin():
                    box.publish("t", "", session=session)
                    inbox.handle(session, str(number), "g", lambda _session: None, topic="t")
    finally:
        event.remove(Engine, "before_cursor_execute", record)
        engine.dispose()

    assert len(asked) == 2  # the box and the inbox


@pytest.mark.parametrize(
    ("owner", "business", "is_admitted"),
    [
        (SchemaOwner("shop"), "shop", True),
        (SchemaOwner("shop"), "Shop", False),
        (SchemaOwner("shop", folds_case=True), "Shop", True),
        (SchemaOwner("shop", folds_case=True), "shop_test", False),
        (SchemaOwner("shop", is_shared=True), "shop_test", True),
        (SchemaOwner("shop"), None, True),
        (SchemaOwner(), "shop", True),
    ],
    ids=str,
)
def test_names_are_compared_as_the_server_does(owner: SchemaOwner, business: str | None, is_admitted: bool) -> None:
    assert owner.admits(business) is is_admitted


@pytest.mark.mariadb
def test_a_server_that_folds_case_takes_one_database_by_any_case_for_one() -> None:
    """MariaDB's data folder may be started so; MySQL's has to be made so."""
    with local_server("mariadb", Durability.NONE, "--lower-case-table-names=1") as server:
        server.execute("CREATE DATABASE shop", "CREATE DATABASE shop_test")
        url = make_url(server.url)
        upgrade(url.set(database="shop"), schema="queue")

        publish(url.set(database="SHOP").render_as_string(hide_password=False), "queue")
        with pytest.raises(ConfigurationError, match="belongs to the database shop,"):
            publish(url.set(database="SHOP_TEST").render_as_string(hide_password=False), "queue")
