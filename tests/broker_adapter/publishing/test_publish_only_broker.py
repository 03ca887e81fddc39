"""PublishOnlyBroker: the inspection before a publish, strict or not, and what waits for its time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence

import pytest

from broker_adapter.publishing.publish_only_broker import PublishOnlyBroker
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import BrokerUnavailable, NotSupported, StorageFailed
from outbox_core.messages.broker_port import Capability, Inspection, Weakness
from outbox_core.messages.message import Message, PublishResult, PublishStatus
from outbox_core.runtime.logs import event_name

WAIT_SECONDS = 60
WEAK = Weakness(subject="topic paid", problem="one replica only", cure="set min.insync.replicas=2")


class MemoryPublisher:
    """Stores in a list; its server is as weak as the test says."""

    product = "Memory"
    capabilities: frozenset[Capability] = frozenset()

    def __init__(self, *weaknesses: Weakness, clock: ManualClock | None = None, inspection_ms: int = 0) -> None:
        self.weaknesses = weaknesses
        self.clock = clock or ManualClock()
        self.inspection_ms = inspection_ms
        self.timeouts_ms: list[int] = []
        self.stored: list[Message] = []
        self.inspected: list[list[str]] = []

    def publish(self, batch: Sequence[Message], *, timeout_ms: int) -> list[PublishResult]:
        self.timeouts_ms.append(timeout_ms)
        self.stored += batch
        return [PublishResult(one.id, PublishStatus.STORED) for one in batch]

    def inspect(self, topics: Sequence[str], *, timeout_ms: int) -> Inspection:
        self.timeouts_ms.append(timeout_ms)
        self.clock.advance(self.inspection_ms)
        self.inspected.append(list(topics))
        return Inspection(product="Memory", version="1", weaknesses=self.weaknesses)

    def close(self) -> None:
        pass


def on(topic: str, number: int = 0, **parts: int) -> Message:
    return Message(id=f"{topic}-{number}", topic=topic, body=b"", **parts)


@pytest.mark.parametrize(
    "call",
    [
        lambda broker: broker.pull("a", "g"),
        lambda broker: broker.ack(["r"]),
        lambda broker: broker.nack(["r"]),
        lambda broker: broker.extend(["r"], invisible_ms=1),
        lambda broker: broker.cancel(["a-0"]),
        lambda broker: broker.admin,
    ],
    ids=["pull", "ack", "nack", "extend", "cancel", "admin"],
)
def test_all_but_a_publish_is_refused_by_the_engines_name(call: Callable[[PublishOnlyBroker], object]) -> None:
    broker = PublishOnlyBroker(MemoryPublisher(), clock=ManualClock())

    with pytest.raises(NotSupported, match="not supported on Memory"):
        call(broker)


def test_each_topic_is_inspected_before_its_first_publish_and_again_after_a_minute() -> None:
    publisher, clock = MemoryPublisher(), ManualClock()
    broker = PublishOnlyBroker(publisher, clock=clock)

    broker.publish([on("a"), on("b")])
    broker.publish([on("a", 1), on("c")])
    clock.advance(60_000)
    broker.publish([on("a", 2)])

    assert publisher.inspected == [["a", "b"], ["c"], ["a"]]
    assert len(publisher.stored) == 5


def test_an_inspection_and_the_publish_behind_it_share_one_timeout() -> None:
    clock = ManualClock()
    publisher = MemoryPublisher(clock=clock, inspection_ms=400)
    broker = PublishOnlyBroker(publisher, timeout_ms=1_000, clock=clock)

    broker.publish([on("a")])
    broker.publish([on("a", 1)])

    assert publisher.timeouts_ms == [1_000, 600, 1_000]


def test_an_inspection_that_took_all_the_time_is_an_outage_and_publishes_nothing() -> None:
    clock = ManualClock()
    publisher = MemoryPublisher(clock=clock, inspection_ms=1_000)
    broker = PublishOnlyBroker(publisher, timeout_ms=1_000, clock=clock)

    with pytest.raises(BrokerUnavailable, match="timeout_ms"):
        broker.publish([on("a")])
    broker.publish([on("a")])

    assert len(publisher.stored) == 1


class HeldWeakness(Weakness, frozen=True, kw_only=True):
    """A weakness that holds the thread of one process that reports it, which it does under the broker's lock."""

    process: int
    reporting: threading.Event
    go_on: threading.Event

    def __str__(self) -> str:
        if os.getpid() == self.process:
            self.reporting.set()
            assert self.go_on.wait(WAIT_SECONDS)
        return self.problem


@pytest.mark.own_process
def test_a_child_publishes_that_was_forked_while_another_thread_did() -> None:
    weakness = HeldWeakness(
        subject="s", problem="p", cure="c", process=os.getpid(), reporting=threading.Event(), go_on=threading.Event()
    )  # fmt: skip
    broker = PublishOnlyBroker(MemoryPublisher(weakness), clock=ManualClock())
    publishing = threading.Thread(target=broker.publish, args=[[on("a")]])
    publishing.start()
    assert weakness.reporting.wait(WAIT_SECONDS)

    child = os.fork()
    if child == 0:
        signal.alarm(WAIT_SECONDS)  # which ends a child that waits for a lock for ever
        stored = broker.publish([on("c")])[0].status is PublishStatus.STORED
        os._exit(0 if stored else 1)
    weakness.go_on.set()
    _, status = os.waitpid(child, 0)
    publishing.join(WAIT_SECONDS)

    assert os.waitstatus_to_exitcode(status) == 0


def test_a_weakness_is_logged_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    broker = PublishOnlyBroker(MemoryPublisher(WEAK), clock=clock)

    for number in range(3):
        assert broker.publish([on("paid", number)])[0].status is PublishStatus.STORED
        clock.advance(60_000)

    [told] = [record for record in caplog.records if record.name.startswith("broker_adapter.publishing")]
    assert event_name(told) == "broker_durability_weak"
    assert told.cure == "set min.insync.replicas=2"  # type: ignore[attr-defined]


def test_a_weakness_that_was_reported_at_the_start_is_not_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    broker = PublishOnlyBroker(MemoryPublisher(WEAK), clock=ManualClock())

    broker.report_weaknesses()
    broker.report_weaknesses()
    broker.publish([on("paid")])

    told = [event_name(one) for one in caplog.records if one.name.startswith("broker_adapter.publishing")]
    assert told == ["broker_durability_weak"]


def test_a_strict_broker_stores_nothing_until_the_weakness_is_cured() -> None:
    publisher = MemoryPublisher(WEAK)
    broker = PublishOnlyBroker(publisher, strict=True, clock=ManualClock())

    for _ in range(2):
        with pytest.raises(StorageFailed, match=r"min\.insync\.replicas=2"):
            broker.publish([on("paid")])
    publisher.weaknesses = ()

    assert broker.publish([on("paid")])[0].status is PublishStatus.STORED
    assert len(publisher.stored) == 1


def test_a_strict_broker_defers_what_goes_to_a_weak_topic_and_publishes_the_rest() -> None:
    publisher = MemoryPublisher(Weakness(subject="queue paid", problem="lost", cure="declare it", topic="paid"))
    broker = PublishOnlyBroker(publisher, strict=True, clock=ManualClock())

    results = broker.publish([on("paid"), on("trips"), on("paid", 1)])

    assert [one.status for one in results] == [PublishStatus.DEFERRED, PublishStatus.STORED, PublishStatus.DEFERRED]
    assert "declare it" in str(results[0].error)
    assert [one.topic for one in publisher.stored] == ["trips"]


def test_what_is_not_due_is_rejected_and_the_rest_keeps_its_place() -> None:
    clock = ManualClock()
    publisher = MemoryPublisher()
    broker = PublishOnlyBroker(publisher, clock=clock)
    now_ms = clock.now_ms()

    results = broker.publish([on("a", 0, deliver_at_ms=now_ms + 1), on("a", 1, deliver_at_ms=now_ms), on("a", 2)])

    assert [one.status for one in results] == [PublishStatus.REJECTED, PublishStatus.STORED, PublishStatus.STORED]
    assert [one.id for one in results] == ["a-0", "a-1", "a-2"]
    assert "?delay=" in str(results[0].error)
    assert [one.id for one in publisher.stored] == ["a-1", "a-2"]


def test_an_empty_batch_asks_the_server_nothing() -> None:
    publisher = MemoryPublisher()

    assert PublishOnlyBroker(publisher).publish([]) == []
    assert publisher.inspected == []
