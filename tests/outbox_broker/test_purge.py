"""A purged topic's groups get nothing of what was in it; dead letters stay, and scheduled messages unless asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Timer

import pytest

from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import GroupConfig, Message
from outbox_core.protocol.wire import PurgeAnswer
from tests.outbox_broker.failing_storage import HeldSyncs
from tests.outbox_broker.killed_engine import RESERVE_BYTES, START_MS, KillingStorage, copy_at_each_call, type_of_tell
from tests.outbox_broker.test_engine_kills import told_in

TOPIC, GROUP, OTHER = "orders", "billing", "audit"
HOUR_MS = 3_600_000
type_of_open = Callable[..., Engine]


def publish(engine: Engine, *ids: str, topic: str = TOPIC, deliver_at_ms: int | None = None) -> None:
    batch = [Message(id=one, topic=topic, body=b"x", deliver_at_ms=deliver_at_ms) for one in ids]
    assert {result.status for result in engine.publisher.publish(batch)} == {"stored"}


def pulled(engine: Engine, group: str = GROUP, *, count: int = 100, topic: str = TOPIC) -> list[str]:
    return [delivery.id for delivery in engine.puller.pull(topic, group, max_messages=count)]


def test_what_waits_and_what_is_in_flight_goes_and_what_comes_later_is_delivered(engine: Engine) -> None:
    publish(engine, "m1", "m2", "m3")
    engine.admin.declare_group(TOPIC, OTHER, GroupConfig())
    [held] = engine.puller.pull(TOPIC, GROUP, max_messages=1)

    purge = engine.purger.purge_topic(TOPIC)
    publish(engine, "m4")

    assert purge == PurgeAnswer(
        groups=2, waiting=5, in_flight=1, scheduled_canceled=0, scheduled_kept=0, dead_discarded=0, dead_kept=0
    )
    assert engine.settler.ack([held.receipt]) == ["stale"]
    assert (pulled(engine), pulled(engine, OTHER)) == (["m4"], ["m4"])


def test_dead_letters_and_scheduled_messages_are_kept(engine: Engine, clock: ManualClock) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    publish(engine, "dead")
    engine.settler.nack([delivery.receipt for delivery in engine.puller.pull(TOPIC, GROUP)])
    publish(engine, "m1")
    publish(engine, "later", deliver_at_ms=clock.now_ms() + HOUR_MS)

    purge = engine.purger.purge_topic(TOPIC)

    assert purge == PurgeAnswer(
        groups=1, waiting=1, in_flight=0, scheduled_canceled=0, scheduled_kept=1, dead_discarded=0, dead_kept=1
    )
    assert [letter.id for letter in engine.admin.dead(TOPIC, GROUP)[0]] == ["dead"]
    assert engine.dead_letters.redrive(TOPIC, GROUP) == 1
    assert pulled(engine) == ["dead"]
    clock.advance(HOUR_MS)
    assert pulled(engine) == ["later"]


def test_dead_letters_of_every_group_are_discarded_if_that_is_asked(engine: Engine) -> None:
    for group in (GROUP, OTHER):
        engine.admin.declare_group(TOPIC, group, GroupConfig(max_attempts=1))
    publish(engine, "dead", "m1")
    for group in (GROUP, OTHER):
        [delivery] = engine.puller.pull(TOPIC, group, max_messages=1)
        engine.settler.nack([delivery.receipt])

    purge = engine.purger.purge_topic(TOPIC, dead=True, by="ops")

    assert (purge.waiting, purge.dead_discarded, purge.dead_kept) == (2, 2, 0)
    assert [engine.admin.dead(TOPIC, group)[0] for group in (GROUP, OTHER)] == [[], []]
    assert (pulled(engine), pulled(engine, OTHER)) == ([], [])


def test_what_is_scheduled_is_canceled_if_that_is_asked(engine: Engine, clock: ManualClock) -> None:
    publish(engine, "m1")
    publish(engine, "later", "latest", deliver_at_ms=clock.now_ms() + HOUR_MS)
    publish(engine, "elsewhere", topic="other", deliver_at_ms=clock.now_ms() + HOUR_MS)

    purge = engine.purger.purge_topic(TOPIC, scheduled=True)

    assert (purge.scheduled_canceled, purge.scheduled_kept) == (2, 0)
    clock.advance(HOUR_MS)
    assert pulled(engine) == ["m1"]  # no group was there to be moved
    assert pulled(engine, topic="other") == ["elsewhere"]


def test_other_topics_and_a_second_purge_change_nothing(engine: Engine) -> None:
    publish(engine, "m1")
    publish(engine, "n1", topic="other")
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    engine.purger.purge_topic(TOPIC)

    again = engine.purger.purge_topic(TOPIC)

    assert (again.waiting, again.in_flight) == (0, 0)
    assert pulled(engine, topic="other") == ["n1"]


def test_an_ordered_group_goes_on_in_order(engine: Engine) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(ordered=True))
    engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, key="k", body=b"") for number in range(3)])
    pulled(engine)

    purge = engine.purger.purge_topic(TOPIC)
    engine.publisher.publish([Message(id=f"n{number}", topic=TOPIC, key="k", body=b"") for number in range(2)])

    assert (purge.waiting, purge.in_flight) == (2, 1)
    assert pulled(engine) == ["n0"]


def test_an_unknown_topic_is_said_to_be_unknown(engine: Engine) -> None:
    with pytest.raises(KeyError):
        engine.purger.purge_topic(TOPIC)


def test_a_purge_outlives_a_restart(open_engine: type_of_open) -> None:
    engine = open_engine()
    publish(engine, "m1")
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    engine.admin.declare_group(TOPIC, OTHER, GroupConfig())
    engine.purger.purge_topic(TOPIC)

    engine = open_engine()

    assert (pulled(engine), pulled(engine, OTHER)) == ([], [])


def purging_run(folder: Path, storage: KillingStorage, tell: type_of_tell) -> None:
    """Publish for two groups, hold some, and purge."""
    options = EngineOptions(segment_bytes=4096, reserve_bytes=RESERVE_BYTES)
    engine = Engine.open(folder, clock=ManualClock(START_MS), options=options, storage=storage)
    for group in (GROUP, OTHER):
        engine.admin.declare_group(TOPIC, group, GroupConfig())
    publish(engine, "m1", "m2", "m3")
    pulled(engine, count=1)
    tell(asked="purge", ids=["topic"])
    engine.purger.purge_topic(TOPIC)
    tell(answered="purge", ids=["topic"])
    publish(engine, "m4")
    tell(answered="new", ids=["m4"])
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["before", "half", "power", "power-messages", "power-actions"])
def test_whatever_storage_call_is_the_last_all_groups_are_purged_or_none(tmp_path: Path, way: str) -> None:
    copy_at_each_call(purging_run, tmp_path, way=way)

    became = set()
    for path in tmp_path.glob("*.told"):
        told = told_in(path.read_bytes())
        if not told.asked["purge"]:
            continue
        clock = ManualClock(START_MS + HOUR_MS)  # what was held is visible again
        options = EngineOptions(reserve_bytes=RESERVE_BYTES, durability=Durability.OS)
        engine = Engine.open(tmp_path / path.stem, clock=clock, options=options)
        try:
            came = {group: set(pulled(engine, group)) - {"m4"} for group in (GROUP, OTHER)}
        finally:
            engine.close()
        assert came[GROUP] == came[OTHER], path.stem
        assert came[GROUP] in (set(), {"m1", "m2", "m3"})
        assert not (told.answered["purge"] and came[GROUP]), "a purge that was answered is undone"
        became.add(bool(came[GROUP]))

    assert became == {True, False}


def test_a_batch_that_is_claimed_as_the_purge_begins_is_purged_with_the_rest(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    disk = HeldSyncs(within="schedule")
    engine = open_engine(storage=disk)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    publish(engine, "m1", deliver_at_ms=clock.now_ms() + HOUR_MS)
    disk.hold()
    clock.advance(HOUR_MS)
    assert disk.waiting.wait(120), "the claim waits for its sync"
    releasing = Timer(0.2, disk.release)
    releasing.start()

    purge = engine.purger.purge_topic(TOPIC, scheduled=True)

    assert pulled(engine) == []
    assert purge.waiting + purge.scheduled_canceled == 1
    assert purge.scheduled_kept == 0
    releasing.join()
