"""A flush to many ledgers at once whose process dies at any call: nothing is lost, and no ledger is left over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outbox_broker.schedule.delay_store import DelayOptions, DelayStore
from outbox_broker.segments.ledger_takeover import read_node, read_segments
from outbox_core.common.errors import StorageFailed
from tests.outbox_broker.delay.conftest import DAY_MS, HOUR_MS, MINUTE_MS, NOW_MS, drain, flush, put, settle, timed
from tests.outbox_broker.delay.failing_disk import Killed
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster

OPTIONS = DelayOptions(batch_messages_max=50, bucket_writers_max=4)
AHEAD_MS = (MINUTE_MS, 3 * MINUTE_MS, 3 * HOUR_MS, 5 * HOUR_MS, 50 * HOUR_MS, 16 * DAY_MS, 30 * DAY_MS, 400 * DAY_MS)
STEPS_MAX = 600
END_MS = NOW_MS + 500 * DAY_MS


def open_schedule(cluster: LedgerCluster) -> DelayStore:
    return DelayStore.open(cluster.open(), options=OPTIONS)


def put_everywhere(schedule: DelayStore, name: str) -> set[str]:
    """Schedule a message for each of several buckets; returns their ids."""
    messages = [timed(f"{name}-{at}", NOW_MS + ahead_ms) for at, ahead_ms in enumerate(AHEAD_MS)]
    put(schedule, NOW_MS, *messages)
    return {one.id for one in messages}


def half_flushed(seed: int) -> Iterator[tuple[int, LedgerCluster, set[str]]]:
    """Yields, for each call of a flush to buckets that exist and others, the cluster whose owner died there."""
    for at in range(STEPS_MAX):
        cluster = LedgerCluster(seed)
        owner = open_schedule(cluster)
        stored = put_everywhere(owner, "filed")
        flush(owner, NOW_MS)
        stored |= put_everywhere(owner, "waiting")
        assert owner.cancel(["filed-3", "waiting-4"], now_ms=NOW_MS) == ["canceled"] * 2
        cluster.ledgers.calls.left = at
        try:
            flush(owner, NOW_MS)
            settle(owner, NOW_MS)
        except Killed:
            cluster.ledgers.calls.left = None
            yield at, cluster, stored - {"filed-3", "waiting-4"}
        else:
            assert at > 60, "a flush has more calls than this"
            return
    pytest.fail(f"a flush did not end within {STEPS_MAX} calls")


def of_earlier_epochs(cluster: LedgerCluster) -> tuple[set[int], set[int]]:
    """Returns the ledgers of earlier epochs that there are, and those that the newest manifest names."""
    cluster.ledgers.say_confirmed()
    node = read_node(cluster.shard())
    assert node is not None
    entries = cluster.ledgers.confirmed(node.node.ledger)
    named = set(read_segments(cluster.shard(), node.node.ledger, entries=entries).ledgers())
    epoch = b"%d" % node.node.epoch
    there = {
        ledger_id for ledger_id, one in cluster.ledgers.ledgers.items() if one.metadata["outbox-epoch"] != epoch
    }  # fmt: skip
    return there, named


@pytest.mark.parametrize("seed", range(3))
def test_a_flush_that_died_at_any_call_loses_nothing_and_repeats_nothing(seed: int) -> None:
    for at, cluster, stored in half_flushed(seed):
        successor = open_schedule(cluster)

        assert successor.queries.count() == len(stored), at
        came = drain(successor, END_MS)
        assert sorted(came) == sorted(stored), at


def test_what_a_flush_left_that_died_is_swept_a_day_later_and_nothing_else(random_seed: int) -> None:
    for at, cluster, stored in half_flushed(random_seed):
        successor = open_schedule(cluster)
        cluster.clock.advance(DAY_MS)
        for _ in range(2):  # of the log the two newest checkpoints are kept
            flush(successor, NOW_MS)
            settle(successor, NOW_MS)
        cluster.clock.advance(HOUR_MS)  # the manifest begins anew without what was dropped
        put(successor, NOW_MS, timed("later", NOW_MS + DAY_MS))
        flush(successor, NOW_MS)
        cluster.sweeper().sweep()

        there, named = of_earlier_epochs(cluster)
        assert there <= named, at
        assert sorted(drain(successor, END_MS)) == sorted({*stored, "later"}), at


def test_no_more_ledgers_are_open_than_a_takeover_may_fence() -> None:
    cluster = LedgerCluster()
    owner = open_schedule(cluster)
    stored = put_everywhere(owner, "filed")
    flush(owner, NOW_MS)
    settle(owner, NOW_MS)
    assert len(AHEAD_MS) > OPTIONS.bucket_writers_max
    cluster.ledgers.recovered.clear()

    successor = open_schedule(cluster)

    _, fenced = cluster.ledgers.recovered
    assert len(fenced) <= OPTIONS.bucket_writers_max + 1, "and the log"
    assert sorted(drain(successor, END_MS)) == sorted(stored)


def test_a_flush_is_repeated_until_its_ledgers_can_be_created() -> None:
    cluster = LedgerCluster()
    owner = open_schedule(cluster)
    stored = put_everywhere(owner, "filed")
    flush(owner, NOW_MS)
    stored |= put_everywhere(owner, "waiting")
    cluster.ledgers.faults.create_fails = 0.3
    failures = 0
    for _ in range(30):
        try:
            flush(owner, NOW_MS)
        except StorageFailed:
            failures += 1
    cluster.ledgers.faults.create_fails = 0.0

    flush(owner, NOW_MS)
    settle(owner, NOW_MS)

    assert failures > 0
    assert sorted(drain(open_schedule(cluster), END_MS)) == sorted(stored)


def test_an_owner_that_was_replaced_in_the_middle_of_a_flush_changes_nothing_any_more() -> None:
    cluster = LedgerCluster()
    owner = open_schedule(cluster)
    stored = put_everywhere(owner, "filed")
    flush(owner, NOW_MS)
    stored |= put_everywhere(owner, "waiting")
    successors: list[DelayStore] = []
    begin_create = cluster.ledgers.begin_create

    def create_and_be_replaced(metadata: dict[str, bytes]) -> object:
        cluster.ledgers.begin_create = begin_create  # type: ignore[method-assign]
        made = begin_create(metadata)
        successors.append(open_schedule(cluster))
        return made

    cluster.ledgers.begin_create = create_and_be_replaced  # type: ignore[method-assign,assignment]
    with pytest.raises(StorageFailed):
        flush(owner, NOW_MS)
    [successor] = successors

    assert successor.queries.count() == len(stored)
    assert sorted(drain(successor, END_MS)) == sorted(stored)
