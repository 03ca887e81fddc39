"""Old segments go, whole, by age or size; never what a group still has to deliver, unless told so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.journal.block import SEGMENT_HEAD_BYTES
from outbox_core.messages.message import GroupConfig, Message
from outbox_core.runtime.retention_hold import RetentionHold
from tests.outbox_broker.action_log import (
    action_segments,
    captured_of,
    checkpoints,
    damage_checkpoints,
    whole_checkpoint,
)
from tests.outbox_broker.failing_storage import HeldSyncs
from tests.outbox_broker.message_log import message_segments, segments_of
from tests.outbox_broker.polling import until

TOPIC, GROUP = "orders", "billing"
HOUR_MS = 3_600_000
BY_AGE = {
    "segment_bytes": 4096, "checkpoint_bytes": 4096, "retention_ms": HOUR_MS, "retention_check_ms": 10**15,
}  # fmt: skip
"""The timer looks at it never: the tests do."""
type_of_open = Callable[..., Engine]
SECONDS_MAX = 120


def fill(engine: Engine, count: int = 60, *, name: str = "m", topic: str = TOPIC) -> list[str]:
    ids = [f"{name}{number}" for number in range(count)]
    for one in ids:
        engine.publisher.publish([Message(id=one, topic=topic, body=one.encode() * 50)])
    return ids


def drained(engine: Engine, group: str = GROUP) -> list[str]:
    ids: list[str] = []
    while found := engine.puller.pull(TOPIC, group, max_messages=1_000):
        engine.settler.ack([one.receipt for one in found])
        ids += [one.id for one in found]
    return ids


def segments(folder: Path, log: str = "messages") -> int:
    return len(segments_of(folder, log))


def log_bytes(folder: Path, log: str = "messages") -> int:
    """The bytes of a log's segments, without their headers."""
    return sum(path.stat().st_size - SEGMENT_HEAD_BYTES for path in segments_of(folder, log))


def test_what_is_settled_and_old_is_dropped_and_everything_goes_on(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**BY_AGE)
    ids = fill(engine)
    assert drained(engine) == ids
    before = segments(folder)
    clock.advance(HOUR_MS)
    fill(engine, 1, name="new")

    assert engine.retention.drop_outdated() == before - 1

    for _ in range(2):
        assert segments(folder) == 1
        assert engine.admin.topic_figures(TOPIC)["stored"] == 61
        assert engine.admin.group_figures(TOPIC, GROUP)["backlog"] == 1
        engine = open_engine(**BY_AGE)
    assert "new0" in drained(engine)
    assert drained(engine, "later")[-1] == "new0", "a new group begins with what is kept"


def test_the_size_of_a_log_is_that_of_the_segments_that_are_there(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**BY_AGE)
    fill(engine)
    drained(engine)
    sizes = [log_bytes(folder), engine.log_figures()["messages_bytes"]]
    clock.advance(HOUR_MS)
    fill(engine, 1, name="new")
    engine.retention.drop_outdated()

    assert sizes == [sizes[0]] * 2
    assert engine.log_figures()["messages_bytes"] == log_bytes(folder) < sizes[0]
    actions_bytes = sum(path.stat().st_size - SEGMENT_HEAD_BYTES for path in action_segments(folder))
    assert engine.log_figures()["actions_bytes"] == actions_bytes


def test_what_is_not_old_stays(open_engine: type_of_open, folder: Path, clock: ManualClock) -> None:
    engine = open_engine(**BY_AGE)
    fill(engine)
    drained(engine)
    before = segments(folder)
    clock.advance(HOUR_MS - 1)

    assert engine.retention.drop_outdated() == 0

    assert segments(folder) == before


def test_what_was_not_judged_yet_is_kept_for_twice_as_long_and_no_longer(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    judged_file = folder.parent / "judged.json"
    engine = open_engine(**BY_AGE, judged_file=judged_file)
    fill(engine)
    drained(engine)
    before = segments(folder)
    judged = RetentionHold(written_at_ms=clock.now_ms(), needed_since_ms={"broker": clock.now_ms()})
    judged_file.write_bytes(msgspec.json.encode(judged))
    dropped = []

    for step_ms in (HOUR_MS, HOUR_MS - 1, 1):
        clock.advance(step_ms)
        dropped.append(engine.retention.drop_outdated())

    assert dropped == [0, 0, before - 1]
    assert len(action_segments(folder)) <= 3


def test_what_was_judged_goes_by_its_age_alone(open_engine: type_of_open, folder: Path, clock: ManualClock) -> None:
    judged_file = folder.parent / "judged.json"
    engine = open_engine(**BY_AGE, judged_file=judged_file)
    fill(engine)
    drained(engine)
    before = segments(folder)
    clock.advance(HOUR_MS)
    judged = RetentionHold(written_at_ms=clock.now_ms(), needed_since_ms={"broker": clock.now_ms()})
    judged_file.write_bytes(msgspec.json.encode(judged))

    assert engine.retention.drop_outdated() == before - 1


@pytest.mark.parametrize("how", ["unread", "in flight", "dead"])
def test_what_a_group_may_still_deliver_holds_its_segment_and_those_behind_it(
    open_engine: type_of_open, folder: Path, clock: ManualClock, how: str
) -> None:
    engine = open_engine(**BY_AGE)
    engine.admin.declare_group(TOPIC, "slow", GroupConfig(max_attempts=1))
    ids = fill(engine)
    drained(engine)
    before = segments(folder)
    held = engine.puller.pull(TOPIC, "slow", max_messages=30, invisible_ms=2 * HOUR_MS)
    engine.settler.ack([one.receipt for one in held[:-1]])
    if how == "in flight":
        engine.settler.extend(
            [held[-1].receipt], invisible_ms=2 * HOUR_MS, begun=True
        )  # so that its only attempt is used up
    if how == "unread":
        engine.settler.nack([held[-1].receipt], delay_ms=0, counts=False)
    if how == "dead":
        engine.settler.nack([held[-1].receipt], reason="broken")
    clock.advance(HOUR_MS)

    assert 0 < engine.retention.drop_outdated() < before - 1

    engine = open_engine(**BY_AGE)
    if how == "dead":
        assert engine.admin.dead(TOPIC, "slow")[0][0].body == ids[29].encode() * 50
        assert engine.dead_letters.redrive(TOPIC, "slow") == 1
    clock.advance(HOUR_MS)
    again = engine.puller.pull(TOPIC, "slow", max_messages=1_000)
    assert sorted(one.id for one in again) == sorted(ids[30:] + ([ids[29]] if how != "in flight" else []))


def test_what_is_scheduled_holds_no_segment_back_and_is_delivered_long_after(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**BY_AGE)
    engine.publisher.publish([Message(id="far", topic=TOPIC, body=b"x", deliver_at_ms=clock.now_ms() + 100 * HOUR_MS)])
    fill(engine)
    drained(engine)
    before = segments(folder)
    clock.advance(50 * HOUR_MS)
    assert engine.retention.drop_outdated() == before - 1
    engine = open_engine(**BY_AGE)
    clock.advance(50 * HOUR_MS)

    assert drained(engine) == ["far"]


def test_a_group_that_reads_too_slowly_is_moved_where_that_is_chosen_and_it_is_told(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    options = {**BY_AGE, "retention_drops_unread": True}
    engine = open_engine(**options)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    ids = fill(engine)
    held = engine.puller.pull(TOPIC, GROUP, max_messages=3)
    clock.advance(HOUR_MS)

    assert engine.retention.drop_outdated() > 0

    lost = engine.counters()["dropped_unread", TOPIC, GROUP]
    assert lost > 3
    assert engine.settler.ack([held[0].receipt]) == ["already_acked"]
    engine = open_engine(**options)
    assert drained(engine) == ids[lost:]
    assert engine.admin.group_figures(TOPIC, GROUP)["backlog"] == 0


@pytest.mark.parametrize("ordered", [True, False], ids=["the next of a key", "who had no room"])
def test_who_waits_for_what_retention_drops_from_a_hand_is_woken(
    open_engine: type_of_open, clock: ManualClock, ordered: bool
) -> None:
    engine = open_engine(**BY_AGE, retention_drops_unread=True, group_in_hand_max=100 if ordered else 1)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(ordered=ordered))
    for number in range(4):
        engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=b"x" * 5_000, key="k")])
    [held] = engine.puller.pull(TOPIC, GROUP, invisible_ms=2 * HOUR_MS)
    assert engine.puller.pull(TOPIC, GROUP) == []
    woken: list[str] = []
    engine.wakeups.subscribe(TOPIC, GROUP, lambda: woken.append(held.id))
    clock.advance(HOUR_MS)
    woken.clear()

    assert engine.retention.drop_outdated() == 3

    assert woken
    assert [one.id for one in engine.puller.pull(TOPIC, GROUP)] == ["m3"]


def test_beyond_the_size_the_oldest_go_whatever_their_age(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine(segment_bytes=4096, retention_ms=None, retention_bytes=20_000, retention_check_ms=10**15)
    fill(engine, 200)
    drained(engine)

    engine.retention.drop_outdated()

    assert sum(path.stat().st_size for path in message_segments(folder)) <= 20_000 + 4096
    assert segments(folder) >= 4


def test_old_segments_of_actions_go_but_two_checkpoints_stay(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**BY_AGE)
    for number in range(6):
        fill(engine, 60, name=f"m{number}-")
        for delivery in engine.puller.pull(TOPIC, GROUP, max_messages=1_000):
            engine.settler.ack([delivery.receipt])
        engine.writer.write_checkpoint()
    before = action_segments(folder)
    assert len(before) > 3
    clock.advance(2 * HOUR_MS)

    engine.retention.drop_outdated()

    assert set(action_segments(folder)) < set(before)
    assert len({captured_of(part) for part in checkpoints(folder)}) >= 2
    engine = open_engine(**BY_AGE)
    assert drained(engine) == []
    engine.close()
    assert damage_checkpoints(folder, captured=whole_checkpoint(folder))
    engine = open_engine(**BY_AGE)
    assert drained(engine) == [], "the checkpoint before it says the same"


def test_a_topic_whose_messages_are_all_gone_goes_on_with_its_sequences(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**BY_AGE)
    ids = fill(engine)
    assert drained(engine) == ids
    fill(engine, 60, name="other", topic="another")
    clock.advance(HOUR_MS)
    engine.retention.drop_outdated()

    engine = open_engine(**BY_AGE)
    assert engine.admin.topic_figures(TOPIC)["stored"] == 60
    fill(engine, 3, name="new")
    assert drained(engine) == ["new0", "new1", "new2"]


def test_the_timer_drops_what_is_old(open_engine: type_of_open, folder: Path, clock: ManualClock) -> None:
    engine = open_engine(**{**BY_AGE, "retention_check_ms": 1})
    fill(engine)
    drained(engine)
    before = segments(folder)

    clock.advance(HOUR_MS)

    until(lambda: segments(folder) < before)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_group_that_is_moved_back_while_retention_waits_is_moved_on_again_and_that_is_counted(
    open_engine: type_of_open, clock: ManualClock, is_new: bool
) -> None:
    disk = HeldSyncs(within="actions")
    engine = open_engine(**BY_AGE, retention_drops_unread=True, storage=disk)
    fill(engine)
    drained(engine)
    clock.advance(2 * HOUR_MS)
    fill(engine, 1, name="new")
    disk.hold()
    dropping = Thread(target=engine.retention.drop_outdated)
    dropping.start()
    assert disk.waiting.wait(SECONDS_MAX)

    def move() -> None:
        if is_new:
            engine.admin.declare_group(TOPIC, "new", GroupConfig(start="earliest"))
        else:
            engine.admin.seek(TOPIC, GROUP, to_offset=0)

    moving = Thread(target=move)
    moving.start()
    name = "new" if is_new else GROUP
    until(lambda: engine.context.state.group(TOPIC, name) is not None)
    until(lambda: engine.admin.group_figures(TOPIC, name)["position"] == 0)
    disk.release()
    dropping.join(SECONDS_MAX)
    moving.join(SECONDS_MAX)

    start = engine.context.state.topic(TOPIC).index.start
    assert engine.admin.group_figures(TOPIC, name)["position"] >= start > 0
    assert engine.counters()["dropped_unread", TOPIC, name] == start
