"""Segments on ledgers: entries, fences, final failures, rolled manifests, deletions, and foreign manifests."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from outbox_broker.segments.ledger import ENTRY_BYTES_MAX, UNCONFIRMED_BYTES_MAX, LedgerSegments
from outbox_broker.segments.ledger_records import CHUNK_BYTES_MAX, FILLER
from outbox_broker.segments.ledgers import ManifestNode
from outbox_broker.segments.port import WriterFenced
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.journal.block import SegmentKind
from tests.outbox_broker.segments.gates import Gate, while_held
from tests.outbox_broker.segments.ledger_cluster import SHARD, LedgerCluster
from tests.outbox_broker.segments.memory_ledgers import Calls, Faults, MemoryWriter
from tests.outbox_broker.segments.written_log import WrittenSegment, end_of, names, payloads, read_all

DAY_MS = 24 * 3_600_000
WAIT_SECONDS = 60


@pytest.fixture
def cluster() -> LedgerCluster:
    return LedgerCluster()


def committed(segments: LedgerSegments, name: str, *blocks: bytes) -> WrittenSegment:
    """A segment with blocks, each of which is an entry."""
    written = WrittenSegment.create(segments, name)
    for one in blocks:
        written.append_committed(one)
    return written


def node_of(cluster: LedgerCluster) -> dict[str, object]:
    found: dict[str, object] = json.loads(cluster.manifests.nodes[SHARD].value)
    return found


def ledger_of(cluster: LedgerCluster, segment: str) -> int:
    [ledger] = [
        ledger_id
        for ledger_id, meta in cluster.ledgers.ledgers.items()
        if meta.metadata["outbox-segment"] == segment.encode()
    ]
    return ledger


# -- entries ---------------------------------------------------------------------------------------------------------


def test_what_is_appended_between_two_commits_is_gathered_into_few_entries(cluster: LedgerCluster) -> None:
    written = committed(cluster.open(), "a", b"first")
    calls = cluster.ledgers.calls = Calls()

    for number in range(100):
        written.append(b"%d" % number * 1_000)
    written.commit()

    assert calls.counts["append"] <= 3
    assert payloads(cluster.open())[1:] == [b"%d" % number * 1_000 for number in range(100)]


def test_a_full_entry_is_sent_before_anybody_commits(cluster: LedgerCluster) -> None:
    written = committed(cluster.open(), "a", b"first")
    calls = cluster.ledgers.calls = Calls()

    for _ in range(20):
        written.append(bytes(ENTRY_BYTES_MAX // 4))

    assert 5 <= calls.counts["append"] <= 7
    assert calls.counts["confirm"] == 0


def test_what_is_appended_without_a_commit_fills_no_memory_and_is_not_lost(cluster: LedgerCluster) -> None:
    written = WrittenSegment.create(cluster.open(), "a")

    for _ in range(70):
        written.append(bytes(1024 * 1024))
        ledger = ledger_of(cluster, "a")
        writers = [one for one in cluster.ledgers.writers if one.ledger_id == ledger and one.confirmed]
        confirmed = sum(cluster.ledgers.length_bytes(ledger, one.confirmed - 1) for one in writers)
        assert written.writer.end - confirmed <= UNCONFIRMED_BYTES_MAX + 2 * 1024 * 1024
    written.commit()

    assert payloads(cluster.open()) == [bytes(1024 * 1024)] * 70


def test_a_block_of_which_only_the_first_entries_arrived_is_a_torn_tail(cluster: LedgerCluster) -> None:
    written = committed(cluster.open(), "a", b"whole")
    written.append(bytes(3 * CHUNK_BYTES_MAX))
    ledger = ledger_of(cluster, "a")
    cluster.ledgers.network = [one for one in cluster.ledgers.network if one.number != 2]

    successor = cluster.open()

    assert payloads(successor) == [b"whole"]
    assert cluster.ledgers.ledgers[ledger].length in {1, 2}


@pytest.mark.parametrize(
    ("sizes", "fillers"), [([100] * 100, 0), ([100_000] * 40, 1), ([5_000_000], 1), ([9_000], 0), ([70_000], 0)]
)
def test_behind_many_or_large_entries_one_more_makes_known_that_they_are_confirmed(
    cluster: LedgerCluster, sizes: list[int], fillers: int
) -> None:
    written = committed(cluster.open(), "a", b"first")
    writer = writer_of(cluster, "a")
    sent: list[bytes] = []
    append = writer.append

    def noted(entry: bytes) -> None:
        sent.append(entry)
        append(entry)

    writer.append = noted  # type: ignore[method-assign]
    for size in sizes:
        written.append(bytes(size))
    for _ in range(2):
        written.commit()

    assert sent.count(FILLER) == fillers
    assert payloads(cluster.open()) == [b"first", *(bytes(size) for size in sizes)]


def test_bytes_are_found_by_few_reads_in_a_ledger_of_an_earlier_owner(cluster: LedgerCluster) -> None:
    written = committed(cluster.open(), "a", *(b"%d" % number * 50 for number in range(500)))
    successor = cluster.open()
    calls = cluster.ledgers.calls = Calls()

    assert read_all(successor, written.places[400:410]) == [b"%d" % number * 50 for number in range(400, 410)]

    assert calls.counts["length"] <= 20
    assert calls.counts["read"] <= 20


# -- owners ----------------------------------------------------------------------------------------------------------


def test_a_takeover_fences_every_ledger_of_the_shard_at_once(cluster: LedgerCluster) -> None:
    segments = cluster.open()
    written = []
    for number in range(20):
        written.append(committed(segments, f"s-{number}", b"record"))
        if number == 3:
            written[3].writer.seal()
    cluster.ledgers.recovered.clear()

    cluster.open()

    manifest, ledgers = cluster.ledgers.recovered
    assert len(manifest) == 1
    assert len(ledgers) == 19
    for one in (*written[:3], *written[4:]):
        with pytest.raises(WriterFenced):
            one.append_committed(b"late")


def test_segments_whose_ledgers_are_created_at_once_are_named_before_their_blocks_are_acknowledged(
    cluster: LedgerCluster,
) -> None:
    segments = cluster.open()
    calls = cluster.ledgers.calls = Calls()
    written = [WrittenSegment.create(segments, f"s-{number}") for number in range(20)]
    for number, one in enumerate(written):
        one.append(b"%d" % number, b"more")

    assert (calls.counts["create"], calls.counts["created"]) == (20, 0), "nobody has waited for a ledger"
    assert names(segments) == []
    assert read_all(segments, written[7].places) == [b"7", b"more"]
    for one in written:
        one.commit()

    successor = cluster.open()
    assert [payloads(successor, f"s-{number}") for number in range(20)] == [
        [b"%d" % number, b"more"] for number in range(20)
    ]


def test_of_many_ledgers_that_cannot_be_created_each_is_tried_again_by_the_next_commit(cluster: LedgerCluster) -> None:
    segments = cluster.open()
    written = [WrittenSegment.create(segments, f"s-{number}") for number in range(12)]
    for one in written:
        one.append(b"record")
    cluster.ledgers.faults.create_fails = 0.5
    for _ in range(30):
        for one in written:
            with suppress(StorageFailed):
                one.commit()
    cluster.ledgers.faults.create_fails = 0.0

    for one in written:
        one.commit()

    successor = cluster.open()
    assert [payloads(successor, one.writer.name) for one in written] == [[b"record"]] * 12


def test_after_a_failed_commit_only_a_higher_epoch_writes(cluster: LedgerCluster) -> None:
    segments = cluster.open()
    written = committed(segments, "a", b"confirmed")
    written.append(b"in doubt")
    cluster.ledgers.faults.lost = 1.0
    with pytest.raises(StorageFailed, match="open the shard again"):
        written.commit()
    cluster.ledgers.faults.lost = 0.0

    for refused in (
        lambda: written.append(b"x"),
        lambda: segments.create("b", kind=SegmentKind.BUCKET),
        segments.check,
        lambda: segments.delete(["a"]),
    ):
        with pytest.raises(StorageFailed, match="open the shard again"):
            refused()
    successor = cluster.open()

    assert successor.epoch == segments.epoch + 1
    assert payloads(successor)[0] == b"confirmed"


def test_of_two_processes_that_take_one_shard_at_once_one_stops(cluster: LedgerCluster) -> None:
    committed(cluster.open(), "a", b"record")
    winner: list[LedgerSegments] = []
    write = cluster.manifests.write

    def write_after_another(shard: str, value: bytes, *, version: int | None) -> int | None:
        cluster.manifests.write = write  # type: ignore[method-assign]
        winner.append(cluster.open())
        return write(shard, value, version=version)

    cluster.manifests.write = write_after_another  # type: ignore[method-assign]
    with pytest.raises(WriterFenced):
        cluster.open()

    assert payloads(winner[0]) == [b"record"]
    committed(winner[0], "b", b"more")


def test_an_error_amid_the_entries_of_a_block_is_final_and_nothing_follows_them(cluster: LedgerCluster) -> None:
    written = committed(cluster.open(), "a", b"confirmed")
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
        written.append(bytes(2 * CHUNK_BYTES_MAX))
    writer.append = append  # type: ignore[method-assign]

    with pytest.raises(StorageFailed, match="open the shard again"):
        written.append_committed(b"acknowledged")
    assert payloads(cluster.open()) == [b"confirmed"]


@pytest.mark.parametrize("seed", range(40))
def test_nothing_confirmed_is_lost_whatever_messages_are(seed: int) -> None:
    cluster = LedgerCluster(seed, Faults(lost=0.1, unknown_outcome=0.1, create_fails=0.05, disguised_fence=0.1))
    confirmed: list[bytes] = []
    for epoch in range(12):
        try:
            segments = cluster.open(manifest_changes_max=2)
            logs = [info.name for info in segments.list() if info.name.startswith("log-")]
            found = [payload for name in logs for payload in payloads(segments, name)]
            assert found[: len(confirmed)] == confirmed
            confirmed = found
            first = segments.list()[len(logs) - 1].first + end_of(segments, logs[-1]) if logs else 0
            log = WrittenSegment.create(segments, f"log-{epoch:02d}", first=first)
            for number in range(5):
                some = [b"%d-%d-%d" % (epoch, number, part) for part in range(3)]
                for one in some:
                    log.append(one)
                WrittenSegment.create(segments, f"other-{number}").append_committed(b"other")
                log.commit()
                confirmed = confirmed + some
        except StorageFailed:
            continue


# -- manifests -------------------------------------------------------------------------------------------------------


def test_a_long_manifest_goes_on_in_another_ledger(cluster: LedgerCluster) -> None:
    segments = cluster.open(manifest_changes_max=5)
    before = node_of(cluster)
    for number in range(23):
        committed(segments, f"s-{number}", b"%d" % number)

    after = node_of(cluster)
    assert after["epoch"] == before["epoch"]
    assert after["ledger"] != before["ledger"]
    assert before["ledger"] not in cluster.ledgers.ledgers
    successor = cluster.open()
    assert [payloads(successor, f"s-{number}") for number in range(23)] == [[b"%d" % n] for n in range(23)]


def test_ledgers_of_this_epoch_are_deleted_at_once_and_those_of_earlier_ones_a_day_after_it(
    cluster: LedgerCluster,
) -> None:
    segments = cluster.open()
    committed(segments, "old", b"record")
    committed(segments, "kept", b"record")
    successor = cluster.open()
    committed(successor, "new", b"record")
    before = set(cluster.ledgers.ledgers)

    successor.delete(["new", "old"])
    assert len(before - set(cluster.ledgers.ledgers)) == 1

    cluster.clock.advance(DAY_MS - 1)
    assert cluster.sweeper().sweep().deleted == []
    cluster.clock.advance(1)
    committed(successor, "later", b"record")
    report = cluster.sweeper().sweep()

    assert len(report.deleted) == 2  # of "old", and the manifest ledger of the first epoch
    assert payloads(successor, "kept") == [b"record"]
    assert payloads(cluster.open(), "kept") == [b"record"]


def test_a_paused_owner_is_refused_though_all_bookies_restarted_and_its_log_was_deleted(
    cluster: LedgerCluster,
) -> None:
    written = committed(cluster.open(), "log-1", b"record")
    successor = cluster.open()
    successor.delete(["log-1"])
    cluster.sweeper().sweep()
    cluster.ledgers.restart_bookies()
    written.append(b"late")

    with pytest.raises(WriterFenced):
        written.commit()


def test_the_model_forgets_the_fence_of_a_deleted_ledger_as_bookies_do(cluster: LedgerCluster) -> None:
    written = committed(cluster.open(), "log-1", b"record")
    successor = cluster.open()
    successor.delete(["log-1"])
    cluster.clock.advance(DAY_MS)
    committed(successor, "later", b"record")
    cluster.sweeper().sweep()
    cluster.ledgers.restart_bookies()
    written.append(b"late")

    written.commit()  # acknowledged: this is what the day is for


def test_a_sweep_deletes_orphans_of_dead_takeovers_and_leaves_other_clusters_alone(cluster: LedgerCluster) -> None:
    foreign = cluster.ledgers.begin_create({"application": b"another"})().ledger_id
    other = cluster.ledgers.begin_create(cluster.shard(cluster="others").metadata(epoch=1, segment="a"))().ledger_id
    unopened = cluster.shard("1-0008").metadata(epoch=1, segment="manifest")
    never_opened = cluster.ledgers.begin_create(unopened)().ledger_id
    orphan = cluster.ledgers.begin_create(cluster.shard().metadata(epoch=1, segment="a"))().ledger_id
    committed(cluster.open(), "a", b"record")
    segments = cluster.open()
    cluster.clock.advance(DAY_MS)

    assert set(cluster.sweeper().sweep(dry_run=True).deleted) >= {orphan, never_opened}
    assert orphan in cluster.ledgers.ledgers
    cluster.sweeper().sweep()

    assert not {orphan, never_opened} & cluster.ledgers.ledgers.keys()
    assert {foreign, other} <= cluster.ledgers.ledgers.keys()
    assert payloads(segments) == [b"record"]


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        (lambda node: {**node, "format": 3}, "upgrade this node"),
        (lambda node: {**node, "format": 1}, "earlier format.*empty ZooKeeper path"),
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


# -- several threads -------------------------------------------------------------------------------------------------


def writer_of(cluster: LedgerCluster, segment: str) -> MemoryWriter:
    """The writer of a segment's only ledger."""
    ledger = ledger_of(cluster, segment)
    [writer] = [one for one in cluster.ledgers.writers if one.ledger_id == ledger]
    return writer


def hold_confirms(writer: MemoryWriter) -> Gate:
    """Who waits for entries of a ledger comes to the gate first, once."""
    gate, confirm = Gate(), writer.confirm

    def held(count: int) -> None:
        gate.hold()
        confirm(count)

    writer.confirm = held  # type: ignore[method-assign]
    return gate


@pytest.mark.parametrize("is_sealed", [False, True], ids=["commit", "seal"])
def test_who_waits_for_a_segment_that_is_deleted_meanwhile_does_not_fail_the_shard(
    cluster: LedgerCluster, *, is_sealed: bool
) -> None:
    segments = cluster.open()
    written = committed(segments, "log-1", b"record")
    written.append(b"more")
    gate = hold_confirms(writer_of(cluster, "log-1"))

    raised = while_held(
        gate, written.writer.seal if is_sealed else written.commit, lambda: segments.delete(["log-1"])
    )  # fmt: skip

    assert not raised
    committed(segments, "a", b"more")
    assert payloads(cluster.open()) == [b"more"]


def test_appends_and_reads_wait_for_nobody_while_the_bookies_do_not_confirm(cluster: LedgerCluster) -> None:
    segments = cluster.open()
    written = committed(segments, "a", b"0")
    written.append(b"1")
    gate = hold_confirms(writer_of(cluster, "a"))

    def write_on() -> None:
        with ThreadPoolExecutor(1) as pool:
            for number in range(2, 50):
                pool.submit(written.append, b"%d" % number).result(WAIT_SECONDS)
            found = pool.submit(read_all, segments, written.places[1:]).result(WAIT_SECONDS)
        assert found == [b"%d" % number for number in range(1, 50)]

    raised = while_held(gate, written.commit, write_on)

    assert not raised
    written.commit()
    assert payloads(cluster.open()) == [b"%d" % number for number in range(50)]
