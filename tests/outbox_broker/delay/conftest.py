"""Schedules on the folder of a test, dropped as by a kill or closed in order, and opened again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.cluster.ownership_lease import OwnershipLease, ShardPermit
from outbox_broker.delay_service.cluster_shard import PermittedTarget
from outbox_broker.delay_service.delay_proxy import CLAIM_AHEAD_MS, DelayProxy
from outbox_broker.journal.journal import Journal
from outbox_broker.journal.replay import JournalReplay
from outbox_broker.log.annotations import FolderAnnotations
from outbox_broker.log.cordon import Cordon
from outbox_broker.log.storage import DiskStorage, Storage
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.schedule.delay_store import DelayOptions, DelayStore, TimedMessage
from outbox_broker.schedule.schedule_log import LOG, CapturedCheckpoint, records_of
from outbox_broker.schedule.schedule_state import ScheduleState
from outbox_broker.schedule.sorted_run import id_hashes
from outbox_broker.segments.local import LocalSegments
from outbox_core.common.clock import Clock, ManualClock
from outbox_core.journal.block import SegmentKind
from outbox_core.messages.publish_guard import PublishTarget

NOW_MS = 1_800_000_000_000
SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000


def timed(message_id: str, due_ms: int, *, topic: str = "t") -> TimedMessage:
    """A message whose payload proves whose it is."""
    return TimedMessage(due_ms, message_id, topic, f"payload of {message_id}".encode() * 3)


class Opened:
    """A schedule that can be killed and opened again."""

    def __init__(
        self, folder: Path, *, storage: Storage | None = None, opener: Callable[[], Any] | None = None
    ) -> None:
        """`storage`: where none is given to open(). `opener`: opens another store than files in the folder."""
        self.folder = folder
        self._storage = storage
        self._opener = opener
        self.options = DelayOptions()
        self.defaults: dict[str, Any] = {"expand_above_messages": 0}  # a test of few messages sees them re-filed
        self.segments: Any = None
        self.schedule: DelayStore | None = None

    def open(self, *, storage: Storage | None = None, **options: Any) -> DelayStore:
        """Open, or open again after a kill; options stay until others are given, beside the defaults."""
        self.drop()
        if options or self.segments is None:
            self.options = DelayOptions(**{**self.defaults, **options})
        if self._opener is None:
            self.segments = LocalSegments.open(self.folder, storage=storage or self._storage)
        else:
            self.segments = self._opener()
        self.schedule = DelayStore.open(self.segments, options=self.options)
        return self.schedule

    def front(
        self, target: PublishTarget, *, clock: Clock, storage: Storage | None = None, claim_ahead_ms: int = 0,
        is_shard: bool = False, **options: Any,
    ) -> DelayProxy:  # fmt: skip
        """Open the delay service in front of a target, not started; the schedule as by open(). `is_shard`: as one of a
        cluster, which is not cordoned.
        """
        syncs = TimedStorage(storage or DiskStorage(), clock_s=time.perf_counter)
        schedule = self.open(storage=syncs, **options)
        is_cordoned_by_a_file = self._opener is None and not is_shard
        annotations = FolderAnnotations(self.folder, storage=syncs)
        cordon = Cordon(annotations, clock=clock) if is_cordoned_by_a_file else None
        return DelayProxy(schedule, target, clock=clock, syncs=syncs, claim_ahead_ms=claim_ahead_ms, cordon=cordon)

    def drop(self) -> None:
        """As a kill: nothing is written any more."""
        if self.segments is not None:
            self.segments.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """A schedule on a fresh folder."""
    one = Opened(tmp_path / "delay")
    yield one
    one.drop()


@pytest.fixture(params=["process", "shard"])
def front_of(
    request: pytest.FixtureRequest, opened: Opened, clock: ManualClock
) -> Iterator[Callable[[PublishTarget], DelayProxy]]:
    """Open the delay service of a process, or of a cluster's shard, in front of a target; again after a close, or after
    a kill, which it is if the one before was not closed.
    """
    fronts: list[DelayProxy] = []
    lease = OwnershipLease(session_timeout_ms=6_000, clock_ms=lambda: 0)
    lease.extend(0)
    is_shard = request.param == "shard"

    def made(target: PublishTarget) -> DelayProxy:
        permitted = PermittedTarget(target, ShardPermit("s-0", lease, epoch=1)) if is_shard else target
        fronts.append(opened.front(permitted, clock=clock, claim_ahead_ms=CLAIM_AHEAD_MS if is_shard else 0))
        return fronts[-1]

    yield made
    if fronts:
        fronts[-1].close()


def existing(opened: Opened) -> DelayStore:
    """The schedule that is open."""
    assert opened.schedule is not None
    return opened.schedule


def put(schedule: DelayStore, now_ms: int, *messages: TimedMessage) -> None:
    """Schedule, all of it anew."""
    assert set(schedule.schedule(messages, now_ms=now_ms)) == {"stored"}


def drain(schedule: DelayStore, now_ms: int) -> list[str]:
    """Everything due, settled; ids in the order in which they came. Checks payloads and due times."""
    ids: list[str] = []
    while (batch := schedule.due(now_ms)) is not None:
        for message in batch.messages:
            assert message.due_ms <= now_ms
            assert message == timed(message.id, message.due_ms, topic=message.topic)
        ids += [message.id for message in batch.messages]
        schedule.fired(batch.number)
    return ids


def settle(schedule: DelayStore, now_ms: int) -> None:
    """All housekeeping that is to be done now."""
    while schedule.housekeeping.step(now_ms):
        pass


def flush(schedule: DelayStore, now_ms: int) -> None:
    """What is in memory goes to buckets."""
    schedule.housekeeping.make_room(now_ms, fill=0)


def recorded(opened: Opened) -> ScheduleState:
    """What the log says now: the state that a restart would begin with."""
    assert opened.segments is not None
    state = ScheduleState(cancels_max=opened.options.cancels_remembered_max)
    for record in records_of(JournalReplay(opened.segments, LOG)):
        state.apply(record)
    return state


def rewrite(opened: Opened, state: ScheduleState) -> None:
    """As a kill, and another state in the log, as another version would have written it."""
    opened.drop()
    segments = LocalSegments.open(opened.folder)
    log = Journal(segments, name=LOG, kind=SegmentKind.MESSAGES)
    assert list(records_of(log.recovered))
    log.resume()
    CapturedCheckpoint.of(log, state.checkpoint(arrived_to=log.end)).write(log, lock=nullcontext())
    segments.close()


def ids_of_one_hash(count: int) -> list[str]:
    """Different ids with the same hash. Both of its checksums are linear: changes to an id whose effects on them cancel
    each other out, whatever the id is, are found by elimination.
    """
    base = "a" * (64 + count)
    [plain] = id_hashes([base])
    basis: dict[int, tuple[int, int]] = {}  # by highest bit: an effect, and the places of the changes that have it
    ids = [base]
    for place in range(len(base)):
        [changed] = id_hashes([_changed(base, 1 << place)])
        effect, places = changed ^ plain, 1 << place
        while effect and effect.bit_length() in basis:
            other, other_places = basis[effect.bit_length()]
            effect, places = effect ^ other, places ^ other_places
        if effect:
            basis[effect.bit_length()] = (effect, places)
        else:
            ids.append(_changed(base, places))
    assert len(set(id_hashes(ids))) == 1
    return ids[:count]


def _changed(text: str, places: int) -> str:
    return "".join("c" if places >> at & 1 else one for at, one in enumerate(text))
