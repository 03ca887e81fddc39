"""Where the outbox's tables are: in the business's own database by default, in every statement by its name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pymysql
import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.orm import Session

from compensator.core.config import load
from compensator.entry.composition import wire
from compensator.work.claim_and_relay import TableScan
from outbox import Inbox, Outbox
from outbox.migrate import upgrade
from outbox_core import SystemClock
from outbox_core.common.errors import ConfigurationError
from spark_reconcile.sources.dbapi_reader import DatabaseAddress, reading
from spark_reconcile.sources.sql_statements import outbox_statements
from tests.fixtures.command_line import outbox
from tests.fixtures.databases import Database
from tests.fixtures.local_server import LocalServer
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, NO_SENDER, Payment, Shop, open_shop

OURS = (
    "message(?:_[0-9]{4})?", "archive", "inbox", "order_head", "order_queue", "compensator_instance",
    "compensator_lease", "alembic_version",
)  # fmt: skip
NAME = re.compile(rf"(?<![\w.`])`?outbox_(?:{'|'.join(OURS)})\b")
"""One of our tables without the database that has it; an index's name has a prefix before ours."""
NO_PLACE = "put the business's database into the URL"


@pytest.fixture
def own_database(mysql_like: Database) -> Database:
    """A database on whose server no schema is named for the outbox."""
    return dataclasses.replace(mysql_like, schema=None)


@pytest.fixture
def own_shop(own_database: Database) -> Iterator[Shop]:
    """A shop with the outbox's tables among its own."""
    upgrade(own_database.url, tables=4)
    with open_shop(own_database) as shop:
        yield shop


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """What any engine of this process sends during the test."""
    sent: list[str] = []

    def record(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    event.listen(Engine, "before_cursor_execute", record)
    yield sent
    event.remove(Engine, "before_cursor_execute", record)


def tables_of(database: Database) -> list[str]:
    engine = create_engine(database.url)
    with engine.connect() as connection:
        listed = text("SELECT table_name FROM information_schema.tables WHERE table_schema = :name")
        found = sorted(connection.scalars(listed, {"name": database.business}))
    engine.dispose()
    return found


def pay(box: Outbox, engine: Engine, payment: int) -> None:
    with Session(engine) as session, session.begin():
        session.add(Payment(id=payment))
        box.publish("paid", str(payment), key=str(payment), session=session)


# -- the default -------------------------------------------------------------------------------------------------------


def test_by_default_the_tables_are_made_among_the_business_s_own(own_database: Database) -> None:
    upgrade(own_database.url, tables=2)

    found = tables_of(own_database)
    assert {"outbox_message", "outbox_message_0000", "outbox_message_0001", "outbox_archive", "outbox_inbox"} <= {
        *found
    }
    assert [name for name in found if not name.startswith("outbox_")] == []


def test_no_statement_of_ours_leaves_the_database_to_the_connection(statements: list[str], own_shop: Shop) -> None:
    engine, url = own_shop.engine, own_shop.database.url
    sent = RecordingBroker()
    with Outbox(engine, broker=sent, sender=BUSY_LIMITS, tables=4, ordered={"ordered"}) as box:
        for payment in range(4):
            pay(box, engine, payment)
        with box.begin() as connection:
            box.publish("ordered", "1", key="k", session=connection)
    left = Outbox(engine, broker=sent, sender=NO_SENDER)
    pay(left, engine, 9)
    left.close()
    with Session(engine) as session, session.begin():
        Inbox(engine).handle(session, "m-1", "group", lambda _session: None, topic="paid")
    own_shop.end_leases()
    config = load(
        {"database": {"url": url}, "broker": {"url": "memory://"}, "compensator": {"leases": True}}, file=None
    )
    parts = wire(config, clock=SystemClock())
    parts.assignment.beat([source.source_name for source in parts.sources])
    [source] = parts.sources
    source.counts()
    batch = source.batches.claim([TableScan(due.table) for due in source.poll().due], rows_max=10)
    source.batches.release(batch, error=None)
    assert source.retention is not None
    source.retention.run()
    parts.close()
    for command in (["list"], ["show", "m-1"], ["park", "--all", "--yes"], ["discard", "--all", "--yes"]):
        outbox("messages", *command, "--url", url)
    outbox("status", "--url", url)
    upgrade(url, tables=4)

    assert len(batch.rows) == 1
    assert len(sent.stored) == 5
    ours = [statement for statement in statements if "outbox_" in statement]
    assert len(ours) > 40
    assert [statement for statement in ours if NAME.search(statement)] == []


def test_two_databases_of_one_server_have_an_outbox_each(mysql_like: Database, own_shop: Shop) -> None:
    other_url = make_url(own_shop.database.url).set(database=f"{own_shop.database.business}_test")
    own_shop.execute(f"CREATE DATABASE {other_url.database}")
    try:
        upgrade(other_url)
        other = create_engine(other_url)
        with other.begin() as connection:
            connection.execute(text("CREATE TABLE payment (id INT PRIMARY KEY, note VARCHAR(64))"))
        pay(Outbox(other, broker=RecordingBroker(), sender=NO_SENDER), other, 1)
        other.dispose()

        assert own_shop.rows() == []
        own_shop.end_leases()
        assert own_shop.scan(broker := RecordingBroker()).run().accepted == 0
        assert broker.stored == []
    finally:
        own_shop.execute(f"DROP DATABASE {other_url.database}")


# -- a connection says which database it is in, and a URL may not ------------------------------------------------------


def by_creator(url: URL, _folder: Path) -> Engine:
    def connect() -> Any:
        return pymysql.connect(
            host=url.host, port=url.port or 3306, user=url.username, password=url.password or "", database=url.database
        )

    return create_engine("mysql+pymysql://", creator=connect)


def by_arguments(url: URL, _folder: Path) -> Engine:
    return create_engine(url.set(database=None), connect_args={"database": url.database})


def by_arguments_against_the_url(url: URL, _folder: Path) -> Engine:
    return create_engine(url.set(database="mysql"), connect_args={"database": url.database})


def by_file(url: URL, folder: Path) -> Engine:
    file = folder / "client.cnf"
    file.write_text(
        f"[client]\nhost={url.host}\nport={url.port}\nuser={url.username}\npassword={url.password or ''}\n"
        f"database={url.database}\n"
    )
    return create_engine("mysql+pymysql://", connect_args={"read_default_file": str(file)})


def by_listener(url: URL, _folder: Path) -> Engine:
    engine = create_engine(url.set(database=None))

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: Any, _record: Any, _arguments: Any, options: dict[str, Any]) -> None:
        options["database"] = url.database

    return engine


def by_init_command(url: URL, _folder: Path) -> Engine:
    return create_engine(url.set(database=None), connect_args={"init_command": f"USE {url.database}"})


@pytest.mark.parametrize(
    "connect",
    [by_creator, by_arguments, by_arguments_against_the_url, by_file, by_listener, by_init_command],
)
def test_the_place_is_the_database_that_the_engine_s_connections_are_in(
    own_shop: Shop, tmp_path: Path, connect: Callable[[URL, Path], Engine]
) -> None:
    engine = connect(make_url(own_shop.database.url), tmp_path)
    broker = RecordingBroker()
    with Outbox(engine, broker=broker, sender=BUSY_LIMITS) as box:
        pay(box, engine, 1)
    upgrade(engine)
    with Session(engine) as session, session.begin():
        Inbox(engine).handle(session, "m-1", "group", lambda _session: None, topic="paid")
    engine.dispose()

    assert [message.body for message in broker.stored] == [b"1"]
    assert own_shop.archived() == 1


def test_a_connection_that_was_moved_to_another_database_does_not_move_the_tables(own_shop: Shop) -> None:
    engine = own_shop.other_engine(pool_size=1, max_overflow=0)
    box = own_shop.box(RecordingBroker(), engine=engine, sender=NO_SENDER)
    with Session(engine) as session, session.begin():
        session.execute(text("USE information_schema"))
        box.publish("paid", "", session=session)

    assert own_shop.row_topics() == ["paid"]


def test_the_place_is_that_of_the_outbox_s_engine_where_the_session_has_another(own_shop: Shop) -> None:
    elsewhere = create_engine(make_url(own_shop.database.url).set(database="information_schema"))
    box = Outbox(own_shop.other_engine(), broker=RecordingBroker(), sender=NO_SENDER)
    inbox = Inbox(own_shop.other_engine())
    with Session(elsewhere) as session, session.begin():
        box.publish("paid", "", session=session)
        inbox.handle(session, "m-1", "group", lambda _session: None, topic="paid")
    elsewhere.dispose()

    assert own_shop.row_topics() == ["paid"]
    with own_shop.engine.connect() as connection:
        assert len(connection.execute(own_shop.tables.inbox.select()).all()) == 1


def test_the_business_s_database_may_be_named(own_shop: Shop) -> None:
    box = own_shop.box(RecordingBroker(), schema=own_shop.database.business, tables=4, sender=NO_SENDER)
    pay(box, own_shop.engine, 1)
    config = load(
        {"database": {"url": own_shop.database.url, "schemas": [own_shop.database.business]},
         "broker": {"url": "memory://"}},
        file=None,
    )  # fmt: skip
    parts = wire(config, clock=SystemClock())

    assert len(parts.sources[0].poll().due) == 1
    parts.close()


# -- no place ----------------------------------------------------------------------------------------------------------


def publish_without(url: URL) -> None:
    engine = create_engine(url)
    with Session(engine) as session, session.begin():
        Outbox(engine, broker=RecordingBroker()).publish("paid", "", session=session)


def handle_without(url: URL) -> None:
    engine = create_engine(url)
    with Session(engine) as session, session.begin():
        Inbox(engine).handle(session, "m-1", "group", lambda _session: None, topic="paid")


def compensate_without(url: URL) -> None:
    config = load({"database": {"url": shown(url)}, "broker": {"url": "memory://"}}, file=None)
    parts = wire(config, clock=SystemClock())
    try:
        parts.sources[0].poll()
    finally:
        parts.close()


def prove_without(url: URL) -> None:
    with reading(DatabaseAddress.of(shown(url))) as reader:
        outbox_statements(reader, schema=reader.address.schema_of(None))


def lease_without(url: URL) -> None:
    options = {"database": {"url": shown(url)}, "broker": {"url": "memory://"}, "compensator": {"leases": True}}
    parts = wire(load(options, file=None), clock=SystemClock())
    try:
        parts.assignment.beat([])
    finally:
        parts.close()


def invoke(*arguments: str) -> Callable[[URL], None]:
    def run(url: URL) -> None:
        outbox(*arguments, "--url", shown(url)).raise_error()

    return run


def shown(url: URL) -> str:
    return url.render_as_string(hide_password=False)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(publish_without, id="publish"),
        pytest.param(handle_without, id="inbox"),
        pytest.param(compensate_without, id="compensator"),
        pytest.param(lease_without, id="leases"),
        pytest.param(invoke("db", "upgrade"), id="db upgrade"),
        pytest.param(invoke("db", "current"), id="db current"),
        pytest.param(invoke("status"), id="status"),
        pytest.param(invoke("messages", "list"), id="messages"),
        pytest.param(lambda url: DatabaseAddress.of(shown(url)).schema_of(None), id="proof"),
    ],
)
def test_without_a_database_and_a_schema_everything_is_refused_with_the_cure(
    mysql_like: Database, use: Callable[[URL], None]
) -> None:
    with pytest.raises(ConfigurationError, match=NO_PLACE):
        use(make_url(mysql_like.url).set(database=""))


# -- tables that may be elsewhere, or are not ours ---------------------------------------------------------------------


@pytest.fixture
def once_default(mysql_like_of_module: LocalServer) -> Iterator[Database]:
    """A database without tables of ours, on a server whose schema `outbox` has some."""
    with mysql_like_of_module.fresh_database() as fresh:
        upgrade(fresh.url, schema="outbox", owner=fresh.business)  # the server keeps it from test to test
        yield dataclasses.replace(fresh, schema=None)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(publish_without, id="publish"),
        pytest.param(handle_without, id="inbox"),
        pytest.param(compensate_without, id="compensator"),
        pytest.param(invoke("db", "upgrade"), id="db upgrade"),
        pytest.param(invoke("status"), id="status"),
        pytest.param(invoke("messages", "list"), id="messages"),
        pytest.param(prove_without, id="proof"),
    ],
)
def test_where_a_schema_outbox_may_have_unsent_rows_everything_is_refused_with_both_cures(
    once_default: Database, use: Callable[[URL], None]
) -> None:
    with pytest.raises(ConfigurationError, match='schema="outbox"') as refused:
        use(make_url(once_default.url))

    assert f'schema="{once_default.business}"' in str(refused.value)
    assert tables_of(once_default) == []


def test_each_of_both_cures_works(once_default: Database) -> None:
    upgrade(once_default.url, schema="outbox")
    assert tables_of(once_default) == []

    upgrade(once_default.url, schema=once_default.business)
    upgrade(once_default.url)
    assert "outbox_message" in tables_of(once_default)


@pytest.mark.parametrize("name", ["outbox_message", "outbox_inbox", "outbox_identity", "outbox_message_0001"])
def test_an_upgrade_refuses_a_table_of_the_business_s_before_it_changes_anything(
    own_database: Database, name: str
) -> None:
    engine = create_engine(own_database.url)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE {name} (id INT PRIMARY KEY, note VARCHAR(20))"))
    engine.dispose()

    with pytest.raises(ConfigurationError, match=rf"{own_database.business}\.{name} has a name of the outbox's"):
        upgrade(own_database.url, tables=2)

    assert tables_of(own_database) == [name]


@pytest.mark.parametrize(
    "use",
    [pytest.param(invoke("db", "upgrade"), id="db upgrade"), pytest.param(compensate_without, id="compensator")],
)
def test_a_url_that_leads_into_a_schema_of_outbox_tables_is_refused_with_the_cure(
    mysql_like: Database, use: Callable[[URL], None]
) -> None:
    upgrade(mysql_like.url, schema=mysql_like.schema)

    with pytest.raises(ConfigurationError, match=f"--schema {mysql_like.schema}"):
        use(make_url(mysql_like.url).set(database=mysql_like.schema))

    assert "outbox_message" not in tables_of(dataclasses.replace(mysql_like, url=f"{mysql_like.url}"))
