"""The segment store on real bookies: its conformance, fenced writers, takeovers, lost bookies, and large records."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from outbox_broker.cluster.bookkeeper.java_ledgers import JavaLedgers
from outbox_broker.cluster.bookkeeper.java_runtime import JavaRuntime
from outbox_broker.cluster.bookkeeper.shard_znodes import ShardZnodes
from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.segments.ledger_reads import read_entries
from outbox_broker.segments.ledger_records import CHUNK_BYTES_MAX
from outbox_broker.segments.ledger_segments import LedgerSegmentStore, LedgerStoreOptions
from outbox_broker.segments.ledger_sweep import LedgerSweeper
from outbox_broker.segments.ledger_takeover import Shard
from outbox_broker.segments.ledgers import EntryMissing, LedgerFailed, LedgerFenced, LedgerMissing
from outbox_broker.segments.segment_store import WriterFenced
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.engines.bookkeeper.ledger_creation import wait_until_ledgers_can_be_made
from tests.outbox_broker.delay.conftest import NOW_MS, drain, put, timed
from tests.outbox_broker.delay.test_segment_store import *  # noqa: F403 - the conformance of all segment stores

DAY_MS = 24 * 3_600_000
_roots = itertools.count(1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def shard(cluster: BookKeeperCluster, ledgers: JavaLedgers, zookeeper: Any, clock: ManualClock) -> Shard:
    """A shard of a delay cluster of the test's own."""
    root = f"/outbox/{os.getpid()}-{next(_roots)}"
    manifests = ShardZnodes(zookeeper, root, request_ms_max=60_000)
    return Shard(cluster=root, name="1-0007", ledgers=ledgers, manifests=manifests, clock=clock)


@pytest.fixture
def open_store(shard: Shard) -> Iterator[Callable[[], Any]]:
    """Take the test's shard over."""
    with ExitStack() as stack:

        def opened() -> LedgerSegmentStore:
            store = LedgerSegmentStore.open(shard)
            stack.callback(store.close)
            return store

        yield opened


def payloads_of(store: LedgerSegmentStore, name: str) -> list[bytes]:
    return [one.payload for one in store.scan(name)]


def append_synced(store: LedgerSegmentStore, name: str, *records: bytes, position: int = 0) -> int:
    *_, end = store.append(name, records, position=position)
    store.sync([name])
    return end


def restore(cluster: BookKeeperCluster, ledgers: JavaLedgers) -> None:
    """Start the bookies that were killed; returns when the client knows of them, too."""
    cluster.restore()
    wait_until_ledgers_can_be_made(ledgers)


def test_a_fenced_writer_learns_of_its_successor_by_any_write(open_store: Callable[[], Any]) -> None:
    writer = open_store()
    end = append_synced(writer, "a", b"1")
    successor = open_store()

    with pytest.raises(WriterFenced):
        append_synced(writer, "a", b"2", position=end)
    with pytest.raises(WriterFenced):
        writer.sync(["a"])
    assert payloads_of(successor, "a") == [b"1"]


def test_a_takeover_of_many_open_ledgers_fences_all_of_them(open_store: Callable[[], Any]) -> None:
    writer = open_store()
    for number in range(64):
        writer.append(f"s-{number}", [b"%d" % number, b"x" * 2_000, b"end"], position=0)
    writer.sync([f"s-{number}" for number in range(64)])

    successor = open_store()

    assert all(payloads_of(successor, f"s-{n}") == [b"%d" % n, b"x" * 2_000, b"end"] for n in range(64))
    with pytest.raises(WriterFenced):
        append_synced(writer, "s-63", b"late", position=4)


def test_a_record_above_four_mebibytes_is_read_whole_after_a_takeover(open_store: Callable[[], Any]) -> None:
    large = os.urandom(2 * CHUNK_BYTES_MAX + 12_345)
    store = open_store()
    first, _, end = store.append("a", [large, b"small"], position=0)
    store.sync(["a"])

    successor = open_store()

    assert successor.read("a", first, len(large)) == large
    assert payloads_of(successor, "a") == [large, b"small"]
    assert end == 4


def test_entries_with_more_bytes_than_the_jvm_has_are_read_though_small_ones_are_before_them(
    ledgers: JavaLedgers,
) -> None:
    entries = [*(b"%d" % number for number in range(500)), *(bytes([n]) * CHUNK_BYTES_MAX for n in range(40))]
    writer = ledgers.begin_create({})()
    for entry in entries:
        writer.append(entry)
    writer.confirm(len(entries))

    found = read_entries(ledgers, writer.ledger_id, count=len(entries))

    assert all(one == entry for one, entry in zip(found, entries, strict=True))
    assert ledgers.length_bytes(writer.ledger_id, len(entries) - 1) == sum(map(len, entries))
    ledgers.delete([writer.ledger_id])


def test_writes_go_on_while_one_bookie_is_dead_and_what_was_confirmed_outlives_all(
    cluster: BookKeeperCluster, ledgers: JavaLedgers, open_store: Callable[[], Any]
) -> None:
    store = open_store()
    end = append_synced(store, "a", b"1")
    first, *others = cluster.bookie_ids
    cluster.kill9(first)

    end = append_synced(store, "a", b"2", position=end)
    for bookie in others:
        cluster.kill9(bookie)
    restore(cluster, ledgers)
    successor = open_store()

    assert payloads_of(successor, "a") == [b"1", b"2"]
    append_synced(successor, "a", b"3", position=end)
    assert payloads_of(successor, "a") == [b"1", b"2", b"3"]


def test_with_too_few_bookies_nothing_is_confirmed_and_the_shard_opens_again_when_they_are_back(
    cluster: BookKeeperCluster, ledgers: JavaLedgers, open_store: Callable[[], Any]
) -> None:
    store = open_store()
    end = append_synced(store, "a", b"confirmed")
    for bookie in cluster.bookie_ids[:2]:
        cluster.kill9(bookie)

    with pytest.raises(StorageFailed):
        append_synced(store, "a", b"in doubt", position=end)
    with pytest.raises(StorageFailed):
        store.sync(())
    restore(cluster, ledgers)
    successor = open_store()

    assert successor.epoch == store.epoch + 1
    assert payloads_of(successor, "a")[0] == b"confirmed"


def test_deleted_ledgers_stay_fenced_for_a_day_though_their_bookies_restart(
    cluster: BookKeeperCluster,
    ledgers: JavaLedgers,
    shard: Shard,
    clock: ManualClock,
    open_store: Callable[[], Any],
) -> None:
    sweeper = LedgerSweeper(
        cluster=shard.cluster, ledgers=shard.ledgers, manifests=shard.manifests, clock=clock,
        retention_ms=LedgerStoreOptions().retention_ms,
    )  # fmt: skip
    paused = open_store()
    end = append_synced(paused, "log-1", b"record")
    successor = open_store()
    successor.delete(["log-1"])
    assert sweeper.sweep().deleted == []
    for bookie in cluster.bookie_ids:
        cluster.kill9(bookie)
    restore(cluster, ledgers)

    with pytest.raises(WriterFenced):
        append_synced(paused, "log-1", b"late", position=end)
    clock.advance(DAY_MS)
    final = open_store()
    assert len(sweeper.sweep().deleted) >= 2
    assert list(final.list()) == []


def test_a_schedule_moves_from_owner_to_owner(open_store: Callable[[], Any]) -> None:
    owner = DelayStore.open(open_store())
    put(owner, NOW_MS, *(timed(f"m{number}", NOW_MS + number) for number in range(50)))
    owner.cancel(["m7"], now_ms=NOW_MS)
    deposed, owner = owner, DelayStore.open(open_store())

    with pytest.raises(WriterFenced):
        deposed.due(NOW_MS + 100)
    assert drain(owner, NOW_MS + 100) == [f"m{number}" for number in range(50) if number != 7]


def test_a_fence_and_what_is_missing_have_errors_of_their_own(ledgers: JavaLedgers, cluster: BookKeeperCluster) -> None:
    writer = ledgers.begin_create({"outbox-test": b"1"})()
    writer.append(b"1")
    writer.confirm(1)
    assert ledgers.recover([writer.ledger_id]) == [1]
    writer.append(b"2")
    with pytest.raises(LedgerFenced, match="-101"):
        writer.confirm(2)
    with pytest.raises(LedgerFenced):
        writer.append(b"3")

    with pytest.raises(EntryMissing):
        ledgers.read(writer.ledger_id, 0, 5)
    ledgers.delete([writer.ledger_id, writer.ledger_id])
    with pytest.raises(LedgerMissing):
        ledgers.recover([writer.ledger_id])
    with pytest.raises(LedgerMissing):
        ledgers.read(writer.ledger_id, 0, 0)


def test_another_password_is_named_as_the_cause(
    ledgers: JavaLedgers, runtime: JavaRuntime, cluster: BookKeeperCluster
) -> None:
    from outbox_broker.cluster.bookkeeper.java_ledgers import BookKeeperOptions

    writer = ledgers.begin_create({})()
    options = BookKeeperOptions(password=b"another", request_s_max=60, operation_ms_max=120_000, session_ms=30_000)
    other = JavaLedgers(runtime, cluster.metadata_uri, options=options)
    try:
        with pytest.raises(LedgerFailed, match="password"):
            other.recover([writer.ledger_id])
    finally:
        other.close()
    writer.append(b"1")
    writer.confirm(1)


def test_appends_reads_and_failures_leave_nothing_behind_in_the_interpreter(
    ledgers: JavaLedgers, cluster: BookKeeperCluster
) -> None:
    def append_and_read(count: int) -> None:
        for _ in range(count // 500):
            writer = ledgers.begin_create({"outbox-test": b"1"})()
            for _ in range(500):
                writer.append(b"x" * 100)
            writer.confirm(500)
            assert len(ledgers.read(writer.ledger_id, 0, 499)) == 500
            with pytest.raises(EntryMissing):
                ledgers.read(writer.ledger_id, 600, 600)
            writer.begin_close()()
            ledgers.delete([writer.ledger_id])

    def blocks() -> int:
        gc.collect()
        return sys.getallocatedblocks()

    append_and_read(2_000)
    before = blocks()
    append_and_read(10_000)

    assert blocks() - before < 1_000


def test_java_keeps_nothing_of_threads_that_ended(runtime: JavaRuntime) -> None:
    threads, system = (runtime.java_class(f"java.lang.{name}") for name in ("Thread", "System"))

    def use_java() -> None:
        runtime.check_process()
        system.nanoTime()

    before = int(threads.activeCount())
    for _ in range(100):  # each shard that a node opens, and closes, has threads of its own
        thread = threading.Thread(target=use_java)
        thread.start()
        thread.join()

    assert int(threads.activeCount()) - before < 50


def test_a_zookeeper_path_of_another_cluster_is_refused(shard: Shard) -> None:
    LedgerSegmentStore.open(shard).close()
    other = Shard(
        cluster="/outbox/others", name=shard.name, ledgers=shard.ledgers, manifests=shard.manifests, clock=shard.clock
    )  # fmt: skip

    with pytest.raises(ConfigurationError, match="own ZooKeeper path"):
        LedgerSegmentStore.open(other)
