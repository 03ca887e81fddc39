"""Scheduled messages arrive in the message log: what retention, damage and a power cut leave of it is what holds."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from random import Random

import msgspec
import pytest

from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.journal.journal import Journal
from outbox_broker.schedule.schedule_log import LOG, CapturedCheckpoint
from outbox_broker.schedule.sorted_run import TimedMessage
from outbox_broker.segments.local import LocalSegments
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import OutboxError, StorageFailed
from outbox_core.journal.block import FrameKind, SegmentKind
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.messages.message import GroupConfig, Message, encode_packed
from tests.outbox_broker.message_log import flip, message_segments, messages_of
from tests.outbox_broker.powered_storage import PoweredStorage

IS_OF_FILES = True
TOPIC, GROUP = "orders", "billing"
START_MS = 1_800_000_000_000
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
RESERVE_BYTES = 64 * 1024
SMALL = EngineOptions(
    segment_bytes=4096, checkpoint_bytes=4096, retention_ms=DAY_MS, retention_check_ms=10**15,
    reserve_bytes=RESERVE_BYTES,
)  # fmt: skip
UNSYNCED = EngineOptions(durability=Durability.OS, reserve_bytes=RESERVE_BYTES)


def message(message_id: str, *, deliver_at_ms: int | None = None) -> Message:
    return Message(id=message_id, topic=TOPIC, body=message_id.encode() * 40, deliver_at_ms=deliver_at_ms)


def publish(engine: Engine, *ids: str, deliver_at_ms: int | None = None) -> list[str]:
    return [
        result.status for result in engine.publisher.publish([message(one, deliver_at_ms=deliver_at_ms) for one in ids])
    ]  # fmt: skip


def drained(engine: Engine) -> list[str]:
    ids: list[str] = []
    while deliveries := engine.puller.pull(TOPIC, GROUP, max_messages=100):
        assert all(one.body == message(one.id).body for one in deliveries)
        engine.settler.ack([one.receipt for one in deliveries])
        ids += [one.id for one in deliveries]
    return ids


def scheduled(engine: Engine) -> int:
    return int(engine.admin.topic_figures(TOPIC)["scheduled"])


def aged(engine: Engine, clock: ManualClock) -> None:
    """Segments of consumed messages that are old enough to go."""
    for batch in range(3):
        publish(engine, *(f"beside-{clock.now_ms()}-{batch}-{number}" for number in range(12)))
    drained(engine)
    clock.advance(2 * DAY_MS)


def test_what_waits_outlives_the_segment_in_which_it_arrived(folder: Path, clock: ManualClock) -> None:
    engine = Engine.open(folder, clock=clock, options=SMALL)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    publish(engine, "waits", deliver_at_ms=clock.now_ms() + 30 * DAY_MS)
    publish(engine, "gone", deliver_at_ms=clock.now_ms() + 30 * DAY_MS)
    engine.publisher.cancel(["gone"])
    aged(engine, clock)

    assert engine.retention.drop_outdated() > 0
    assert "waits" not in {one.record.id for one in messages_of(folder)}
    assert scheduled(engine) == 1
    engine.close()
    engine = Engine.open(folder, clock=clock, options=SMALL)

    assert (scheduled(engine), drained(engine)) == (1, [])
    clock.advance(30 * DAY_MS)
    assert drained(engine) == ["waits"]
    engine.close()


def test_the_checkpoint_before_a_damaged_one_finds_what_arrived_behind_it(folder: Path, clock: ManualClock) -> None:
    engine = Engine.open(folder, clock=clock, options=SMALL)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    publish(engine, "first", deliver_at_ms=clock.now_ms() + 30 * DAY_MS)
    aged(engine, clock)
    assert engine.retention.drop_outdated() > 0
    publish(engine, "second", deliver_at_ms=clock.now_ms() + 30 * DAY_MS)
    aged(engine, clock)
    assert engine.retention.drop_outdated() > 0
    engine.close()
    newest = max((folder / "schedule").glob("log-*.segment"))
    for position in range(100, newest.stat().st_size, 40):
        flip(newest, position)

    engine = Engine.open(folder, clock=clock, options=SMALL)

    assert scheduled(engine) == 2
    clock.advance(60 * DAY_MS)
    assert drained(engine) == ["first", "second"]
    engine.close()


def test_a_flipped_bit_where_messages_arrived_costs_one_of_them_and_brings_no_canceled_one_back(
    folder: Path, tmp_path: Path, clock: ManualClock, random_seed: int
) -> None:
    kept, canceled = [f"kept{number}" for number in range(4)], [f"canceled{number}" for number in range(200)]
    engine = Engine.open(folder, clock=clock)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    publish(engine, *kept, *canceled, deliver_at_ms=clock.now_ms() + HOUR_MS)
    assert set(engine.publisher.cancel(canceled)) == {"canceled"}
    engine.close()
    [segment] = message_segments(folder)
    log = max((folder / "schedule").glob("log-*.segment"))
    places = [(path, at) for path in (segment, log) for at in range(40, path.stat().st_size)]

    for number, (path, position) in enumerate(Random(random_seed).sample(places, 60)):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(folder, copy)
        flip(copy / path.relative_to(folder), position)
        came: list[str] | None = None
        with suppress(SegmentDamaged):  # a change of state is lost: it is refused, with the cure
            engine = Engine.open(copy, clock=ManualClock(START_MS + HOUR_MS))
            came = drained(engine)
            engine.close()
        if came is None:
            assert path == log, position
            continue
        assert set(came) <= set(kept), (path, position)
        assert len(came) >= len(kept) - (path == segment), (path, position)


class _Cut:
    """An engine whose message log is not synced any more, while the schedule's log is."""

    def __init__(
        self, folder: Path, tmp_path: Path, clock: ManualClock, storage: PoweredStorage | None = None
    ) -> None:  # fmt: skip
        self.storage = storage or PoweredStorage()
        self.folder, self._to, self._clock = folder, tmp_path / "cut", clock
        self.engine = Engine.open(folder, clock=clock, storage=self.storage)
        self.engine.admin.declare_group(TOPIC, GROUP, GroupConfig())

    def put(self, message_id: str, *, due_ms: int) -> int:
        """As a publish does before it waits for the disk; the arrival number."""
        context = self.engine.context
        payload = encode_packed(message(message_id, deliver_at_ms=due_ms))
        with context.lock:
            statuses, _ = context.schedule.put(
                [TimedMessage(due_ms, message_id, TOPIC, payload)], now_ms=self._clock.now_ms()
            )  # fmt: skip
        assert statuses == ["stored"]
        return context.schedule.next_seq() - 1

    def reopened(self) -> Engine:
        """After a power cut; the engine before is left alone."""
        self.storage.copy_after_power_cut(self.folder, self._to, random=Random(1), whole_in="")
        self.engine.close()
        return Engine.open(self._to, clock=self._clock)


@pytest.fixture
def cut(folder: Path, tmp_path: Path, clock: ManualClock) -> _Cut:
    return _Cut(folder, tmp_path, clock)


def test_a_cancel_holds_for_a_message_that_a_power_cut_took_and_that_is_published_again(
    cut: _Cut, clock: ManualClock
) -> None:
    due_ms = clock.now_ms() + HOUR_MS
    publish(cut.engine, "a", deliver_at_ms=due_ms)
    cut.put("b", due_ms=due_ms)
    with cut.engine.context.lock:
        stopped = cut.engine.context.schedule.stop(["b"], now_ms=clock.now_ms())
    cut.engine.context.schedule.commit(stopped.place)

    engine = cut.reopened()

    assert [one.record.id for one in messages_of(engine.context.folder)] == ["a"]
    assert (stopped.statuses, scheduled(engine)) == (["canceled"], 1)
    assert publish(engine, "b", deliver_at_ms=due_ms) == ["duplicate"]
    clock.advance(HOUR_MS)
    assert drained(engine) == ["a"]
    engine.close()


def test_no_arrival_number_is_given_twice_though_a_power_cut_took_what_a_dispatch_named(
    cut: _Cut, clock: ManualClock
) -> None:
    due_ms = clock.now_ms() + HOUR_MS
    publish(cut.engine, "a", deliver_at_ms=clock.now_ms() + 2 * HOUR_MS)
    taken = cut.put("b", due_ms=due_ms)
    claim = cut.engine.context.schedule.claim(due_ms)  # nothing is placed: the timer is not told of another time
    assert claim is not None
    assert claim.batch.ids == ["b"]
    claim.commit()

    engine = cut.reopened()

    assert (scheduled(engine), engine.context.schedule.next_seq()) == (1, taken + 1)
    assert publish(engine, "b", deliver_at_ms=due_ms) == ["stored"]
    clock.advance(2 * HOUR_MS)
    assert drained(engine) == ["b", "a"]
    assert scheduled(engine) == 0
    engine.close()


def test_a_cancel_is_durable_before_the_message_that_it_stops_in_advance(cut: _Cut, clock: ManualClock) -> None:
    with cut.engine.context.lock:
        stopped = cut.engine.context.schedule.stop(["early"], now_ms=clock.now_ms())
    cut.put("early", due_ms=clock.now_ms() + HOUR_MS)
    cut.engine.context.messages.commit()

    engine = cut.reopened()

    assert stopped.statuses == ["unknown"]
    assert [one.kind for one in messages_of(engine.context.folder)] == [FrameKind.CANCELED]
    assert engine.publisher.cancel(["early"]) == ["canceled"]
    clock.advance(HOUR_MS)
    assert drained(engine) == []
    engine.close()


def test_what_arrived_is_durable_before_a_checkpoint_that_has_it(cut: _Cut, clock: ManualClock) -> None:
    cut.put("a", due_ms=clock.now_ms() + HOUR_MS)
    cut.engine.context.schedule.housekeeping.let_go_of_arrivals(1 << 40, now_ms=clock.now_ms())

    engine = cut.reopened()

    assert [one.record.id for one in messages_of(engine.context.folder)] == ["a"]
    clock.advance(HOUR_MS)
    assert drained(engine) == ["a"]
    engine.close()


def publish_behind_a_shorter_log(folder: Path, clock: ManualClock) -> None:
    """Publish c where a power cut took the end of the message log, which the schedule's checkpoint with a has."""
    engine = Engine.open(folder, clock=clock, options=UNSYNCED)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    publish(engine, "a", deliver_at_ms=clock.now_ms() + HOUR_MS)
    publish(engine, *(f"b{number}" for number in range(20)))
    engine.context.schedule.housekeeping.let_go_of_arrivals(1 << 40, now_ms=clock.now_ms())
    engine.close()
    [segment] = message_segments(folder)
    (folder / "messages" / f"{segment.stem}.proven").unlink()
    segment.write_bytes(segment.read_bytes()[:3_000])
    engine = Engine.open(folder, clock=clock, options=UNSYNCED)
    publish(engine, "c", deliver_at_ms=clock.now_ms() + HOUR_MS)
    engine.close()


def test_a_log_of_messages_that_ends_before_the_checkpoint_is_gone_on_with_from_its_end(
    folder: Path, clock: ManualClock
) -> None:
    publish_behind_a_shorter_log(folder, clock)

    engine = Engine.open(folder, clock=clock, options=UNSYNCED)

    assert scheduled(engine) == 2
    clock.advance(HOUR_MS)
    assert {"a", "c"} <= set(drained(engine))
    engine.close()


def test_a_checkpoint_from_before_a_shorter_log_of_messages_loses_nothing_that_came_after_it(
    folder: Path, clock: ManualClock
) -> None:
    publish_behind_a_shorter_log(folder, clock)
    newest = max((folder / "schedule").glob("log-*.segment"))
    for position in range(100, newest.stat().st_size, 40):
        flip(newest, position)

    engine = Engine.open(folder, clock=clock, options=UNSYNCED)

    clock.advance(HOUR_MS)
    assert {"a", "c"} <= set(drained(engine))
    engine.close()


class _FailingMessages(PoweredStorage):
    """The message log is not synced any more, once it is armed."""

    is_armed = False

    def sync(self, descriptor: int) -> None:
        if self.is_armed and "/messages/" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(descriptor)


def test_nothing_is_filed_that_a_power_cut_could_take_from_where_it_arrived(
    folder: Path, tmp_path: Path, clock: ManualClock
) -> None:
    storage = _FailingMessages()
    cut = _Cut(folder, tmp_path, clock, storage)
    cut.put("b", due_ms=clock.now_ms() + HOUR_MS)
    storage.is_armed = True

    with pytest.raises(StorageFailed):
        cut.engine.context.schedule.housekeeping.make_room(clock.now_ms(), fill=0)

    assert all(b"flushed" not in path.read_bytes() for path in (folder / "schedule").glob("log-*"))
    storage.is_armed = False
    engine = cut.reopened()
    assert publish(engine, "b", deliver_at_ms=clock.now_ms() + HOUR_MS) == ["stored"]
    assert scheduled(engine) == 1
    engine.close()


def test_what_is_filed_counts_though_its_arrival_is_damaged(folder: Path, clock: ManualClock) -> None:
    engine = Engine.open(folder, clock=clock)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    due_ms = clock.now_ms() + HOUR_MS
    # Once before the flush, so that its checkpoint is behind; then what is filed behind that checkpoint alone.
    publish(engine, "a", "b", deliver_at_ms=due_ms)
    engine.close()
    engine = Engine.open(folder, clock=clock)
    engine.context.schedule.housekeeping.make_room(clock.now_ms(), fill=0)
    engine.close()
    log = max((folder / "schedule").glob("log-*.segment"))
    for position in range(100, log.stat().st_size, 40):  # its checkpoint: the one before counts
        flip(log, position)
    [segment] = message_segments(folder)
    flip(segment, segment.read_bytes().index(message("b").body) + 3)

    engine = Engine.open(folder, clock=clock)

    assert scheduled(engine) == 2
    clock.advance(HOUR_MS)
    assert sorted(drained(engine)) == ["a", "b"]
    assert (scheduled(engine), engine.log_figures()["scheduled"]) == (0, 0)
    engine.close()


def test_a_number_that_a_deletion_made_void_is_not_given_again_though_the_last_arrival_is_damaged(
    folder: Path, clock: ManualClock
) -> None:
    engine = Engine.open(folder, clock=clock)
    due_ms = clock.now_ms() + HOUR_MS
    publish(engine, "a", deliver_at_ms=due_ms)
    engine.publisher.publish([Message(id="z", topic="other", body=b"z" * 50, deliver_at_ms=due_ms)])
    engine.deletion.delete_topic(TOPIC, force=True)
    engine.close()
    [segment] = message_segments(folder)
    flip(segment, segment.read_bytes().index(b"z" * 50) + 5)

    engine = Engine.open(folder, clock=clock)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    assert publish(engine, "new", deliver_at_ms=due_ms) == ["stored"]

    clock.advance(2 * HOUR_MS)
    assert drained(engine) == ["new"]
    engine.close()


def test_a_schedule_that_is_missing_beside_its_messages_is_refused_with_the_cure(
    folder: Path, clock: ManualClock
) -> None:
    engine = Engine.open(folder, clock=clock)
    publish(engine, "a", deliver_at_ms=clock.now_ms() + HOUR_MS)
    engine.close()
    shutil.rmtree(folder / "schedule")

    with pytest.raises(OutboxError, match=r"log-\* of the schedule are missing.*restore them from a copy"):
        Engine.open(folder, clock=clock)


def test_an_arrival_is_in_the_log_once_under_its_number(folder: Path, clock: ManualClock) -> None:
    engine = Engine.open(folder, clock=clock)
    publish(engine, "a", "b", deliver_at_ms=clock.now_ms() + HOUR_MS)
    engine.publisher.cancel(["early"])
    publish(engine, "early", "c", deliver_at_ms=clock.now_ms() + HOUR_MS)
    engine.close()

    found = [(one.record.id, one.kind, one.number) for one in messages_of(folder)]
    assert found == [
        ("a", FrameKind.SCHEDULED, 1), ("b", FrameKind.SCHEDULED, 2), ("early", FrameKind.CANCELED, 0),
        ("c", FrameKind.SCHEDULED, 3),
    ]  # fmt: skip


def test_a_schedule_of_an_earlier_format_is_refused_with_the_cure(folder: Path, clock: ManualClock) -> None:
    Engine.open(folder, clock=clock).close()
    segments = LocalSegments.open(folder / "schedule")
    log = Journal(segments, name=LOG, kind=SegmentKind.MESSAGES)
    checkpoint = log.recovered.checkpoint
    assert checkpoint is not None
    earlier = msgspec.msgpack.encode(msgspec.msgpack.decode(b"".join(checkpoint.parts))[:-1])
    log.resume()
    CapturedCheckpoint([earlier], log.end, 0).write(log, lock=nullcontext())
    segments.close()

    with pytest.raises(SegmentDamaged, match=r"format that this version does not read.*drain it with the version that"):
        Engine.open(folder, clock=clock)
