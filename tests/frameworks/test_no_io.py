"""A business call does no I/O but its own transaction's: whatever state the broker is in, and the sender's queue."""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import event, insert
from sqlalchemy.orm import Session

from compensator.core.batch_totals import BatchTotals
from outbox import Outbox, SenderLimits, Telemetry
from outbox.telemetry.metrics import OutboxMetrics
from tests.frameworks.reached import Reached
from tests.outbox.shop import Payment, Shop

WAIT_SECONDS = 300
LEASES = {"lease_ms": 60_000, "lease_margin_ms": 1_000}


class Connects:
    """The addresses that each thread has connected to, or tried to."""

    def __init__(self) -> None:
        self._by_thread: defaultdict[int, list[Any]] = defaultdict(list)
        self._changed = threading.Condition()

    def note(self, address: object) -> None:
        with self._changed:
            self._by_thread[threading.get_ident()].append(address)
            self._changed.notify_all()

    @property
    def mine(self) -> list[Any]:
        """Those of the thread that asks."""
        with self._changed:
            return list(self._by_thread[threading.get_ident()])

    def wait_for(self, address: tuple[str, int]) -> set[int]:
        """The threads that have connected to this address, once one has."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._to(address), WAIT_SECONDS):
                raise TimeoutError(f"nobody has connected to {address}")
            return self._to(address)

    def _to(self, address: tuple[str, int]) -> set[int]:
        return {thread for thread, known in self._by_thread.items() if address in known}


@pytest.fixture
def connects(monkeypatch: pytest.MonkeyPatch) -> Connects:
    """Who connects to what from now on."""
    found = Connects()
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        found.note(address)
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    return found


@pytest.fixture
def dead_port() -> int:
    """A port of this machine on which nobody listens."""
    return 1


@pytest.fixture
def mute_port() -> Iterator[int]:
    """A port that takes connections and never says a word: the worst of brokers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as bound:
        yield bound.getsockname()[1]


def pay_function(box: Outbox, topic: str) -> Callable[[int], None]:
    @box.transactional
    def pay(session: Any, number: int) -> None:
        session.execute(insert(Payment).values(id=number, note=""))
        box.publish(topic, str(number))

    return pay


def statements_of(shop: Shop, call: Callable[[], None]) -> list[str]:
    """What the business's engine executes during a call, by its first word."""
    found: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        word = statement.split(maxsplit=1)[0]
        if word not in {"BEGIN", "ROLLBACK"}:  # how a transaction begins on SQLite; the servers' drivers do not tell
            found.append(word)

    event.listen(shop.engine, "before_cursor_execute", note)
    try:
        call()
    finally:
        event.remove(shop.engine, "before_cursor_execute", note)
    return found


@pytest.mark.parametrize("state", ["dead", "mute"])
def test_a_broker_that_is_dead_or_mute_costs_a_business_call_no_connection_and_no_statement(
    shop: Shop, connects: Connects, dead_port: int, mute_port: int, topic: str, state: str
) -> None:
    port = dead_port if state == "dead" else mute_port
    box = shop.box(f"http://127.0.0.1:{port}", sender=SenderLimits(**LEASES, close_timeout_ms=100))
    pay = pay_function(box, topic)
    pay(0)  # opens the pool's connection to the database
    sender = connects.wait_for(("127.0.0.1", port))
    before = connects.mine

    first = statements_of(shop, lambda: pay(1))
    many = statements_of(shop, lambda: [pay(number) for number in range(2, 20)] and None)

    assert first == ["INSERT", "INSERT"]  # the payment, the message
    assert many == first * 18
    assert connects.mine == before
    assert sender.isdisjoint({threading.get_ident()})
    assert shop.payments() == list(range(20))
    box.close()
    assert len(shop.rows()) == 20


def test_publishing_touches_no_socket_even_at_the_first_call(
    shop: Shop, connects: Connects, dead_port: int, topic: str
) -> None:
    with shop.engine.connect():
        pass
    before = connects.mine

    box = shop.box(f"http://127.0.0.1:{dead_port}")
    with Session(box.engine) as session:
        session.begin()
        for number in range(100):
            box.publish(topic, str(number), session=session)
        session.rollback()

    assert connects.mine == before
    assert box.close()


def test_a_full_queue_drops_the_send_and_the_compensator_sends_the_row(
    shop: Shop, connects: Connects, broker_url: str, reached: Reached, topic: str, mute_port: int
) -> None:
    limits = SenderLimits(**LEASES, queue_rows_max=3, batch_rows_max=1, close_timeout_ms=100)
    metrics = OutboxMetrics()
    box = shop.box(f"http://127.0.0.1:{mute_port}", sender=limits, telemetry=Telemetry(metrics=metrics))
    pay = pay_function(box, topic)
    pay(0)
    connects.wait_for(("127.0.0.1", mute_port))  # the sender has its hands full now
    for number in range(1, 30):
        pay(number)

    dropped = metrics.registry.get_sample_value("outbox_sender_dropped_rows_total")
    box.close()

    assert dropped == 30 - 1 - 3
    assert shop.payments() == list(range(30))
    assert len(shop.rows()) == 30
    shop.end_leases()
    result = compensate(shop, reached)
    assert result.accepted == 30
    assert sorted(reached.bodies(topic), key=int) == [str(number) for number in range(30)]
    assert shop.rows() == []


def compensate(shop: Shop, reached: Reached) -> BatchTotals:
    """One pass of the compensator to the real broker."""
    return shop.scan(reached.broker).run()
