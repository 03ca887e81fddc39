"""A schedule whose ledgers are slow, as with a bookie that hangs: who asks whether it is ready does not wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from outbox_broker.schedule.delay_store import DelayStore
from tests.outbox_broker.delay.conftest import MINUTE_MS, NOW_MS, flush, put, timed
from tests.outbox_broker.segments.gates import Gate
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster
from tests.outbox_broker.segments.memory_ledgers import MemoryWriter
from tests.outbox_broker.segments.written_log import WrittenSegment

WAIT_SECONDS = 60


def hold_reads(cluster: LedgerCluster) -> Gate:
    """The next read of a ledger waits at the gate."""
    gate, read = Gate(), cluster.ledgers.read

    def held(ledger_id: int, first: int, last: int) -> list[bytes]:
        gate.hold()
        return read(ledger_id, first, last)

    cluster.ledgers.read = held  # type: ignore[method-assign]
    return gate


def test_a_node_learns_whether_a_shard_is_ready_while_its_dispatch_waits_for_a_bookie() -> None:
    cluster = LedgerCluster()
    schedule = DelayStore.open(cluster.open())
    put(schedule, NOW_MS, timed("m1", NOW_MS + MINUTE_MS))
    flush(schedule, NOW_MS)
    gate = hold_reads(cluster)

    with ThreadPoolExecutor(2) as pool:
        dispatched = pool.submit(schedule.due, NOW_MS + MINUTE_MS)
        try:
            assert gate.reached.wait(WAIT_SECONDS)
            pool.submit(schedule.check_ready).result(WAIT_SECONDS)  # TimeoutError where it waits for the read
        finally:
            gate.go.set()
        batch = dispatched.result(WAIT_SECONDS)

    assert batch is not None
    assert batch.ids == ["m1"]


def test_a_node_learns_whether_a_shard_is_ready_while_its_manifest_goes_on_in_another_ledger() -> None:
    cluster = LedgerCluster()
    segments = cluster.open(manifest_changes_max=2)
    for name in ("a", "b"):
        WrittenSegment.create(segments, name).append_committed(b"record")
    gate = hold_manifests(cluster)

    with ThreadPoolExecutor(2) as pool:
        committed = pool.submit(WrittenSegment.create(segments, "c").append_committed, b"record")
        try:
            assert gate.reached.wait(WAIT_SECONDS)
            pool.submit(segments.check).result(WAIT_SECONDS)
        finally:
            gate.go.set()
        assert committed.result(WAIT_SECONDS) > 0


def hold_manifests(cluster: LedgerCluster) -> Gate:
    """The next ledger of a manifest is created once the gate is opened."""
    gate, begin_create = Gate(), cluster.ledgers.begin_create

    def held(metadata: Mapping[str, bytes]) -> Callable[[], MemoryWriter]:
        if metadata["outbox-segment"] == b"manifest":
            gate.hold()
        return begin_create(metadata)

    cluster.ledgers.begin_create = held  # type: ignore[method-assign]
    return gate
