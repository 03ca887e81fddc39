"""Background work beside producers, at each isolation level on each server: no INSERT waits, and locks are counted.

The work is done and left uncommitted; then producers insert at every place that a gap lock could cover. A wait shows in
the server's own count of lock waits, and ends in an error after a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from outbox.admin.message_admin import MessageAdmin
from outbox.consumers.inbox_table import InboxStore
from outbox.migrate import schema_upgrade
from outbox.store.archive_purge import ArchiveStore
from outbox.store.database import background_engine
from outbox.store.order_table import OrderStore
from outbox.store.row import publish_row
from outbox_core import Message
from tests.outbox.innodb_locks import rows_locked
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop

HOUR_US = 3_600_000_000
OURS = "a" * 32
LEVELS = [
    pytest.param("READ COMMITTED", marks=pytest.mark.slow),
    "REPEATABLE READ",
    pytest.param("SERIALIZABLE", marks=pytest.mark.slow),
]
PLACES = ["0000-first", "due-00005-between", "due-00019-after", "parked-00003-between", "zzzz-last", None]


class Bench:
    """A shop whose engines are at one isolation level, with rows of every kind to work on."""

    def __init__(self, shop: Shop, level: str) -> None:
        self.shop = shop
        self.producers = shop.other_engine(isolation_level=level)
        self.background = background_engine(self.producers)
        dialect, schema = shop.engine.dialect, shop.database.schema
        self.store = shop.store
        self.admin = MessageAdmin(dialect=dialect, schema=schema)
        self.archive = ArchiveStore(dialect=dialect, schema=schema)
        self.inbox = InboxStore(dialect=dialect, schema=schema)
        self.order = OrderStore(dialect=dialect, schema=schema)

    def fill(self) -> None:
        """20 due rows, 10 parked ones, 30 archived and 30 handled messages."""
        self.add("due", 20)
        parked = self.add("parked", 10)
        sent = self.add("sent", 30)
        with self.background.begin() as connection:
            self.store.claim(connection, [*parked, *sent], token=OURS, lease_us=HOUR_US)
            self.store.park(connection, parked, token=OURS, error="refused")
            self.store.archive(connection, sent, token=OURS, outcome="stored")
            self.store.remove(connection, sent, token=OURS)
            for message_id in sent:
                self.inbox.mark(connection, group="group", message_id=message_id, topic="topic")

    def add(self, prefix: str, count: int) -> list[str]:
        """Rows that are due, of a sender that is dead."""
        rows = [publish_row(Message(id=f"{prefix}-{number:05d}", topic="topic", body=b"x")) for number in range(count)]
        with self.background.begin() as connection:
            self.store.insert(connection, rows, token="d" * 32, lease_us=-HOUR_US)
        return [row.id for row in rows]

    def close(self) -> None:
        """Let go of the background's connections."""
        self.background.dispose()


@pytest.fixture(params=LEVELS)
def bench(request: pytest.FixtureRequest, mysql_shop: Shop) -> Iterator[Bench]:
    """At each level, on each server."""
    made = Bench(mysql_shop, request.param)
    yield made
    made.close()


def nothing_is_due(bench: Bench, connection: Connection) -> None:
    """An empty scan, and a claim of rows that are gone."""
    connection.execute(text(f"DELETE FROM {bench.shop.database.schema}.message"))
    connection.commit()
    assert bench.store.due_ids(connection, limit=200) == []
    assert bench.store.claim(connection, ["gone-1", "zzzz-2"], token=OURS, lease_us=HOUR_US) == 0


def claim_to_the_end(bench: Bench, connection: Connection) -> None:
    """A claim that reaches the end of what is due."""
    ids = bench.store.due_ids(connection, limit=200)
    assert bench.store.claim(connection, ids, token=OURS, lease_us=HOUR_US) == 20
    assert len(bench.store.claimed(connection, ids, token=OURS)) == 20


def settle_in_every_way(bench: Bench, connection: Connection) -> None:
    """Rows that are ours, somebody else's, and gone."""
    ids = [*bench.store.due_ids(connection, limit=12), "0000", "zzzz"]
    bench.store.claim(connection, ids, token=OURS, lease_us=HOUR_US)
    for token in (OURS, "b" * 32):
        bench.store.archive(connection, ids[:6], token=token, outcome="stored")
        bench.store.remove(connection, [*ids[:6], "gone-1", "zzzz-2"], token=token)
        bench.store.reschedule(connection, ids[6:9], token=token, delay_us=HOUR_US, error="down")
        bench.store.release(connection, ids[8:9], token=token, delay_us=HOUR_US, error=None)
        bench.store.park(connection, ids[9:], token=token, error="refused")


def purge_everything(bench: Bench, connection: Connection) -> None:
    """All old evidence, and a second round that finds nothing."""
    for _ in range(2):
        bench.archive.purge(connection, older_than_us=-HOUR_US, limit=200)
        bench.inbox.purge(connection, older_than_us=-HOUR_US, limit=200)
        bench.order.purge_heads(connection, idle_us=-HOUR_US, after="", limit=200)


def discard_parked_rows(bench: Bench, connection: Connection) -> None:
    """What an operator does: parked rows, gone ones, and pending ones that stay."""
    ids = [f"parked-{number:05d}" for number in range(12)]
    assert bench.admin.retry(connection, ids[:2]) == 2
    assert bench.admin.park(connection, ids[:1]) == 1
    assert bench.admin.discard(connection, [*ids, "due-00001"]) == 9


def count_the_backlog(bench: Bench, connection: Connection) -> None:
    """The figures of a metrics page."""
    assert bench.store.backlog(connection).pending == 20


WORK: list[Callable[[Bench, Connection], None]] = [
    nothing_is_due,
    claim_to_the_end,
    settle_in_every_way,
    purge_everything,
    discard_parked_rows,
    count_the_backlog,
]


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_no_producer_waits_for_background_work_that_is_not_committed_yet(
    bench: Bench, broker: RecordingBroker, work: Callable[[Bench, Connection], None]
) -> None:
    bench.fill()
    box = bench.shop.box(broker, engine=bench.producers, sender=NO_SENDER, ordered={"ordered"})
    waits = lock_waits(bench.shop)

    with bench.background.connect() as connection:
        work(bench, connection)
        for number, message_id in enumerate(PLACES):
            with Session(bench.producers) as session, session.begin():
                session.execute(text("SET SESSION innodb_lock_wait_timeout = 1"))
                session.add(Payment(id=number))
                box.publish("topic", "", message_id=message_id, session=session)
                box.publish("ordered", "", key=f"key-{number}", session=session)
        connection.rollback()

    assert bench.shop.payments() == list(range(len(PLACES)))
    assert lock_waits(bench.shop) == waits


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_background_work_waits_for_no_transaction_that_a_producer_has_open(
    bench: Bench, work: Callable[[Bench, Connection], None]
) -> None:
    bench.fill()
    waits = lock_waits(bench.shop)

    with contextlib.ExitStack() as stack:
        for message_id in filter(None, PLACES):
            connection = stack.enter_context(bench.producers.connect())
            row = publish_row(Message(id=message_id, topic="topic", body=b"x"))
            bench.store.insert(connection, [row], token="c" * 32, lease_us=HOUR_US)
        background = stack.enter_context(bench.background.connect())
        if work is not nothing_is_due:  # it begins by emptying the table, which is not ours to do beside others
            work(bench, background)
        else:
            bench.store.claim(background, ["gone-1", "zzzz-2"], token=OURS, lease_us=HOUR_US)
        background.rollback()

    assert lock_waits(bench.shop) == waits


def test_producers_at_any_level_wait_for_each_other_only_over_one_ordered_key(
    bench: Bench, broker: RecordingBroker
) -> None:
    box = bench.shop.box(broker, engine=bench.producers, sender=NO_SENDER, ordered={"ordered"})
    waits = lock_waits(bench.shop)

    with contextlib.ExitStack() as stack:
        for number in range(5):
            connection = stack.enter_context(bench.producers.connect())
            connection.begin()
            connection.execute(text("SET SESSION innodb_lock_wait_timeout = 1"))
            with Session(connection) as session:
                session.add(Payment(id=number))
                box.publish("ordered", "", key=f"key-{number}", session=session)
                box.publish("topic", "", key="one key for all", session=session)
                session.commit()  # the rows are written; the transaction is the connection's, and open
    assert lock_waits(bench.shop) == waits


@pytest.mark.parametrize(
    ("settles", "most"),
    [
        pytest.param(False, 220, id="claim"),  # the row's own lock, and for some the secondary index's
        pytest.param(True, 550, id="claim and settle"),  # the same rows once more, and their archive entries
    ],
)
def test_a_claim_locks_its_rows_and_no_more_at_any_level(bench: Bench, settles: bool, most: int) -> None:
    bench.add("due", 2_000)

    with bench.background.connect() as connection:
        ids = bench.store.due_ids(connection, limit=100)
        claimed = bench.store.claim(connection, ids, token=OURS, lease_us=HOUR_US)
        if settles:
            bench.store.archive(connection, ids, token=OURS, outcome="stored")
            bench.store.remove(connection, ids, token=OURS)
        locked = rows_locked(bench.shop, connection)
        connection.rollback()

    assert claimed == 100
    assert 100 <= locked <= most


def test_a_look_at_what_is_due_locks_nothing_at_any_level(bench: Bench) -> None:
    bench.add("due", 200)

    with bench.background.connect() as connection:
        bench.store.due_ids(connection, limit=100)
        bench.store.backlog(connection)
        locked = rows_locked(bench.shop, connection)
        connection.rollback()

    assert locked == 0


def test_a_purge_locks_what_it_deletes_and_no_more_at_any_level(bench: Bench) -> None:
    bench.fill()

    with bench.background.connect() as connection:
        gone = bench.archive.purge(connection, older_than_us=-HOUR_US, limit=10)
        locked = rows_locked(bench.shop, connection)
        connection.rollback()

    assert gone == 10
    assert 10 <= locked <= 40  # the row in its three indexes


def test_two_claimers_without_skip_locked_share_a_backlog_and_neither_gets_a_row_twice(bench: Bench) -> None:
    bench.add("due", 300)
    got: dict[str, list[str]] = {OURS: [], "b" * 32: []}

    with bench.background.connect() as one, bench.background.connect() as other:
        # Both look before either claims: the worst case, in which both want the same rows.
        for connection, token in ((one, OURS), (other, "b" * 32), (one, OURS)):
            ids = bench.store.due_ids(connection, limit=100)
            rival = bench.store.due_ids(other if connection is one else one, limit=100)
            assert ids == rival
            bench.store.claim(connection, ids, token=token, lease_us=HOUR_US)
            got[token] += [row.id for row in bench.store.claimed(connection, ids, token=token)]
            connection.commit()
            late = other if connection is one else one
            assert bench.store.claim(late, rival, token="e" * 32, lease_us=HOUR_US) == 0
            late.commit()

    assert len(got[OURS]) + len(got["b" * 32]) == len({*got[OURS], *got["b" * 32]}) == 300


def test_an_upgrade_makes_producers_wait_for_nothing_when_there_is_nothing_to_do(
    bench: Bench, broker: RecordingBroker
) -> None:
    with bench.shop.engine.begin() as connection:
        bench.shop.tables.metadata.drop_all(connection)
    schema_upgrade.upgrade(bench.shop.engine, schema=bench.shop.database.schema)
    box = bench.shop.box(broker, engine=bench.producers, sender=NO_SENDER)

    with bench.producers.begin() as connection:
        with Session(connection) as session:
            session.add(Payment(id=1))
            box.publish("topic", "", session=session)
            session.commit()
        # This transaction has written, and holds the metadata lock of the message table until its end.
        schema_upgrade.upgrade(bounded(bench.shop), schema=bench.shop.database.schema)

    assert bench.shop.payments() == [1]
    assert len(bench.shop.rows()) == 1


def bounded(shop: Shop) -> Engine:
    """An engine that gives up a metadata lock after a second, so that a wait is an error."""
    engine = shop.other_engine()
    with engine.connect() as connection:
        connection.execute(text("SET SESSION lock_wait_timeout = 1"))
    return engine


def lock_waits(shop: Shop) -> int:
    """How often, since the server started, somebody has waited for a row's lock."""
    with shop.engine.connect() as connection:
        return int(connection.execute(text("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_waits'")).one()[1])
