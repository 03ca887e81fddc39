"""A delay service hands its target each topic by due time, then as published: in a process, and in a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from outbox_broker.delay_service.delay_proxy import DelayProxy
from outbox_core import Message
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.message import PublishResult, PublishStatus
from outbox_core.messages.publish_guard import PublishTarget
from tests.broker_adapter.conformance.scheduled_order import SPAN_MS, in_order, scheduled
from tests.outbox_broker.delay.conftest import HOUR_MS, NOW_MS

TOPICS = ("orders", "bills")
STEPS = 10


class Target:
    """Takes everything, or a few of each request; a repeat, as after a restart, is known by its id."""

    def __init__(self) -> None:
        self.came: dict[str, list[str]] = {topic: [] for topic in TOPICS}
        self.copies = 0
        self.out_after: int | None = None
        """Messages of a request that it takes before it is out, which it tells of with what it took."""

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        taken = batch[: self.out_after]
        for message in taken:
            self.copies += 1
            if message.id not in self.came[message.topic]:
                self.came[message.topic].append(message.id)
        results = [PublishResult(message.id, PublishStatus.STORED) for message in taken]
        if len(taken) < len(batch):
            raise BrokerUnavailable("out").with_answered(dict(enumerate(results)))
        return results


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.mark.parametrize("ahead_ms", [1_000, 3 * HOUR_MS], ids=["in memory", "in buckets"])
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed"])
def test_scheduled_messages_come_by_due_time_then_in_the_order_in_which_they_were_published(
    front_of: Callable[[PublishTarget], DelayProxy], clock: ManualClock, killed: bool, ahead_ms: int
) -> None:
    target = Target()
    front = front_of(target)
    batches = {topic: scheduled(topic, base_ms=NOW_MS + ahead_ms) for topic in TOPICS}
    for of_each in zip(*batches.values(), strict=True):
        front.publish([message for batch in of_each for message in batch])
        if killed:
            front = front_of(target)

    for number in range(STEPS + SPAN_MS):
        clock.advance(ahead_ms // STEPS if number < STEPS else 1)
        while front.service.turn() == 0:
            pass
        if killed and number >= STEPS:
            front = front_of(target)

    assert target.came == {topic: in_order(of_topic) for topic, of_topic in batches.items()}


@pytest.mark.parametrize("ahead_ms", [1_000, 3 * HOUR_MS], ids=["in memory", "in buckets"])
def test_stops_amid_messages_of_one_millisecond_change_neither_their_order_nor_their_number(
    front_of: Callable[[PublishTarget], DelayProxy], clock: ManualClock, ahead_ms: int
) -> None:
    target = Target()
    front = front_of(target)
    batches = {topic: scheduled(topic, base_ms=NOW_MS + ahead_ms) for topic in TOPICS}
    messages = [message for of_topic in batches.values() for batch in of_topic for message in batch]
    for of_each in zip(*batches.values(), strict=True):
        front.publish([message for batch in of_each for message in batch])
    clock.advance(ahead_ms + SPAN_MS)

    target.out_after = 7
    while sum(map(len, target.came.values())) < len(messages) // 2:
        while front.service.turn() == 0:
            pass
        front.close()
        front = front_of(target)
    target.out_after = None
    while front.service.turn() == 0:
        pass

    assert target.came == {topic: in_order(of_topic) for topic, of_topic in batches.items()}
    assert target.copies == len(messages)
