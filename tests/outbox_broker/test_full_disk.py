"""A disk that is completely full: both services start on it, and go on with what they hold, until there is room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from broker_adapter.embedded import EmbeddedBroker
from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.delay_service.delay_proxy import DelayProxy
from outbox_broker.engine.engine import Engine
from outbox_broker.log.disk_reserve import Reserve
from outbox_broker.log.storage import DiskStorage
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.schedule.delay_store import DelayOptions, DelayStore
from outbox_broker.segments.local import LocalSegments
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import StorageFailed
from outbox_core.messages.message import CancelStatus, GroupConfig, Message
from tests.outbox_broker.mounts import small_disk

TOPIC, GROUP = "orders", "billing"
MIB = 1 << 20
HOUR_MS = 3_600_000
OPTIONS = EngineOptions(
    segment_bytes=MIB // 4, checkpoint_bytes=MIB // 4, reserve_bytes=MIB, retention_ms=60_000,
    retention_check_ms=10**15, schedule_memory_messages_max=500, fire_batch_max=100,
)  # fmt: skip
type_of_publish = Callable[[list[Message]], object]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, size_mb=12) as place:
        yield place


def fill(disk: Path) -> Path:
    """Take all room that there is; returns the file that has it."""
    ballast = disk / "ballast"
    for size_bytes in (MIB, 4096, 1):
        try:
            with ballast.open("ab", buffering=0) as file:
                while file.write(bytes(size_bytes)):
                    pass
        except OSError:
            pass
    return ballast


def messages(name: str, count: int, *, deliver_at_ms: int | None = None) -> list[Message]:
    return [
        Message(id=f"{name}-{number}", topic=TOPIC, body=b"x" * 1_000, deliver_at_ms=deliver_at_ms)
        for number in range(count)
    ]


def publish(take: type_of_publish, found: list[Message]) -> list[str]:
    for start in range(0, len(found), 100):
        take(found[start : start + 100])
    return [one.id for one in found]


def consume(engine: Engine) -> list[str]:
    """Pull and settle until nothing is ready."""
    ids: list[str] = []
    while deliveries := engine.puller.pull(TOPIC, GROUP, max_messages=50, invisible_ms=HOUR_MS):
        assert engine.settler.ack([one.receipt for one in deliveries]) == ["acked"] * len(deliveries)
        ids += [one.id for one in deliveries]
    return ids


def test_a_broker_starts_on_a_full_disk_and_goes_on_with_all_but_publishes(disk: Path, clock: ManualClock) -> None:
    engine = Engine.open(disk / "data", clock=clock, options=OPTIONS)
    stored = publish(engine.publisher.publish, messages("now", 300))
    due = publish(engine.publisher.publish, messages("due", 50, deliver_at_ms=clock.now_ms() + HOUR_MS))
    engine.publisher.publish(messages("far", 1, deliver_at_ms=clock.now_ms() + 100 * HOUR_MS))
    engine.close()
    ballast = fill(disk)

    engine = Engine.open(disk / "data", clock=clock, options=OPTIONS)

    with pytest.raises(StorageFailed, match=r"No space left on device.*free some disk space"):
        publish(engine.publisher.publish, messages("refused", 2_000))
    assert engine.log_figures()["publishes_refused"] == 1
    assert consume(engine) == stored
    clock.advance(HOUR_MS)
    assert sorted(consume(engine)) == sorted(due)
    assert engine.publisher.cancel(["far-0"]) == [CancelStatus.CANCELED]
    engine.check_ready()
    ballast.unlink()
    assert publish(engine.publisher.publish, messages("after", 10)) == consume(engine)
    assert engine.log_figures()["publishes_refused"] == 0
    engine.close()


def test_what_falls_due_on_a_full_disk_leaves_room_for_its_acknowledgements_and_all_of_it_comes(
    disk: Path, clock: ManualClock
) -> None:
    engine = Engine.open(disk / "data", clock=clock, options=OPTIONS)
    due = publish(engine.publisher.publish, messages("due", 2_000, deliver_at_ms=clock.now_ms() + HOUR_MS))
    while engine.context.schedule.housekeeping.step(clock.now_ms()):
        pass
    fill(disk)
    clock.advance(HOUR_MS)

    came: list[str] = []
    for _ in range(100):
        came += consume(engine)
        if len(came) >= len(due):
            break
        clock.advance(60_001)
        engine.retention.drop_outdated()
        engine.context.schedule.housekeeping.step(clock.now_ms())

    assert sorted(came) == sorted(due)
    engine.close()


def test_retention_frees_a_full_disk_though_much_waits_in_memory(disk: Path, clock: ManualClock) -> None:
    options = replace(
        OPTIONS, schedule_memory_messages_max=10_000, schedule_memory_bytes_max=2 * MIB, reserve_bytes=4 * MIB
    )  # fmt: skip
    engine = Engine.open(disk / "data", clock=clock, options=options)
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    later = publish(engine.publisher.publish, messages("later", 1_500, deliver_at_ms=clock.now_ms() + 1_000 * HOUR_MS))
    stored = publish(engine.publisher.publish, messages("now", 2_000))
    assert consume(engine) == stored
    fill(disk)
    clock.advance(HOUR_MS)

    dropped = 0
    for _ in range(4):
        dropped += engine.retention.drop_outdated()
        clock.advance(HOUR_MS)

    assert dropped > 0
    engine.close()
    engine = Engine.open(disk / "data", clock=clock, options=options)
    clock.advance(1_000 * HOUR_MS)
    assert sorted(consume(engine)) == sorted(later)
    engine.close()


class Delay:
    """A delay service on a disk, turned by hand."""

    def __init__(self, folder: Path, target: EmbeddedBroker, clock: ManualClock) -> None:
        reserve = Reserve(folder / "reserve", size_bytes=MIB)
        syncs = TimedStorage(DiskStorage(), clock_s=lambda: 0.0)
        self._store = LocalSegments.open(folder, storage=syncs, reserve=reserve)
        schedule = DelayStore.open(self._store, options=DelayOptions(memory_messages_max=500), reserve=reserve)
        reserve.take()
        self.front = DelayProxy(schedule, target, clock=clock, syncs=syncs, room=reserve)

    def turn(self) -> None:
        """Deliver all that is due, and keep house as its second thread does."""
        for _ in range(200):
            try:
                if self.front.service.turn() and self.front.service.keep():
                    return
            except StorageFailed:
                continue
        raise AssertionError("it does not come to rest")

    def close(self) -> None:
        self.front.close()
        self._store.close()


@pytest.fixture
def target(tmp_path: Path, clock: ManualClock) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(f"embedded:{tmp_path / 'target'}", clock=clock)
    yield broker
    broker.close()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_delay_service_on_a_full_disk_delivers_and_cancels_all_it_has_and_takes_more_then(
    disk: Path, clock: ManualClock, target: EmbeddedBroker, *, is_restarted: bool
) -> None:
    delay = Delay(disk / "delay", target, clock)
    deliver_at_ms = clock.now_ms() + HOUR_MS
    due = publish(delay.front.publish, messages("due", 2_000, deliver_at_ms=deliver_at_ms))
    if is_restarted:
        delay.close()
        fill(disk)
        delay = Delay(disk / "delay", target, clock)
    fill(disk)

    with pytest.raises(StorageFailed, match="No space left on device"):
        publish(delay.front.publish, messages("refused", 3_000, deliver_at_ms=deliver_at_ms))
    with pytest.raises(StorageFailed, match="No space left on device"):
        delay.front.check_ready()
    refused = delay.front.log_figures()
    assert delay.front.cancel(["due-7"]) == [CancelStatus.CANCELED]
    clock.advance(HOUR_MS)
    delay.turn()

    got: list[str] = []
    while deliveries := target.pull(TOPIC, GROUP, max_messages=500, wait_ms=0, invisible_ms=HOUR_MS):
        got += [one.id for one in deliveries]
    assert set(got) >= set(due) - {"due-7"}
    assert len(got) == len(set(got))
    assert "due-7" not in got
    delay.turn()
    delay.front.check_ready()
    roomy = delay.front.log_figures()
    assert (refused["publishes_refused"], roomy["publishes_refused"]) == (1, 0)
    assert refused["disk_free_bytes"] < roomy["disk_free_bytes"] < roomy["disk_size_bytes"] == 12 * MIB
    delay.front.publish(messages("after", 1))
    delay.turn()
    assert [one.id for one in target.pull(TOPIC, GROUP, max_messages=5, wait_ms=0)] == ["after-0"]
    delay.close()


def test_room_is_made_for_a_write_whose_size_is_known_or_nothing_is_given_up(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "reserve", size_bytes=8192)
    reserve.take()

    with pytest.raises(StorageFailed, match="No space left"):
        reserve.make_room(1 << 60, spends=True)
    with pytest.raises(StorageFailed, match="No space left"):
        reserve.make_room(1 << 60, spends=False)
    reserve.make_room(1, spends=True)

    assert reserve.held_bytes == 8192
