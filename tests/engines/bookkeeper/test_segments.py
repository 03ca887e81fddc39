"""Segments on real bookies: their conformance, fenced owners, takeovers, lost bookies, and large blocks."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from outbox_broker.cluster.bookkeeper.java_ledgers import JavaLedgers
from outbox_broker.cluster.bookkeeper.java_runtime import JavaRuntime
from outbox_broker.cluster.bookkeeper.shard_znodes import ShardZnodes
from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.segments.ledger import LedgerOptions, LedgerSegments
from outbox_broker.segments.ledger_reads import read_entries
from outbox_broker.segments.ledger_records import CHUNK_BYTES_MAX
from outbox_broker.segments.ledger_sweep import LedgerSweeper
from outbox_broker.segments.ledger_takeover import Shard
from outbox_broker.segments.ledgers import EntryMissing, LedgerFailed, LedgerFenced, LedgerMissing
from outbox_broker.segments.port import WriterFenced
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.engines.bookkeeper.ledger_creation import wait_until_ledgers_can_be_made
from tests.outbox_broker.delay.conftest import NOW_MS, drain, put, timed
from tests.outbox_broker.segments.test_conformance import *  # noqa: F403 - what segments on every medium do
from tests.outbox_broker.segments.written_log import WrittenSegment, payloads, read_all

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


class Bookies:
    """The bookies as the medium of a shard's segments."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._opened: list[LedgerSegments] = []

    def open(self) -> LedgerSegments:
        self._opened.append(LedgerSegments.open(self._shard))
        return self._opened[-1]

    def close(self) -> None:
        for segments in self._opened:
            segments.close()


@pytest.fixture
def medium(shard: Shard) -> Iterator[Bookies]:
    """Opened, it takes the test's shard over."""
    with closing(Bookies(shard)) as bookies:
        yield bookies


def committed(segments: LedgerSegments, name: str, *blocks: bytes) -> WrittenSegment:
    """A segment with blocks, each of which is an entry."""
    written = WrittenSegment.create(segments, name)
    for one in blocks:
        written.append_committed(one)
    return written


def restore(cluster: BookKeeperCluster, ledgers: JavaLedgers) -> None:
    """Start the bookies that were killed; returns when the client knows of them, too."""
    cluster.restore()
    wait_until_ledgers_can_be_made(ledgers)


def test_a_takeover_of_many_open_ledgers_fences_all_of_them(medium: Bookies) -> None:
    segments = medium.open()
    written = [WrittenSegment.create(segments, f"s-{number}") for number in range(64)]
    for number, one in enumerate(written):
        one.append(b"%d" % number, b"x" * 2_000, b"end")
    for one in written:
        one.commit()

    successor = medium.open()

    assert all(payloads(successor, f"s-{n}") == [b"%d" % n, b"x" * 2_000, b"end"] for n in range(64))
    with pytest.raises(WriterFenced):
        written[-1].append_committed(b"late")


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
    cluster: BookKeeperCluster, ledgers: JavaLedgers, medium: Bookies
) -> None:
    written = committed(medium.open(), "a", b"1")
    first, *others = cluster.bookie_ids
    cluster.kill9(first)

    written.append_committed(b"2")
    for bookie in others:
        cluster.kill9(bookie)
    restore(cluster, ledgers)
    successor = medium.open()

    assert payloads(successor) == [b"1", b"2"]
    assert read_all(successor, written.places) == [b"1", b"2"]
    committed(successor, "b", b"3")
    assert payloads(successor, "b") == [b"3"]


def test_with_too_few_bookies_nothing_is_confirmed_and_the_shard_opens_again_when_they_are_back(
    cluster: BookKeeperCluster, ledgers: JavaLedgers, medium: Bookies
) -> None:
    segments = medium.open()
    written = committed(segments, "a", b"confirmed")
    for bookie in cluster.bookie_ids[:2]:
        cluster.kill9(bookie)

    with pytest.raises(StorageFailed):
        written.append_committed(b"in doubt")
    with pytest.raises(StorageFailed):
        segments.check()
    restore(cluster, ledgers)
    successor = medium.open()

    assert successor.epoch == segments.epoch + 1
    assert payloads(successor)[0] == b"confirmed"


def test_deleted_ledgers_stay_fenced_for_a_day_though_their_bookies_restart(
    cluster: BookKeeperCluster, ledgers: JavaLedgers, shard: Shard, clock: ManualClock, medium: Bookies
) -> None:
    sweeper = LedgerSweeper(
        cluster=shard.cluster, ledgers=shard.ledgers, manifests=shard.manifests, clock=clock,
        retention_ms=LedgerOptions().retention_ms,
    )  # fmt: skip
    paused = committed(medium.open(), "log-1", b"record")
    successor = medium.open()
    successor.delete(["log-1"])
    assert sweeper.sweep().deleted == []
    for bookie in cluster.bookie_ids:
        cluster.kill9(bookie)
    restore(cluster, ledgers)

    with pytest.raises(WriterFenced):
        paused.append_committed(b"late")
    clock.advance(DAY_MS)
    final = medium.open()
    assert len(sweeper.sweep().deleted) >= 2
    assert list(final.list()) == []


def test_a_schedule_moves_from_owner_to_owner(medium: Bookies) -> None:
    owner = DelayStore.open(medium.open())
    put(owner, NOW_MS, *(timed(f"m{number}", NOW_MS + number) for number in range(50)))
    owner.cancel(["m7"], now_ms=NOW_MS)
    deposed, owner = owner, DelayStore.open(medium.open())

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
    LedgerSegments.open(shard).close()
    other = Shard(
        cluster="/outbox/others", name=shard.name, ledgers=shard.ledgers, manifests=shard.manifests, clock=shard.clock
    )  # fmt: skip

    with pytest.raises(ConfigurationError, match="own ZooKeeper path"):
        LedgerSegments.open(other)
