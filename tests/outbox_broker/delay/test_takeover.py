"""A takeover goes on in the log of the epoch before: what it writes and reads, where it may die, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outbox_broker.schedule.delay_store import DelayOptions, DelayStore
from outbox_broker.schedule.schedule_log import PREFIX
from outbox_broker.segments.ledger import LedgerSegments
from outbox_broker.segments.ledger_manifest import StoredSegment
from outbox_broker.segments.ledger_takeover import read_node, read_segments
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import SegmentDamaged
from tests.outbox_broker.delay.conftest import DAY_MS, HOUR_MS, NOW_MS, drain, flush, put, settle, timed
from tests.outbox_broker.delay.failing_disk import Killed
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster
from tests.outbox_broker.segments.memory_ledgers import Calls, Faults

OPTIONS = DelayOptions(batch_messages_max=3, hand_outs_max=2, dedup_messages=10)
STEPS_MAX = 400
END_MS = NOW_MS + 60 * DAY_MS


def take_over(cluster: LedgerCluster) -> tuple[LedgerSegments, DelayStore]:
    store = cluster.open()
    return store, DelayStore.open(store, options=OPTIONS)


def ids(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def put_all(schedule: DelayStore, names: list[str], *, ahead_ms: int) -> None:
    put(schedule, NOW_MS, *(timed(one, NOW_MS + ahead_ms + at) for at, one in enumerate(names)))


def log_segments(cluster: LedgerCluster) -> list[StoredSegment]:
    """The segments of the log, as the newest manifest names them."""
    cluster.ledgers.say_confirmed()
    node = read_node(cluster.shard())
    assert node is not None
    entries = cluster.ledgers.confirmed(node.node.ledger)
    found = read_segments(cluster.shard(), node.node.ledger, entries=entries)
    return [found.segments[name] for name in sorted(found.segments) if name.startswith(PREFIX)]


def test_a_takeover_repeats_nothing_that_is_pending_and_reads_nothing_that_is_in_buckets() -> None:
    cluster = LedgerCluster()
    _, owner = take_over(cluster)
    put_all(owner, ids("filed", 300), ahead_ms=30 * DAY_MS)
    flush(owner, NOW_MS)
    put_all(owner, ids("pending", 300), ahead_ms=30 * DAY_MS)
    cluster.ledgers.calls, cluster.ledgers.read_segments = Calls(), type(cluster.ledgers.read_segments)()

    _, successor = take_over(cluster)

    assert successor.queries.count() == 600
    assert cluster.ledgers.calls.counts["append"] == 1, "the manifest's snapshot"
    assert not [one for one in cluster.ledgers.read_segments if one.startswith("l1")]
    assert successor.schedule([timed("pending7", NOW_MS + DAY_MS)], now_ms=NOW_MS) == ["duplicate"]
    assert sorted(drain(successor, END_MS)) == sorted(ids("filed", 300) + ids("pending", 300))


def test_what_a_takeover_reads_does_not_grow_with_what_is_in_buckets() -> None:
    reads = []
    for flushes in (8, 40):
        cluster = LedgerCluster()
        _, owner = take_over(cluster)
        for number in range(flushes):
            put_all(owner, ids(f"m{number}-", 20), ahead_ms=30 * DAY_MS)
            flush(owner, NOW_MS)
        cluster.ledgers.read_segments.clear()
        take_over(cluster)
        reads.append(sum(n for name, n in cluster.ledgers.read_segments.items() if name.startswith(("l1", "ids-"))))

    assert reads[0] == reads[1]


def test_one_manifest_names_the_logs_ledgers_of_several_epochs_and_all_of_them_are_read() -> None:
    cluster = LedgerCluster()
    names = []
    for epoch in range(5):
        store, owner = take_over(cluster)
        names += ids(f"m{epoch}-", 4)
        put_all(owner, names[-4:], ahead_ms=HOUR_MS)
        assert owner.cancel([names.pop()], now_ms=NOW_MS) == ["canceled"]

    assert [one.epoch for one in log_segments(cluster)] == [1, 2, 3, 4, 5]
    _, successor = take_over(cluster)
    assert sorted(drain(successor, END_MS)) == sorted(names)
    assert store.epoch == 5


def test_a_log_that_lost_a_segment_in_its_middle_is_refused_with_the_cure() -> None:
    cluster = LedgerCluster()
    for epoch in range(4):
        store, owner = take_over(cluster)
        put_all(owner, ids(f"m{epoch}-", 4), ahead_ms=HOUR_MS)
    first, _, lost, behind = (one.name for one in log_segments(cluster))
    store.delete([lost])

    for _ in range(2):
        with pytest.raises(SegmentDamaged, match=f"{lost} is missing before {behind}; restore it from a copy"):
            take_over(cluster)

    assert first in {one.name for one in cluster.open().list()}


def test_ledgers_of_earlier_epochs_are_kept_while_the_log_goes_on_in_them_and_a_day_after_their_epoch() -> None:
    cluster = LedgerCluster()
    _, owner = take_over(cluster)
    put_all(owner, ids("a", 4), ahead_ms=HOUR_MS)
    _, owner = take_over(cluster)
    put_all(owner, ids("b", 4), ahead_ms=HOUR_MS)
    of_first, of_second = (one.ledger for one in log_segments(cluster))
    cluster.clock.advance(36 * HOUR_MS)
    cluster.sweeper().sweep()
    assert {of_first, of_second} <= cluster.ledgers.ledgers.keys()

    _, owner = take_over(cluster)
    for _ in range(2):  # the two newest checkpoints are kept, and all from the older one on
        flush(owner, NOW_MS)
        settle(owner, NOW_MS)
    put_all(owner, ids("c", 1), ahead_ms=HOUR_MS)  # the log began anew; an hour later its manifest does
    cluster.clock.advance(HOUR_MS)
    flush(owner, NOW_MS)
    cluster.sweeper().sweep()

    assert of_first not in cluster.ledgers.ledgers, "its epoch ended 37 hours ago"
    assert of_second in cluster.ledgers.ledgers, "its epoch ended an hour ago"
    cluster.clock.advance(DAY_MS)
    cluster.sweeper().sweep()
    assert of_second not in cluster.ledgers.ledgers
    assert sorted(drain(owner, END_MS)) == sorted(ids("a", 4) + ids("b", 4) + ids("c", 1))


def test_after_many_takeovers_the_log_begins_anew_with_a_checkpoint_and_no_more_than_that_is_read() -> None:
    cluster = LedgerCluster()
    read = kept = 0
    for epoch in range(80):
        cluster.ledgers.read_segments.clear()
        _, owner = take_over(cluster)
        read = max(read, sum(name.startswith(PREFIX) for name in cluster.ledgers.read_segments))
        put_all(owner, [f"m{epoch}"], ahead_ms=HOUR_MS)
        kept = max(kept, len(log_segments(cluster)))

    assert 8 < read <= 17, "of one that was begun at the kill the end is unknown"
    assert 16 < kept <= 33, "the checkpoint before the newest is kept, with all behind it"
    _, successor = take_over(cluster)
    assert sorted(drain(successor, END_MS)) == sorted(ids("m", 80))


def dead_takeovers(seed: int) -> Iterator[tuple[int, LedgerCluster, DelayStore]]:
    """Yields, for each call of a takeover, the cluster where one died there, and the owner that it was to replace."""
    for at in range(STEPS_MAX):
        cluster = LedgerCluster(seed)
        _, owner = take_over(cluster)
        put_all(owner, ids("filed", 6), ahead_ms=30 * DAY_MS)
        put_all(owner, ids("due", 6), ahead_ms=0)
        flush(owner, NOW_MS)
        put_all(owner, ids("pending", 6), ahead_ms=HOUR_MS)
        assert owner.due(NOW_MS + 10) is not None
        cluster.ledgers.calls.left = at
        try:
            _, dying = take_over(cluster)
            assert dying.due(NOW_MS + 10) is not None
            dying.housekeeping.step(NOW_MS + 10)
        except Killed:
            cluster.ledgers.calls.left = None
            yield at, cluster, owner
        else:
            assert at > 15, "a takeover has more calls than this"
            return
    pytest.fail(f"a takeover did not end within {STEPS_MAX} calls")


@pytest.mark.parametrize("faults", [Faults(unknown_outcome=1), Faults(lost=1)], ids=["no answer", "no bookies"])
def test_a_takeover_that_fails_leaves_no_writer_open(faults: Faults) -> None:
    cluster = LedgerCluster()
    cluster.ledgers.faults = faults

    with pytest.raises(StorageFailed):
        take_over(cluster)

    [manifest] = cluster.ledgers.writers
    assert manifest.is_released


@pytest.mark.parametrize("seed", range(3))
def test_a_takeover_that_died_at_any_step_is_taken_over_and_nothing_is_lost_or_comes_twice(seed: int) -> None:
    for at, cluster, deposed in dead_takeovers(seed):
        _, successor = take_over(cluster)

        with pytest.raises(StorageFailed):
            deposed.due(NOW_MS + 10)
        with pytest.raises(StorageFailed):
            put_all(deposed, ["late"], ahead_ms=0)
        came = drain(successor, END_MS)
        assert sorted(came) == sorted(ids("filed", 6) + ids("due", 6) + ids("pending", 6)), at
