"""A connection that is lost at any statement, before the server got it or after it did it: what committed is sent, what
did not is not, and only the same id is ever sent twice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from sqlalchemy import Engine, create_engine, inspect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.consumers.inbox_table import InboxStore
from outbox.migrate import schema_upgrade
from outbox.store.row import publish_row
from outbox.store.schema import outbox_tables
from outbox_core import Message
from outbox_core.common.errors import OutboxError
from tests.fixtures.cutting_proxy import CuttingProxy, Moment, cutting_proxy
from tests.fixtures.databases import Database
from tests.outbox.recording_broker import WAIT_SECONDS, RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, NO_SENDER, Payment, Shop
from tests.traps.passes import compensate, one_pass

STATEMENTS_MAX = 80
MOMENTS = list(Moment)


@dataclass
class Cuts:
    """Runs something once without a cut, then once for each of its statements with a cut there."""

    proxy: CuttingProxy
    moment: Moment
    seen: list[str] = field(default_factory=list)

    def each(self) -> Iterator[int]:
        """Numbers from 0 (no cut) on, until a run has no statement of that number any more."""
        for number in range(STATEMENTS_MAX):
            self.proxy.arm(number or None, moment=self.moment)
            yield number
            if number and self.proxy.cut_statement is None:
                return
            self.seen.append(self.proxy.cut_statement or "no cut")
        raise AssertionError(f"more than {STATEMENTS_MAX} statements: {self.proxy.statements}")


@pytest.fixture
def proxy(mysql_shop: Shop) -> Iterator[CuttingProxy]:
    """In front of the shop's server."""
    with cutting_proxy(mysql_shop.database.url) as opened:
        yield opened


@contextlib.contextmanager
def fresh_engine(proxy: CuttingProxy) -> Iterator[Engine]:
    """An engine through the proxy without any connection yet, so that connecting is cut into as well."""
    engine = proxy.engine()
    try:
        yield engine
    finally:
        engine.dispose()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("ordered", [set(), {"payments"}], ids=["unordered", "ordered"])
def test_a_business_transaction_cut_anywhere_sends_what_it_committed_and_nothing_else(
    mysql_shop: Shop, proxy: CuttingProxy, broker: RecordingBroker, moment: Moment, ordered: set[str]
) -> None:
    raised, runs = 0, 0

    for number in (cuts := Cuts(proxy, moment)).each():
        with fresh_engine(proxy) as engine:
            box = Outbox(engine, broker=broker, schema=mysql_shop.database.schema, sender=NO_SENDER, ordered=ordered)
            with contextlib.closing(box):
                runs += 1
                try:
                    pay(box, engine, number)
                except (DBAPIError, OutboxError):
                    raised += 1
                else:
                    assert number in mysql_shop.payments(), f"a commit that succeeded is gone, cut at {cuts.seen[-1]}"
    compensate(mysql_shop, broker)

    committed = mysql_shop.payments()
    assert sorted(broker.ids) == sorted(f"{number}-{part}" for number in committed for part in "ab")
    assert broker.duplicates == []
    assert any("message" in one for one in cuts.seen), "no cut met the INSERT of the messages"
    assert any(one == "COMMIT" for one in cuts.seen), "no cut met the COMMIT"
    assert 0 < raised < runs
    assert (raised > runs - len(committed)) is (moment is Moment.AFTER), "an answer lost after COMMIT is ambiguous"


def pay(box: Outbox, engine: Engine, number: int) -> None:
    """Business with two messages, and a savepoint on its way."""
    with Session(engine) as session, session.begin():
        session.add(Payment(id=number))
        box.publish("payments", "a", key="k", message_id=f"{number}-a", session=session)
        with session.begin_nested():
            box.publish("payments", "b", key="k", message_id=f"{number}-b", session=session)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_sender_cut_anywhere_while_it_settles_loses_nothing_and_archives_once(
    mysql_shop: Shop, proxy: CuttingProxy, moment: Moment
) -> None:
    number = 0
    business_is_over = threading.Event()

    def cut_from_here(_batch: object) -> None:
        assert business_is_over.wait(WAIT_SECONDS)
        proxy.arm(number or None, moment=moment)

    broker = RecordingBroker()
    cuts = Cuts(proxy, moment)
    for number in cuts.each():
        broker.rule = cut_from_here
        with fresh_engine(proxy) as engine:
            box = Outbox(engine, broker=broker, schema=mysql_shop.database.schema, sender=BUSY_LIMITS)
            proxy.arm(None)
            business_is_over.clear()
            with contextlib.closing(box):
                pay(box, engine, number)
                business_is_over.set()
        broker.rule = None
        if number == 0:
            assert mysql_shop.rows() == [], "the sender alone, and nobody else, sent and removed them"
    compensate(mysql_shop, broker)

    expected = sorted(f"{number}-{part}" for number in mysql_shop.payments() for part in "ab")
    assert len(mysql_shop.payments()) == len(cuts.seen) + 1
    assert sorted(broker.ids) == expected
    assert set(broker.duplicates) <= set(expected)
    assert mysql_shop.archived() == len(expected)
    assert any(one.startswith("DELETE") for one in cuts.seen)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_compensator_cut_anywhere_in_its_pass_loses_nothing_and_archives_once(
    mysql_shop: Shop, proxy: CuttingProxy, broker: RecordingBroker, moment: Moment
) -> None:
    published = 0

    for number in (cuts := Cuts(proxy, moment)).each():
        rows = [publish_row(Message(id=f"{number}-{part}", topic="payments", body=b"")) for part in ("a", "b")]
        with mysql_shop.engine.begin() as connection:
            mysql_shop.store.insert(connection, rows, token="d" * 32, lease_us=-1)
        published += len(rows)
        with fresh_engine(proxy) as engine, contextlib.suppress(OutboxError):
            one_pass(mysql_shop, broker, engine=engine)
    compensate(mysql_shop, broker)

    assert len(set(broker.ids)) == published == len(broker.ids)
    assert mysql_shop.archived() == published
    for begins in ("SELECT", "UPDATE", "INSERT INTO", "DELETE", "COMMIT"):
        assert any(one.startswith(begins) for one in cuts.seen), f"no cut met {begins}"


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_handler_cut_anywhere_has_its_effect_once_however_often_it_is_delivered(
    mysql_shop: Shop, proxy: CuttingProxy, moment: Moment
) -> None:
    inbox = InboxStore(dialect=mysql_shop.engine.dialect, schema=mysql_shop.database.schema)
    handled: list[int] = []

    def handle(engine: Engine, number: int) -> None:
        with Session(engine) as session, session.begin():
            if inbox.mark(session.connection(), group="group", message_id=str(number), topic="topic"):
                session.add(Payment(id=number))

    for number in (cuts := Cuts(proxy, moment)).each():
        with fresh_engine(proxy) as engine, contextlib.suppress(DBAPIError):
            handle(engine, number)
        handle(mysql_shop.engine, number)  # delivered again
        handled.append(number)

    assert mysql_shop.payments() == handled
    assert len(cuts.seen) > 4


@pytest.mark.slow
def test_an_upgrade_cut_anywhere_can_be_run_again(mysql_like: Database) -> None:
    schema = mysql_like.schema
    direct = create_engine(mysql_like.url)

    with cutting_proxy(mysql_like.url) as proxy:
        # A cut before a statement leaves what a cut after the one before it does.
        for _ in (cuts := Cuts(proxy, Moment.AFTER)).each():
            with fresh_engine(proxy) as engine, contextlib.suppress(DBAPIError, OutboxError):
                schema_upgrade.upgrade(engine, schema=schema)
            again = schema_upgrade.upgrade(direct, schema=schema)
            with direct.begin() as connection:
                found = set(inspect(connection).get_table_names(schema=schema))
                connection.exec_driver_sql(f"DROP DATABASE {schema}")
            assert again == schema_upgrade.head(), f"after a cut at {proxy.cut_statement}"
            assert {table.name for table in outbox_tables(mysql_like.namespace).metadata.sorted_tables} <= found
    direct.dispose()

    for step in ("CREATE TABLE", "CREATE INDEX", "INSERT"):
        assert any(one.lstrip().startswith(step) for one in cuts.seen), step
