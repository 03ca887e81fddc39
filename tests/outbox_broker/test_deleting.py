"""Topics and consumer groups that are deleted are gone, for whoever is in the middle of something, and after a kill."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import GroupDeleted, InUse, InvalidMessage
from outbox_core.journal import journal
from outbox_core.journal.deletion_records import DeletedGroup, DeletedTopic
from outbox_core.messages.message import GroupConfig, Message
from tests.outbox_broker.action_log import actions_of
from tests.outbox_broker.failing_storage import HeldSyncs
from tests.outbox_broker.message_log import flip_directory, flip_footer, footers_of
from tests.outbox_broker.polling import until

TOPIC, GROUP = "orders", "billing"
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
WAIT_MS = 60_000
"""Longer than any test lets pass: what ends such a wait is an event."""

HALF_MS = WAIT_MS // 2
"""Nothing but a pull waits for so long."""
NEVER_MS = 1 << 50
"""The test looks for what may go, and the timer does not."""
DEADLINE_S = 120

type_of_open = Callable[..., Engine]


def message(message_id: str, *, topic: str = TOPIC, deliver_at_ms: int | None = None, size: int = 1) -> Message:
    return Message(id=message_id, topic=topic, body=b"x" * size, deliver_at_ms=deliver_at_ms)


def publish(engine: Engine, *ids: str, topic: str = TOPIC, deliver_at_ms: int | None = None, size: int = 1) -> None:
    results = engine.publisher.publish(
        [message(one, topic=topic, deliver_at_ms=deliver_at_ms, size=size) for one in ids]
    )
    assert [one.status for one in results] == ["stored"] * len(ids)


def pull_ids(engine: Engine, group: str = GROUP) -> list[str]:
    return [one.id for one in engine.puller.pull(TOPIC, group)]


class WatchedClock(ManualClock):
    """Tells of pulls that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.pulls = threading.Semaphore(0)

    def wait(self, condition: threading.Condition, timeout_ms: int | None) -> bool:
        if (timeout_ms or 0) > HALF_MS:
            self.pulls.release()
        return super().wait(condition, timeout_ms)


@pytest.fixture
def clock() -> WatchedClock:
    """Time that stands still until the test moves it."""
    return WatchedClock()


# -- groups --------------------------------------------------------------------------------------------------------


def test_a_deleted_group_is_gone_and_stays_gone(open_engine: type_of_open) -> None:
    engine = open_engine()
    publish(engine, "a", "b")
    engine.settler.ack([one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=1)])
    engine.puller.pull(TOPIC, "other")

    engine.deletion.delete_group(TOPIC, GROUP)

    assert engine.admin.groups(TOPIC) == ["other"]
    with pytest.raises(KeyError, match="no consumer group billing"):
        engine.admin.group_figures(TOPIC, GROUP)
    with pytest.raises(KeyError):
        engine.deletion.delete_group(TOPIC, GROUP)
    with pytest.raises(KeyError):
        engine.deletion.delete_group("nothing", GROUP)
    assert open_engine().admin.groups(TOPIC) == ["other"]


def test_a_deletion_is_durable_before_it_is_answered(folder: Path, clock: ManualClock) -> None:
    storage = HeldSyncs()
    with ThreadPoolExecutor() as pool:
        engine = Engine.open(folder, clock=clock, storage=storage)
        try:
            publish(engine, "a")
            pull_ids(engine)
            storage.hold()
            answer = pool.submit(engine.deletion.delete_group, TOPIC, GROUP, force=True)
            assert storage.waiting.wait(DEADLINE_S)
            assert not answer.done()
        finally:
            storage.release()
        answer.result()
        engine.close()


def test_a_group_of_the_same_name_is_another_group(open_engine: type_of_open) -> None:
    engine = open_engine()
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1, filter="type = 'a'", ordered=True))
    publish(engine, "a", "b")
    engine.deletion.delete_group(TOPIC, GROUP)

    again = [pull_ids(engine)]
    engine = open_engine()

    assert again == [["a", "b"]]
    assert engine.admin.group_config(TOPIC, GROUP) == GroupConfig()
    assert engine.admin.group_figures(TOPIC, GROUP)["in_flight"] == 2


def test_no_receipt_of_a_deleted_group_settles_anything(open_engine: type_of_open, clock: ManualClock) -> None:
    engine = open_engine()
    publish(engine, "a", "b")
    old = [one.receipt for one in engine.puller.pull(TOPIC, GROUP)]
    engine.deletion.delete_group(TOPIC, GROUP, force=True)

    gone = engine.settler.ack(old), engine.settler.nack(old), engine.settler.extend(old, invisible_ms=1_000)
    new = [one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=1)]
    stale = engine.settler.ack(old), engine.settler.nack(old), engine.settler.extend(old, invisible_ms=1_000)

    assert gone == (["unknown"] * 2, ["stale"] * 2, ["stale"] * 2)
    assert stale == (["stale"] * 2, ["stale"] * 2, ["stale"] * 2)
    assert engine.settler.ack(new) == ["acked"]
    assert engine.settler.ack(old) == ["stale"] * 2
    assert open_engine().admin.group_figures(TOPIC, GROUP)["backlog"] == 1


def test_receipts_stay_stale_when_all_but_a_checkpoint_is_gone(open_engine: type_of_open) -> None:
    engine = open_engine(checkpoint_bytes=4096, segment_bytes=4096)
    publish(engine, "a")
    [old] = [one.receipt for one in engine.puller.pull(TOPIC, GROUP)]
    engine.deletion.delete_group(TOPIC, GROUP, force=True)
    for _ in range(200):
        engine.admin.pause(TOPIC, "other", paused=False) if "other" in engine.admin.groups(
            TOPIC
        ) else engine.admin.declare_group(TOPIC, "other", GroupConfig())

    engine = open_engine(checkpoint_bytes=4096, segment_bytes=4096)

    assert GROUP not in engine.admin.groups(TOPIC)
    [new] = [one.receipt for one in engine.puller.pull(TOPIC, GROUP)]
    assert new != old
    assert engine.settler.ack([old]) == ["stale"]
    assert engine.settler.ack([new]) == ["acked"]


def test_a_group_in_use_is_deleted_by_force_alone(engine: Engine, clock: ManualClock) -> None:
    publish(engine, "a")
    [held] = engine.puller.pull(TOPIC, GROUP, invisible_ms=30_000)

    with pytest.raises(InUse, match=r"hold 1 messages; stop its consumers, or force"):
        engine.deletion.delete_group(TOPIC, GROUP)
    assert engine.settler.ack([held.receipt]) == ["acked"]
    engine.deletion.delete_group(TOPIC, GROUP)

    pull_ids(engine)
    engine.deletion.delete_group(TOPIC, GROUP, force=True)
    pull_ids(engine)
    clock.advance(30_000)  # whoever held it is dead
    engine.deletion.delete_group(TOPIC, GROUP)
    assert engine.admin.groups(TOPIC) == []


def test_a_pull_that_waits_keeps_its_group_and_ends_with_the_deletion(engine: Engine, clock: WatchedClock) -> None:
    with ThreadPoolExecutor() as pool:
        pulls = [pool.submit(engine.puller.pull, TOPIC, GROUP, wait_ms=WAIT_MS) for _ in range(3)]
        for _ in pulls:
            assert clock.pulls.acquire(timeout=DEADLINE_S)
        with pytest.raises(InUse, match="3 pulls wait"):
            engine.deletion.delete_group(TOPIC, GROUP)

        engine.deletion.delete_group(TOPIC, GROUP, force=True)

        ended = [pull.exception() for pull in pulls]
    assert [type(one) for one in ended] == [GroupDeleted] * 3
    assert all("billing of orders was deleted" in str(one) for one in ended)
    assert engine.admin.groups(TOPIC) == []


def test_waiting_pulls_do_not_go_on_with_a_group_that_another_made_at_once(engine: Engine) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    began = engine.deletions

    engine.deletion.delete_group(TOPIC, GROUP)
    publish(engine, "a")
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())

    with pytest.raises(GroupDeleted):
        engine.puller.take(TOPIC, GROUP, max_messages=1, invisible_ms=1_000, since=began)

    def take_at_hand() -> bool:  # nothing is said where another thread, as the timer's, is at work
        return engine.puller.take_at_hand(TOPIC, GROUP, max_messages=1, invisible_ms=1_000, since=began) is not None

    with pytest.raises(GroupDeleted):
        until(take_at_hand)
    assert pull_ids(engine) == ["a"]


def test_a_deleted_group_leaves_room_in_hand_and_for_dead_letters(
    open_engine: type_of_open, clock: WatchedClock
) -> None:
    engine = open_engine(in_hand_max=2, group_in_hand_min=0, dead_letters_bytes_max=1)
    publish(engine, "a", "b")
    engine.admin.declare_group(TOPIC, "dying", GroupConfig(max_attempts=1))
    engine.settler.nack([one.receipt for one in engine.puller.pull(TOPIC, "dying", max_messages=1)])
    assert engine.admin.group_figures(TOPIC, "dying")["dead"] == 1
    assert len(engine.puller.pull(TOPIC, GROUP)) == 2
    with ThreadPoolExecutor() as pool:
        short = pool.submit(engine.puller.pull, TOPIC, "third", wait_ms=WAIT_MS)
        assert clock.pulls.acquire(timeout=DEADLINE_S)
        engine.deletion.delete_group(TOPIC, GROUP, force=True)
        assert [one.id for one in short.result()] == ["a", "b"]
    engine.deletion.delete_group(TOPIC, "third", force=True)
    engine.deletion.delete_group(TOPIC, "dying", force=True)

    engine.admin.declare_group(TOPIC, "dying", GroupConfig(max_attempts=1))
    engine.settler.nack([one.receipt for one in engine.puller.pull(TOPIC, "dying", max_messages=1)])

    assert engine.admin.group_figures(TOPIC, "dying")["dead"] == 1


def test_a_deleted_group_holds_nothing_back(open_engine: type_of_open, folder: Path, clock: ManualClock) -> None:
    engine = open_engine(segment_bytes=4096, retention_ms=HOUR_MS, retention_check_ms=NEVER_MS)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    for number in range(6):
        publish(engine, f"m{number}", size=2_000)
    clock.advance(2 * HOUR_MS)
    assert engine.retention.drop_outdated() == 0

    engine.deletion.delete_group(TOPIC, GROUP)

    assert engine.retention.drop_outdated() > 0


def test_figures_of_a_deleted_group_are_gone(engine: Engine) -> None:
    publish(engine, "a")
    engine.settler.ack([one.receipt for one in engine.puller.pull(TOPIC, GROUP)])
    assert any(GROUP in place for place in engine.counters())

    engine.deletion.delete_group(TOPIC, GROUP)

    assert not any(GROUP in place for place in engine.counters())
    assert any(TOPIC in place for place in engine.counters())


# -- topics --------------------------------------------------------------------------------------------------------


def test_a_deleted_topic_is_gone_and_stays_gone(open_engine: type_of_open) -> None:
    engine = open_engine()
    publish(engine, "a", "b")
    publish(engine, "c", topic="other")

    engine.deletion.delete_topic(TOPIC)

    for _ in range(2):
        assert engine.admin.topics() == ["other"]
        with pytest.raises(KeyError, match="no topic orders"):
            engine.admin.topic_figures(TOPIC)
        with pytest.raises(KeyError):
            engine.deletion.delete_topic(TOPIC)
        assert not any(TOPIC in place for place in engine.counters())
        engine = open_engine()


def test_a_topic_in_use_is_deleted_by_force_alone(engine: Engine, clock: ManualClock) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    publish(engine, "later", deliver_at_ms=clock.now_ms() + HOUR_MS)

    with pytest.raises(InUse, match="1 consumer groups, 1 scheduled and 0 recurring messages"):
        engine.deletion.delete_topic(TOPIC)
    engine.deletion.delete_group(TOPIC, GROUP)
    with pytest.raises(InUse, match="0 consumer groups, 1 scheduled and 0 recurring messages"):
        engine.deletion.delete_topic(TOPIC)
    engine.publisher.cancel(["later"])
    engine.deletion.delete_topic(TOPIC)

    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    publish(engine, "later2", deliver_at_ms=clock.now_ms() + HOUR_MS)
    engine.deletion.delete_topic(TOPIC, force=True)

    assert engine.admin.topics() == []
    assert engine.log_figures()["scheduled"] == 0


def test_a_topic_that_is_made_again_goes_on_at_the_old_end(open_engine: type_of_open) -> None:
    engine = open_engine()
    publish(engine, "a", "b")
    [old, _] = [one.receipt for one in engine.puller.pull(TOPIC, GROUP)]
    engine.deletion.delete_topic(TOPIC, force=True)
    assert engine.settler.ack([old]) == ["unknown"]

    publish(engine, "c")
    [new] = engine.puller.pull(TOPIC, GROUP)
    engine.deletion.delete_topic(TOPIC, force=True)
    engine = open_engine()
    publish(engine, "d", "e")
    engine = open_engine()

    assert new.id == "c"
    assert engine.settler.ack([old, new.receipt]) == ["unknown", "unknown"]
    page = engine.reader.read(TOPIC, start="earliest")
    assert [one.id for one in page.messages] == ["d", "e"]
    assert (page.offset, page.next_offset) == (3, 5)
    assert engine.settler.ack([one.receipt for one in engine.puller.pull(TOPIC, GROUP)]) == ["acked"] * 2


@pytest.mark.parametrize("is_kept", [True, False])
def test_deleted_messages_do_not_come_back_from_footers_and_checkpoints(
    open_engine: type_of_open, folder: Path, is_kept: bool
) -> None:
    small = {"segment_bytes": 4096, "checkpoint_bytes": 4096}
    engine = open_engine(**small)
    for number in range(7):
        publish(engine, f"old{number}", size=1_500)
    publish(engine, "of-another", topic="other")
    engine.deletion.delete_topic(TOPIC)
    if is_kept:
        for number in range(7):
            publish(engine, f"new{number}", size=1_500)
    for number in range(100):
        engine.admin.declare_group("other", "busy", GroupConfig(max_attempts=1 + number))

    for footers in ("kept", "damaged"):
        if footers == "damaged":
            for footer in footers_of(folder):
                flip_directory(footer)
        engine = open_engine(**small)
        assert engine.admin.topics() == ([TOPIC, "other"] if is_kept else ["other"])
        if is_kept:
            page = engine.reader.read(TOPIC, start="earliest")
            assert [one.id for one in page.messages] == [f"new{number}" for number in range(7)]
            assert page.offset == 7
    publish(engine, "last")
    assert [one.id for one in engine.reader.read(TOPIC, offset=0).messages][-1:] == ["last"]


def test_a_footer_that_is_damaged_is_made_anew_beside_a_deleted_topic(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine(segment_bytes=4096)
    for number in range(4):
        publish(engine, f"a{number}", size=700)
        publish(engine, f"b{number}", topic="other", size=700)
    engine.deletion.delete_topic(TOPIC)
    publish(engine, "a9")
    engine = open_engine(segment_bytes=4096)
    for footer in footers_of(folder):
        flip_footer(footer)

    assert [one.id for one in engine.puller.pull("other", GROUP)] == [f"b{number}" for number in range(4)]
    assert pull_ids(engine) == ["a9"]


def test_scheduled_messages_of_a_deleted_topic_are_canceled_and_told(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(schedule_memory_messages_max=4)
    due_ms = clock.now_ms() + 20 * DAY_MS
    ids = [f"m{number}" for number in range(20)]
    for number, one in enumerate(ids):
        publish(engine, one, deliver_at_ms=due_ms + number * HOUR_MS)
        publish(engine, f"other{number}", topic="other", deliver_at_ms=due_ms + number * HOUR_MS)

    engine.deletion.delete_topic(TOPIC, force=True)

    assert engine.log_figures()["scheduled"] == 20
    assert all(engine.publisher.scheduled_message(one) is None for one in ids)
    told = {one for action in actions_of(folder) if isinstance(action, journal.Canceled) for one in action.ids}
    assert told == set(ids)
    publish(engine, "again")
    clock.advance(25 * DAY_MS)
    engine = open_engine()
    assert pull_ids(engine) == ["again"]
    assert len(engine.puller.pull("other", GROUP)) == 20


def test_a_message_that_is_on_its_way_as_its_topic_is_deleted_is_canceled(folder: Path, clock: ManualClock) -> None:
    storage = HeldSyncs()
    with ThreadPoolExecutor() as pool:
        engine = Engine.open(folder, clock=clock, storage=storage)
        try:
            publish(engine, "due", deliver_at_ms=clock.now_ms() + 1_000)
            publish(engine, "other", topic="other", deliver_at_ms=clock.now_ms() + 1_000)
            storage.hold()
            clock.advance(1_000)
            fired = pool.submit(engine.puller.pull, "other", GROUP)
            assert storage.waiting.wait(DEADLINE_S)  # it is handed out by the schedule, and that is not synced yet

            deleted = pool.submit(engine.deletion.delete_topic, TOPIC, force=True)
        finally:
            storage.release()
        deleted.result()
        assert [one.id for one in fired.result()] in (["other"], [])
        found = (
            [one.id for one in engine.puller.pull("other", GROUP, wait_ms=WAIT_MS)] if not fired.result() else ["other"]
        )
        publish(engine, "new")
        assert pull_ids(engine) == ["new"]
        assert found == ["other"]
        engine.close()
    engine = Engine.open(folder, clock=clock)
    try:
        assert [one.id for one in engine.reader.read(TOPIC, start="earliest").messages] == ["new"]
    finally:
        engine.close()


def test_a_deleted_topic_frees_its_place(open_engine: type_of_open) -> None:
    engine = open_engine(topics_max=2)
    publish(engine, "a")
    publish(engine, "b", topic="other")
    [refused] = engine.publisher.publish([message("c", topic="third")])
    assert refused.status == "rejected"

    engine.deletion.delete_topic(TOPIC)

    publish(engine, "d", topic="third")
    assert engine.admin.topics() == ["other", "third"]
    with pytest.raises(InvalidMessage):
        engine.admin.declare_group(TOPIC, GROUP, GroupConfig())


def test_deleted_topics_are_forgotten_once_retention_has_dropped_what_they_left(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    options = {
        "topics_max": 2, "segment_bytes": 4096, "checkpoint_bytes": 4096, "retention_ms": HOUR_MS,
        "retention_check_ms": NEVER_MS,
    }  # fmt: skip
    engine = open_engine(**options)
    for name in ("t1", "t2"):
        publish(engine, name, topic=name)
        engine.deletion.delete_topic(name)
    publish(engine, "t3", topic="t3")
    with pytest.raises(InUse, match="2 deleted topics are remembered"):
        engine.deletion.delete_topic("t3")

    for number in range(8):
        publish(engine, f"m{number}", topic="t3", size=2_000)
        for attempts in range(30):
            engine.admin.declare_group("t3", GROUP, GroupConfig(max_attempts=1 + attempts))
    engine.settler.ack([one.receipt for one in engine.puller.pull("t3", GROUP)])
    engine.deletion.delete_group("t3", GROUP)
    engine.writer.write_checkpoint()
    engine.writer.write_checkpoint()
    clock.advance(2 * HOUR_MS)
    assert engine.retention.drop_outdated() > 0
    engine.deletion.delete_topic("t3")

    engine = open_engine(**options)
    publish(engine, "new", topic="t1")
    assert [one.id for one in open_engine(**options).reader.read("t1", start="earliest").messages] == ["new"]


def test_readers_of_a_deleted_topic_keep_their_place(engine: Engine) -> None:
    publish(engine, "a", "b")
    page = engine.reader.read(TOPIC, start="earliest")

    engine.deletion.delete_topic(TOPIC)
    nothing = engine.reader.read(TOPIC, offset=page.next_offset)
    publish(engine, "c")

    assert (nothing.messages, nothing.next_offset) == ([], page.next_offset)
    assert [one.id for one in engine.reader.read(TOPIC, offset=page.next_offset).messages] == ["c"]


def test_what_was_published_before_is_known_by_its_id_still(open_engine: type_of_open) -> None:
    engine = open_engine()
    publish(engine, "a")
    engine.deletion.delete_topic(TOPIC)

    [result] = engine.publisher.publish([message("a")])

    assert result.status == "duplicate"


# -- kills ---------------------------------------------------------------------------------------------------------


def test_files_of_this_version_name_deletions(folder: Path, open_engine: type_of_open) -> None:
    engine = open_engine()
    publish(engine, "a")
    pull_ids(engine)
    engine.deletion.delete_group(TOPIC, GROUP, force=True)
    pull_ids(engine)
    engine.deletion.delete_topic(TOPIC, force=True)

    deletions = [one for one in actions_of(folder) if isinstance(one, DeletedGroup | DeletedTopic)]

    assert [type(one) for one in deletions] == [DeletedGroup, DeletedTopic]
    assert isinstance(deletions[1], DeletedTopic)
    assert (deletions[1].end, deletions[1].groups) == (1, [GROUP])
