"""The engine of a broker on ledgers, on its owner: when bookies, folders, threads or its lease are gone."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from outbox_broker.cluster.broker_shard import FOLDER_PREFIX, BookieReserve, BrokerShard
from outbox_broker.cluster.cluster_errors import NotOwner
from outbox_broker.cluster.ownership_lease import OwnershipLease, ShardPermit
from outbox_broker.cluster.shard_host import OpenedShard
from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.journal.journal import frames
from outbox_broker.segments.port import WriterFenced
from outbox_core.common.errors import BrokerCordoned, NotSupported, StorageFailed
from outbox_core.journal.block import FrameKind
from outbox_core.messages.message import GroupConfig, Message
from outbox_core.protocol.wire import CordonNote, GroupRemainder
from tests.outbox_broker.cluster.conftest import eventually
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster

TOPIC, GROUP = "orders", "billing"
MIB = 1024 * 1024


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def permit() -> ShardPermit:
    lease = OwnershipLease(session_timeout_ms=60_000)
    lease.extend(lease.now_ms())
    return ShardPermit("0-0000", lease, epoch=1)


def started(cluster: LedgerCluster) -> BrokerShard:
    store = cluster.open()
    opened = OpenedShard(store=store, epoch=store.epoch, annotations=store.annotations, close=store.close)
    return BrokerShard.start(opened, permit(), clock=cluster.clock, options=EngineOptions(), room=None)


@pytest.fixture
def shard(folders: Path) -> Iterator[BrokerShard]:
    """One that runs."""
    with ExitStack() as stack:
        running = started(LedgerCluster())
        stack.callback(running.close)
        yield running
    assert list(folders.iterdir()) == []


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def test_a_process_that_can_make_no_folder_leaves_the_shard_to_another_node(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folders / "gone"))
    with pytest.raises(StorageFailed, match="no temporary folder can be made"):
        started(LedgerCluster())


def test_a_process_that_can_have_no_more_threads_leaves_nothing_behind(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threads()

    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: refused(self) if "sender" in self.name else start(self))
    with pytest.raises(StorageFailed, match="no more threads"):
        started(LedgerCluster())

    eventually(lambda: threads() <= before, what="the engine's threads have ended")
    assert list(folders.iterdir()) == []


def test_deliveries_are_sent_although_nobody_waits_for_them_and_after_an_error_that_passes(shard: BrokerShard) -> None:
    engine = shard.engine
    engine.publisher.publish([Message(id=one, topic=TOPIC, body=b"x") for one in "abc"])
    engine.puller.pull(TOPIC, GROUP, max_messages=1)
    eventually(lambda: is_sent(engine), what="the first delivery")

    commit, failed = engine.context.actions.commit, threading.Event()

    def failing() -> None:
        if not failed.is_set():
            failed.set()
            raise StorageFailed("no ledger can be created")
        commit()

    engine.context.actions.commit = failing  # type: ignore[method-assign]
    assert failed.wait(60)
    engine.puller.pull(TOPIC, GROUP, max_messages=1)

    eventually(lambda: is_sent(engine), what="the second delivery")


def is_sent(engine: Engine) -> bool:
    return engine.context.actions.committed == engine.context.actions.end


def test_new_messages_are_refused_while_much_is_not_confirmed_and_what_is_stored_can_be_consumed(
    shard: BrokerShard, folders: Path
) -> None:
    reserve = BookieReserve(folders, None, unconfirmed_bytes_max=MIB)
    reserve.engine = shard.engine
    reserve.require()
    shard.engine.context.messages.append(frames(FrameKind.CANCELED, [bytes(2 * MIB)]), at_ms=1)

    with pytest.raises(StorageFailed, match="the bookies are behind"):
        reserve.require()
    reserve.require(1)


def test_what_is_not_confirmed_counts_in_all_three_logs(shard: BrokerShard) -> None:
    context = shard.engine.context
    for log in (context.messages, context.actions, context.schedule.log):
        with context.lock:
            log.commit()
            before = shard.engine.unconfirmed_bytes()
            log.append(frames(FrameKind.CANCELED, [bytes(MIB)]), at_ms=1)
            assert shard.engine.unconfirmed_bytes() >= before + MIB


def test_its_ports_refuse_all_once_its_permit_ended(shard: BrokerShard) -> None:
    served = shard.served()
    served.check_owner()
    assert served.snapshots is not None
    with pytest.raises(NotSupported, match="neither a target"):
        served.needed(served.refusals)

    shard.permit.revoke("lost")

    with pytest.raises(NotOwner, match="lost"):
        served.check_owner()


def test_a_cordon_is_the_brokers_and_outlives_its_owners(folders: Path) -> None:
    cluster = LedgerCluster()
    first = started(cluster)
    publish(first, "before")
    first.engine.operations.cordon.begin(reason="moving")

    second = started(cluster)  # takes over from an owner that did not end
    with pytest.raises(BrokerCordoned, match="moving"):
        publish(second, "m1")
    [left] = second.engine.operations.remainder()
    [delivery] = second.engine.puller.pull(TOPIC, GROUP)
    second.engine.settler.ack([delivery.receipt])
    second.engine.operations.cordon.end()

    third = started(cluster)
    publish(third, "m1")

    assert left.groups == [GroupRemainder(group=GROUP, ready=1, in_flight=0, dead=0)]
    for shard in (first, second, third):
        shard.close()


def test_an_owner_that_was_deposed_changes_no_cordon(folders: Path) -> None:
    cluster = LedgerCluster()
    deposed = started(cluster)
    owner = started(cluster)
    owner.engine.operations.cordon.begin()

    with pytest.raises(WriterFenced):
        deposed.engine.operations.cordon.end()
    with pytest.raises(WriterFenced):
        deposed.engine.operations.cordon.begin(reason="late")

    successor = started(cluster)
    assert successor.engine.operations.cordon.note == CordonNote(since_ms=cluster.clock.now_ms(), reason="")
    for shard in (deposed, owner, successor):
        shard.close()


def test_a_cordon_whose_outcome_is_unknown_is_known_to_the_next_owner(folders: Path) -> None:
    became = set()
    for seed in range(20):
        cluster = LedgerCluster(seed)
        owner = started(cluster)
        cluster.ledgers.faults.unknown_outcome = 1.0
        with pytest.raises(StorageFailed, match="did not answer"):
            owner.engine.operations.cordon.begin()
        with pytest.raises(StorageFailed):
            owner.check()
        cluster.ledgers.faults.unknown_outcome = 0.0

        successor = started(cluster)

        is_cordoned = successor.engine.operations.cordon.note is not None
        became.add(is_cordoned)
        successor.engine.operations.cordon.end()
        publish(successor, "m1")
        with suppress(StorageFailed):  # it can write no more
            owner.close()
        successor.close()
    assert became == {True, False}


def publish(shard: BrokerShard, one: str) -> None:
    shard.engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    shard.engine.publisher.publish([Message(id=one, topic=TOPIC, body=b"x")])


def test_folders_that_killed_processes_left_behind_go_and_those_in_use_stay(folders: Path) -> None:
    left, new = folders / f"{FOLDER_PREFIX}left", folders / f"{FOLDER_PREFIX}new"
    for path in (left, new):
        path.mkdir()
        (path / "lock").touch()
    first = started(LedgerCluster())
    for path in set(folders.iterdir()) - {new}:
        os.utime(path, (1, 1))

    second = started(LedgerCluster())

    assert not left.exists()
    assert len(set(folders.iterdir())) == 3
    first.close()
    second.close()
    assert list(folders.iterdir()) == [new]
