"""A cordoned broker takes no new messages, over restarts and kills, and goes on with all that it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import BrokerCordoned
from outbox_core.messages.message import GroupConfig, Message
from outbox_core.protocol.wire import CordonNote, GroupRemainder, TopicRemainder
from tests.outbox_broker.killed_engine import RESERVE_BYTES, START_MS, KillingStorage, copy_at_each_call, type_of_tell
from tests.outbox_broker.test_engine_kills import told_in

TOPIC, GROUP = "orders", "billing"
IS_OF_FILES = True
HOUR_MS = 3_600_000
type_of_open = Callable[..., Engine]


def publish(engine: Engine, *ids: str, topic: str = TOPIC, deliver_at_ms: int | None = None) -> None:
    batch = [Message(id=one, topic=topic, body=b"x", deliver_at_ms=deliver_at_ms) for one in ids]
    assert {result.status for result in engine.publisher.publish(batch)} == {"stored"}


def pulled(engine: Engine) -> list[str]:
    return [delivery.id for delivery in engine.puller.pull(TOPIC, GROUP)]


def test_publishes_are_refused_for_now_scheduled_ones_too(engine: Engine, clock: ManualClock) -> None:
    engine.operations.cordon.begin(reason="moving")

    for deliver_at_ms in (None, clock.now_ms() + HOUR_MS):
        with pytest.raises(BrokerCordoned, match=r"cordoned \(moving\)") as refused:
            publish(engine, "m1", deliver_at_ms=deliver_at_ms)
        assert refused.value.retryable
        assert refused.value.retry_after_ms >= 1_000
    assert engine.admin.topics() == []
    engine.operations.cordon.end()
    publish(engine, "m1")


def test_what_is_stored_is_delivered_settled_and_falls_due(engine: Engine, clock: ManualClock) -> None:
    publish(engine, "m1", "m2")
    publish(engine, "later", "never", deliver_at_ms=clock.now_ms() + HOUR_MS)
    [first, second] = engine.puller.pull(TOPIC, GROUP)

    engine.operations.cordon.begin()

    assert engine.settler.ack([first.receipt]) == ["acked"]
    engine.settler.nack([second.receipt], delay_ms=0, reason="again")
    assert pulled(engine) == ["m2"]
    assert engine.publisher.cancel(["never"]) == ["canceled"]
    engine.admin.declare_group(TOPIC, "audit", GroupConfig())
    clock.advance(HOUR_MS)
    assert "later" in pulled(engine)


def test_a_cordon_outlives_restarts_until_it_is_ended(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine()
    since_ms = clock.now_ms()
    engine.operations.cordon.begin(reason="moving")

    clock.advance(HOUR_MS)
    engine = open_engine()
    engine.operations.cordon.begin()

    assert engine.operations.cordon.note == CordonNote(since_ms=since_ms, reason="moving")
    with pytest.raises(BrokerCordoned):
        publish(engine, "m1")
    engine.operations.cordon.end()
    engine = open_engine()
    assert engine.operations.cordon.note is None
    publish(engine, "m1")


def test_a_cordon_whose_file_was_cut_still_holds(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine()
    engine.operations.cordon.begin(reason="moving")
    engine.close()
    (folder / "cordoned").write_bytes(b'{"since')

    engine = open_engine()

    with pytest.raises(BrokerCordoned):
        publish(engine, "m1")
    engine.operations.cordon.end()
    publish(engine, "m1")


def test_what_is_left_is_told_by_topic_and_group(engine: Engine, clock: ManualClock) -> None:
    engine.admin.declare_group(TOPIC, "idle", GroupConfig(filter="type = 'wanted'"))
    publish(engine, "m1", "m2")
    publish(engine, "later", topic="reports", deliver_at_ms=clock.now_ms() + HOUR_MS)
    publish(engine, "n1", topic="read-by-nobody")
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    [first] = engine.puller.pull(TOPIC, GROUP, max_messages=1)
    engine.settler.nack([first.receipt])
    [second] = engine.puller.pull(TOPIC, GROUP, max_messages=1)

    left = list(engine.operations.remainder())

    assert left == [
        TopicRemainder(
            topic=TOPIC, scheduled=0, groups=[GroupRemainder(group=GROUP, ready=0, in_flight=1, dead=1)]
        ),
        TopicRemainder(topic="reports", scheduled=1, groups=[]),
    ]  # fmt: skip
    assert engine.settler.ack([second.receipt]) == ["acked"]
    assert engine.publisher.cancel(["later"]) == ["canceled"]
    [topic] = engine.operations.remainder()
    assert [(group.ready, group.in_flight, group.dead) for group in topic.groups] == [(0, 0, 1)]


def test_what_is_left_of_a_group_says_how_old_the_oldest_of_it_is(engine: Engine, clock: ManualClock) -> None:
    for group in ("behind", "ahead"):
        engine.admin.declare_group(TOPIC, group, GroupConfig())
    publish(engine, "m1")
    clock.advance(500)
    publish(engine, "m2")
    engine.settler.ack([delivery.receipt for delivery in engine.puller.pull(TOPIC, "ahead", max_messages=1)])
    clock.advance(250)

    [topic] = engine.operations.remainder()

    assert [(left.group, left.oldest_unacked_age_ms) for left in topic.groups] == [("behind", 750), ("ahead", 250)]


def cordoning_run(folder: Path, storage: KillingStorage, tell: type_of_tell) -> None:
    """Publish, cordon, and end the cordon."""
    options = EngineOptions(segment_bytes=4096, reserve_bytes=RESERVE_BYTES)
    engine = Engine.open(folder, clock=ManualClock(START_MS), options=options, storage=storage)
    publish(engine, "m1")
    for what, do in (("cordon", engine.operations.cordon.begin), ("uncordon", engine.operations.cordon.end)):
        tell(asked=what, ids=["broker"])
        do()
        tell(answered=what, ids=["broker"])
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["before", "half", "power"])
def test_whatever_storage_call_is_the_last_what_was_answered_holds(tmp_path: Path, way: str) -> None:
    copy_at_each_call(cordoning_run, tmp_path, way=way)

    became = set()
    for path in tmp_path.glob("*.told"):
        told = told_in(path.read_bytes())
        options = EngineOptions(reserve_bytes=RESERVE_BYTES, durability=Durability.OS)
        engine = Engine.open(tmp_path / path.stem, clock=ManualClock(START_MS), options=options)
        try:
            is_cordoned = engine.operations.cordon.note is not None
        finally:
            engine.close()
        assert is_cordoned or not told.answered["cordon"] or told.asked["uncordon"], path.stem
        assert not is_cordoned or (told.asked["cordon"] and not told.answered["uncordon"]), path.stem
        became.add(is_cordoned)

    assert became == {True, False}


def test_a_cordon_whose_text_is_damaged_still_holds(folder: Path, open_engine: type_of_open) -> None:
    engine = open_engine()
    engine.operations.cordon.begin(reason="moving to K\u00f6ln")
    engine.close()
    file = folder / "cordoned"
    file.write_bytes(file.read_bytes().replace("\u00f6".encode(), b"\xff\xff"))

    engine = open_engine()

    with pytest.raises(BrokerCordoned):
        engine.publisher.publish([Message(id="m", topic=TOPIC, body=b"x")])
