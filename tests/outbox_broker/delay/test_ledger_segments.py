"""Segments on ledgers: chunks, fences, final failures, rolled manifests, deletions, and foreign manifests."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from outbox_broker.segments.ledger_records import CHUNK_BYTES_MAX
from outbox_broker.segments.ledger_segments import LedgerSegmentStore
from outbox_broker.segments.ledgers import ManifestNode
from outbox_broker.segments.segment_store import SegmentAppend, WriterFenced
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.journal.journal import SegmentDamaged
from tests.outbox_broker.delay.ledger_stores import SHARD, LedgerCluster
from tests.outbox_broker.delay.memory_ledgers import Calls, Faults, MemoryWriter
from tests.outbox_broker.delay.test_shared_syncs import Gate

DAY_MS = 24 * 3_600_000
WAIT_SECONDS = 60


@pytest.fixture
def cluster() -> LedgerCluster:
    return LedgerCluster()


def payloads(store: LedgerSegmentStore, name: str) -> list[bytes]:
    return [one.payload for one in store.scan(name)]


def append_synced(store: LedgerSegmentStore, name: str, *records: bytes, position: int = 0) -> int:
    *_, end = store.append(name, records, position=position)
    store.sync([name])
    return end


def node_of(cluster: LedgerCluster) -> dict[str, object]:
    found: dict[str, object] = json.loads(cluster.manifests.nodes[SHARD].value)
    return found


def test_a_record_above_four_mebibytes_takes_several_entries_and_is_read_whole(cluster: LedgerCluster) -> None:
    large = bytes(range(256)) * (3 * CHUNK_BYTES_MAX // 256) + b"tail"
    store = cluster.open()

    first, second, end = store.append("a", [large, b"small"], position=0)
    store.sync(["a"])

    assert (first, second, end) == (0, 4, 5)
    assert store.read("a", first, len(large)) == large
    assert payloads(cluster.open(), "a") == [large, b"small"]


def test_a_record_of_which_only_the_first_entries_arrived_is_a_torn_tail(cluster: LedgerCluster) -> None:
    store = cluster.open()
    end = append_synced(store, "a", b"whole")
    store.append("a", [bytes(3 * CHUNK_BYTES_MAX)], position=end)
    [piece] = [ledger for ledger, meta in cluster.ledgers.ledgers.items() if meta.metadata["outbox-segment"] == b"a"]
    cluster.ledgers.network = [one for one in cluster.ledgers.network if one.number != 2]

    successor = cluster.open()

    assert payloads(successor, "a") == [b"whole"]
    assert cluster.ledgers.ledgers[piece].length in {1, 2}


def test_a_takeover_fences_every_ledger_of_the_shard_at_once(cluster: LedgerCluster) -> None:
    store = cluster.open()
    for number in range(20):
        append_synced(store, f"s-{number}", b"record")
        if number == 3:
            store.seal("s-3")
    cluster.ledgers.recovered.clear()

    cluster.open()

    manifest, pieces = cluster.ledgers.recovered
    assert len(manifest) == 1
    assert len(pieces) == 19
    for number in range(20):
        with pytest.raises(WriterFenced):
            append_synced(store, f"s-{number}", b"late", position=1)


def test_no_more_ledgers_are_open_than_a_takeover_may_fence(cluster: LedgerCluster) -> None:
    store = cluster.open(open_ledgers_max=3)
    for number in range(10):
        store.append(f"s-{number}", [b"record"], position=0)
    append_synced(store, "last", b"record")
    closed = [
        meta.metadata["outbox-segment"].decode() for meta in cluster.ledgers.ledgers.values() if meta.length is not None
    ]
    cluster.ledgers.recovered.clear()

    successor = cluster.open()

    assert len(closed) >= 7
    assert len(cluster.ledgers.recovered[1]) <= 4  # one more is being closed
    assert [payloads(successor, name) for name in closed] == [[b"record"]] * len(closed)


def test_of_more_buckets_than_ledgers_may_be_open_a_part_goes_on_in_its_ledgers(cluster: LedgerCluster) -> None:
    store = cluster.open(open_ledgers_max=8)
    ends = dict.fromkeys((f"s-{number}" for number in range(16)), 0)
    made = []
    for _ in range(6):
        before = len(cluster.ledgers.ledgers)
        for name in ends:
            ends[name] = append_synced(store, name, b"record", position=ends[name])
        made.append(len(cluster.ledgers.ledgers) - before)

    assert made[0] == 16
    assert max(made[2:]) < 12, "closed longest ago, and needed next, would be all of them"
    assert all(payloads(cluster.open(), name) == [b"record"] * 6 for name in ends)


def test_segments_that_are_appended_to_at_once_are_named_by_one_change_that_their_sync_waits_for(
    cluster: LedgerCluster,
) -> None:
    store = cluster.open()
    appends = [SegmentAppend(f"s-{number}", [b"%d" % number, b"more"], 0) for number in range(20)]
    calls = cluster.ledgers.calls = Calls()

    positions = store.append_all(appends)

    assert calls.counts["confirm"] == 0
    store.sync([one.name for one in appends])
    assert calls.counts["append"] == 20 * 2 + 1  # records; and one change of the manifest
    assert positions == [[0, 1, 2]] * 20
    successor = cluster.open()
    assert [payloads(successor, f"s-{number}") for number in range(20)] == [[b"%d" % n, b"more"] for n in range(20)]


@pytest.mark.parametrize(
    ("records", "fillers"),
    [([b"r"] * 16, 0), ([b"r"] * 17, 1), ([bytes(8_000)] * 2, 0), ([bytes(9_000)] * 2, 1), ([bytes(70_000)], 0)],
)
def test_behind_many_or_large_entries_that_were_sent_together_one_more_makes_known_that_they_are_confirmed(
    cluster: LedgerCluster, records: list[bytes], fillers: int
) -> None:
    store = cluster.open()
    calls = cluster.ledgers.calls = Calls()

    *_, end = store.append("a", records, position=0)
    for _ in range(2):
        store.sync(["a"])

    assert calls.counts["append"] == len(records) + 1 + fillers  # and one change of the manifest
    store.append("a", [b"next"], position=end)
    store.sync(["a"])
    assert payloads(cluster.open(), "a") == [*records, b"next"]


def test_if_one_of_many_ledgers_cannot_be_created_nothing_counts_and_the_append_can_be_repeated(
    cluster: LedgerCluster,
) -> None:
    store = cluster.open()
    end = append_synced(store, "s-0", b"before")
    appends = [SegmentAppend(f"s-{n}", [b"record"], end if n == 0 else 0) for n in range(12)]
    cluster.ledgers.faults.create_fails = 0.5
    with pytest.raises(StorageFailed, match="enough bookies"):
        store.append_all(appends)
    cluster.ledgers.faults.create_fails = 0.0

    store.append_all(appends)
    store.sync([one.name for one in appends])

    successor = cluster.open()
    assert payloads(successor, "s-0") == [b"before", b"record"]
    assert all(payloads(successor, f"s-{n}") == [b"record"] for n in range(1, 12))


def test_a_segment_is_appended_to_once_at_a_time(cluster: LedgerCluster) -> None:
    with pytest.raises(ValueError, match="two appends"):
        cluster.open().append_all([SegmentAppend("a", [b"1"], 0), SegmentAppend("a", [b"2"], 1)])


def test_one_entry_follows_those_that_were_sent_together_once_they_are_confirmed(cluster: LedgerCluster) -> None:
    store = cluster.open()
    records = [b"%d" % number for number in range(17)]
    *_, end = store.append("a", records, position=0)
    store.sync(["a"])

    assert len([one for one in cluster.ledgers.network if one.number == 17]) == 3
    *_, end = store.append("a", [b"17"], position=end)
    store.sync(["a"])

    assert end == 19
    assert payloads(store, "a") == payloads(cluster.open(), "a") == [*records, b"17"]


def test_after_a_failed_sync_only_a_higher_epoch_writes(cluster: LedgerCluster) -> None:
    store = cluster.open()
    end = append_synced(store, "a", b"confirmed")
    store.append("a", [b"in doubt"], position=end)
    cluster.ledgers.faults.lost = 1.0
    with pytest.raises(StorageFailed, match="open the shard again"):
        store.sync(["a"])
    cluster.ledgers.faults.lost = 0.0

    for refused in (
        lambda: store.append("a", [b"x"], position=end),
        lambda: store.append("b", [b"x"], position=0),
        lambda: store.sync(()),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(StorageFailed, match="open the shard again"):
            refused()
    successor = cluster.open()

    assert successor.epoch == store.epoch + 1
    assert payloads(successor, "a")[0] == b"confirmed"


def test_a_fence_that_looks_like_a_lack_of_bookies_is_found_in_the_manifest(cluster: LedgerCluster) -> None:
    store = cluster.open()
    end = append_synced(store, "a", b"record")
    cluster.open()
    cluster.ledgers.faults.disguised_fence = 1.0
    store.append("a", [b"late"], position=end)

    with pytest.raises(WriterFenced):
        store.sync(["a"])


def test_a_ledger_that_cannot_be_created_fails_one_append_and_no_more(cluster: LedgerCluster) -> None:
    store = cluster.open()
    end = append_synced(store, "a", b"1")
    cluster.ledgers.faults.create_fails = 1.0

    with pytest.raises(StorageFailed, match="enough bookies"):
        store.append("b", [b"x"], position=0)
    append_synced(store, "a", b"2", position=end)
    cluster.ledgers.faults.create_fails = 0.0
    append_synced(store, "b", b"x")

    assert payloads(store, "a") == [b"1", b"2"]
    assert payloads(store, "b") == [b"x"]


def test_a_long_manifest_goes_on_in_another_ledger(cluster: LedgerCluster) -> None:
    store = cluster.open(manifest_changes_max=5)
    before = node_of(cluster)
    for number in range(23):
        append_synced(store, f"s-{number}", b"%d" % number)

    after = node_of(cluster)
    assert after["epoch"] == before["epoch"]
    assert after["ledger"] != before["ledger"]
    assert before["ledger"] not in cluster.ledgers.ledgers
    successor = cluster.open()
    assert [payloads(successor, f"s-{number}") for number in range(23)] == [[b"%d" % n] for n in range(23)]


def test_of_two_processes_that_take_one_shard_at_once_one_stops(cluster: LedgerCluster) -> None:
    append_synced(cluster.open(), "a", b"record")
    winner: list[LedgerSegmentStore] = []
    write = cluster.manifests.write

    def write_after_another(shard: str, value: bytes, *, version: int | None) -> int | None:
        cluster.manifests.write = write  # type: ignore[method-assign]
        winner.append(cluster.open())
        return write(shard, value, version=version)

    cluster.manifests.write = write_after_another  # type: ignore[method-assign]
    with pytest.raises(WriterFenced):
        cluster.open()

    assert payloads(winner[0], "a") == [b"record"]
    assert append_synced(winner[0], "a", b"more", position=1) == 2


def test_ledgers_of_this_epoch_are_deleted_at_once_and_those_of_earlier_ones_a_day_after_it(
    cluster: LedgerCluster,
) -> None:
    store = cluster.open()
    append_synced(store, "old", b"record")
    append_synced(store, "kept", b"record")
    successor = cluster.open()
    append_synced(successor, "new", b"record")
    before = set(cluster.ledgers.ledgers)

    successor.delete(["new", "old"])
    assert len(before - set(cluster.ledgers.ledgers)) == 1

    cluster.clock.advance(DAY_MS - 1)
    assert cluster.sweeper().sweep().deleted == []
    cluster.clock.advance(1)
    append_synced(successor, "later", b"record")
    report = cluster.sweeper().sweep()

    assert len(report.deleted) == 2  # of "old", and the manifest ledger of the first epoch
    assert payloads(successor, "kept") == [b"record"]
    assert payloads(cluster.open(), "kept") == [b"record"]


def test_a_paused_writer_is_refused_though_all_bookies_restarted_and_its_log_was_deleted(
    cluster: LedgerCluster,
) -> None:
    paused = cluster.open()
    end = append_synced(paused, "log-1", b"record")
    successor = cluster.open()
    successor.delete(["log-1"])
    cluster.sweeper().sweep()
    cluster.ledgers.restart_bookies()
    paused.append("log-1", [b"late"], position=end)

    with pytest.raises(WriterFenced):
        paused.sync(["log-1"])


def test_the_model_forgets_the_fence_of_a_deleted_ledger_as_bookies_do(cluster: LedgerCluster) -> None:
    paused = cluster.open()
    end = append_synced(paused, "log-1", b"record")
    successor = cluster.open()
    successor.delete(["log-1"])
    cluster.clock.advance(DAY_MS)
    append_synced(successor, "later", b"record")
    cluster.sweeper().sweep()
    cluster.ledgers.restart_bookies()
    paused.append("log-1", [b"late"], position=end)

    paused.sync(["log-1"])  # acknowledged: this is what the day is for


def test_a_sweep_deletes_orphans_of_dead_takeovers_and_leaves_other_clusters_alone(cluster: LedgerCluster) -> None:
    foreign = cluster.ledgers.begin_create({"application": b"another"})().ledger_id
    other = cluster.ledgers.begin_create(cluster.shard(cluster="others").metadata(epoch=1, segment="a"))().ledger_id
    unopened = cluster.shard("1-0008").metadata(epoch=1, segment="manifest")
    never_opened = cluster.ledgers.begin_create(unopened)().ledger_id
    orphan = cluster.ledgers.begin_create(cluster.shard().metadata(epoch=1, segment="a"))().ledger_id
    append_synced(cluster.open(), "a", b"record")
    store = cluster.open()
    cluster.clock.advance(DAY_MS)

    assert set(cluster.sweeper().sweep(dry_run=True).deleted) >= {orphan, never_opened}
    assert orphan in cluster.ledgers.ledgers
    cluster.sweeper().sweep()

    assert not {orphan, never_opened} & cluster.ledgers.ledgers.keys()
    assert {foreign, other} <= cluster.ledgers.ledgers.keys()
    assert payloads(store, "a") == [b"record"]


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        (lambda node: {**node, "format": 2}, "upgrade this node"),
        (lambda node: {**node, "cluster": "others"}, "this cluster's own ZooKeeper path"),
        (lambda _: {"host": "n1"}, "outbox delay init"),
    ],
)
def test_a_foreign_manifest_is_refused_by_an_error_that_names_the_cure(
    cluster: LedgerCluster, change: Callable[[dict[str, object]], dict[str, object]], cure: str
) -> None:
    cluster.open()
    cluster.manifests.nodes[SHARD] = ManifestNode(json.dumps(change(node_of(cluster))).encode(), 3)

    with pytest.raises(ConfigurationError, match=cure):
        cluster.open()
    assert cluster.manifests.nodes[SHARD].version == 3


def test_an_entry_that_no_bookie_has_any_more_is_damage_of_its_record_alone(cluster: LedgerCluster) -> None:
    store = cluster.open()
    first, second, _ = store.append("a", [b"first", b"second"], position=0)
    store.sync(["a"])
    store.seal("a")
    [ledger] = [ledger for ledger, meta in cluster.ledgers.ledgers.items() if meta.metadata["outbox-segment"] == b"a"]
    cluster.ledgers.flip_byte(ledger, first)

    with pytest.raises(SegmentDamaged, match="a: damaged record at 0"):
        store.read("a", first, 5)
    assert store.read("a", second, 6) == b"second"


@pytest.mark.parametrize("seed", range(40))
def test_nothing_confirmed_is_lost_whatever_messages_are(seed: int) -> None:
    cluster = LedgerCluster(seed, Faults(lost=0.1, unknown_outcome=0.1, create_fails=0.05, disguised_fence=0.1))
    confirmed: list[bytes] = []
    end = 0
    for epoch in range(12):
        try:
            store = cluster.open(open_ledgers_max=1, manifest_changes_max=2)
            found = payloads(store, "a") if "a" in store.list() else []
            assert found[: len(confirmed)] == confirmed
            confirmed = found
            *_, end = [0, *(one.end for one in store.scan("a"))] if found else [0]
            for number in range(5):
                records = [b"%d-%d-%d" % (epoch, number, part) for part in range(3)]
                *_, end = store.append("a", records, position=end)
                store.append("b", [b"other"], position=0)
                store.sync(["a"])
                confirmed = confirmed + records
        except StorageFailed:
            continue


def writer_of(cluster: LedgerCluster, segment: str) -> MemoryWriter:
    """The writer of a segment's only ledger."""
    named = {
        ledger
        for ledger, meta in cluster.ledgers.ledgers.items()
        if meta.metadata["outbox-segment"] == segment.encode()
    }
    [writer] = [one for one in cluster.ledgers.writers if one.ledger_id in named]
    return writer


def hold_confirms(writer: MemoryWriter) -> Gate:
    """Who waits for entries of a ledger comes to the gate first, once."""
    gate, confirm = Gate(), writer.confirm

    def held(count: int) -> None:
        gate.hold()
        confirm(count)

    writer.confirm = held  # type: ignore[method-assign]
    return gate


def sync(store: LedgerSegmentStore) -> None:
    store.sync(["log-1"])


def read(store: LedgerSegmentStore) -> None:
    with suppress(StorageFailed):
        store.read("log-1", 0, len(b"record"))


def close_to_make_room(store: LedgerSegmentStore) -> None:
    store.append("b", [b"record"], position=0)


@pytest.mark.parametrize("wait", [sync, read, close_to_make_room])
def test_who_waits_for_a_segment_that_is_deleted_meanwhile_does_not_fail_the_store(
    cluster: LedgerCluster, wait: Callable[[LedgerSegmentStore], None]
) -> None:
    store = cluster.open(open_ledgers_max=1)
    store.append("log-1", [b"record"], position=0)
    gate = hold_confirms(writer_of(cluster, "log-1"))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait, store)
        try:
            assert gate.reached.wait(WAIT_SECONDS)
            store.delete(["log-1"])
        finally:
            gate.go.set()
        waiting.result(WAIT_SECONDS)

    append_synced(store, "a", b"more")
    assert payloads(cluster.open(), "a") == [b"more"]


def test_an_error_amid_the_entries_of_a_record_is_final_and_nothing_follows_them(cluster: LedgerCluster) -> None:
    store = cluster.open()
    end = append_synced(store, "a", b"confirmed")
    writer = writer_of(cluster, "a")
    append, sent = writer.append, 0

    def append_one(entry: bytes) -> None:
        nonlocal sent
        sent += 1
        if sent > 1:
            raise MemoryError("Java heap space")
        append(entry)

    writer.append = append_one  # type: ignore[method-assign]
    with pytest.raises(StorageFailed, match="Java heap space"):
        store.append("a", [bytes(2 * CHUNK_BYTES_MAX)], position=end)
    writer.append = append  # type: ignore[method-assign]

    with pytest.raises(StorageFailed, match="open the shard again"):
        append_synced(store, "a", b"acknowledged", position=end)
    assert payloads(cluster.open(), "a") == [b"confirmed"]
