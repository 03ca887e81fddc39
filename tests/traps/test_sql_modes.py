"""Any sql_mode of a server, on each driver: no value is SQL, none is stored altered, all statements run.

X14 of docs/traps.md.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from compensator.assignment import LeasedAssignment
from compensator.assignment.lease_registry import LeaseRegistry, LeaseStore
from compensator.work.due_tables import DueTables
from outbox import Outbox, Outcome, consumer
from outbox.admin.message_admin import AdminAction, MessageAdmin, MessageSelection
from outbox.admin.source_owners import read_sharing
from outbox.consumers.inbox_table import InboxStore
from outbox.migrate import upgrade
from outbox.store.archive_purge import ArchiveStore
from outbox.store.database import background_engine, error_code
from outbox.store.message_table import RowInsert
from outbox.store.order_table import OrderStore
from outbox.store.row import publish_row
from outbox.store.schema import RowState
from outbox.store.table_placement import MessageTable
from outbox_core import Message
from outbox_core.assignment.even_assignment import Resource
from outbox_core.common.errors import BrokerUnavailable
from tests.fixtures.databases import Database
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop
from tests.outbox.watched_broker import delivery
from tests.traps.passes import compensate, one_pass

INJECTION = "', (SELECT 'mine'), '"
KEYS = [INJECTION, "\\' OR 1=1 -- ", "'", "\\", '"', "it''s", "Zażółć \N{GRINNING FACE} \\' \\\" % %s :x"]
HEADERS = {"quotes": "\"'\\", "who": "Žofie \N{GRINNING FACE}"}
BODY = b"\\'\"\\\\ ' \" \0\x1a\n\r" + bytes(range(256))
BODIES = [BODY, b"", b"'", b"\\", b'{"a": "b\\\\c"}']
DRIVERS = ["pymysql", "asyncmy", "aiomysql"]
HOSTILE_MODES = ["NO_BACKSLASH_ESCAPES", "ANSI_QUOTES,NO_BACKSLASH_ESCAPES", "ANSI"]
ALL_BUT_ORACLE = (
    "REAL_AS_FLOAT,PIPES_AS_CONCAT,ANSI_QUOTES,IGNORE_SPACE,ONLY_FULL_GROUP_BY,NO_UNSIGNED_SUBTRACTION,"
    "NO_DIR_IN_CREATE,NO_AUTO_VALUE_ON_ZERO,NO_BACKSLASH_ESCAPES,STRICT_TRANS_TABLES,STRICT_ALL_TABLES,TRADITIONAL,"
    "HIGH_NOT_PRECEDENCE,NO_ENGINE_SUBSTITUTION,PAD_CHAR_TO_FULL_LENGTH,TIME_TRUNCATE_FRACTIONAL,"
    "IGNORE_BAD_TABLE_OPTIONS,NO_KEY_OPTIONS,NO_TABLE_OPTIONS,NO_FIELD_OPTIONS,EMPTY_STRING_IS_NULL,"
    "SIMULTANEOUS_ASSIGNMENT,TIME_ROUND_FRACTIONAL"
)
"""All that MariaDB 10.11 and MySQL 9 have between them, but for those about dates, which no column of ours has."""
SQL_MODES = ["", "ANSI", "NO_BACKSLASH_ESCAPES", "ORACLE,NO_BACKSLASH_ESCAPES,EMPTY_STRING_IS_NULL", ALL_BUT_ORACLE]
WRONG_VALUE = 1231


@pytest.mark.parametrize("sql_mode", HOSTILE_MODES)
@pytest.mark.parametrize("driver", DRIVERS)
def test_no_key_is_sql_and_no_body_is_altered(
    mysql_shop: Shop, broker: RecordingBroker, driver: str, sql_mode: str
) -> None:
    published = _publish_hostile(mysql_shop, broker, driver=driver, sql_mode=sql_mode)

    written = [(row["message_key"], row["body"], row["body_sha256"]) for row in mysql_shop.rows()]
    compensate(mysql_shop, broker)

    assert written == [(key, body, hashlib.sha256(body).hexdigest()) for key, body in published]
    assert [(one.key, one.body, dict(one.headers)) for one in broker.stored] == [
        (key, body, HEADERS) for key, body in published
    ]


@pytest.mark.parametrize("driver", DRIVERS)
def test_every_value_of_an_insert_is_text_of_hexadecimal_digits_or_a_number(mysql_shop: Shop, driver: str) -> None:
    dialect = create_engine(make_url(mysql_shop.database.url).set(drivername=f"mysql+{driver}")).dialect
    seen: list[object] = []

    class Recorder:
        def exec_driver_sql(self, _statement: str, parameters: Sequence[object]) -> None:
            seen.extend(parameters)

    message = Message(id="m-1", topic="t", body=BODY, key=INJECTION, headers=HEADERS)
    insert: Any = RowInsert(dialect, MessageTable(mysql_shop.database.schema, "message"))
    insert(Recorder(), [publish_row(message)], token="token", lease_us=1, packet_bytes=None)

    assert [one for one in seen if isinstance(one, bytes | bytearray)] == []
    assert not [one for one in seen if isinstance(one, str) and set(one) & set("'\"\\%")]


def test_naive_bytes_that_a_driver_escapes_are_sql_where_backslashes_escape_nothing(mysql_shop: Shop) -> None:
    mysql_shop.execute("CREATE TABLE naive (id INT PRIMARY KEY, body BLOB)")

    async def insert() -> None:
        engine = create_async_engine(
            make_url(mysql_shop.database.url).set(drivername="mysql+asyncmy"),
            connect_args={"init_command": "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'"},
        )
        try:
            async with engine.begin() as connection:
                await connection.exec_driver_sql("INSERT INTO naive VALUES (1, %s)", (b"'), (2, 0x41) -- ",))
        finally:
            await engine.dispose()

    asyncio.run(insert())

    with mysql_shop.engine.connect() as connection:
        assert connection.scalars(text("SELECT id FROM naive ORDER BY id")).all() == [1, 2]


@pytest.mark.parametrize("sql_mode", SQL_MODES)
def test_all_statements_run_under_every_sql_mode_that_the_server_has(mysql_like: Database, sql_mode: str) -> None:
    modes = [mode for mode in sql_mode.split(",") if _has(mysql_like, mode)]

    _journey(mysql_like, ",".join(modes))

    assert len(modes) >= len(sql_mode.split(",")) // 2
    assert ("ORACLE" in modes) == ("ORACLE" in sql_mode and mysql_like.name == "mariadb")


@pytest.mark.parametrize("kind", ["publish", "cancel"])
def test_a_row_whose_body_was_altered_is_set_aside_and_not_sent(shop: Shop, broker: RecordingBroker, kind: str) -> None:
    box = shop.box(broker, sender=NO_SENDER)
    with Session(shop.engine) as session, session.begin():
        box.publish("topic", "as it was", session=session)
        box.cancel("some-id", session=session)
    message = shop.tables.message
    with shop.engine.begin() as connection:
        connection.execute(update(message).where(message.c.kind == kind).values(body=b"another-id"))

    shop.end_leases()
    one_pass(shop, broker, engine=shop.engine)

    [row] = shop.rows()
    assert (row["kind"], row["state"]) == (kind, RowState.PARKED)
    assert "SHA-256" in row["last_error"]
    assert (broker.topics, broker.canceled) == (([], ["some-id"]) if kind == "publish" else (["topic"], []))


def _publish_hostile(shop: Shop, broker: RecordingBroker, *, driver: str, sql_mode: str) -> list[tuple[str, bytes]]:
    """Publish each key and each body by the driver; returns them in their order."""
    pairs = [(key, BODY) for key in KEYS] + [(INJECTION, body) for body in BODIES]
    url = make_url(shop.database.url).set(drivername=f"mysql+{driver}")
    arguments = {"init_command": f"SET SESSION sql_mode = '{sql_mode}'"}
    if driver == "pymysql":
        engine = shop.other_engine(connect_args=arguments)
        box = shop.box(broker, engine=engine, sender=NO_SENDER)
        with Session(engine) as session, session.begin():
            _publish_all(box, pairs, session)
        return pairs

    async def publish() -> None:
        engine = create_async_engine(url, connect_args=arguments)
        box = shop.box(broker, engine=engine, sender=NO_SENDER)
        async with AsyncSession(engine) as session, session.begin():
            _publish_all(box, pairs, session)
        await engine.dispose()

    asyncio.run(publish())
    return pairs


def _publish_all(box: Outbox, pairs: Sequence[tuple[str, bytes]], session: Session | AsyncSession) -> None:
    for key, body in pairs:
        box.publish("topic", body, key=key, headers=HEADERS, session=session)


def _has(database: Database, mode: str) -> bool:
    engine = create_engine(database.url)
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql(f"SET SESSION sql_mode = '{mode}'")
        return True
    except DBAPIError as error:
        if error_code(error) != WRONG_VALUE:
            raise
        return False
    finally:
        engine.dispose()


def _journey(database: Database, mode: str) -> None:
    """A message's life, and all that is done beside it, on connections in this mode from the first to the last."""
    engine = create_engine(database.url, connect_args={"init_command": f"SET SESSION sql_mode = '{mode}'"})
    shop = Shop(database, engine)
    try:
        upgrade(engine, schema=database.schema)
        upgrade(engine, schema=database.schema, tables=2)
        Payment.metadata.create_all(engine)
        _produce_and_compensate(shop, engine)
        _consume(shop, engine)
        _look_after(shop, engine)
    finally:
        shop.close()
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DROP DATABASE IF EXISTS `{database.schema}`")
            Payment.metadata.drop_all(connection)
        engine.dispose()


def _produce_and_compensate(shop: Shop, engine: Engine) -> None:
    broker = RecordingBroker()
    box = shop.box(broker, engine=engine, sender=NO_SENDER, ordered=["ordered"])
    with Session(engine) as session, session.begin():
        session.add(Payment(id=1, note="-"))
        box.publish("topic", BODY, key=INJECTION, headers=HEADERS, session=session)
        box.publish("topic", b"", session=session)
        box.publish("ordered", b"1", key="k", session=session)
        later = box.publish("ordered", b"2", key="k", session=session)
        box.cancel(later.id, session=session)
    broker.rule = _out
    shop.end_leases()
    one_pass(shop, broker, engine=engine)
    assert len(shop.rows()) == 5
    broker.rule = None
    with background_engine(engine).connect() as connection, connection.begin():
        _park_and_retry(shop, connection)
    shop.end_leases()
    one_pass(shop, broker, engine=engine)
    one_pass(shop, broker, engine=engine)
    assert sorted(one.body for one in broker.stored) == sorted([BODY, b"", b"1", b"2"])
    assert shop.rows() == []


def _park_and_retry(shop: Shop, connection: Connection) -> None:
    admin = MessageAdmin(dialect=connection.dialect, schema=shop.database.schema)
    ids = admin.ids(connection, MessageSelection(topic="topic"), action=AdminAction.PARK, limit=10)
    assert admin.park(connection, ids) == 2
    shown = [admin.show(connection, one, body_bytes_max=1_000) for one in ids]
    assert sorted(found[1].body for found in shown if found) == sorted([BODY, b""])
    assert len(admin.rows(connection, MessageSelection(state=RowState.PARKED, key=INJECTION), limit=10)) == 1
    assert admin.retry(connection, ids) == 2


def _consume(shop: Shop, engine: Engine) -> None:
    @consumer("orders", group="payments", inbox=engine, schema=shop.database.schema)
    def pay(session: Session, _one: object) -> None:
        session.add(Payment(id=2, note="-"))

    assert [pay.handle(delivery()) for _ in range(2)] == [Outcome.HANDLED, Outcome.DEDUPLICATED]
    assert shop.payments() == [1, 2]


def _look_after(shop: Shop, engine: Engine) -> None:
    """What compensators do beside sending: looks, leases, retention."""
    background, schema = background_engine(engine), shop.database.schema
    dialect = engine.dialect
    with background.connect() as connection, connection.begin():
        DueTables(dialect=dialect, schema=schema, tables=["message", "message_0001"]).poll(connection)
        DueTables(dialect=dialect, schema=schema, tables=["message"]).count(connection, rows_max=10)
        assert ArchiveStore(dialect=dialect, schema=schema).purge(connection, older_than_us=-(10**9), limit=100) == 5
        assert InboxStore(dialect=dialect, schema=schema).purge(connection, older_than_us=-(10**9), limit=100) == 1
        heads = OrderStore(dialect=dialect, schema=schema).purge_heads
        assert heads(connection, idle_us=-(10**9), after="", limit=10) == (1, None)
    leases = LeasedAssignment(LeaseRegistry(engine=background, store=LeaseStore(dialect=dialect, schema=schema)))
    assert leases.beat([Resource("one", None)]) == {"one"}
    with background.connect() as connection:
        sharing = read_sharing(connection, dialect=dialect, schema=schema)
    assert sharing is not None
    assert [one.sources for one in sharing.instances] == [1]
    leases.leave()
    background.dispose()


def _out(_batch: Sequence[Message]) -> None:
    raise BrokerUnavailable("the broker is out")
