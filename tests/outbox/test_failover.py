"""A primary that is killed, and its replica that is promoted: the same database, which a box finds by its pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.store.database_identity import DatabaseIdentity
from outbox_core import Message
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy, cutting_tcp_proxy
from tests.fixtures.local_server import Durability, LocalServer
from tests.fixtures.servers import local_server
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Payment, Shop, open_shop

WAIT_SECONDS = 120
pytestmark = pytest.mark.mariadb


class Pair:
    """A primary, its replica, and the name by which clients find the one that is the primary."""

    def __init__(self, primary: LocalServer, replica: LocalServer, name: CuttingTcpProxy) -> None:
        self.primary = primary
        self.replica = replica
        self.name = name

    def follow(self) -> None:
        self.replica.execute(
            "SET GLOBAL read_only = 1",
            f"CHANGE MASTER TO master_host = '127.0.0.1', master_port = {make_url(self.primary.url).port}, "
            "master_user = 'root', master_use_gtid = slave_pos, master_connect_retry = 1",
            "START SLAVE",
        )

    def catch_up(self) -> None:
        """Wait until the replica has all that the primary has committed."""
        [(position,)] = self.primary.execute("SELECT @@gtid_binlog_pos")
        assert self.replica.execute(f"SELECT MASTER_GTID_WAIT('{position}', {WAIT_SECONDS})") == [(0,)]

    def fail_over(self) -> None:
        """Kill the primary and promote the replica, to which the name then leads."""
        self.catch_up()
        self.primary.kill9()
        self.replica.execute("STOP SLAVE", "RESET SLAVE ALL", "SET GLOBAL read_only = 0")
        self.name.lead_to(make_url(self.replica.url).port or 0)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with (
        local_server("mariadb", Durability.NONE) as primary,
        local_server("mariadb", Durability.NONE, "--server-id=2", "--log-slave-updates") as replica,
        cutting_tcp_proxy(make_url(primary.url).port or 0) as name,
    ):
        pair = Pair(primary, replica, name)
        pair.follow()
        yield pair


@pytest.fixture
def shop(pair: Pair) -> Iterator[Shop]:
    """By the name, with a pool that pings, as the guide has it."""
    database = pair.primary.create_database()
    url = make_url(database.url).set(port=pair.name.port).render_as_string(hide_password=False)
    with open_shop(replace(database, url=url)) as opened:
        yield opened


def pay(box: Outbox, engine: Engine, number: int) -> None:
    with Session(engine) as session, session.begin():
        session.add(Payment(id=number))
        box.publish("payments", str(number), session=session)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_box_goes_on_at_the_promoted_replica_and_settles_there_what_it_had_sent_before(
    pair: Pair, shop: Shop
) -> None:
    is_sending, is_promoted = threading.Event(), threading.Event()

    def fail_over_after_the_first(batch: Sequence[Message]) -> None:
        if batch[0].body == b"2":
            is_sending.set()
            assert is_promoted.wait(WAIT_SECONDS)

    broker = RecordingBroker(fail_over_after_the_first)
    engine = shop.other_engine(pool_pre_ping=True)
    box = shop.box(broker, engine=engine)
    pay(box, engine, 1)
    wait_until(lambda: shop.rows() == [])

    pay(box, engine, 2)
    assert is_sending.wait(WAIT_SECONDS)
    pair.fail_over()
    is_promoted.set()
    wait_until(lambda: shop.rows() == [])
    pay(box, engine, 3)
    wait_until(lambda: shop.rows() == [])

    assert [message.body for message in broker.stored] == [b"1", b"2", b"3"]
    assert [len(batch) for batch in broker.batches] == [1, 1, 1]
    assert (shop.payments(), shop.archived()) == ([1, 2, 3], 3)


def test_the_identity_of_a_promoted_replica_is_that_of_its_primary(pair: Pair, shop: Shop) -> None:
    identity = DatabaseIdentity(shop.engine, schema=shop.database.schema)
    box = shop.box(RecordingBroker())
    at_replica = create_engine(make_url(shop.database.url).set(port=make_url(pair.replica.url).port))
    shop.closing.callback(at_replica.dispose)

    pair.catch_up()
    with at_replica.connect() as connection:
        before = (identity.is_of(connection), identity.is_follower(connection))
    pair.fail_over()
    with at_replica.connect() as connection:
        after = (identity.is_of(connection), identity.is_follower(connection))
    pay(box, at_replica, 1)
    wait_until(lambda: shop.rows() == [])

    assert (before, after) == ((True, True), (True, False))
    assert shop.payments() == [1]
