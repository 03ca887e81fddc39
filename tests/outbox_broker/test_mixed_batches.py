"""A batch that mixes topics is stored as one, each topic's messages together and in order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import Message, PublishStatus

type_of_open = Callable[..., Engine]


def message(topic: str, number: int, *, deliver_at_ms: int | None = None) -> Message:
    return Message(id=f"{topic}-{number}", topic=topic, body=b"x", deliver_at_ms=deliver_at_ms)


def pull_ids(engine: Engine, topic: str) -> list[str]:
    return [one.id for one in engine.puller.pull(topic, "g", max_messages=1_000)]


@pytest.mark.parametrize("due", [False, True], ids=["all plain", "one of them due long ago"])
def test_each_topic_of_a_mixed_batch_keeps_its_order_and_stands_together(
    open_engine: type_of_open, clock: ManualClock, *, due: bool
) -> None:
    engine = open_engine()
    batch = [message(topic, number) for number in range(5) for topic in ("a", "b", "c")]
    if due:
        batch[4] = message("b", 1, deliver_at_ms=clock.now_ms() - 1)

    results = engine.publisher.publish(batch)

    assert [(one.id, one.status) for one in results] == [(one.id, PublishStatus.STORED) for one in batch]
    assert [len(engine.context.state.topics[topic].index.tail) for topic in "abc"] == [1, 1, 1]
    engine = open_engine()
    assert [pull_ids(engine, topic) for topic in "abc"] == [[f"{one}-{number}" for number in range(5)] for one in "abc"]
    assert engine.publisher.publish(batch)[7].status is PublishStatus.DUPLICATE


def test_of_a_mixed_batch_topics_beyond_the_bound_are_refused_alone(open_engine: type_of_open) -> None:
    engine = open_engine(topics_max=2)
    engine.publisher.publish([message("a", 0)])

    results = engine.publisher.publish([message("b", 0), message("c", 0), message("a", 1)])

    assert [one.status for one in results] == [PublishStatus.STORED, PublishStatus.REJECTED, PublishStatus.STORED]
    assert (engine.admin.topics(), pull_ids(engine, "a")) == (["a", "b"], ["a-0", "a-1"])


def test_a_group_that_waits_is_woken_for_its_topic_of_a_mixed_batch_alone(engine: Engine) -> None:
    woken: list[str] = []
    for topic in "ab":
        engine.wakeups.subscribe(topic, "g", lambda topic=topic: woken.append(topic))  # type: ignore[misc]

    engine.publisher.publish([message("b", 0), message("c", 0)])

    assert woken == ["b"]
