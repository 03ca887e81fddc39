"""DelayedBroker: without a due time to the target, with one to the delay service; answers keep their order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from broker_adapter.embedded import EmbeddedBroker
from broker_adapter.publishing.publish_only_broker import PublishOnlyBroker
from outbox_core.common.clock import ManualClock, SystemClock
from outbox_core.common.errors import ConfigurationError, NotSupported
from outbox_core.messages.broker_port import Capability
from outbox_core.messages.connect import connect
from outbox_core.messages.delayed_broker import DelayedBroker
from outbox_core.messages.message import CancelStatus, Message, PublishStatus
from tests.broker_adapter.publishing.test_publish_only_broker import MemoryPublisher

HOUR_MS = 3_600_000


class Delayed:
    """A target that cannot delay, and an embedded broker that stands for the delay service."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock(HOUR_MS)  # so all due times have long passed by the machine's clock
        self.target = MemoryPublisher()
        self.delay = EmbeddedBroker(f"embedded:{folder}", clock=self.clock)
        self.broker = DelayedBroker(PublishOnlyBroker(self.target, clock=self.clock), self.delay)

    def message(self, number: int, *, in_ms: int | None = None) -> Message:
        due_ms = None if in_ms is None else self.clock.now_ms() + in_ms
        return Message(id=f"m-{number}", topic="trip", body=b"", deliver_at_ms=due_ms)


@pytest.fixture
def delayed(tmp_path: Path) -> Iterator[Delayed]:
    made = Delayed(tmp_path / "delay")
    yield made
    made.broker.close()


def test_each_message_goes_where_it_belongs_and_answers_come_in_order(delayed: Delayed) -> None:
    batch = [delayed.message(0, in_ms=HOUR_MS), delayed.message(1), delayed.message(2, in_ms=0)]
    batch.append(delayed.message(3, in_ms=2 * HOUR_MS))

    results = delayed.broker.publish(batch)

    assert [(one.id, one.status) for one in results] == [(f"m-{n}", PublishStatus.STORED) for n in range(4)]
    assert [one.id for one in delayed.target.stored] == ["m-1"]
    assert delayed.delay.admin.figures("trip")["scheduled"] == 2
    assert [one.id for one in delayed.delay.pull("trip", "g")] == ["m-2"]


def test_a_cancel_reaches_what_is_scheduled_and_nothing_that_was_sent(delayed: Delayed) -> None:
    delayed.broker.publish([delayed.message(0, in_ms=HOUR_MS), delayed.message(1)])

    assert delayed.broker.cancel(["m-0"]) == [CancelStatus.CANCELED]
    assert delayed.delay.admin.figures("trip")["scheduled"] == 0


def test_a_canceled_message_does_not_reach_the_target_when_it_is_published_again_after_its_due_time(
    delayed: Delayed,
) -> None:
    message = delayed.message(0, in_ms=HOUR_MS)
    delayed.broker.publish([message])
    assert delayed.broker.cancel([message.id]) == [CancelStatus.CANCELED]
    delayed.clock.advance(2 * HOUR_MS)

    results = delayed.broker.publish([message])

    assert [one.status for one in results] == [PublishStatus.DUPLICATE]
    assert delayed.target.stored == []
    assert delayed.delay.pull("trip", "g") == []


def test_it_can_delay_and_cancel_and_nothing_else_that_its_target_cannot(delayed: Delayed) -> None:
    assert delayed.broker.capabilities == {Capability.DELAY, Capability.CANCEL}
    with pytest.raises(NotSupported):
        delayed.broker.pull("trip", "g")


def test_a_delay_service_that_cannot_delay_is_refused() -> None:
    target = PublishOnlyBroker(MemoryPublisher())

    with pytest.raises(ConfigurationError, match="cannot delay"):
        DelayedBroker(target, PublishOnlyBroker(MemoryPublisher()))


def test_a_url_names_both(tmp_path: Path) -> None:
    delay_url = f"embedded:{tmp_path / 'delay'}"
    broker = connect(f"embedded:{tmp_path / 'target'}?delay={quote(delay_url, safe='')}")
    try:
        assert isinstance(broker, DelayedBroker)
        later_ms = SystemClock().now_ms() + HOUR_MS
        now, later = Message(id="a", topic="t", body=b""), Message(id="b", topic="t", body=b"", deliver_at_ms=later_ms)
        broker.publish([now, later])

        assert [one.id for one in broker.pull("t", "g")] == ["a"]
    finally:
        broker.close()
    delay = EmbeddedBroker(delay_url)
    assert delay.admin.figures("t")["scheduled"] == 1
    delay.close()
