"""The sender: a thread of its own per process, a bounded queue, a close with a deadline. No business call waits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event
from sqlalchemy.orm import Session

from outbox import Outbox, SenderLimits
from outbox_core import Message
from outbox_core.common.errors import BrokerRefused, BrokerUnavailable, ConfigurationError
from outbox_core.runtime.logs import event_name
from tests.fixtures.forks import FORKS
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, Payment, Shop

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 300
SEND_FOR_MS = 5_000


class HangingBroker(RecordingBroker):
    """Hangs in publish until told to go on."""

    def __init__(self) -> None:
        super().__init__(self._hang)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def _hang(self, _batch: Sequence[Message]) -> None:
        self.entered.set()
        self.go_on.wait(WAIT_SECONDS)


def pay(shop: Shop, box: Outbox, number: int) -> None:
    """One committed payment and its message."""
    with Session(shop.engine) as session, session.begin():
        session.add(Payment(id=number))
        box.publish("payments", str(number), session=session)


def test_a_broker_that_hangs_holds_up_no_business_call(shop: Shop) -> None:
    broker = HangingBroker()
    box = shop.box(broker)
    pay(shop, box, 0)
    assert broker.entered.wait(WAIT_SECONDS)

    for number in range(1, 50):
        pay(shop, box, number)
    still_hanging = not broker.go_on.is_set() and broker.stored == []
    broker.go_on.set()

    assert still_hanging
    assert shop.payments() == list(range(50))
    broker.wait_for(lambda it: len(it.stored) == 50)


def test_what_gathers_while_a_batch_is_sent_is_sent_as_one_batch(sqlite_shop: Shop) -> None:
    broker = HangingBroker()
    box = sqlite_shop.box(broker)
    pay(sqlite_shop, box, 0)
    assert broker.entered.wait(WAIT_SECONDS)

    for number in range(1, 30):
        pay(sqlite_shop, box, number)
    broker.go_on.set()

    assert box.close()
    assert [len(batch) for batch in broker.batches] == [1, 29]
    assert [message.body for message in broker.stored] == [str(number).encode() for number in range(30)]


@pytest.mark.parametrize("rows_max", [1, 3])
def test_a_batch_has_as_many_rows_as_the_limit_allows(sqlite_shop: Shop, rows_max: int) -> None:
    broker = HangingBroker()
    box = sqlite_shop.box(broker, sender=replace(BUSY_LIMITS, batch_rows_max=rows_max))
    pay(sqlite_shop, box, 0)
    assert broker.entered.wait(WAIT_SECONDS)

    for number in range(1, 7):
        pay(sqlite_shop, box, number)
    broker.go_on.set()

    assert box.close()
    assert [len(batch) for batch in broker.batches] == [1] + [rows_max] * (6 // rows_max)


def test_close_drains_what_is_queued_and_may_be_called_again(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)
    for number in range(20):
        pay(shop, box, number)

    closed = [box.close(), box.close()]

    assert closed == [True, True]
    assert len(broker.stored) == 20
    assert shop.rows() == []


def test_close_gives_up_at_its_deadline_and_leaves_the_rest_in_the_table(shop: Shop) -> None:
    broker = HangingBroker()
    box = shop.box(broker)
    pay(shop, box, 0)
    assert broker.entered.wait(WAIT_SECONDS)  # so that the first is on its way alone
    for number in (1, 2):
        pay(shop, box, number)

    emptied = box.close(timeout_ms=50)
    broker.go_on.set()
    for thread in threading.enumerate():
        if thread.name == "outbox-sender":
            thread.join(WAIT_SECONDS)

    assert not emptied
    assert [message.body for message in broker.stored] == [b"0"]
    assert [row["body"] for row in shop.rows()] == [b"1", b"2"]


def test_a_commit_after_close_keeps_its_row_for_the_compensator(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)
    box.close()

    pay(shop, box, 1)

    assert shop.payments() == [1]
    assert len(shop.rows()) == 1
    shop.end_leases()
    assert shop.scan(broker).run().accepted == 1


def test_the_sender_sends_nothing_once_its_lease_may_be_over(sqlite_shop: Shop) -> None:
    broker = HangingBroker()
    limits = SenderLimits(lease_ms=60_000, lease_margin_ms=59_999)
    box = sqlite_shop.box(broker, sender=limits)

    @event.listens_for(sqlite_shop.engine, "commit")
    def let_the_lease_end(_connection: Connection) -> None:
        inserted_ms = time.monotonic_ns() // 1_000_000
        while time.monotonic_ns() // 1_000_000 <= inserted_ms:
            time.sleep(0)

    pay(sqlite_shop, box, 1)
    emptied = box.close()

    assert emptied
    assert broker.batches == []
    assert len(sqlite_shop.rows()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_refused", [False, True])
def test_the_sender_begins_no_further_request_of_a_batch_once_its_lease_may_be_over(
    sqlite_shop: Shop, is_refused: bool
) -> None:
    def let_the_lease_end(_batch: Sequence[Message]) -> None:
        [_, other] = [row["created_at_us"] for row in sqlite_shop.rows()]
        until_ms = other // 1_000 + SEND_FOR_MS
        while time.time_ns() // 1_000_000 <= until_ms:
            time.sleep(0.01)
        if is_refused:
            raise BrokerRefused("one of them")

    broker = RecordingBroker(let_the_lease_end)
    limits = SenderLimits(lease_ms=60_000, lease_margin_ms=60_000 - SEND_FOR_MS)
    box = sqlite_shop.box(broker, sender=limits, ordered=[] if is_refused else ["payments"])

    with Session(sqlite_shop.engine) as session, session.begin():
        for number in (1, 2):
            box.publish("payments", str(number), key="k", session=session)
    broker.wait_for(lambda it: len(it.batches) == 1)
    assert box.close(timeout_ms=WAIT_SECONDS * 1_000)

    assert len(broker.batches) == 1
    bodies = [row["body"] for row in sqlite_shop.rows()]
    assert bodies == ([b"1", b"2"] if is_refused else [b"2"])
    sqlite_shop.end_leases()
    broker.rule = None
    sqlite_shop.scan(broker).run()
    assert [message.body for message in broker.stored] == [b"1", b"2"]


def test_the_sender_goes_on_after_an_outage_and_after_the_database_refused_to_settle(
    sqlite_shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    def rule(batch: Sequence[Message]) -> None:
        if batch[0].body == b"0":
            raise BrokerUnavailable("down")

    broker = RecordingBroker(rule)
    box = sqlite_shop.box(broker)

    pay(sqlite_shop, box, 0)
    broker.wait_for(lambda it: len(it.batches) == 1)
    sqlite_shop.execute("ALTER TABLE outbox_archive RENAME TO hidden")
    pay(sqlite_shop, box, 1)
    broker.wait_for(lambda it: len(it.stored) == 1)
    pay(sqlite_shop, box, 2)
    broker.wait_for(lambda it: len(it.stored) == 2)
    deadline = time.monotonic() + WAIT_SECONDS
    while "send_not_settled" not in [event_name(record) for record in caplog.records]:
        assert time.monotonic() < deadline
        time.sleep(0.001)

    assert [row["body"] for row in sqlite_shop.rows()] == [b"0", b"1", b"2"]
    box.close(timeout_ms=1)  # it would repeat what the database refuses until the lease ends
    sqlite_shop.execute("ALTER TABLE hidden RENAME TO outbox_archive")
    sqlite_shop.end_leases()
    broker.rule = None
    sqlite_shop.scan(broker).run()
    assert sqlite_shop.rows() == []
    assert sorted(message.body for message in broker.stored) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("fork", FORKS)
def test_a_forked_child_sends_its_own_commits_and_none_of_its_parents(
    shop: Shop, tmp_path: Path, fork: Callable[[], int]
) -> None:
    parents = HangingBroker()
    box = shop.box(parents)
    pay(shop, box, 0)
    assert parents.entered.wait(WAIT_SECONDS)
    pay(shop, box, 1)  # queued when the fork happens

    child = fork()
    if child == 0:
        os._exit(child_status(shop, box, parents, tmp_path / "sent"))
    _, status = os.waitpid(child, 0)
    parents.go_on.set()

    assert os.waitstatus_to_exitcode(status) == 0
    assert (tmp_path / "sent").read_text() == "2"
    assert box.close()
    assert [message.body for message in parents.stored] == [b"0", b"1"]
    assert shop.payments() == [0, 1, 2]
    assert shop.rows() == []


def child_status(shop: Shop, box: Outbox, broker: HangingBroker, report: Path) -> int:
    """What a forked worker does: let go of the parent's connections, pay, send."""
    try:
        broker.go_on.set()
        shop.engine.dispose(close=False)
        pay(shop, box, 2)
        emptied = box.close(timeout_ms=WAIT_SECONDS * 1_000)
        report.write_text(",".join(message.body.decode() for message in broker.stored))
        return 0 if emptied else 2
    except BaseException as error:
        report.write_text(repr(error))
        return 1


@pytest.mark.slow
@pytest.mark.own_process
def test_a_fork_waits_for_an_open_transaction_of_the_sender_so_that_its_child_can_write(
    sqlite_shop: Shop, tmp_path: Path
) -> None:
    broker = HangingBroker()
    broker.go_on.set()
    removing, forks, forked = threading.Event(), threading.Event(), threading.Event()

    def stay_in_the_transaction(statement: str) -> None:
        if statement.startswith("DELETE"):  # the sender's, in the transaction that removes what was sent
            removing.set()
            assert forks.wait(WAIT_SECONDS)
            forked.wait(1)  # comes at once where the fork does not wait for this transaction

    # The pool of the sender's connections is made from this one, with its listeners.
    event.listen(sqlite_shop.engine.pool, "connect", lambda raw, _: raw.set_trace_callback(stay_in_the_transaction))
    box = sqlite_shop.box(broker)
    pay(sqlite_shop, box, 0)
    assert removing.wait(WAIT_SECONDS)
    os.register_at_fork(before=forks.set)  # called before the hooks that are there already
    child = os.fork()
    if child == 0:
        forked.set()
        os._exit(child_status(sqlite_shop, box, broker, tmp_path / "sent"))
    forked.set()
    _, status = os.waitpid(child, 0)

    assert (tmp_path / "sent").read_text() == "0,2"
    assert os.waitstatus_to_exitcode(status) == 0
    assert box.close()
    assert sqlite_shop.payments() == [0, 2]
    assert sqlite_shop.rows() == []


@pytest.mark.parametrize("fork", FORKS)
def test_a_child_does_not_share_the_parents_background_connections(
    mysql_shop: Shop, tmp_path: Path, fork: Callable[[], int]
) -> None:
    broker = RecordingBroker()
    connections = Connections(mysql_shop.engine)
    box = mysql_shop.box(broker)
    pay(mysql_shop, box, 0)
    broker.wait_for(lambda it: len(it.stored) == 1)
    while mysql_shop.rows() or connections.out:
        time.sleep(0.001)
    assert connections.used["sender"]

    child = fork()
    if child == 0:
        os._exit(status_with_connections_of_its_own(mysql_shop, box, connections))
    _, status = os.waitpid(child, 0)
    pay(mysql_shop, box, 2)

    assert os.waitstatus_to_exitcode(status) == 0
    broker.wait_for(lambda it: len(it.stored) == 2)
    assert box.close()
    assert mysql_shop.payments() == [0, 1, 2]
    assert mysql_shop.rows() == []


class Connections:
    """The server's ids of connections: those that this process opened, those that are out, and those that were used."""

    def __init__(self, engine: Engine) -> None:
        self.opened: set[int] = set()
        self.out: set[int] = set()
        self.used: dict[str, set[int]] = {"business": set(), "sender": set()}
        # The pool of the sender's connections is made from this one, with its listeners.
        event.listen(engine.pool, "connect", lambda raw, _: self.opened.add(raw.thread_id()))
        event.listen(engine.pool, "checkout", lambda raw, *_: self._take(raw.thread_id()))
        event.listen(engine.pool, "checkin", lambda raw, _: self.out.discard(raw.thread_id()))

    def _take(self, connection: int) -> None:
        self.out.add(connection)
        is_business = threading.current_thread() is threading.main_thread()
        self.used["business" if is_business else "sender"].add(connection)

    def clear(self) -> None:
        """Forget everything, in a child."""
        for ids in (self.opened, self.out, *self.used.values()):
            ids.clear()


def status_with_connections_of_its_own(shop: Shop, box: Outbox, connections: Connections) -> int:
    """What a forked worker does: pay, send; 0 where its sender used connections that it opened itself."""
    connections.clear()
    shop.engine.dispose(close=False)
    pay(shop, box, 1)
    if not box.close(timeout_ms=WAIT_SECONDS * 1_000):
        return 2
    sender = connections.used["sender"]
    return 0 if sender and sender <= connections.opened else 3


EXITS = """
import sys
from sqlalchemy.orm import Session
from outbox import Outbox, SenderLimits
from tests.outbox.shop import Payment
box = Outbox(sys.argv[1], broker=sys.argv[2], sender=SenderLimits(lease_ms=60_000, lease_margin_ms=1_000))
with Session(box.engine) as session, session.begin():
    session.add(Payment(id=1))
    box.publish("payments", "1", session=session)
"""


@pytest.mark.processes
def test_a_process_that_ends_without_close_sends_what_is_queued(sqlite_shop: Shop, tmp_path: Path) -> None:
    arguments = [sqlite_shop.database.url, f"embedded:{tmp_path / 'broker-data'}"]

    done = subprocess.run(
        [sys.executable, "-c", EXITS, *arguments],
        env={"PYTHONPATH": str(ROOT)}, cwd=ROOT, timeout=300, capture_output=True, text=True,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
    assert sqlite_shop.payments() == [1]
    assert sqlite_shop.rows() == []


@pytest.mark.parametrize("fields", [{"queue_rows_max": -1}, {"batch_rows_max": 0}, {"close_timeout_ms": -1}])
def test_limits_that_cannot_work_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(fields))):
        SenderLimits(**fields)
