"""Entries of which copies were changed on the bookies' disks: read from a whole copy, or known to be lost."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from outbox_broker.cluster.bookkeeper.java_ledgers import BookKeeperOptions, JavaLedgers
from outbox_broker.cluster.bookkeeper.java_runtime import JavaRuntime
from outbox_broker.cluster.bookkeeper.shard_znodes import ShardZnodes
from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.segments.ledger import LedgerSegments
from outbox_broker.segments.ledger_takeover import Shard
from outbox_broker.segments.ledgers import LedgerDamaged, LedgerFailed
from outbox_core.common.clock import ManualClock
from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.engines.bookkeeper.ledger_creation import wait_until_ledgers_can_be_made
from tests.outbox_broker.delay.conftest import DAY_MS, NOW_MS, drain, flush, put, settle, timed

_roots = itertools.count(1)


@pytest.fixture
def ledgers(cluster: BookKeeperCluster, runtime: JavaRuntime) -> Iterator[JavaLedgers]:
    """A client whose entries are on all bookies once they are confirmed."""
    options = BookKeeperOptions(ack_quorum=3, request_s_max=60, operation_ms_max=120_000, session_ms=30_000)
    client = JavaLedgers(runtime, cluster.metadata_uri, options=options)
    try:
        wait_until_ledgers_can_be_made(client)
        yield client
    finally:
        client.close()


@pytest.fixture
def shard(cluster: BookKeeperCluster, ledgers: JavaLedgers, zookeeper: Any) -> Shard:
    """A shard of a delay cluster of the test's own."""
    root = f"/outbox/damage-{os.getpid()}-{next(_roots)}"
    manifests = ShardZnodes(zookeeper, root, request_ms_max=60_000)
    return Shard(cluster=root, name="1-0007", ledgers=ledgers, manifests=manifests, clock=ManualClock())


def written(ledgers: JavaLedgers, *entries: bytes) -> int:
    """A closed ledger of these entries."""
    writer = ledgers.begin_create({})()
    for entry in entries:
        writer.append(entry)
    writer.confirm(len(entries))
    writer.begin_close()()
    return writer.ledger_id


def restore(cluster: BookKeeperCluster, ledgers: JavaLedgers) -> None:
    """Start the bookies that were killed; returns when the client knows of them, too."""
    cluster.restore()
    wait_until_ledgers_can_be_made(ledgers)


def flip_bit(cluster: BookKeeperCluster, bookies: Iterable[str], ledger_id: int, entry: int, *, at: int) -> None:
    """Change an entry on the disks of some bookies, which do not run afterwards."""
    for bookie in bookies:
        cluster.kill9(bookie)
        cluster.flip_bit(bookie, ledger_id, entry, at=at)


def test_an_entry_all_of_whose_copies_are_damaged_is_lost_and_no_other_one_is(
    cluster: BookKeeperCluster, ledgers: JavaLedgers
) -> None:
    ledger_id = written(ledgers, b"first", b"second", b"third")
    flip_bit(cluster, cluster.bookie_ids, ledger_id, 1, at=0)
    restore(cluster, ledgers)

    with pytest.raises(
        LedgerDamaged, match=f"entry 1 of ledger {ledger_id} is lost: no copy on its 3 bookies is whole"
    ) as raised:
        ledgers.read(ledger_id, 0, 2)

    assert raised.value.found == b"recond"
    with pytest.raises(LedgerDamaged, match="entry 1"):
        ledgers.length_bytes(ledger_id, 1)
    assert [ledgers.read(ledger_id, entry, entry) for entry in (0, 2)] == [[b"first"], [b"third"]]


def test_an_entry_is_not_lost_while_a_bookie_that_may_have_a_whole_copy_is_out(
    cluster: BookKeeperCluster, ledgers: JavaLedgers
) -> None:
    ledger_id = written(ledgers, b"first", b"second")
    *damaged, whole = cluster.bookie_ids
    flip_bit(cluster, damaged, ledger_id, 1, at=0)
    restore(cluster, ledgers)
    cluster.kill9(whole)

    with pytest.raises(LedgerFailed) as raised:
        ledgers.read(ledger_id, 0, 1)
    assert not isinstance(raised.value, LedgerDamaged)

    restore(cluster, ledgers)
    assert ledgers.read(ledger_id, 0, 1) == [b"first", b"second"]


def test_a_flipped_bit_of_all_copies_costs_one_message_and_the_schedule_goes_on(
    cluster: BookKeeperCluster, ledgers: JavaLedgers, shard: Shard
) -> None:
    store = LedgerSegments.open(shard)
    owner = DelayStore.open(store)
    for day in (1, 2):
        put(owner, NOW_MS, *(timed(f"d{day}-{number}", NOW_MS + day * DAY_MS) for number in range(3)))
        flush(owner, NOW_MS)
    settle(owner, NOW_MS)
    store.close()
    LedgerSegments.open(shard).close()  # the bookies know all entries of the ledgers that it closed
    ledger_id, entry, at = in_bucket(ledgers, shard, b"payload of d1-1")
    flip_bit(cluster, cluster.bookie_ids, ledger_id, entry, at=at)
    restore(cluster, ledgers)

    store = LedgerSegments.open(shard)
    successor = DelayStore.open(store)

    assert drain(successor, NOW_MS + 3 * DAY_MS) == ["d1-0", "d1-2", "d2-0", "d2-1", "d2-2"]
    assert successor.queries.figures()["quarantined_messages"] == 1
    store.close()


def in_bucket(ledgers: JavaLedgers, shard: Shard, needle: bytes) -> tuple[int, int, int]:
    """Returns the ledger, the entry of it, and the place in that, at which a bucket of a shard has these bytes."""
    [found] = [
        (ledger_id, number, entry.find(needle))
        for ledger_id, metadata in ledgers.find()
        if metadata.get("outbox-cluster") == shard.cluster.encode()
        and metadata["outbox-segment"].startswith((b"l0", b"l1"))
        for number, entry in enumerate(ledgers.read(ledger_id, 0, ledgers.confirmed(ledger_id) - 1))
        if needle in entry
    ]
    return found
