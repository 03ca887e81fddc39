"""A shard's schedule is read beside its owner: what the bookies know to be confirmed, and nobody is fenced."""

from __future__ import annotations

import random
import stat
from pathlib import Path

import pytest

from outbox_broker.delay_service.cluster_export import ClusterExport, ExportOptions, ExportReport
from outbox_broker.delay_service.target_publisher import timed
from outbox_broker.schedule.delay_store import DelayOptions, DelayStore
from outbox_broker.segments.ledger import LedgerOptions, LedgerSegments
from outbox_broker.segments.ledger_view import LedgerView
from outbox_broker.segments.ledgers import LedgerMissing
from outbox_broker.segments.port import SegmentReader
from outbox_core import Message
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.journal import journal
from outbox_core.journal.block import FRAMES_MAX, SegmentKind
from outbox_core.messages.message import Record
from tests.outbox_broker.action_log import actions_of
from tests.outbox_broker.delay.conftest import DAY_MS, HOUR_MS, NOW_MS, settle
from tests.outbox_broker.message_log import messages_of
from tests.outbox_broker.segments.ledger_cluster import SHARD, LedgerCluster

OPTIONS = DelayOptions(
    memory_messages_max=9, batch_messages_max=3, hand_outs_max=2, log_bytes_max=4_000, expand_above_messages=0
)
AHEAD_MS = (0, 5_000, 2 * HOUR_MS, 3 * DAY_MS, 400 * DAY_MS)


def message(name: str, *, due_ms: int | None) -> Message:
    return Message(id=name, topic="t", body=name.encode(), key="k", created_at_ms=NOW_MS, deliver_at_ms=due_ms)


def put(owner: DelayStore, *messages: Message) -> None:
    assert set(owner.schedule([timed(one, NOW_MS) for one in messages], now_ms=NOW_MS)) == {"stored"}


class Views:
    """Views of the cluster's shards; some fail first."""

    def __init__(self, cluster: LedgerCluster, failures: int = 0) -> None:
        self.failures = failures
        self._cluster = cluster

    def view(self, shard: str) -> SegmentReader | None:
        if self.failures:
            self.failures -= 1
            raise LedgerMissing("a ledger was deleted meanwhile")
        return LedgerView.open(self._cluster.shard(shard))


class ChangingViews(Views):
    """Views of which those of one shard lose a bucket first."""

    def __init__(self, cluster: LedgerCluster, *, shard: str, changes: int) -> None:
        super().__init__(cluster)
        self.changes = changes
        self._shard = shard

    def view(self, shard: str) -> SegmentReader | None:
        view = super().view(shard)
        if shard == self._shard and self.changes:
            self.changes -= 1
            return Changed(view)
        return view


class Changed:
    """A view whose buckets were deleted meanwhile."""

    def __init__(self, view: SegmentReader) -> None:
        self.list, self.blocks, self._read = view.list, view.blocks, view.read
        self._buckets = {segment.name for segment in view.list() if segment.kind is SegmentKind.BUCKET}

    def read(self, name: str, position: int, size_bytes: int) -> bytes:
        if name in self._buckets:
            raise LedgerMissing(f"{name} was deleted meanwhile")
        return self._read(name, position, size_bytes)


def export(
    views: Views, folder: Path, *shards: str, attempts_max: int = 3, cancels_max: int = 100
) -> ExportReport:  # fmt: skip
    options = ExportOptions(cancels_max=cancels_max, attempts_max=attempts_max, retry_ms=0)
    return ClusterExport(shards=shards or (SHARD,), views=views, clock=ManualClock(), options=options).write(folder)


def exported(folder: Path) -> list[Record]:
    return [stored.record for stored in messages_of(folder)]


def canceled(folder: Path) -> set[str]:
    return {id_ for action in actions_of(folder) if isinstance(action, journal.Canceled) for id_ in action.ids}


@pytest.mark.parametrize("seed", range(8))
def test_what_waits_and_what_was_canceled_is_exported_while_the_owner_goes_on(tmp_path: Path, seed: int) -> None:
    chance, cluster = random.Random(seed), LedgerCluster(seed)
    owner = DelayStore.open(cluster.open(), options=OPTIONS)
    dues: dict[str, int] = {}
    waiting: set[str] = set()
    stopped: set[str] = set()
    now_ms, handed = NOW_MS, None
    for number in range(60):
        due_ms = now_ms + chance.choice(AHEAD_MS)
        put(owner, message(f"m{number}", due_ms=due_ms))
        dues[f"m{number}"] = due_ms
        waiting.add(f"m{number}")
        if chance.random() < 0.2 and (one := f"m{chance.randrange(number + 1)}") in waiting:
            [result] = owner.cancel([one], now_ms=now_ms)
            if result == "canceled":
                stopped.add(one)
                waiting.discard(one)
        if chance.random() < 0.2:
            now_ms += chance.choice((1_000, HOUR_MS, 3 * HOUR_MS))  # cancels are remembered for a week
            settle(owner, now_ms)
        while chance.random() < 0.5 and (batch := owner.due(now_ms)) is not None:
            owner.fired(batch.number)
            waiting -= {one.id for one in batch.messages}
    handed = owner.due(now_ms)
    if handed is not None and len(handed) > 1:
        owner.fired_in_part(handed.number, done=handed.seqs[:1])
        waiting.discard(handed.ids[0])
        handed = handed.without({0})
    put(owner, message("last", due_ms=None))
    cluster.ledgers.say_confirmed()

    report = export(Views(cluster), tmp_path / "export")

    found = {one.id: one for one in exported(tmp_path / "export")}
    assert found.keys() == waiting | {"last"}
    assert handed is None or found.keys() >= {one.id for one in handed.messages}, "not delivered as far as is known"
    assert all(found[name].deliver_at_ms == dues[name] for name in waiting)
    assert found["last"].deliver_at_ms is None
    assert found["last"].body == b"last"
    assert canceled(tmp_path / "export") == stopped
    assert (report.messages, report.cancels) == (len(found), len(stopped))
    assert len(cluster.ledgers.recovered) == 0, "nothing was fenced"
    put(owner, message("later", due_ms=now_ms + DAY_MS))


def test_more_cancels_than_a_block_can_have_are_exported_each_once(tmp_path: Path) -> None:
    cluster = LedgerCluster()
    owner = DelayStore.open(cluster.open(), options=DelayOptions())
    names = [f"m{number}" for number in range(FRAMES_MAX // 2 + 1)]  # two frames of each
    owner.cancel(names, now_ms=NOW_MS)
    cluster.ledgers.say_confirmed()

    report = export(Views(cluster), tmp_path / "export", cancels_max=2 * len(names))

    ids = [
        id_ for action in actions_of(tmp_path / "export") if isinstance(action, journal.Canceled) for id_ in action.ids
    ]
    assert sorted(ids) == sorted(names)
    assert report.cancels == len(names)


def test_what_the_bookies_do_not_know_to_be_confirmed_is_not_seen(tmp_path: Path) -> None:
    cluster = LedgerCluster()
    owner = DelayStore.open(cluster.open(), options=OPTIONS)
    put(owner, message("known", due_ms=NOW_MS + HOUR_MS))
    cluster.ledgers.say_confirmed()
    put(owner, message("after", due_ms=NOW_MS + HOUR_MS))

    export(Views(cluster), tmp_path / "export")

    assert [one.id for one in exported(tmp_path / "export")] == ["known"]


def test_a_shard_that_changed_meanwhile_is_read_again_and_counts_once(tmp_path: Path) -> None:
    cluster = LedgerCluster()
    owner = DelayStore.open(cluster.open(), options=OPTIONS)
    put(owner, message("a", due_ms=NOW_MS + HOUR_MS), message("b", due_ms=NOW_MS + HOUR_MS))
    cluster.ledgers.say_confirmed()

    report = export(Views(cluster, failures=2), tmp_path / "export", SHARD, "1-0008")

    assert sorted(one.id for one in exported(tmp_path / "export")) == ["a", "b"]
    assert (report.shards, report.messages) == (1, 2), "the other shard was never opened"
    with pytest.raises(StorageFailed, match="deleted meanwhile"):
        export(Views(cluster, failures=3), tmp_path / "again")
    with pytest.raises(ConfigurationError, match="is not empty"):
        export(Views(cluster), tmp_path / "export")


def test_a_manifest_of_another_cluster_is_refused(tmp_path: Path) -> None:
    cluster = LedgerCluster()
    cluster.open()

    with pytest.raises(ConfigurationError, match="own ZooKeeper path"):
        LedgerView.open(cluster.shard(cluster="others"))


def test_what_was_written_of_a_shard_before_it_changed_is_removed(tmp_path: Path) -> None:
    cluster, names = LedgerCluster(), []
    for shard in ("before", "changing", "behind"):
        owner = DelayStore.open(LedgerSegments.open(cluster.shard(shard), options=LedgerOptions()), options=OPTIONS)
        for number in range(12):  # some are in memory, and some in a bucket
            put(owner, message(f"{shard}-{number}", due_ms=NOW_MS + 3 * DAY_MS))
            names.append(f"{shard}-{number}")
    cluster.ledgers.say_confirmed()
    views = ChangingViews(cluster, shard="changing", changes=2)

    report = export(views, tmp_path / "export", "before", "changing", "behind")

    assert views.changes == 0
    assert sorted(one.id for one in exported(tmp_path / "export")) == sorted(names)
    assert report.messages == len(names)


def test_an_export_can_be_read_by_its_owner_alone(tmp_path: Path) -> None:
    cluster = LedgerCluster()
    owner = DelayStore.open(cluster.open(), options=OPTIONS)
    put(owner, message("a", due_ms=NOW_MS + HOUR_MS))
    owner.cancel(["b"], now_ms=NOW_MS)
    cluster.ledgers.say_confirmed()

    export(Views(cluster), tmp_path / "export")

    paths = list((tmp_path / "export").glob("*/*.segment"))
    assert {path.parent.name for path in paths} == {"messages", "actions"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
