"""The grants of docs/guides/databases.md are enough for each role, and none of them can do another's work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, select
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from compensator.retention.retention import Retention, RetentionOptions
from outbox.consumers.inbox_table import InboxStore
from outbox.migrate import schema_upgrade
from outbox.store.archive_purge import ArchiveStore
from outbox.store.database import database_errors
from outbox.store.order_table import OrderStore
from outbox_core.common.errors import ConfigurationError
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, NO_SENDER, Payment, Shop
from tests.traps.naive import run
from tests.traps.passes import one_pass

GRANTS = "grants on the outbox's schema: SELECT, INSERT"
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "databases.md"
ROLES = ("app", "compensator", "reconciliation", "migrate")


class Users:
    """The roles of the guide, as users of one test's server."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._suffix = f"_{str(shop.database.schema).rpartition('_')[2]}"

    def create(self) -> None:
        """Run the guide's statements, on this test's schemas and with names of its own."""
        business = str(self._shop.engine.url.database)
        for statement in self._statements():
            named = re.sub(rf"\b({'|'.join(ROLES)});?$", rf"\1{self._suffix}", statement)
            self._shop.execute(
                named.replace(" shop.", f" {business}.").replace(" outbox.", f" {self._shop.database.schema}.")
            )

    def drop(self) -> None:
        """All of them."""
        for role in ROLES:
            self._shop.execute(f"DROP USER IF EXISTS {role}{self._suffix}")

    def engine(self, role: str) -> Engine:
        """An engine of this role, on the schema that it may see; disposed of with the shop."""
        database = {"compensator": str(self._shop.database.schema), "migrate": ""}.get(role)
        url = make_url(self._shop.database.url).set(username=f"{role}{self._suffix}", database=database)
        engine = create_engine(url)
        self._shop.closing.callback(engine.dispose)
        return engine

    @staticmethod
    def _statements() -> list[str]:
        [block] = re.findall(r"```sql\n(.*?)```", GUIDE.read_text(), re.DOTALL)
        lines = [line for line in block.splitlines() if line and not line.startswith("--")]
        return [line.rstrip(";") for line in lines]


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


def test_reconciliation_reads_both_schemas_and_writes_none(mysql_shop: Shop, users: Users) -> None:
    engine = users.engine("reconciliation")

    with engine.connect() as connection:
        connection.execute(select(mysql_shop.tables.message)).all()
        connection.execute(select(mysql_shop.tables.archive)).all()
        run(connection, "SELECT * FROM payment")
        with (
            pytest.raises(ConfigurationError, match=GRANTS),
            database_errors(engine.url),
        ):
            run(connection, f"DELETE FROM {mysql_shop.database.schema}.message")


def test_migrate_makes_the_tables_and_sees_no_business_table(mysql_shop: Shop, users: Users) -> None:
    mysql_shop.execute(f"DROP DATABASE {mysql_shop.database.schema}")

    reached = schema_upgrade.upgrade(users.engine("migrate").url, schema=mysql_shop.database.schema)

    assert reached == schema_upgrade.head()
    assert mysql_shop.rows() == []


@pytest.mark.parametrize("role", ["app", "compensator", "reconciliation"])
def test_nobody_but_migrate_makes_tables(users: Users, mysql_shop: Shop, role: str) -> None:
    engine = users.engine(role)
    mysql_shop.execute(f"DROP TABLE {mysql_shop.database.schema}.message")

    with pytest.raises(ConfigurationError, match=GRANTS):
        schema_upgrade.upgrade(engine.url, schema=mysql_shop.database.schema)
