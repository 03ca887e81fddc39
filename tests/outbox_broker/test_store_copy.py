"""A broker on ledgers, copied to a data folder while it runs: what was acknowledged by the snapshot is in it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.http.ledger_snapshots import LedgerSnapshots
from outbox_broker.log.storage import DiskStorage
from outbox_broker.segments.ledger import LedgerSegments
from outbox_broker.segments.ledger_view import LedgerView
from outbox_broker.server.log_report import LogStatus, report_folder
from outbox_broker.server.store_files import BrokerCopied, copy_broker
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.messages.message import GroupConfig, Message
from outbox_core.protocol.wire import SnapshotAnswer
from tests.outbox_broker.delay.failing_disk import Killed
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster, Told

TOPIC, GROUP = "orders", "billing"
HOUR_MS = 3_600_000
OPTIONS = EngineOptions(segment_bytes=4096, checkpoint_bytes=4096, schedule_memory_messages_max=8, retention_ms=1)


class Owned:
    """An engine that owns the shard, and what is asked of it."""

    def __init__(self, folder: Path, stack: ExitStack, *, cluster: LedgerCluster | None = None) -> None:
        self.cluster = cluster or LedgerCluster()
        self._segments: LedgerSegments = self.cluster.open()
        self.engine = Engine.open(
            folder / "owner", clock=self.cluster.clock, options=OPTIONS, segments=lambda _part: self._segments,
            annotations=self._segments.annotations,
        )  # fmt: skip
        stack.callback(self.engine.close)
        self._snapshots = LedgerSnapshots(self.engine, self._segments, clock=self.cluster.clock)
        self.engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))

    def snapshot(self) -> SnapshotAnswer:
        return self._snapshots.take()

    def copy(
        self, to: Path, *, ask: Callable[[], SnapshotAnswer] | None = None, cluster: str = "trips"
    ) -> BrokerCopied:  # fmt: skip
        return copy_broker(
            to, cluster=cluster, ask=ask or self.snapshot, view=lambda: LedgerView.open(self.cluster.shard()),
            storage=DiskStorage(), clock=self.cluster.clock, shows=lambda _done, _all: None, pause=Told(self.cluster),
        )  # fmt: skip

    def publish(self, *ids: str, due_ms: int | None = None) -> None:
        for one in ids:
            self.engine.publisher.publish([Message(id=one, topic=TOPIC, body=one.encode() * 30, deliver_at_ms=due_ms)])


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[Owned]:
    with ExitStack() as stack:
        yield Owned(tmp_path, stack)


def test_a_copy_has_all_of_the_moment_and_goes_on_as_another_generation(owned: Owned, tmp_path: Path) -> None:
    engine, clock = owned.engine, owned.cluster.clock
    due_ms = clock.now_ms() + HOUR_MS
    owned.publish(*(f"m{number:02d}" for number in range(60)))
    owned.publish(*(f"later-{number:02d}" for number in range(40)), due_ms=due_ms)
    done = engine.puller.pull(TOPIC, GROUP, max_messages=20)
    engine.settler.ack([one.receipt for one in done])
    [dead] = engine.puller.pull(TOPIC, GROUP, max_messages=1)
    engine.settler.nack([dead.receipt], reason="broken")
    [held] = engine.puller.pull(TOPIC, GROUP, max_messages=1)

    copied = owned.copy(tmp_path / "copy")
    owned.publish("after")

    assert {report.status for report in report_folder(tmp_path / "copy")} == {LogStatus.CLEAN}
    assert copied.segments == len(list((tmp_path / "copy").glob("*/*.segment")))
    clock.advance(HOUR_MS)
    copy = Engine.open(tmp_path / "copy", clock=clock, options=OPTIONS)
    try:
        assert copy.settler.ack([held.receipt]) == ["stale"]
        came = [one.id for one in pulled(copy)]
        died = {one.id for one in copy.admin.dead(TOPIC, GROUP, limit=10)[0]}
    finally:
        copy.close()
    assert died == {dead.id, held.id}, "what was in flight has used up its only attempt"
    wanted = {f"m{number:02d}" for number in range(60)} - {one.id for one in done} - {dead.id}
    assert sorted(came) == sorted(wanted - {held.id} | {f"later-{number:02d}" for number in range(40)})


def pulled(engine: Engine) -> Iterator[Message]:
    """All that is ready, acknowledged."""
    while found := engine.puller.pull(TOPIC, GROUP, max_messages=50):
        assert [one.body for one in found] == [one.id.encode() * 30 for one in found]
        engine.settler.ack([one.receipt for one in found])
        yield from (one.message for one in found)


def test_segments_that_are_dropped_while_they_are_read_have_the_owner_asked_once_more(
    owned: Owned, tmp_path: Path
) -> None:
    asked: list[SnapshotAnswer] = []

    def ask() -> SnapshotAnswer:
        asked.append(owned.snapshot())
        if len(asked) == 1:  # what it names is dropped before it is read
            for one in owned.engine.puller.pull(TOPIC, GROUP, max_messages=500):
                owned.engine.settler.ack([one.receipt])
            owned.cluster.clock.advance(60_000)
            owned.engine.retention.check()
        return asked[-1]

    owned.publish(*(f"m{number:02d}" for number in range(60)))
    copied = owned.copy(tmp_path / "copy", ask=ask)

    assert len(asked) == 2
    assert copied.at_ms == asked[1].at_ms
    assert {one.name for one in asked[0].segments} - {one.name for one in asked[1].segments}
    assert {report.status for report in report_folder(tmp_path / "copy")} == {LogStatus.CLEAN}


def test_what_the_bookies_do_not_know_to_be_confirmed_is_waited_for_and_at_last_refused(
    owned: Owned, tmp_path: Path
) -> None:
    owned.publish("a", "b", "c")
    with pytest.raises(StorageFailed, match="do not know all of it to be confirmed yet"):
        copy_broker(
            tmp_path / "copy", cluster="trips", ask=owned.snapshot, view=lambda: LedgerView.open(owned.cluster.shard()),
            storage=DiskStorage(), clock=owned.cluster.clock, shows=lambda _done, _all: None, pause=Untold(),
        )  # fmt: skip

    with pytest.raises(ConfigurationError, match="whose restore did not end"):
        Engine.open(tmp_path / "copy")


class Untold(threading.Event):
    """A pause in which nobody is told anything."""

    def wait(self, timeout: float | None = None) -> bool:
        return False


def test_a_folder_that_is_not_empty_and_a_broker_in_a_folder_are_refused(owned: Owned, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(ConfigurationError, match="is not empty"):
        owned.copy(tmp_path / "full")
    with pytest.raises(ConfigurationError, match="has a data folder: back that up"):
        owned.copy(tmp_path / "copy", ask=lambda: SnapshotAnswer(at_ms=1, files=0, size_bytes=0))


def test_a_copy_is_on_the_disk_before_it_may_be_opened(
    owned: Owned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    owned.publish(*(f"m{number:02d}" for number in range(60)))

    copied = owned.copy(tmp_path / "copy")

    segments = list((tmp_path / "copy").glob("*/*.segment"))
    assert len(segments) == copied.segments
    assert {path.stat().st_ino for path in segments} <= synced


def test_a_folder_into_which_another_copy_goes_is_refused(owned: Owned, tmp_path: Path) -> None:
    def ask() -> SnapshotAnswer:
        with pytest.raises(ConfigurationError, match=r"is in use|whose restore did not end"):
            owned.copy(tmp_path / "copy")
        return owned.snapshot()

    owned.publish("a")
    assert owned.copy(tmp_path / "copy", ask=ask).segments


def test_a_second_copy_reads_what_is_new_and_is_of_its_own_moment(owned: Owned, tmp_path: Path) -> None:
    ids, to = [f"m{number:02d}" for number in range(60)], tmp_path / "copy"
    owned.publish(*ids)
    first = owned.copy(to)
    sealed = {path: path.stat().st_ino for path in to.glob("messages/*.segment")}
    owned.publish("later")
    owned.engine.operations.cordon.begin()

    second = owned.copy(to)

    assert first.kept == 0
    assert second.kept >= first.segments - 3, "all that was sealed: the newest of each log may have grown"
    assert sum(path.stat().st_ino == inode for path, inode in sealed.items()) >= len(sealed) - 1
    copy = Engine.open(to, clock=owned.cluster.clock, options=OPTIONS)
    try:
        assert copy.operations.cordon.note is not None
        assert [one.id for one in pulled(copy)] == [*ids, "later"]
    finally:
        copy.close()
    with pytest.raises(ConfigurationError, match="is not empty"):
        owned.copy(to)


def test_what_earlier_owners_left_is_not_read_again(owned: Owned, tmp_path: Path) -> None:
    owned.publish(*(f"m{number:02d}" for number in range(60)))
    with ExitStack() as stack:
        successor = Owned(tmp_path / "successor", stack, cluster=owned.cluster)
        successor.publish("n")
        first = successor.copy(tmp_path / "copy")

        second = successor.copy(tmp_path / "copy")

    assert second.segments - second.kept <= 3, "those that may still grow"
    assert second.segments == first.segments > 4


def test_what_a_killed_copy_has_written_is_kept_and_what_retention_dropped_goes(owned: Owned, tmp_path: Path) -> None:
    owned.publish(*(f"m{number:02d}" for number in range(60)))
    owned.copy(tmp_path / "copy")
    with pytest.raises(Killed):
        owned.copy(tmp_path / "copy", ask=killed)
    with pytest.raises(ConfigurationError, match="whose restore did not end"):
        Engine.open(tmp_path / "copy")

    again = owned.copy(tmp_path / "copy")
    before = set((tmp_path / "copy").glob("messages/*.segment"))
    for one in owned.engine.puller.pull(TOPIC, GROUP, max_messages=500):
        owned.engine.settler.ack([one.receipt])
    owned.cluster.clock.advance(60_000)
    owned.engine.retention.check()
    owned.copy(tmp_path / "copy")

    assert again.kept > 0
    assert before - set((tmp_path / "copy").glob("messages/*.segment"))
    assert {report.status for report in report_folder(tmp_path / "copy")} == {LogStatus.CLEAN}


def killed() -> SnapshotAnswer:
    raise Killed


def test_the_copy_of_another_cluster_is_left_alone(owned: Owned, tmp_path: Path) -> None:
    owned.publish("a")
    owned.copy(tmp_path / "copy")
    with pytest.raises(ConfigurationError, match="is not empty"):
        owned.copy(tmp_path / "copy", cluster="others")
    Engine.open(tmp_path / "copy", clock=owned.cluster.clock).close()
