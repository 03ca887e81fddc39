"""A backup that is restored onto ledgers: all that was acknowledged is there, nothing settled comes again, and who is
killed on the way leaves no broker, or a whole one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outbox_broker.backup.backup import BackupTarget
from outbox_broker.backup.restore import restore_backup
from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.log.storage import DiskStorage
from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.segments.local import LocalSegments
from outbox_broker.server.cli import app
from outbox_broker.server.store_restore import restore_to_bookies
from outbox_core.common.errors import BrokerCordoned, ConfigurationError, StorageFailed
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.messages.message import GroupConfig, Message
from tests.outbox_broker.delay.failing_disk import Killed
from tests.outbox_broker.segments.ledger_cluster import SHARD, LedgerCluster, Told

TOPIC, GROUP = "orders", "billing"
HOUR_MS = 3_600_000
OPTIONS = EngineOptions(segment_bytes=4096, checkpoint_bytes=4096, schedule_memory_messages_max=8)
NOW = [f"m{number:02d}" for number in range(60)]
LATER = [f"later-{number:02d}" for number in range(40)]


class Backup:
    """The backup of a broker's folder, and what the broker had then."""

    def __init__(self, folder: Path) -> None:
        self.cluster = LedgerCluster()
        self.data, self.path = folder / "data", folder / "backup"
        clock = self.cluster.clock
        engine = Engine.open(self.data, clock=clock, options=OPTIONS)
        engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
        publish(engine, *NOW)
        publish(engine, *LATER, due_ms=clock.now_ms() + HOUR_MS)
        done = engine.puller.pull(TOPIC, GROUP, max_messages=20)
        engine.settler.ack([one.receipt for one in done])
        [dead] = engine.puller.pull(TOPIC, GROUP, max_messages=1)
        engine.settler.nack([dead.receipt], reason="broken")
        [self.held] = engine.puller.pull(TOPIC, GROUP, max_messages=1)
        self.done, self.dead = {one.id for one in done}, dead.id
        engine.close()
        self.take()

    def take(self) -> None:
        """Back the folder up."""
        target = BackupTarget(self.path, storage=DiskStorage(), clock=self.cluster.clock, bytes_per_second=None)
        target.take(self.data, ask=nothing, shows=nothing)

    def restore(self, cluster: LedgerCluster | None = None) -> None:
        """Restore it to the cluster's shard."""
        cluster = cluster or self.cluster
        restore_to_bookies(self.path, cluster.shard(), clock=cluster.clock, shows=nothing, pause=Told(cluster))

    def check(self, cluster: LedgerCluster) -> None:
        """Serve what was restored: all of the backup is there, once."""
        with owned(cluster) as engine:
            assert engine.settler.ack([self.held.receipt]) == ["stale"]
            cluster.clock.advance(HOUR_MS)
            came = pulled(engine)
            died = {one.id for one in engine.admin.dead(TOPIC, GROUP, limit=10)[0]}
        assert died == {self.dead, self.held.id}, "what was in flight has used up its only attempt"
        assert sorted(came) == sorted({*NOW, *LATER} - self.done - died)


def nothing(*_: object) -> None:
    """Shows no progress, and asks no broker."""


@contextmanager
def owned(cluster: LedgerCluster) -> Iterator[Engine]:
    """An engine that takes the shard over, in an empty folder."""
    taken = cluster.open()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.open(
            Path(folder), clock=cluster.clock, options=OPTIONS, segments=lambda _part: taken,
            annotations=taken.annotations,
        )  # fmt: skip
        try:
            yield engine
        finally:
            engine.close()


def publish(engine: Engine, *ids: str, due_ms: int | None = None) -> None:
    for one in ids:
        engine.publisher.publish([Message(id=one, topic=TOPIC, body=one.encode() * 30, deliver_at_ms=due_ms)])


def pulled(engine: Engine) -> list[str]:
    """The ids of all that is ready, acknowledged."""
    came: list[str] = []
    while found := engine.puller.pull(TOPIC, GROUP, max_messages=50):
        assert [one.body for one in found] == [one.id.encode() * 30 for one in found]
        assert set(engine.settler.ack([one.receipt for one in found])) == {"acked"}
        came += [one.id for one in found]
    return came


@pytest.fixture
def backup(tmp_path: Path) -> Backup:
    """Of a broker with messages, deliveries, dead letters, and much that is scheduled."""
    return Backup(tmp_path)


def test_what_the_backup_has_goes_on_on_ledgers_as_another_generation(backup: Backup) -> None:
    shown: list[tuple[int, int]] = []
    restore_to_bookies(
        backup.path, backup.cluster.shard(), clock=backup.cluster.clock, shows=lambda *done: shown.append(done)
    )

    assert shown == sorted(shown)
    assert shown[-1][0] == shown[-1][1]
    backup.check(backup.cluster)
    with owned(backup.cluster) as engine:  # and it has its own life
        publish(engine, "new")
        assert pulled(engine) == ["new"]


def test_whichever_call_is_the_last_there_is_no_broker_or_a_whole_one(backup: Backup) -> None:
    count, became = 0, set()
    while True:
        cluster = LedgerCluster()
        cluster.ledgers.calls.left = count
        is_killed = False
        try:
            backup.restore(cluster)
        except Killed:
            is_killed = True
        cluster.ledgers.calls.left = None
        is_there = SHARD in cluster.manifests.nodes
        became.add((is_killed, is_there))
        if is_killed and not is_there:
            backup.restore(cluster)
        if not is_killed or count % 10 == 0:  # each takes a while
            backup.check(cluster)
        count += 1
        if not is_killed:
            break

    assert became == {(True, False), (False, True)}
    assert count > 50


def test_a_segment_that_could_not_be_written_is_written_again_and_else_there_is_no_broker(backup: Backup) -> None:
    for seed in range(4):
        cluster = LedgerCluster(seed)
        cluster.ledgers.faults.lost = 0.15
        try:
            backup.restore(cluster)
        except StorageFailed:
            assert SHARD not in cluster.manifests.nodes
        else:
            cluster.ledgers.faults.lost = 0.0
            backup.check(cluster)

    failing = LedgerCluster()
    failing.ledgers.faults.lost = 1.0
    with pytest.raises(StorageFailed):
        backup.restore(failing)
    assert SHARD not in failing.manifests.nodes


def test_a_restore_without_an_answer_at_its_last_step_has_made_all_or_nothing(backup: Backup) -> None:
    became: set[bool] = set()
    for seed in range(40):
        cluster = LedgerCluster(seed)
        cluster.ledgers.faults.unknown_outcome = 1.0
        with pytest.raises(StorageFailed, match="did not answer"):
            backup.restore(cluster)
        cluster.ledgers.faults.unknown_outcome = 0.0
        became.add(SHARD in cluster.manifests.nodes)
        with suppress(ConfigurationError):
            backup.restore(cluster)
        backup.check(cluster)
        if became == {True, False}:
            break
    assert became == {True, False}


def test_what_a_killed_restore_left_goes_by_the_sweeper_and_what_is_named_stays(backup: Backup) -> None:
    cluster = LedgerCluster()
    cluster.ledgers.calls.left = 40
    with pytest.raises(Killed):
        backup.restore(cluster)
    cluster.ledgers.calls.left = None
    left = set(cluster.ledgers.ledgers)
    with owned(cluster):  # somebody started an empty broker meanwhile
        cluster.clock.advance(25 * HOUR_MS)
        swept = cluster.sweeper().sweep()
    assert left
    assert left <= set(swept.deleted)

    backup.restore()
    backup.cluster.clock.advance(25 * HOUR_MS)
    assert backup.cluster.sweeper().sweep().deleted == []
    with owned(backup.cluster):
        pass
    backup.cluster.sweeper().sweep()
    backup.check(backup.cluster)


def test_ledgers_that_a_sweeper_took_meanwhile_are_missed_before_anything_names_them(backup: Backup) -> None:
    cluster = LedgerCluster()

    def shows(done: int, total: int) -> None:
        if done == total:
            cluster.clock.advance(25 * HOUR_MS)
            assert cluster.sweeper().sweep().deleted

    with pytest.raises(StorageFailed, match="there is no ledger"):
        restore_to_bookies(backup.path, cluster.shard(), clock=cluster.clock, shows=shows)
    assert SHARD not in cluster.manifests.nodes


def test_a_path_with_a_broker_is_refused_also_one_that_came_meanwhile(backup: Backup) -> None:
    with owned(backup.cluster) as engine:
        publish(engine, "mine")
    with pytest.raises(ConfigurationError, match=r"already.*: name another path"):
        backup.restore()
    assert ids_of(backup.cluster) == ["mine"]

    cluster = LedgerCluster()

    def shows(done: int, total: int) -> None:
        if done == total:
            with owned(cluster) as engine:
                publish(engine, "theirs")

    with pytest.raises(ConfigurationError, match=r"meanwhile.*: name another path"):
        restore_to_bookies(backup.path, cluster.shard(), clock=cluster.clock, shows=shows)
    assert ids_of(cluster) == ["theirs"]


def ids_of(cluster: LedgerCluster) -> list[str]:
    with owned(cluster) as engine:
        engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
        return pulled(engine)


def test_a_cordon_is_restored_and_a_damaged_backup_is_not(backup: Backup) -> None:
    engine = Engine.open(backup.data, clock=backup.cluster.clock, options=OPTIONS)
    engine.operations.cordon.begin(reason="moving")
    engine.close()
    backup.take()
    backup.restore()
    with owned(backup.cluster) as restored:
        with pytest.raises(BrokerCordoned, match="moving"):
            publish(restored, "late")
        restored.operations.cordon.end()
    backup.check(backup.cluster)

    cluster = LedgerCluster()
    content = max((backup.path / "contents").iterdir(), key=lambda path: path.stat().st_size)
    content.write_bytes(content.read_bytes()[:-1] + b"\xff")
    with pytest.raises(SegmentDamaged, match="was not restored"):
        backup.restore(cluster)
    assert not cluster.ledgers.ledgers


def test_the_backup_of_a_delay_service_is_refused(backup: Backup, tmp_path: Path) -> None:
    store = LocalSegments.open(tmp_path / "delay")
    DelayStore.open(store).close()
    store.close()
    backup.data, backup.path = tmp_path / "delay", tmp_path / "of-delay"
    backup.take()

    with pytest.raises(ConfigurationError, match="is no backup of a broker"):
        backup.restore()


@pytest.mark.parametrize("log", ["actions", "messages"])
def test_a_torn_tail_is_cut_as_an_opening_of_the_folder_would(backup: Backup, log: str) -> None:
    newest = max((backup.data / log).glob("*.segment"))
    whole = newest.read_bytes()
    newest.with_suffix(".proven").unlink()
    newest.write_bytes(whole + whole[40:90])  # an append that a power failure cut
    backup.take()

    backup.restore()

    assert len(segment_bytes(backup.cluster, newest.stem)) == len(whole) - 40
    backup.check(backup.cluster)


def segment_bytes(cluster: LedgerCluster, name: str) -> bytes:
    store = cluster.open()
    return store.read(name, 0, 1 << 30)


def test_bytes_that_were_durable_and_are_gone_are_damage_and_nothing_else_takes_their_place(
    backup: Backup, tmp_path: Path
) -> None:
    newest = max((backup.data / "messages").glob("*.segment"))
    size = newest.stat().st_size
    with newest.open("r+b") as file:
        file.truncate(size - 30)
    backup.take()

    backup.restore()

    assert len(segment_bytes(backup.cluster, newest.stem)) == size - 40
    restore_backup(backup.path, tmp_path / "folder", storage=DiskStorage(), clock=backup.cluster.clock, shows=nothing)
    folder = Engine.open(tmp_path / "folder", clock=backup.cluster.clock, options=OPTIONS)
    in_folder = pulled(folder)
    folder.close()
    with owned(backup.cluster) as engine:
        publish(engine, "new")
        assert pulled(engine) == [*in_folder, "new"]


@pytest.mark.parametrize("options", [(), ("--to", "f", "--store", "bookkeeper://zk/p"), ("--to", "f", "--config", "c")])
def test_a_restore_goes_to_a_folder_or_to_bookies_and_not_to_both_or_neither(options: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="give --to for a data folder, or --store"):
        CliRunner().invoke(app, ["restore", "backup", *options], catch_exceptions=False)


def test_a_segment_that_stands_in_two_parts_is_refused(backup: Backup) -> None:
    bucket = next(
        path for path in (backup.data / "schedule").glob("*.segment") if not path.name.startswith("schedule-")
    )
    (backup.data / "actions" / bucket.name).write_bytes(bucket.read_bytes())
    backup.take()

    with pytest.raises(SegmentDamaged, match="is there twice"):
        backup.restore()
    assert SHARD not in backup.cluster.manifests.nodes
