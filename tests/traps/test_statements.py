"""Every statement that the outbox and the compensator send is one that MySQL 5.7 knows. Recorded on the wire."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from outbox.admin.message_admin import MessageAdmin, MessageSelection
from outbox.consumers.inbox_table import InboxStore
from outbox.migrate import schema_upgrade
from outbox.store.archive_purge import ArchiveStore
from outbox.store.database import background_engine
from outbox.store.order_table import OrderStore
from outbox.store.schema import RowState, message_table_names
from tests.fixtures.cutting_proxy import CuttingProxy, cutting_proxy
from tests.fixtures.databases import Database
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, NO_SENDER, Base, Payment, Shop
from tests.traps.passes import one_pass

NEWER_THAN_5_7 = {
    "SKIP LOCKED": r"\bSKIP\s+LOCKED\b",
    "NOWAIT": r"\bNOWAIT\b",
    "FOR SHARE": r"\bFOR\s+SHARE\b",
    "RETURNING": r"\bRETURNING\b",
    "common table expression": r"\bWITH\s+(RECURSIVE\s+)?\w+\s*(\([^)]*\))?\s+AS\s*\(",
    "window function": r"\bOVER\s*\(|\bROW_NUMBER\b|\bLAG\s*\(|\bRANK\s*\(",
    "LATERAL": r"\bLATERAL\b",
    "INTERSECT or EXCEPT": r"\bINTERSECT\b|\bEXCEPT\b",
    "VALUES ROW": r"\bVALUES\s+ROW\b|\bTABLE\s+\w+\s*$",
    "row alias": r"\bAS\s+new\b.*\bON\s+DUPLICATE\b",
    "JSON_TABLE": r"\bJSON_TABLE\b|\bJSON_VALUE\b|\bMEMBER\s+OF\b",
    "REGEXP_LIKE": r"\bREGEXP_(LIKE|REPLACE|INSTR|SUBSTR)\b",
    "IF NOT EXISTS of a column or index": r"\b(COLUMN|INDEX)\s+IF\s+(NOT\s+)?EXISTS\b",
    "RENAME COLUMN or INDEX VISIBILITY": r"\bRENAME\s+COLUMN\b|\bINVISIBLE\b",
    "default expression or CHECK": r"\bDEFAULT\s+\(|\bCHECK\s*\(",
    "ALGORITHM=INSTANT": r"\bALGORITHM\s*=\s*INSTANT\b",
    "collation of 8.0": r"_0900_",
    "functions of 8.0": r"\bUUID_TO_BIN\b|\bBIN_TO_UUID\b|\bANY_VALUE\b|\bGROUPING\s*\(",
    "optimizer hint of 8.0": r"/\*\+",
    "stored session variables": r"\bSET_VAR\b|\bSET\s+PERSIST\b",
}
KEYED = re.compile(r"WHERE \(*(\w+\.)*(id|number|sent_at_us|order_key|consumer_group) (IN|=) ")
LOCKING_READ = re.compile(r"\bFOR\s+UPDATE\b|\bLOCK\s+IN\s+SHARE\b", re.IGNORECASE)


def newer(statement: str) -> list[str]:
    """What of a statement MySQL 5.7 would not know."""
    return [name for name, pattern in NEWER_THAN_5_7.items() if re.search(pattern, statement, re.IGNORECASE)]


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("SELECT id FROM m ORDER BY due LIMIT 1 FOR UPDATE SKIP LOCKED", "SKIP LOCKED"),
        ("DELETE FROM m WHERE id = 1 RETURNING id", "RETURNING"),
        ("WITH due AS (SELECT 1) SELECT * FROM due", "common table expression"),
        ("SELECT ROW_NUMBER() OVER (PARTITION BY k) FROM m", "window function"),
        ("INSERT INTO h VALUES (1) AS new ON DUPLICATE KEY UPDATE a = new.a", "row alias"),
        ("ALTER TABLE m ADD COLUMN IF NOT EXISTS a INT", "IF NOT EXISTS of a column or index"),
    ],
)
def test_the_list_finds_what_is_newer(statement: str, name: str) -> None:
    assert newer(statement) == [name]


def say_that_it_is_5_7(connection: Any, _record: object) -> None:
    """Let the server answer so where the dialect asks it, and in nothing else."""
    query = connection.query

    def ask(statement: str | bytes | bytearray, *more: Any) -> Any:
        asks = bytes(statement, "utf-8") if isinstance(statement, str) else bytes(statement)
        return query("SELECT '5.7.44'" if asks == b"SELECT VERSION()" else statement, *more)

    connection.query = ask


@pytest.fixture
def recorder(mysql: Database) -> Iterator[tuple[CuttingProxy, Engine]]:
    """A real MySQL whose dialect is told that it is 5.7, and all that is said to it."""
    with cutting_proxy(mysql.url) as proxy:
        engine = proxy.engine()
        # Before the dialect's own listener, which asks the first connection for the version.
        event.listen(engine, "connect", say_that_it_is_5_7, insert=True)
        with engine.connect():
            pass
        assert engine.dialect.server_version_info == (5, 7, 44)
        proxy.arm(None)
        yield proxy, engine
        engine.dispose()


def test_everything_that_is_sent_is_known_to_mysql_5_7(
    recorder: tuple[CuttingProxy, Engine], mysql: Database, broker: RecordingBroker
) -> None:
    proxy, engine = recorder

    use_everything(engine, mysql, broker)

    statements = [one for one in proxy.statements if not one.startswith("SET GLOBAL")]
    kinds = {one.split()[0].upper() for one in statements}
    assert {"SELECT", "INSERT", "UPDATE", "DELETE", "COMMIT", "CREATE"} <= kinds
    assert [(one, found) for one in statements if (found := newer(one))] == []
    assert [one for one in statements if LOCKING_READ.search(one)] == [], "a locking read of a range locks gaps"


def test_every_delete_and_update_of_rows_names_them_by_their_key(
    recorder: tuple[CuttingProxy, Engine], mysql: Database, broker: RecordingBroker
) -> None:
    proxy, engine = recorder

    use_everything(engine, mysql, broker)

    writes = [
        one
        for one in proxy.statements
        if one.startswith(("UPDATE", "DELETE")) and str(mysql.schema) in one and "alembic_version" not in one
    ]
    assert len(writes) > 8
    ours = [one for one in writes if not one.endswith("SET due_at_us=1")]  # the test's own: the leases are over
    assert [one for one in ours if not KEYED.search(one)] == []


def use_everything(engine: Engine, database: Database, broker: RecordingBroker) -> None:
    """All that the SDK and the compensator do with a database, once."""
    schema_upgrade.upgrade(engine, schema=database.schema)
    Base.metadata.create_all(engine)
    shop = Shop(database, engine)
    with contextlib.closing(shop):
        publish(shop, broker)
        shop.end_leases()
        compensate(shop, broker)
        operate(shop)


def publish(shop: Shop, broker: RecordingBroker) -> None:
    """Ordered and unordered messages, a cancel, settled by the sender."""
    broker.rejects["never"] = "refused"
    box = shop.box(broker, sender=BUSY_LIMITS, ordered={"ordered"})
    for turn in range(2):
        with Session(shop.engine) as session, session.begin():
            session.add(Payment(id=turn))
            box.publish("topic", "a" * turn, key="k", headers={"a": "b"}, session=session)
            box.publish("topic", "", message_id=f"never-{turn}" if turn else "never", session=session)
            box.publish("ordered", "", key="k", session=session)
            box.publish("ordered", "", key="other", session=session)
            box.cancel("topic", session=session)
    assert box.close(timeout_ms=120_000)
    later = shop.box(broker, sender=NO_SENDER, ordered={"ordered"})
    for number in range(10, 13):
        with Session(shop.engine) as session, session.begin():
            session.add(Payment(id=number))
            later.publish("ordered", "", key="k", session=session)
            later.publish("topic", "", session=session)


def compensate(shop: Shop, broker: RecordingBroker) -> None:
    """A pass, its figures, and retention."""
    one_pass(shop, broker, engine=shop.engine, batch_rows=2)
    background = background_engine(shop.engine)
    dialect, schema = shop.engine.dialect, shop.database.schema
    inbox = InboxStore(dialect=dialect, schema=schema)
    with background.begin() as connection:
        for _ in range(2):
            inbox.mark(connection, group="group", message_id="1", topic="topic")
        inbox.handled(connection, group="group", message_id="1", topic="topic")
    with background.begin() as connection:
        ArchiveStore(dialect=dialect, schema=schema).purge(connection, older_than_us=-3_600_000_000, limit=200)
        inbox.purge(connection, older_than_us=-3_600_000_000, limit=200)
        OrderStore(dialect=dialect, schema=schema).purge_heads(connection, idle_us=-1, after="", limit=200)
        message_table_names(connection, shop.database.namespace)
    background.dispose()


def operate(shop: Shop) -> None:
    """What people do with rows."""
    admin = MessageAdmin(dialect=shop.engine.dialect, schema=shop.database.schema)
    with shop.engine.begin() as connection:
        admin.rows(
            connection, MessageSelection(state=RowState.PARKED, topic="topic", key="k", older_than_us=0), limit=10
        )
        admin.show(connection, "never", body_bytes_max=10)
        admin.retry(connection, ["never"])
        admin.park(connection, ["never"])
        admin.discard(connection, ["never"])
        schema_upgrade.current(connection, schema=shop.database.schema)
