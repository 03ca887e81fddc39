"""What `outbox db grants` prints is enough for each role, and none of them can do another's work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import Engine, create_engine, delete, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from compensator.retention.retention import Retention, RetentionOptions
from outbox.consumers.inbox_table import InboxStore
from outbox.migrate import schema_upgrade
from outbox.store.archive_purge import ArchiveStore
from outbox.store.database import database_errors
from outbox.store.order_table import OrderStore
from outbox_core.common.errors import ConfigurationError
from outbox_core.common.table_namespace import VERSION_TABLE
from tests.fixtures.databases import Database
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, NO_SENDER, Payment, Shop, open_shop
from tests.traps.naive import run
from tests.traps.passes import one_pass

GRANTS = "grants on the outbox's schema: SELECT, INSERT"
ROLES = ("app", "compensator", "reconciliation", "migrate")


class Users:
    """The roles as users of one test's server, each with the grants that the command prints and no others."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._suffix = f"_{str(shop.engine.url.database).rpartition('_')[2]}"

    def create(self) -> None:
        """Run what `outbox db grants` prints for each of them."""
        for role in ROLES:
            user = f"{role}{self._suffix}"
            printed = self._shop.command("db", "grants", "--role", role, "--user", user).stdout
            with self._shop.engine.begin() as connection:
                for statement in [f"CREATE USER {user}", *printed.splitlines()]:
                    connection.exec_driver_sql(statement.rstrip(";").replace("%", "%%"))

    def drop(self) -> None:
        """All of them."""
        for role in ROLES:
            self._shop.execute(f"DROP USER IF EXISTS {role}{self._suffix}")

    def engine(self, role: str) -> Engine:
        """An engine of this role, in the database that it may see; disposed of with the shop."""
        hidden = self._shop.database.schema is not None and role != "app"
        url = make_url(self._shop.database.url).set(username=f"{role}{self._suffix}")
        engine = create_engine(url.set(database="") if hidden else url)
        self._shop.closing.callback(engine.dispose)
        return engine


@pytest.fixture(params=["of its own", "the business's"])
def mysql_shop(request: pytest.FixtureRequest, mysql_like: Database) -> Iterator[Shop]:
    """A shop whose outbox is in a schema of its own, and one where it is in the business's database."""
    database = mysql_like if request.param == "of its own" else replace(mysql_like, schema=None)
    schema_upgrade.upgrade(database.url, schema=database.schema)
    with open_shop(database) as shop:
        yield shop


@pytest.fixture
def users(mysql_shop: Shop) -> Iterator[Users]:
    """Made, and dropped at the end."""
    made = Users(mysql_shop)
    try:
        made.create()
        yield made
    finally:
        made.drop()


def test_the_app_publishes_settles_and_handles_with_its_grants(
    mysql_shop: Shop, users: Users, broker: RecordingBroker
) -> None:
    engine = users.engine("app")
    box = mysql_shop.box(broker, engine=engine, sender=BUSY_LIMITS, ordered={"ordered"})
    inbox = InboxStore(dialect=engine.dialect, schema=mysql_shop.database.schema)

    with Session(engine) as session, session.begin():
        session.add(Payment(id=1))
        box.publish("topic", "", session=session)
        box.publish("ordered", "", key="k", session=session)
        inbox.mark(session.connection(), group="group", message_id="1", topic="topic")
    assert box.close(timeout_ms=120_000)

    assert len(broker.ids) == 2
    assert mysql_shop.rows() == []
    assert mysql_shop.archived() == 2


def test_the_compensator_sends_and_purges_with_its_grants(
    mysql_shop: Shop, users: Users, broker: RecordingBroker
) -> None:
    box = mysql_shop.box(broker, engine=users.engine("app"), ordered={"ordered"}, sender=NO_SENDER)
    with Session(box.engine) as session, session.begin():
        box.publish("topic", "", session=session)
        box.publish("ordered", "", key="k", session=session)
    mysql_shop.end_leases()
    engine = users.engine("compensator")

    one_pass(mysql_shop, broker, engine=engine)
    Retention(
        engine=engine,
        archive=ArchiveStore(dialect=engine.dialect, schema=mysql_shop.database.schema),
        inbox=InboxStore(dialect=engine.dialect, schema=mysql_shop.database.schema),
        order=OrderStore(dialect=engine.dialect, schema=mysql_shop.database.schema),
        options=RetentionOptions(archive_days=-1.0, inbox_days=-1.0),
    ).run()

    assert len(broker.ids) == 2
    assert mysql_shop.archived() == 0


def test_reconciliation_reads_the_outbox_and_writes_nothing(mysql_shop: Shop, users: Users) -> None:
    engine = users.engine("reconciliation")

    with engine.connect() as connection:
        connection.execute(select(mysql_shop.tables.message)).all()
        connection.execute(select(mysql_shop.tables.archive)).all()
        with (
            pytest.raises(ConfigurationError, match=GRANTS),
            database_errors(engine.url),
        ):
            connection.execute(delete(mysql_shop.tables.message))


def test_migrate_makes_the_tables_and_sees_no_business_table(mysql_shop: Shop, users: Users) -> None:
    with mysql_shop.engine.begin() as connection:
        mysql_shop.tables.metadata.drop_all(connection)
        connection.execute(text(f"DROP TABLE {mysql_shop.tables.metadata.schema}.{VERSION_TABLE}"))

    named = mysql_shop.database.schema is not None
    owner = mysql_shop.database.business if named else None  # of a schema that has none yet, and sees no database else
    reached = schema_upgrade.upgrade(users.engine("migrate").url, schema=mysql_shop.database.schema, owner=owner)

    assert reached == schema_upgrade.head()
    assert mysql_shop.rows() == []


@pytest.mark.parametrize("role", ["compensator", "reconciliation", "migrate"])
def test_nobody_but_the_app_sees_business_tables(users: Users, mysql_shop: Shop, role: str) -> None:
    engine = users.engine(role)

    with pytest.raises(DBAPIError, match="denied"), engine.connect() as connection:
        run(connection, f"SELECT * FROM {mysql_shop.database.business}.payment")


@pytest.mark.parametrize("role", ["app", "compensator", "reconciliation"])
def test_nobody_but_migrate_makes_tables(users: Users, mysql_shop: Shop, role: str) -> None:
    engine = users.engine(role)
    with mysql_shop.engine.begin() as connection:
        mysql_shop.tables.message.drop(connection)
        connection.execute(text(f"DROP TABLE {mysql_shop.tables.metadata.schema}.{VERSION_TABLE}"))

    with pytest.raises(ConfigurationError, match=GRANTS):
        schema_upgrade.upgrade(engine.url, schema=mysql_shop.database.schema)
