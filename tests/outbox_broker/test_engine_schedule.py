"""The engine on its durable schedule: cascades, cancels, flushes that hold nothing up, restarts, and memory."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import google_crc32c
import pytest

from outbox_broker.engine.engine import Engine
from outbox_broker.log.storage import DiskStorage
from outbox_broker.schedule.levels import BUCKETS_MAX
from outbox_core.common.clock import ManualClock, SystemClock
from outbox_core.common.errors import ConfigurationError
from outbox_core.journal import journal
from outbox_core.journal.block import VERSION, FrameKind
from outbox_core.messages.limits import DELAY_MAX_MS
from outbox_core.messages.message import GroupConfig, Message, Record
from tests.outbox_broker.action_log import actions_of
from tests.outbox_broker.message_log import message_segments, messages_of

TOPIC, GROUP = "orders", "billing"
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
type_of_open = Callable[..., Engine]


def message(message_id: str, *, topic: str = TOPIC, deliver_at_ms: int | None = None) -> Message:
    return Message(
        id=message_id, topic=topic, body=message_id.encode(), key="k", headers={"h": message_id},
        deliver_at_ms=deliver_at_ms,
    )  # fmt: skip


def publish(engine: Engine, *ids: str, topic: str = TOPIC, deliver_at_ms: int | None = None) -> list[str]:
    results = engine.publisher.publish([message(one, topic=topic, deliver_at_ms=deliver_at_ms) for one in ids])
    return [str(one.status) for one in results]


def drained(engine: Engine, *, topic: str = TOPIC) -> list[str]:
    """All that is ready, settled; each is what was published."""
    ids: list[str] = []
    while found := engine.puller.pull(topic, GROUP, max_messages=1_000):
        assert engine.settler.ack([one.receipt for one in found]) == ["acked"] * len(found)
        for one in found:
            assert (one.body, one.key, one.headers) == (one.id.encode(), "k", {"h": one.id})
        ids += [one.id for one in found]
    return ids


def settle(engine: Engine, clock: ManualClock) -> None:
    """All housekeeping of the schedule that is to be done now."""
    while engine.context.schedule.housekeeping.step(clock.now_ms()):
        pass


def flush(engine: Engine, clock: ManualClock) -> None:
    """What the schedule has in memory goes to its buckets."""
    engine.context.schedule.housekeeping.make_room(clock.now_ms(), fill=0)


def bucket_levels(folder: Path) -> set[str]:
    """The levels of the buckets that have a segment."""
    return {path.name.partition("-")[0] for path in (folder / "schedule").glob("l[01]*.segment")}


def test_a_message_goes_down_all_levels_over_restarts_and_is_delivered_on_its_millisecond(
    open_engine: type_of_open, clock: ManualClock, folder: Path
) -> None:
    engine = open_engine()
    due_ms = clock.now_ms() + 60 * DAY_MS + 12_345
    publish(engine, "far", deliver_at_ms=due_ms)
    beside = [f"beside-{number}" for number in range(1_000)]  # so many that their bucket is re-filed
    publish(engine, *beside, deliver_at_ms=due_ms)
    levels: set[str] = set()

    flush(engine, clock)
    for ahead_ms in (3 * DAY_MS, 2 * HOUR_MS, HOUR_MS // 2, 1):
        while clock.now_ms() < due_ms - ahead_ms:
            clock.advance(min(max(ahead_ms // 3, HOUR_MS // 2), due_ms - ahead_ms - clock.now_ms()))
            settle(engine, clock)
            levels |= bucket_levels(folder)
        engine = open_engine()
        assert drained(engine) == []
        assert engine.publisher.scheduled_message("far") == {"id": "far", "topic": TOPIC, "deliver_at_ms": due_ms}

    clock.advance(1)
    assert drained(engine) == ["far", *beside]
    assert levels == {"l1w", "l1d", "l1h", "l0m"}
    assert engine.publisher.scheduled_message("far") is None


@pytest.mark.parametrize("passing_ms", [0, 55 * DAY_MS, 59 * DAY_MS, 60 * DAY_MS - HOUR_MS])
def test_a_cancel_wins_on_whatever_level_its_message_stands_and_after_a_restart(
    open_engine: type_of_open, clock: ManualClock, passing_ms: int
) -> None:
    engine = open_engine()
    due_ms = clock.now_ms() + 60 * DAY_MS
    publish(engine, "gone", "kept", deliver_at_ms=due_ms)
    flush(engine, clock)
    clock.advance(passing_ms)
    settle(engine, clock)

    assert engine.publisher.cancel(["gone"]) == ["canceled"]

    engine = open_engine()
    assert engine.publisher.cancel(["gone"]) == ["canceled"]
    assert publish(engine, "gone", deliver_at_ms=due_ms) == ["duplicate"]
    clock.advance(due_ms - clock.now_ms())
    assert drained(engine) == ["kept"]
    assert engine.publisher.cancel(["kept", "gone"]) == ["too_late", "canceled"]
    assert {"stored": 1, "scheduled": 0}.items() <= engine.admin.topic_figures(TOPIC).items()


def test_a_cancel_that_came_before_its_publish_wins_over_a_flush_and_a_restart(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine()
    due_ms = clock.now_ms() + HOUR_MS
    assert engine.publisher.cancel(["early"]) == ["unknown"]
    publish(engine, "other", deliver_at_ms=due_ms)
    flush(engine, clock)
    engine = open_engine()

    assert publish(engine, "early", "early", deliver_at_ms=due_ms) == ["stored", "duplicate"]
    assert publish(engine, "early") == ["duplicate"]

    assert engine.publisher.cancel(["early"]) == ["canceled"]
    clock.advance(HOUR_MS)
    assert drained(engine) == ["other"]


def test_canceled_or_delivered_exactly_one_whoever_is_first(folder: Path, random_seed: int) -> None:
    random = Random(random_seed)
    engine = Engine.open(folder)
    start_ms = SystemClock().now_ms() + 100
    ids = [f"m{number}" for number in range(400)]
    engine.publisher.publish([message(one, deliver_at_ms=start_ms + number) for number, one in enumerate(ids)])
    random.shuffle(ids)
    said: dict[str, str] = {}
    delivered: list[str] = []

    def cancel(mine: list[str]) -> None:
        for one in mine:
            said[one] = engine.publisher.cancel([one])[0]

    with ThreadPoolExecutor(2) as pool:
        canceling = [pool.submit(cancel, ids[:200]), pool.submit(cancel, ids[200:])]
        while not all(one.done() for one in canceling) or engine.admin.topic_figures(TOPIC)["scheduled"]:
            delivered += [one.id for one in engine.puller.pull(TOPIC, GROUP, wait_ms=50, invisible_ms=HOUR_MS)]
        for one in canceling:
            one.result()
    delivered += drained(engine)
    engine.close()

    assert sorted(delivered) == sorted(one for one in ids if said[one] == "too_late")
    assert {said[one] for one in ids} <= {"canceled", "too_late"}


def test_what_fell_due_while_the_broker_was_down_comes_in_order_of_its_due_time_from_wherever_it_stood(
    open_engine: type_of_open, clock: ManualClock, random_seed: int
) -> None:
    random = Random(random_seed)
    engine = open_engine(schedule_memory_messages_max=50)
    ahead_ms = {f"m{number}": random.randrange(1, 100 * DAY_MS) for number in range(300)}
    for one, ms in ahead_ms.items():
        publish(engine, one, deliver_at_ms=clock.now_ms() + ms)
    engine.close()
    clock.advance(101 * DAY_MS)

    engine = open_engine()

    assert drained(engine) == sorted(ahead_ms, key=lambda one: ahead_ms[one])


def test_memory_and_files_do_not_grow_with_what_is_scheduled(
    open_engine: type_of_open, clock: ManualClock, folder: Path, random_seed: int
) -> None:
    random = Random(random_seed)
    engine = open_engine(schedule_memory_messages_max=500, durability="os")

    for number in range(0, 6_000, 100):
        engine.publisher.publish(
            [message(f"m{number + at}", deliver_at_ms=clock.now_ms() + random.randrange(DELAY_MAX_MS))
             for at in range(100)]
        )  # fmt: skip
        assert engine.context.schedule.queries.figures()["in_memory"] <= 2 * 500 + 100

    settle(engine, clock)
    assert engine.log_figures()["scheduled"] == 6_000
    assert sum(count for _, count in engine.publisher.scheduled(bucket="day")) == 6_000
    assert engine.context.schedule.queries.figures()["buckets"] <= BUCKETS_MAX
    assert len(list((folder / "schedule").glob("l*.segment"))) <= BUCKETS_MAX + 2


class HeldFlush(DiskStorage):
    """The sync of an id index, which a flush ends with, waits from hold() until release()."""

    def __init__(self) -> None:
        self.waiting = threading.Event()
        self.held = False
        self._free = threading.Event()

    def release(self) -> None:
        self._free.set()

    def sync(self, descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if self.held and name.startswith("ids-"):
            self.waiting.set()
            if not self._free.wait(120):
                raise TimeoutError("nobody released the flush")
        super().sync(descriptor)


@pytest.fixture
def flushing(open_engine: type_of_open, clock: ManualClock) -> Iterator[tuple[Engine, HeldFlush]]:
    """An engine whose keeper is in the middle of a flush of a, b, c and d, due in an hour."""
    storage = HeldFlush()
    engine = open_engine(storage=storage, schedule_memory_messages_max=4)
    publish(engine, "before", topic="another")
    storage.held = True
    publish(engine, "a", "b", "c", "d", deliver_at_ms=clock.now_ms() + HOUR_MS)
    assert storage.waiting.wait(120)
    yield engine, storage
    storage.release()


def test_while_memory_is_flushed_everything_else_goes_on(
    flushing: tuple[Engine, HeldFlush], clock: ManualClock
) -> None:
    engine, storage = flushing

    assert publish(engine, "plain", topic="another") == ["stored"]
    assert drained(engine, topic="another") == ["before", "plain"]
    assert publish(engine, "soon", deliver_at_ms=clock.now_ms() + 5) == ["stored"]
    assert publish(engine, "a", deliver_at_ms=clock.now_ms() + HOUR_MS) == ["duplicate"]
    assert publish(engine, "b") == ["duplicate"]
    assert engine.publisher.cancel(["a", "unborn"]) == ["canceled", "unknown"]
    clock.advance(5)
    assert drained(engine) == ["soon"]
    assert engine.admin.topic_figures(TOPIC)["scheduled"] == 3

    storage.release()
    settle(engine, clock)
    clock.advance(HOUR_MS)
    assert drained(engine) == ["b", "c", "d"]


@pytest.mark.parametrize("restarts", ["during", "after", "never"])
def test_what_fires_or_is_canceled_while_it_is_flushed_does_so_once(
    flushing: tuple[Engine, HeldFlush], open_engine: type_of_open, clock: ManualClock, restarts: str
) -> None:
    engine, storage = flushing
    publish(engine, "later", deliver_at_ms=clock.now_ms() + 2 * HOUR_MS)
    assert engine.publisher.cancel(["b", "later"]) == ["canceled", "canceled"]
    clock.advance(HOUR_MS)
    assert drained(engine) == ["a", "c", "d"]

    if restarts == "during":
        threading.Timer(0.05, storage.release).start()
        engine = open_engine(schedule_memory_messages_max=4)
    storage.release()
    settle(engine, clock)
    if restarts == "after":
        engine = open_engine(schedule_memory_messages_max=4)

    assert engine.publisher.cancel(["a", "b", "c", "later"]) == ["too_late", "canceled", "too_late", "canceled"]
    clock.advance(3 * HOUR_MS)
    settle(engine, clock)
    assert drained(engine) == []
    assert {"stored": 3, "scheduled": 0}.items() <= engine.admin.topic_figures(TOPIC).items()
    assert publish(engine, "a", "b", "c", "d") == ["duplicate"] * 4


def test_a_folder_of_another_version_is_refused_and_told_what_to_do(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine()
    publish(engine, "a")
    engine.close()
    [path] = message_segments(folder)
    data = bytearray(path.read_bytes())
    other = VERSION + 1
    struct.pack_into("<H", data, 8, other)
    struct.pack_into("<I", data, 36, google_crc32c.value(bytes(data[:36])))
    path.write_bytes(data)

    with pytest.raises(ConfigurationError, match=f"format {other} .*this version reads format {VERSION}: upgrade"):
        open_engine()


class HalfPlaced(DiskStorage):
    """Once armed, it takes half of what is written to the message log and no more, as a machine that loses power."""

    def __init__(self) -> None:
        self.is_armed = False

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        if self.is_armed and _path(descriptor).parent.name == "messages":
            super().write(descriptor, data[: len(data) // 2], position=position)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().write(descriptor, data, position=position)

    def truncate(self, descriptor: int, size: int) -> None:
        if self.is_armed:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().truncate(descriptor, size)


class FullSchedule(DiskStorage):
    """The schedule's log has no room from the moment on in which what is due stands in the message log."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.is_full = is_full
        self.is_armed = False

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        if self.is_full and _path(descriptor).name.startswith("log-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(descriptor, data, position=position)

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.is_full |= self.is_armed and _path(descriptor).parent.name == "messages"


def _path(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def test_a_batch_that_the_schedule_cannot_settle_yet_is_told_once_however_often_it_is_tried(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    storage = FullSchedule()
    engine = open_engine(storage=storage)
    publish(engine, "a", "b", "c", deliver_at_ms=clock.now_ms() + HOUR_MS)
    storage.is_armed = True
    clock.advance(HOUR_MS)

    assert drained(engine) == ["a", "b", "c"]
    written = engine.log_figures()["actions_bytes"]
    for _ in range(5):
        assert drained(engine) == []

    assert engine.dispatcher.has_taken(), "the schedule did not settle it"
    assert engine.log_figures()["actions_bytes"] == written
    assert engine.counters()["fired", TOPIC, ""] == 3
    assert sum(count for _, count in engine.lateness.counts()) == 3
    storage.is_armed = storage.is_full = False
    assert drained(engine) == []
    assert not engine.dispatcher.has_taken()


def dispatched(folder: Path) -> list[journal.Fired]:
    """What the action log says of dispatched messages."""
    return [action for action in actions_of(folder) if isinstance(action, journal.Fired)]


class FailingActions(DiskStorage):
    """Takes so many more writes to the action log, once told how many, and then fails each."""

    def __init__(self) -> None:
        self.left: int | None = None

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        if self.left is not None and _path(descriptor).parent.name == "actions":
            if not self.left:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.left -= 1
        super().write(descriptor, data, position=position)


def records(folder: Path, kind: FrameKind) -> list[tuple[int, Record, int]]:
    """What the message log has of this kind: number, message, and when it was stored."""
    return [(one.number, one.record, one.stored_at_ms) for one in messages_of(folder) if one.kind == kind]


@pytest.mark.parametrize("start_ms", [1 << 31, 1_800_000_000_000], ids=["short times", "today"])
def test_what_is_scheduled_is_recorded_as_it_was_published_when_it_came_and_when_it_fell_due(
    folder: Path, start_ms: int, random_seed: int
) -> None:
    random = Random(random_seed)
    batch = [
        Message(
            id=f"m{number}", topic=TOPIC, key=random.choice([None, "k", "\u00e9"]), body=random.randbytes(number),
            headers=random.choice([{}, {"h": "v"}, {"h": "", "other": "v\u00e9"}]),
            created_at_ms=random.choice([0, 1, 1 << 33]), deliver_at_ms=start_ms + random.randint(1, HOUR_MS),
        )
        for number in range(100)
    ]  # fmt: skip
    clock = ManualClock(start_ms)
    engine = Engine.open(folder, clock=clock)
    engine.publisher.publish([Message(id="before", topic=TOPIC, body=b"b")])
    engine.publisher.publish(batch)
    clock.advance(HOUR_MS)
    assert len(engine.puller.pull(TOPIC, GROUP, max_messages=1_000)) == 1 + len(batch)
    engine.close()

    stored = [
        Record(
            id=one.id, topic=one.topic, key=one.key, headers=dict(one.headers), body=one.body,
            created_at_ms=one.created_at_ms or start_ms, deliver_at_ms=one.deliver_at_ms,
        )
        for one in batch
    ]  # fmt: skip
    arrived = [(number, record, start_ms) for number, record in enumerate(stored, 1)]
    in_order = sorted(stored, key=lambda record: record.deliver_at_ms or 0)
    due = [(sequence, record, start_ms + HOUR_MS) for sequence, record in enumerate(in_order, 1)]
    assert records(folder, FrameKind.SCHEDULED) == arrived
    assert records(folder, FrameKind.DISPATCHED) == due


def test_each_topic_of_a_batch_is_told_once_where_the_action_log_fails_between_two(
    open_engine: type_of_open, clock: ManualClock, folder: Path
) -> None:
    storage = FailingActions()
    engine = open_engine(storage=storage)
    topics = ("orders", "refunds", "trips")
    for topic in topics:
        publish(engine, f"of-{topic}", topic=topic, deliver_at_ms=clock.now_ms() + HOUR_MS)
    storage.left = 1
    clock.advance(HOUR_MS)
    for _ in range(3):
        engine.dispatcher.dispatch_unless_disk_is_full()
    assert engine.dispatcher.has_taken(), "the batch could not be told"

    storage.left = None
    engine.dispatcher.dispatch_unless_disk_is_full()
    assert [drained(engine, topic=topic) for topic in topics] == [[f"of-{topic}"] for topic in topics]
    engine.close()

    assert sorted(record.topic for record in dispatched(folder)) == sorted(topics)


class HeldSchedule(DiskStorage):
    """Syncs of the schedule's log wait, once it is held, until they are let go."""

    def __init__(self) -> None:
        self.is_held = False
        self.waiting = threading.Event()
        self.free = threading.Event()

    def sync(self, descriptor: int) -> None:
        if self.is_held and _path(descriptor).name.startswith("log-"):
            self.waiting.set()
            if not self.free.wait(120):
                raise TimeoutError("nobody let the schedule go on")
        super().sync(descriptor)


class CountedSchedule(DiskStorage):
    """Counts writes and syncs of the logs, by folder."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        self.calls[f"{_path(descriptor).parent.name} written"] += 1
        super().write(descriptor, data, position=position)

    def sync(self, descriptor: int) -> None:
        self.calls[f"{_path(descriptor).parent.name} synced"] += 1
        super().sync(descriptor)


def test_what_is_scheduled_is_written_once_and_synced_once(open_engine: type_of_open, clock: ManualClock) -> None:
    storage = CountedSchedule()
    engine = open_engine(storage=storage)
    publish(engine, "first")
    storage.calls.clear()

    due_ms = clock.now_ms() + HOUR_MS
    assert publish(engine, *(f"m{number}" for number in range(500)), deliver_at_ms=due_ms) == ["stored"] * 500

    assert storage.calls == {"messages written": 1, "messages synced": 1}


def test_who_finds_anything_does_not_wait_for_what_is_due(open_engine: type_of_open, clock: ManualClock) -> None:
    storage = HeldSchedule()
    engine = open_engine(storage=storage)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    publish(engine, "a", "b", "c")
    publish(engine, "due", deliver_at_ms=clock.now_ms() + HOUR_MS)
    storage.is_held = True
    clock.advance(HOUR_MS)
    assert storage.waiting.wait(120)
    try:
        with ThreadPoolExecutor(1) as pool:
            pulling = pool.submit(engine.puller.pull, TOPIC, GROUP, max_messages=9)
            try:
                assert [one.id for one in pulling.result(timeout=120)] == ["a", "b", "c"]
            finally:
                storage.free.set()
    finally:
        storage.is_held = False

    assert [one.id for one in engine.puller.pull(TOPIC, GROUP, max_messages=9)] == ["due"]


def test_what_was_placed_and_not_settled_is_delivered_once_over_a_checkpoint_between_two_kills(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    ids = [f"m{number}" for number in range(6)]
    storage = FullSchedule()
    engine = open_engine(storage=storage, dedup_messages_max=2)
    publish(engine, *ids, deliver_at_ms=clock.now_ms() + HOUR_MS)
    storage.is_armed = True
    clock.advance(HOUR_MS)
    assert drained(engine) == ids

    engine = open_engine(storage=FullSchedule(is_full=True), dedup_messages_max=2)
    with engine.context.lock:
        engine.writer.write_checkpoint()
    engine = open_engine(dedup_messages_max=2)

    assert drained(engine) == []
    assert {"stored": 6, "scheduled": 0}.items() <= engine.admin.topic_figures(TOPIC).items()
    assert not engine.dispatcher.has_taken()


def test_a_long_message_that_was_placed_before_a_kill_is_known_after_it(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    long = Message(id="long", topic=TOPIC, body=bytes(range(256)) * 100, deliver_at_ms=clock.now_ms() + HOUR_MS)
    storage = FullSchedule()
    engine = open_engine(storage=storage, dedup_messages_max=1)
    engine.publisher.publish([long])
    publish(engine, "beside", deliver_at_ms=clock.now_ms() + HOUR_MS)
    storage.is_armed = True
    clock.advance(HOUR_MS)
    [found, _] = engine.puller.pull(TOPIC, GROUP)
    assert found.body == long.body

    engine = open_engine(dedup_messages_max=1)

    assert {"stored": 2, "scheduled": 0}.items() <= engine.admin.topic_figures(TOPIC).items()
    assert engine.puller.pull(TOPIC, GROUP) == []
    assert not engine.dispatcher.has_taken()


def test_a_batch_placed_by_half_before_a_kill_is_delivered_once_over_a_checkpoint_and_another_kill(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    ids = [f"m{number}" for number in range(8)]
    storage = HalfPlaced()
    engine = open_engine(storage=storage, dedup_messages_max=1)
    publish(engine, *ids, deliver_at_ms=clock.now_ms() + HOUR_MS)
    storage.is_armed = True
    clock.advance(HOUR_MS)
    assert drained(engine) == []

    engine = open_engine(storage=FullSchedule(is_full=True), dedup_messages_max=1)
    assert drained(engine) == ids
    with engine.context.lock:
        engine.writer.write_checkpoint()
    engine = open_engine(dedup_messages_max=1)

    assert drained(engine) == []
    assert {"stored": 8, "scheduled": 0}.items() <= engine.admin.topic_figures(TOPIC).items()


def test_what_was_placed_before_a_kill_is_recorded_as_dispatched_after_it(
    open_engine: type_of_open, clock: ManualClock, folder: Path
) -> None:
    ids = [f"m{number}" for number in range(8)]
    storage = HalfPlaced()
    engine = open_engine(storage=storage)
    publish(engine, *ids, deliver_at_ms=clock.now_ms() + HOUR_MS)
    storage.is_armed = True
    clock.advance(HOUR_MS)
    assert drained(engine) == []
    assert dispatched(folder) == []

    engine = open_engine()
    assert drained(engine) == ids
    engine.close()

    assert sorted(entry for record in dispatched(folder) for entry in record.entries) == list(enumerate(ids))


@pytest.mark.parametrize(
    "ask", [lambda it: it.admin.topic_figures(TOPIC), lambda it: it.admin.group_figures(TOPIC, GROUP)]
)
def test_figures_that_wait_for_the_schedule_hold_no_publish_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Engine], dict[str, int]]
) -> None:
    publish(engine, "a")
    drained(engine)
    count = engine.context.schedule.count_undelivered
    published: list[str] = []

    with ThreadPoolExecutor(1) as pool:

        def busy_count(topic: str, *, after: int) -> int:
            published.extend(pool.submit(publish, engine, "b").result(timeout=120))
            return count(topic, after=after)

        monkeypatch.setattr(engine.context.schedule, "count_undelivered", busy_count)
        figures = ask(engine)

    assert published == ["stored"]
    assert (figures["stored"], figures["scheduled"]) == (2, 0)


# -- clocks --------------------------------------------------------------------------------------------------------


def test_a_process_that_was_suspended_delivers_what_fell_due_in_order_within_a_slice(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine()
    for hours in (5, 1, 3):
        publish(engine, f"in-{hours}h", deliver_at_ms=clock.now_ms() + hours * HOUR_MS)

    clock.step_wall(4 * HOUR_MS)  # monotonic time stands still while a machine sleeps

    assert drained(engine) == ["in-1h", "in-3h"]


def test_while_a_leap_second_is_smeared_nothing_is_early_by_the_clock_and_nothing_is_lost(
    open_engine: type_of_open, clock: ManualClock
) -> None:
    engine = open_engine()
    start_ms = clock.now_ms()
    due_ms = {f"m{number}": start_ms + number * 250 for number in range(1, 40)}
    for one, ms in due_ms.items():
        publish(engine, one, deliver_at_ms=ms)
    came: list[str] = []

    for number in range(100):
        clock.advance(100)
        clock.step_wall(-1 if number % 2 else 0)  # the wall clock runs half a percent slower
        for one in drained(engine):
            assert due_ms[one] <= clock.now_ms() + 1
            came.append(one)

    assert clock.now_ms() < start_ms + 10_000
    assert came == [one for one, ms in due_ms.items() if ms <= clock.now_ms()]


@pytest.mark.parametrize("hours", [-30, -5, -1, 1, 5, 30])
def test_after_a_step_of_the_wall_clock_of_hours_each_message_fires_by_the_new_clock(
    open_engine: type_of_open, clock: ManualClock, hours: int
) -> None:
    engine = open_engine(schedule_memory_messages_max=3)
    start_ms = clock.now_ms()
    due_ms = {f"m{number}": start_ms + number * HOUR_MS // 2 for number in range(1, 80)}
    for one, ms in due_ms.items():
        publish(engine, one, deliver_at_ms=ms)
    clock.advance(2 * HOUR_MS)
    came = drained(engine)
    clock.step_wall(hours * HOUR_MS)

    for _ in range(160):
        for one in drained(engine):
            assert due_ms[one] <= clock.now_ms()
            came.append(one)
        clock.advance(HOUR_MS // 2)
        settle(engine, clock)

    assert came == list(due_ms)
