"""Old segments go although something in them is still wanted: it is moved, and comes as if nothing had happened."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random

import pytest

from outbox_broker.common.engine_options import Durability
from outbox_broker.engine.dead_letter_operations import EditOperation
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import StorageFailed
from outbox_core.messages.message import DeadEdit, GroupConfig, Message
from outbox_core.runtime.logs import event_name
from tests.outbox_broker.message_log import damage_message

TOPIC, GROUP, OTHERS = "orders", "billing", "mail"
DAY_MS = 86_400_000
SEGMENT_BYTES = 4096
MESSAGE_BYTES = 200
"""More than one takes in the log."""
OLD = {
    "segment_bytes": SEGMENT_BYTES, "checkpoint_bytes": 4096, "retention_ms": DAY_MS, "retention_check_ms": 10**15,
}  # fmt: skip
"""The timer looks at it never: the tests do."""
type_of_open = Callable[..., Engine]
_numbers = count()


def publish(engine: Engine, *ids: str, key: str | None = None, topic: str = TOPIC) -> None:
    engine.publisher.publish(
        [Message(id=one, topic=topic, key=key, headers={"name": one}, body=one.encode() * 9) for one in ids]
    )


def fill(engine: Engine, *, segments: int = 8, groups: tuple[str, ...] = (GROUP,)) -> None:
    """Segments of messages that the groups settle; whatever else is ready stays so."""
    for _ in range(segments):
        publish(engine, *(f"filler-{next(_numbers)}" for _ in range(40)))
        for group in groups:
            found = engine.puller.pull(TOPIC, group, max_messages=1_000)
            engine.settler.ack([one.receipt for one in found if is_filler(one.id)])
            others = [one.receipt for one in found if not is_filler(one.id)]
            engine.settler.nack(others, delay_ms=0, counts=False)


def is_filler(message_id: str) -> bool:
    return message_id.startswith("filler-")


def grow_old(engine: Engine, clock: ManualClock) -> int:
    """All segments but the newest are beyond the retention time; returns how many were dropped."""
    engine.context.messages.roll()
    publish(engine, f"filler-{next(_numbers)}")
    clock.advance(DAY_MS)
    return engine.retention.drop_outdated()


def stored(engine: Engine) -> int:
    return engine.log_figures()["messages_bytes"]


def pulled(engine: Engine, group: str = GROUP, topic: str = TOPIC) -> list[str]:
    """What is ready, settled, without what only fills segments."""
    ids: list[str] = []
    while found := engine.puller.pull(topic, group, max_messages=1_000):
        assert all(one.body == one.id.encode() * 9 and one.headers["name"] == one.id for one in found)
        engine.settler.ack([one.receipt for one in found])
        ids += [one.id for one in found if not is_filler(one.id)]
    return ids


def dead(engine: Engine, group: str = GROUP) -> list[str]:
    return [one.id for one in engine.admin.dead(TOPIC, group, limit=1_000)[0]]


def die(engine: Engine, *ids: str, group: str = GROUP) -> None:
    """The group gives up on these."""
    engine.admin.declare_group(TOPIC, group, GroupConfig(max_attempts=1))
    publish(engine, *ids)
    engine.settler.nack(
        [one.receipt for one in engine.puller.pull(TOPIC, group, max_messages=1_000)], reason="no such account"
    )


@pytest.mark.parametrize("restarted", [False, True])
def test_a_dead_letter_outlives_its_segment_and_can_be_redriven(
    open_engine: type_of_open, clock: ManualClock, restarted: bool
) -> None:
    engine = open_engine(**OLD)
    die(engine, "m0")
    fill(engine)
    before = stored(engine)

    assert grow_old(engine, clock) > 5

    assert stored(engine) < before / 4
    assert engine.cleaner.moved_messages == 1
    engine = open_engine(**OLD) if restarted else engine
    [letter] = engine.admin.dead(TOPIC, GROUP)[0]
    assert (letter.id, letter.reason, letter.body) == ("m0", "no such account", b"m0" * 9)
    assert engine.dead_letters.redrive(TOPIC, GROUP) == 1
    assert pulled(engine) == ["m0"]
    assert grow_old(engine, clock) >= 1
    assert engine.cleaner.moved_messages == (0 if restarted else 1), "what is settled is not moved again"


def test_what_was_put_off_comes_when_it_was_to_come(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine(**OLD)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    publish(engine, "late")
    [delivery] = engine.puller.pull(TOPIC, GROUP)
    engine.settler.nack([delivery.receipt], delay_ms=20 * DAY_MS)
    for _ in range(6):
        fill(engine)
        assert grow_old(engine, clock) > 5
        assert stored(engine) < 3 * SEGMENT_BYTES
    assert engine.cleaner.moved_messages == 6, "once a retention time"

    assert pulled(engine) == []
    clock.advance(14 * DAY_MS)
    assert [(one.id, one.attempt) for one in engine.puller.pull(TOPIC, GROUP)] == [("late", 2)]


def test_a_receipt_holds_when_its_message_has_moved(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine(**OLD)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    publish(engine, "held")
    [delivery] = engine.puller.pull(TOPIC, GROUP, invisible_ms=DAY_MS // 2)
    fill(engine)
    assert grow_old(engine, clock) > 5

    assert engine.settler.ack([delivery.receipt]) == ["acked"]

    engine = open_engine(**OLD)
    clock.advance(10 * DAY_MS)
    assert pulled(engine) == []


def test_each_group_has_the_one_copy_until_it_has_settled_it(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine(**OLD)
    for group in (GROUP, OTHERS):
        engine.admin.declare_group(TOPIC, group, GroupConfig(max_attempts=1))
    publish(engine, "m0", "m1")
    for group in (GROUP, OTHERS):
        engine.settler.nack([one.receipt for one in engine.puller.pull(TOPIC, group, max_messages=100)])
    fill(engine, groups=(GROUP, OTHERS))
    grow_old(engine, clock)
    assert engine.cleaner.moved_messages == 2
    assert engine.dead_letters.discard(TOPIC, GROUP, ids=["m0"], by="ops", why="wrong") == 1
    pulled(engine), pulled(engine, OTHERS)
    engine = open_engine(**OLD)

    assert grow_old(engine, clock) >= 1

    assert engine.cleaner.moved_messages == 2, "of which one group wants both, and the other one"
    assert (dead(engine), dead(engine, OTHERS)) == (["m1"], ["m0", "m1"])
    for group in (GROUP, OTHERS):
        engine.dead_letters.redrive(TOPIC, group)
    assert (pulled(engine), pulled(engine, OTHERS)) == (["m1"], ["m0", "m1"])


def test_what_waits_behind_a_key_is_moved_and_comes_in_order(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine(**OLD)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(ordered=True))
    publish(engine, *(f"k{number}" for number in range(5)), key="k")
    [first] = engine.puller.pull(TOPIC, GROUP, max_messages=10, invisible_ms=DAY_MS // 2)
    fill(engine)

    assert grow_old(engine, clock) > 5

    assert engine.cleaner.moved_messages == 5
    engine = open_engine(**OLD)
    assert engine.settler.ack([first.receipt]) == ["acked"]
    assert pulled(engine) == ["k1", "k2", "k3", "k4"]


def test_what_an_operator_made_of_a_dead_letter_is_moved_and_not_what_it_was(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(**OLD)
    die(engine, "m0")
    operation = EditOperation(name="op", by="ops", why="typo")
    [edited] = engine.dead_letters.edit(TOPIC, GROUP, {"m0": DeadEdit(body=b"better")}, operation=operation)
    [delivery] = engine.puller.pull(TOPIC, GROUP)
    engine.settler.nack([delivery.receipt])
    for _ in range(2):
        fill(engine)
        assert grow_old(engine, clock) > 5

    assert dead(engine) == [edited.new_id]
    assert engine.dead_letters.redrive(TOPIC, GROUP) == 1
    found = engine.puller.pull(TOPIC, GROUP)
    assert [one.body for one in found if one.id == edited.new_id] == [b"better"]
    assert engine.cleaner.moved_messages == 2


def test_a_letter_that_was_moved_can_be_edited_and_moved_again(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine(**OLD)
    die(engine, "m0")
    fill(engine)
    grow_old(engine, clock)
    operation = EditOperation(name="op", by="ops", why="typo")
    [edited] = engine.dead_letters.edit(TOPIC, GROUP, {"m0": DeadEdit(body=b"better")}, operation=operation)
    fill(engine)
    assert grow_old(engine, clock) > 5

    engine = open_engine(**OLD)
    found = engine.puller.pull(TOPIC, GROUP, max_messages=100)
    assert [one.body for one in found if one.id == edited.new_id] == [b"better"]


def test_nothing_is_moved_where_most_of_what_is_old_is_wanted(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine(**OLD)
    for tens in range(40):
        die(engine, *(f"m{10 * tens + number}" for number in range(10)))
    before = stored(engine)

    assert grow_old(engine, clock) == 0

    assert engine.cleaner.moved_messages == 0
    assert stored(engine) > before
    assert engine.log_figures()["messages_unwanted_bytes"] < before / 2
    assert engine.dead_letters.discard(TOPIC, GROUP, ids=[f"m{n}" for n in range(400) if n % 4], by="o", why="w") == 300
    clock.advance(2 * 3_600_000)
    assert engine.retention.drop_outdated() > 5, "of what was looked at before, most is not wanted any more"
    assert engine.cleaner.moved_messages >= 50
    assert stored(engine) < before
    engine.dead_letters.redrive(TOPIC, GROUP)
    assert pulled(engine) == [f"m{number}" for number in range(0, 400, 4)]


def test_what_a_group_has_not_got_yet_holds_its_segments_and_nothing_is_moved(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(**OLD)
    engine.admin.declare_group(TOPIC, "slow", GroupConfig())
    die(engine, "m0")
    fill(engine)

    assert grow_old(engine, clock) == 0

    assert engine.cleaner.moved_messages == 0
    assert pulled(engine, "slow") == ["m0"]
    assert grow_old(engine, clock) > 5
    assert dead(engine) == ["m0"]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("is_quiet", [False, True])
def test_who_is_moved_back_gets_from_there_on_what_was_moved_as_well(
    open_engine: type_of_open, clock: ManualClock, restarted: bool, is_quiet: bool
) -> None:
    engine = open_engine(**OLD)
    began_ms = clock.now_ms()
    seeks = {
        "by offset": {"to_offset": 0}, "by time": {"to_ms": began_ms}, "later": {"to_offset": 1},
        "later by time": {"to_ms": began_ms + 1},
    }  # fmt: skip
    for group in (*seeks, "to the end"):
        engine.admin.declare_group(TOPIC, group.replace(" ", "-"), GroupConfig())
    groups = tuple(engine.admin.groups(TOPIC))
    publish(engine, "late")
    for group in groups:
        [delivery] = engine.puller.pull(TOPIC, group)
        engine.settler.nack([delivery.receipt], delay_ms=100 * DAY_MS)
    clock.advance(1)
    fill(engine, groups=groups)
    if is_quiet:  # all that the topic has now is what was moved
        engine.context.messages.roll()
        publish(engine, "other", topic="another")
        clock.advance(DAY_MS)
        assert engine.retention.drop_outdated() > 5
    else:
        assert grow_old(engine, clock) > 5
        publish(engine, "new")

    for name, to in seeks.items():
        engine.admin.seek(TOPIC, name.replace(" ", "-"), **to)
    engine.admin.seek(TOPIC, "to-the-end", to_offset=engine.admin.topic_figures(TOPIC)["stored"])

    engine = open_engine(**OLD) if restarted else engine
    new = [] if is_quiet else ["new"]
    assert {name: pulled(engine, name.replace(" ", "-")) for name in seeks} == {
        "by offset": ["late", *new], "by time": ["late", *new], "later": new, "later by time": new,
    }  # fmt: skip
    clock.advance(200 * DAY_MS)
    assert pulled(engine, "to-the-end") == []
    assert {engine.admin.group_figures(TOPIC, group)["backlog"] for group in groups} == {0}


def test_what_was_moved_goes_with_its_topic_or_its_group_or_a_purge(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(**OLD)
    for group in (GROUP, OTHERS, "third"):
        engine.admin.declare_group(TOPIC, group, GroupConfig(max_attempts=1))
    publish(engine, "m0")
    for group in (GROUP, OTHERS, "third"):
        engine.settler.nack([one.receipt for one in engine.puller.pull(TOPIC, group, max_messages=100)])
    fill(engine, groups=(GROUP, OTHERS, "third"))
    assert grow_old(engine, clock) > 5
    assert dead(engine, OTHERS) == ["m0"]

    engine.deletion.delete_group(TOPIC, GROUP)
    engine.dead_letters.discard(TOPIC, OTHERS, by="ops", why="old")
    engine.deletion.delete_topic(TOPIC, force=True)
    publish(engine, "m1")

    engine = open_engine(**OLD)
    assert pulled(engine, "third") == ["m1"]
    assert engine.context.state.dead_letter_memory.size_bytes == 0


def test_a_group_is_moved_past_what_was_moved_where_what_is_unread_may_go(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(**OLD)
    die(engine, "m0", "m1")
    fill(engine)
    assert grow_old(engine, clock) > 5
    pulled(engine)
    engine = open_engine(**OLD, retention_drops_unread=True)

    assert grow_old(engine, clock) >= 1

    assert dead(engine) == []
    assert engine.counters()["dropped_unread", TOPIC, GROUP] == 2
    assert dead(open_engine(**OLD)) == []


def test_a_message_that_is_moved_while_it_is_read_is_no_damaged_one(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    """A pull reads without the lock; meanwhile its message is moved, and its segment dropped."""
    engine = open_engine(**OLD)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    publish(engine, "m0")
    engine.settler.nack([one.receipt for one in engine.puller.pull(TOPIC, GROUP)], delay_ms=0, counts=False)
    fill(engine)
    topic = engine.context.state.topic(TOPIC)
    group = topic.groups[GROUP]
    choice = engine.puller.choose(topic, group, count_max=1)
    assert choice is not None

    assert grow_old(engine, clock) > 5
    records = engine.puller.read(choice)
    with engine.context.lock:
        delivered = engine.puller.deliver(topic, group, choice, records, invisible_ms=1_000, consumer=None)

    assert [record for _, record in records] == [None]
    assert delivered == []
    assert dead(engine) == []
    assert pulled(engine) == ["m0"]


def test_a_segment_with_a_damaged_message_that_is_wanted_stays_and_that_is_told(
    open_engine: type_of_open, folder: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(**OLD)
    die(engine, "m0", "m1")
    fill(engine)
    engine.close()
    damage_message(folder, "m1")
    engine = open_engine(**OLD)

    with caplog.at_level(logging.WARNING):
        assert grow_old(engine, clock) == 0

    assert [(one.sequence, one.cure) for one in caplog.records if event_name(one) == "segment_kept"] == [
        (1, "discard it, or restore the segment from a copy")
    ]
    assert engine.dead_letters.discard(TOPIC, GROUP, ids=["m0"], by="ops", why="x") == 1
    assert engine.dead_letters.discard(TOPIC, GROUP, by="ops", why="all") == 1
    assert engine.retention.drop_outdated() > 5


def test_what_is_in_no_segment_any_more_holds_none(open_engine: type_of_open, folder: Path, clock: ManualClock) -> None:
    """The opening passes over a damaged message of the newest segment; its group gives up on it, and remembers it."""
    engine = open_engine(**OLD)
    publish(engine, "m0", "m1", "m2")
    engine.close()
    damage_message(folder, "m1")
    engine = open_engine(**OLD)
    assert pulled(engine) == ["m0", "m2"]
    fill(engine)

    assert grow_old(engine, clock) > 5

    [letter] = open_engine(**OLD).admin.dead(TOPIC, GROUP)[0]
    assert (letter.id, letter.reason) == ("", "its record in the message log is damaged")


def test_what_nobody_wants_goes_although_something_behind_it_cannot_be_read(
    open_engine: type_of_open, clock: ManualClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(**OLD)
    fill(engine)
    engine.context.messages.roll()
    die(engine, "m0")
    fill(engine)
    read = engine.context.messages.read

    def failing(offset: int, size_bytes: int) -> bytes:
        raise StorageFailed("cannot read messages: Input/output error") from OSError(5, "Input/output error")

    monkeypatch.setattr(engine.context.messages, "read", failing)
    with caplog.at_level(logging.WARNING):
        assert grow_old(engine, clock) > 5

    assert "segments_not_cleaned" in map(event_name, caplog.records)
    monkeypatch.setattr(engine.context.messages, "read", read)
    assert dead(engine) == ["m0"]
    assert engine.retention.drop_outdated() > 5


def test_without_syncs_a_segment_stays_until_the_one_with_its_copies_is_on_the_disk(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine(**OLD, durability=Durability.OS)
    die(engine, "m0")
    fill(engine)

    assert grow_old(engine, clock) == 0

    assert engine.cleaner.moved_messages == 1
    assert engine.retention.drop_outdated() == 0
    publish(engine, "begins-another-segment")
    assert engine.retention.drop_outdated() > 5
    assert dead(engine) == ["m0"]


def test_places_of_what_was_moved_leave_room_for_other_dead_letters(
    open_engine: type_of_open, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(**OLD, dead_letters_bytes_max=2_000)
    die(engine, "m0", "m1", "m2")
    fill(engine)

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            fill(engine)
            die(engine, *(f"n{next(_numbers)}-{number}" for number in range(3)))
            grow_old(engine, clock)

    memory = engine.context.state.dead_letter_memory
    assert 0 < engine.cleaner.moved_messages < 9
    assert memory.size_bytes < 2_000
    kept = [one for one in caplog.records if event_name(one) == "segment_kept"]
    assert {one.cure for one in kept} == {"redrive or discard dead letters"}
    engine.dead_letters.redrive(TOPIC, GROUP)
    assert len(pulled(engine)) == 12
    assert memory.size_bytes == 0


def test_in_a_month_the_disk_has_at_most_twice_what_is_kept_and_wanted(
    open_engine: type_of_open, clock: ManualClock, random_seed: int
) -> None:
    """Messages come, of which a few die, or are put off for days; operators see to some of the dead."""
    random = Random(random_seed)
    engine = open_engine(**OLD)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    day_ends = [0, 0]
    kept: set[str] = set()
    for hour in range(0, 30 * 24, 3):
        publish(engine, *(f"m{hour}-{number}" for number in range(36)))
        done: list[str] = []
        for one in engine.puller.pull(TOPIC, GROUP, max_messages=1_000):
            what = random.random()
            if what < 0.04:
                kept.add(one.id)
            if what < 0.02:
                engine.settler.nack([one.receipt], reason="broken")
            elif what < 0.04:
                engine.settler.nack([one.receipt], delay_ms=random.randint(2, 9) * DAY_MS, counts=False)
            else:
                done.append(one.receipt)
                kept.discard(one.id)
        engine.settler.ack(done)
        if hour % 24 == 21:
            letters = dead(engine)
            seen_to = random.sample(letters, len(letters) // 8)
            kept -= set(seen_to)
            engine.dead_letters.discard(TOPIC, GROUP, ids=seen_to, by="ops", why="seen to")
            day_ends.append(engine.context.messages.end)
            engine.retention.drop_outdated()
            newest_bytes = engine.context.messages.end - day_ends[-3]  # of two days, since segments go whole
            assert stored(engine) <= newest_bytes + 2 * MESSAGE_BYTES * len(kept) + 2 * SEGMENT_BYTES
        clock.advance(3 * 3_600_000)

    assert engine.cleaner.moved_messages > 200
    assert engine.context.messages.end > 5 * stored(engine)
    put_off = kept - set(dead(engine))
    clock.advance(10 * DAY_MS)
    assert len(put_off) > 10
    assert set(pulled(engine)) == put_off
    assert len(dead(engine)) == len(kept) - len(put_off) > 20
