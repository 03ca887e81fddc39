"""The engine's locks are taken in one order, which stands in EngineContext: no two threads wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import GroupConfig, Message
from tests.outbox_broker.lock_monitor import LockMonitor
from tests.outbox_broker.message_log import flip_footer
from tests.outbox_broker.test_mending import SMALL, drained, footers, stored

type_of_open = Callable[..., Engine]
JOIN_SECONDS = 300
IS_OF_FILES = True


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> LockMonitor:
    """Of the locks that the broker makes in this test."""
    made = LockMonitor()
    made.install(monkeypatch)
    return made


def test_locks_are_taken_in_one_order_by_all_that_an_engine_does(
    monitor: LockMonitor, open_engine: type_of_open, clock: ManualClock
) -> None:
    options = {**SMALL, "retention_ms": 100_000_000, "retention_check_ms": 1}
    stored(open_engine(**options), clock)
    engine = open_engine(**options)  # which reads its footers when they are asked for
    for path in footers(engine.context.folder):
        flip_footer(path)
    waiting = threading.Thread(target=engine.puller.pull, args=("later", "group"), kwargs={"wait_ms": 60_000})
    waiting.start()
    drained(engine)
    engine.admin.declare_group("filtered", "group", GroupConfig(filter="colour = 'red'"))
    engine.publisher.publish([Message(id=f"f{number}", topic="filtered", body=b"") for number in range(10)])
    engine.puller.pull("filtered", "group")
    engine.publisher.publish(
        [Message(id=f"l{number}", topic="later", body=b"", deliver_at_ms=clock.now_ms() + 50) for number in range(10)]
    )
    engine.publisher.cancel(["l1"])
    clock.advance(100)
    waiting.join(JOIN_SECONDS)
    for delivery in engine.puller.pull("later", "group"):
        engine.settler.extend([delivery.receipt], invisible_ms=60_000)
        engine.settler.nack([delivery.receipt])
    engine.dead_letters.redrive("orders", "billing")
    engine.admin.seek("orders", "billing", to_ms=0)
    engine.admin.pause("orders", "billing", paused=True)
    engine.deletion.delete_topic("later", force=True)
    clock.advance(200_000_000)
    engine.retention.drop_outdated()
    engine.close()

    assert not waiting.is_alive()
    assert monitor.cycle() == []
    assert {"consumer_group", "footer_repair"} <= monitor.modules_under("context")
    assert "context" not in monitor.modules_under("consumer_group") | monitor.modules_under("footer_repair")


def test_locks_that_two_threads_take_in_two_orders_are_found(
    monitor: LockMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (made_by(f"/outbox_broker/{name}.py") for name in ("one", "other"))
    with one, other:
        pass
    assert monitor.cycle() == []
    with other, one:
        pass

    assert {name.partition(":")[0] for name in monitor.cycle()} == {"one", "other"}


def made_by(path: str) -> threading.Lock:
    """A lock that the code in this file makes."""
    place: dict[str, threading.Lock] = {}
    exec(compile("import threading\nmade = threading.Lock()", path, "exec"), place)
    return place["made"]
