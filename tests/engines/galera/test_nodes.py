"""An outbox on three nodes of Galera behind a balancer: each connection may be to another node, which may be behind.

With `wsrep_sync_wait = 0` in outbox_core.common.mysql_session three of these fail: the one that reads the nodes' logs,
and both with a node that is behind, where the order of a key breaks and a settlement finds no row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import count
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, event, make_url, text, update
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from compensator.work.engines import InstanceEngines
from outbox import Outbox
from outbox.migrate import upgrade
from outbox.store.database import background_engine, error_code
from outbox.store.database_identity import DatabaseIdentity
from outbox_core.runtime import command
from outbox_core.runtime.logs import event_name
from spark_reconcile.sources.dbapi_reader import DatabaseAddress, reading
from tests.engines.galera.galera_cluster import WAIT_SECONDS, GaleraCluster
from tests.fixtures.local_server import LocalServer
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop

DEADLOCK = 1213
LEASE_LOST = "settled_after_lease_was_lost"
KEYS = 4
MESSAGES = 120


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def balanced(cluster: GaleraCluster, shop: Shop) -> Engine:
    """An engine that opens a connection for each transaction: each time to the next node."""
    engine = create_engine(cluster.url(shop.database.url), poolclass=NullPool)
    shop.closing.callback(engine.dispose)
    return engine


def at_node(cluster: GaleraCluster, shop: Shop, number: int) -> Engine:
    engine = create_engine(cluster.url(shop.database.url, cluster.nodes[number]))
    shop.closing.callback(engine.dispose)
    return engine


def pay(engine: Engine, box: Outbox, number: int, *, key: str | None = None) -> None:
    """One committed payment and its message; a transaction that another node's ended is done again, as a shop's is."""
    while True:
        try:
            with Session(engine) as session, session.begin():
                session.add(Payment(id=number))
                box.publish("payments", str(number), key=key, session=session)
        except DBAPIError as error:
            if error_code(error) != DEADLOCK:
                raise
        else:
            return


def bodies_by_key(broker: RecordingBroker) -> dict[str | None, list[int]]:
    found: dict[str | None, list[int]] = {}
    for message in list(broker.stored):
        found.setdefault(message.key, []).append(int(message.body))
    return found


def test_order_and_settlements_hold_when_each_transaction_is_on_another_node(
    cluster: GaleraCluster, galera_shop: Shop, broker: RecordingBroker
) -> None:
    engine = balanced(cluster, galera_shop)
    box = galera_shop.box(broker, engine=engine, ordered={"payments"})
    for number in range(MESSAGES):
        pay(engine, box, number, key=str(number % KEYS))
    broker.wait_for(lambda it: len(it.stored) == MESSAGES)
    wait_until(lambda: galera_shop.rows() == [])

    assert bodies_by_key(broker) == {str(key): list(range(key, MESSAGES, KEYS)) for key in range(KEYS)}
    assert broker.duplicates == []
    assert galera_shop.archived() == MESSAGES


def test_compensators_behind_the_balancer_keep_the_order_of_what_a_sender_left(
    cluster: GaleraCluster, galera_shop: Shop, broker: RecordingBroker
) -> None:
    engine = balanced(cluster, galera_shop)
    silent = galera_shop.box(RecordingBroker(), engine=engine, ordered={"payments"}, sender=NO_SENDER)
    for number in range(MESSAGES):
        pay(engine, silent, number, key=str(number % KEYS))
    galera_shop.end_leases()

    background = background_engine(engine)
    scans = [galera_shop.scan(broker, engine=background, batch_rows=20) for _ in range(2)]
    run_together([lambda scan=scan: run_until_settled(scan.run, galera_shop) for scan in scans])  # type: ignore[misc]

    first = {key: list(dict.fromkeys(bodies)) for key, bodies in bodies_by_key(broker).items()}
    assert first == {str(key): list(range(key, MESSAGES, KEYS)) for key in range(KEYS)}
    assert galera_shop.archived() == MESSAGES


def run_together(works: Sequence[Callable[[], object]]) -> None:
    """Run these beside each other; raises what the first of them raised."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # a thread's error is its test's
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def run_until_settled(step: Callable[[], object], shop: Shop) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while shop.rows():
        assert time.monotonic() < deadline
        step()


# -- a node that is behind ---------------------------------------------------------------------------------------------


@contextmanager
def node_that_is_behind(cluster: GaleraCluster, shop: Shop, number: int) -> Iterator[None]:
    """In the block this node applies nothing that others commit: its applier waits for a table that a client locks."""
    business = shop.database.business
    shop.execute("CREATE TABLE locked (id INT PRIMARY KEY)")
    with closing(cluster.nodes[number].connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION wsrep_sync_wait = 15")
        cursor.execute(f"SELECT COUNT(*) FROM {business}.locked")  # which waits until the table is there
        cursor.execute(f"LOCK TABLES {business}.locked READ")
        shop.execute("INSERT INTO locked VALUES (1)")
        yield


def is_waiting(node: LocalServer, shop: Shop) -> bool:
    """Whether a statement on our tables waits on this node."""
    waiting = f"SELECT 1 FROM information_schema.processlist WHERE info LIKE '%{shop.database.schema}.%'"
    return node.execute(f"{waiting} AND time_ms > 300 AND id <> CONNECTION_ID()") != []


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [event_name(record) for record in list(caplog.records)]


def test_a_sender_on_a_node_that_is_behind_settles_what_another_node_committed(
    cluster: GaleraCluster, galera_shop: Shop, broker: RecordingBroker, caplog: pytest.LogCaptureFixture
) -> None:
    business = at_node(cluster, galera_shop, 0)
    box = galera_shop.box(broker, engine=at_node(cluster, galera_shop, 1))
    pay(business, box, 1)
    wait_until(lambda: galera_shop.rows() == [])

    with node_that_is_behind(cluster, galera_shop, 1):
        pay(business, box, 2)
        broker.wait_for(lambda it: len(it.stored) == 2)
        wait_until(lambda: is_waiting(cluster.nodes[1], galera_shop) or LEASE_LOST in logged(caplog))
    wait_until(lambda: galera_shop.rows() == [] or LEASE_LOST in logged(caplog))

    assert LEASE_LOST not in logged(caplog)
    assert galera_shop.archived() == 2
    assert len(broker.batches) == 2


def test_a_sender_on_a_node_that_is_behind_sends_nothing_before_an_older_message_of_its_key(
    cluster: GaleraCluster, galera_shop: Shop, broker: RecordingBroker
) -> None:
    business = at_node(cluster, galera_shop, 0)
    box = galera_shop.box(broker, engine=at_node(cluster, galera_shop, 1), ordered={"payments"})
    silent = galera_shop.box(RecordingBroker(), engine=business, ordered={"payments"}, sender=NO_SENDER)
    pay(business, box, 1, key="k")
    wait_until(lambda: galera_shop.rows() == [])

    with node_that_is_behind(cluster, galera_shop, 1):
        pay(business, silent, 2, key="k")
        pay(business, box, 3, key="k")
        wait_until(lambda: is_waiting(cluster.nodes[1], galera_shop) or len(broker.stored) == 2)
    wait_until(lambda: len(galera_shop.rows()) == 2 or len(broker.stored) == 2)
    galera_shop.end_leases()
    run_until_settled(galera_shop.scan(broker).run, galera_shop)

    assert [message.body for message in broker.stored] == [b"1", b"2", b"3"]


def test_a_sender_leaves_a_node_that_takes_no_statements_for_another_one(
    cluster: GaleraCluster, galera_shop: Shop, broker: RecordingBroker
) -> None:
    ports = [make_url(node.url).port or 0 for node in cluster.nodes]
    business = at_node(cluster, galera_shop, 0)
    cluster.balancer.lead_to(ports[1])
    box = galera_shop.box(broker, engine=create_engine(cluster.url(galera_shop.database.url)))
    pay(business, box, 1)
    wait_until(lambda: galera_shop.rows() == [])

    try:
        cluster.nodes[1].execute("SET GLOBAL wsrep_reject_queries = 'ALL'")
        cluster.balancer.lead_to(ports[0], ports[2])
        pay(business, box, 2)
        wait_until(lambda: galera_shop.rows() == [])
    finally:
        cluster.nodes[1].execute("SET GLOBAL wsrep_reject_queries = 'NONE'")
        cluster.balancer.lead_to(*ports)

    assert [len(batch) for batch in broker.batches] == [1, 1]
    assert galera_shop.archived() == 2


# -- the pin -----------------------------------------------------------------------------------------------------------


@contextmanager
def statements_by_connection(cluster: GaleraCluster, found: dict[tuple[int, int], list[str]]) -> Iterator[None]:
    """Adds, by node and connection, the statements that the nodes ran in the block."""
    for node in cluster.nodes:
        node.execute("SET GLOBAL log_output = 'TABLE'", "TRUNCATE mysql.general_log", "SET GLOBAL general_log = 1")
    try:
        yield
    finally:
        for number, node in enumerate(cluster.nodes):
            node.execute("SET GLOBAL general_log = 0")
            for connection_id, statement in node.execute("SELECT thread_id, argument FROM mysql.general_log"):
                found.setdefault((number, connection_id), []).append(str(statement))


def test_each_connection_of_ours_waits_for_the_other_nodes_and_none_of_the_business_does(
    cluster: GaleraCluster, galera_shop: Shop, broker: RecordingBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = balanced(cluster, galera_shop)
    statements: dict[tuple[int, int], list[str]] = {}
    schema = galera_shop.database.schema or ""
    url = cluster.url(galera_shop.database.url)

    with statements_by_connection(cluster, statements):
        upgrade(url, schema=schema)
        box = Outbox(engine, broker=broker, schema=schema, ordered={"payments"})
        pay(engine, box, 1, key="k")
        broker.wait_for(lambda it: len(it.stored) == 1)
        wait_until(lambda: galera_shop.rows() == [])
        box.close()
        for arguments in (["status", "--json"], ["messages", "list"], ["compensator", "once", "--broker", "memory:"]):
            with pytest.raises(SystemExit):
                command.main([*arguments[:2], *arguments[2:], "--url", url, "--schema", schema])
        with closing_engines(url) as engines, engines.reads.connect() as connection:
            connection.execute(text(f"SELECT COUNT(*) FROM {schema}.message"))
        with reading(DatabaseAddress.of(url)) as reader:
            reader.tables(schema=schema)

    of_business = {name for name, ran in statements.items() if any("INSERT INTO payment" in one for one in ran)}
    of_test = {name for name, ran in statements.items() if ran[-1].startswith("SET GLOBAL general_log")}
    asking = {name for name, ran in statements.items() if any(schema in one for one in ran)} - of_test
    waiting = {name for name, ran in statements.items() if any("wsrep_sync_wait = 15" in one for one in ran)}
    assert len(asking - of_business) >= 5
    assert [statements[name] for name in asking - of_business - waiting] == []
    assert of_business
    assert of_business & waiting == set()


@contextmanager
def closing_engines(url: str) -> Iterator[InstanceEngines]:
    with closing(InstanceEngines(url)) as engines:
        yield engines


# -- conflicts ---------------------------------------------------------------------------------------------------------


def test_a_business_s_conflict_with_another_node_fails_its_commit_and_nothing_is_sent(
    cluster: GaleraCluster, galera_shop: Shop, broker: RecordingBroker
) -> None:
    engines = [at_node(cluster, galera_shop, number) for number in (0, 1)]
    box = galera_shop.box(broker, engine=engines[0])
    pay(engines[0], box, 1)
    broker.wait_for(lambda it: len(it.stored) == 1)

    with Session(engines[0]) as first, Session(engines[1]) as second:
        second.execute(text("SET SESSION wsrep_sync_wait = 15"))
        for session, topic in ((first, "loser"), (second, "winner")):
            session.execute(update(Payment).where(Payment.id == 1).values(note=topic))
            box.publish(topic, "", session=session)
        second.commit()
        with pytest.raises(OperationalError) as caught:
            first.commit()
        first.rollback()
    broker.wait_for(lambda it: len(it.stored) == 2)
    wait_until(lambda: galera_shop.rows() == [])

    assert error_code(caught.value) == DEADLOCK
    assert broker.topics == ["payments", "winner"]
    assert galera_shop.archived() == 2


@contextmanager
def another_node_changes_the_row_before(
    statement: str, engine: Engine, shop: Shop, *, times: int
) -> Iterator[list[str]]:
    """Each time that background work commits after a statement that begins so, another node commits first."""
    changed: list[str] = []
    began: set[int] = set()

    def note(connection: Any, _cursor: Any, running: str, *_: Any) -> None:
        if running.startswith(statement):
            began.add(id(connection.connection.dbapi_connection))

    def conflict(connection: Any) -> None:
        driver = id(connection.connection.dbapi_connection)
        if driver in began and len(changed) < times:
            began.discard(driver)
            changed.append(statement)
            with engine.begin() as rival:
                rival.execute(text("SET SESSION wsrep_sync_wait = 15"))
                rival.execute(update(shop.tables.message).values(last_error=f"rival {len(changed)}"))

    event.listen(Engine, "before_cursor_execute", note)
    event.listen(Engine, "commit", conflict)
    try:
        yield changed
    finally:
        event.remove(Engine, "before_cursor_execute", note)
        event.remove(Engine, "commit", conflict)


def repeated(caplog: pytest.LogCaptureFixture) -> int:
    return logged(caplog).count("transaction_repeated")


@pytest.mark.parametrize("times", [1, 3])
def test_a_settlement_that_conflicts_with_another_node_is_repeated(
    cluster: GaleraCluster,
    galera_shop: Shop,
    broker: RecordingBroker,
    caplog: pytest.LogCaptureFixture,
    times: int,
) -> None:
    caplog.set_level(logging.INFO)
    engines = [at_node(cluster, galera_shop, number) for number in (0, 1)]
    with another_node_changes_the_row_before("DELETE", engines[1], galera_shop, times=times) as changed:
        box = galera_shop.box(broker, engine=engines[0])
        pay(engines[0], box, 1)
        wait_until(lambda: galera_shop.rows() == [])

    assert len(changed) == repeated(caplog) == times
    assert [len(batch) for batch in broker.batches] == [1]
    assert galera_shop.archived() == 1


def test_of_two_compensators_that_claim_the_same_rows_on_two_nodes_one_is_rolled_back(
    cluster: GaleraCluster, galera_shop: Shop, broker: RecordingBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Row locks are a node's own, so both claim all rows; the cluster's certification lets one of them commit."""
    caplog.set_level(logging.INFO)
    ids = galera_shop.add_due(40)
    both_claimed = threading.Barrier(2)
    turns = count()

    def meet(_connection: Any, _cursor: Any, running: str, *_: Any) -> None:
        if running.startswith("UPDATE") and "token" in running and next(turns) < 2:
            both_claimed.wait(WAIT_SECONDS)

    event.listen(Engine, "after_cursor_execute", meet)
    try:
        scans = []
        for number in (0, 1):
            background = background_engine(at_node(cluster, galera_shop, number))
            galera_shop.closing.callback(background.dispose)
            scans.append(galera_shop.scan(broker, engine=background))
        run_together([scan.run for scan in scans])
    finally:
        event.remove(Engine, "after_cursor_execute", meet)
    wait_until(lambda: galera_shop.rows() == [])

    assert repeated(caplog) >= 1
    assert sorted(broker.ids) == ids
    assert galera_shop.archived() == len(ids)


# -- a node that dies --------------------------------------------------------------------------------------------------


@pytest.fixture
def killed_node(cluster: GaleraCluster) -> Iterator[LocalServer]:
    """The node that the test may kill; it is there again afterwards."""
    node = cluster.nodes[2]
    yield node
    node.start()
    cluster.wait_until_synced()


def try_to_pay(engine: Engine, box: Outbox, number: int) -> None:
    """One payment; whether it was committed is the database's to say."""
    with suppress(Exception):  # whatever a dying node does
        pay(engine, box, number)


def test_nothing_is_lost_when_a_node_is_killed_and_the_identity_stays(
    cluster: GaleraCluster, galera_shop: Shop, broker: RecordingBroker, killed_node: LocalServer
) -> None:
    engine = create_engine(cluster.url(galera_shop.database.url), pool_pre_ping=True)
    galera_shop.closing.callback(engine.dispose)
    box = galera_shop.box(broker, engine=engine)
    done = threading.Event()
    numbers = count()

    def publish() -> None:
        while not done.is_set():
            try_to_pay(engine, box, next(numbers))

    publishers = [threading.Thread(target=publish) for _ in range(3)]
    for publisher in publishers:
        publisher.start()
    try:
        broker.wait_for(lambda it: len(it.stored) >= 30)
        killed_node.kill9()
        stored = len(broker.stored)
        broker.wait_for(lambda it: len(it.stored) >= stored + 60)
    finally:  # they would go on until somebody ends pytest
        done.set()
        for publisher in publishers:
            publisher.join(WAIT_SECONDS)
    box.close()
    galera_shop.end_leases()
    run_until_settled(galera_shop.scan(broker).run, galera_shop)

    assert sorted(int(message.body) for message in broker.stored) == galera_shop.payments()
    identity = DatabaseIdentity(engine, schema=galera_shop.database.schema)
    for number in (0, 1):
        with at_node(cluster, galera_shop, number).connect() as connection:
            assert identity.is_of(connection)
    with Session(at_node(cluster, galera_shop, 1)) as session, session.begin():
        galera_shop.box(broker, engine=engine, sender=NO_SENDER).publish("accepted", "", session=session)
    assert galera_shop.row_topics() == ["accepted"]
