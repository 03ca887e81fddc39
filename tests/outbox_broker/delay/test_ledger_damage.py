"""Entries of ledgers of which no copy matches its checksum: told, set aside, or refused, as damage of files is."""

from __future__ import annotations

import pytest

from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.segments.ledger import LedgerSegments
from outbox_broker.segments.ledger_records import CHUNK_BYTES_MAX
from outbox_broker.segments.ledger_view import LedgerView
from outbox_broker.segments.port import RecordDamaged, read_record
from outbox_core.journal.block import BLOCK_HEAD_BYTES, FRAME_HEAD_BYTES
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.runtime.logs import event_name
from tests.outbox_broker.delay.conftest import DAY_MS, NOW_MS, drain, flush, put, settle, timed
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster
from tests.outbox_broker.segments.written_log import WrittenSegment, payloads


@pytest.fixture
def cluster() -> LedgerCluster:
    return LedgerCluster()


def ledger_of(cluster: LedgerCluster, segment: str) -> int:
    [ledger] = [
        ledger_id
        for ledger_id, one in cluster.ledgers.ledgers.items()
        if one.metadata["outbox-segment"] == segment.encode()
    ]
    return ledger


def with_segment(cluster: LedgerCluster, *payloads_: bytes) -> tuple[LedgerSegments, WrittenSegment]:
    """A sealed segment, of which each payload has an entry."""
    segments = cluster.open()
    written = WrittenSegment.create(segments)
    for payload in payloads_:
        written.append_committed(payload)
    written.writer.seal()
    return segments, written


def damage_bucket(cluster: LedgerCluster, needle: bytes) -> None:
    """Flip a bit of the entry, in a bucket, that has these bytes."""
    [(ledger_id, number, at)] = {
        (ledger_id, number, at)
        for ledger_id, one in cluster.ledgers.ledgers.items()
        if one.metadata["outbox-segment"].startswith((b"l0", b"l1"))
        for bookie in cluster.ledgers.bookies
        for number, entry in bookie.entries.get(ledger_id, {}).items()
        if (at := entry.find(needle)) >= 0
    }
    cluster.ledgers.damage(ledger_id, number, at=at)


def with_days(cluster: LedgerCluster) -> None:
    """Three messages on each of three days, in a bucket each."""
    schedule = DelayStore.open(cluster.open())
    for day in (1, 2, 3):
        put(schedule, NOW_MS, *(timed(f"d{day}-{number}", NOW_MS + day * DAY_MS) for number in range(3)))
        flush(schedule, NOW_MS)
    settle(schedule, NOW_MS)


def test_a_lost_entry_is_damage_of_its_frame_alone_with_what_is_left_of_it(cluster: LedgerCluster) -> None:
    segments, written = with_segment(cluster, b"first", b"second")
    cluster.ledgers.damage(ledger_of(cluster, "a"), 0)
    first, second = written.places

    with pytest.raises(RecordDamaged, match=f"a: damaged record at {first.position}") as raised:
        read_record(segments, first)

    assert raised.value.found == b"firsu"
    assert read_record(segments, second) == b"second"


def test_of_a_frame_of_several_entries_all_but_the_lost_one_is_found(cluster: LedgerCluster) -> None:
    payload = bytes(range(256)) * (2 * CHUNK_BYTES_MAX // 256) + b"tail"
    segments, written = with_segment(cluster, payload)
    cluster.ledgers.damage(ledger_of(cluster, "a"), 1)

    with pytest.raises(RecordDamaged) as raised:
        read_record(segments, written.places[0])

    changed = bytearray(payload)
    changed[2 * CHUNK_BYTES_MAX - 1 - BLOCK_HEAD_BYTES - FRAME_HEAD_BYTES] ^= 1
    assert raised.value.found == bytes(changed)


def test_a_lost_entry_costs_its_frames_and_the_blocks_around_it_are_whole(cluster: LedgerCluster) -> None:
    segments, _ = with_segment(cluster, *(b"%d" % number for number in range(100)))
    cluster.ledgers.damage(ledger_of(cluster, "a"), 50)
    cluster.ledgers.say_confirmed()
    view = LedgerView.open(cluster.shard())
    assert view is not None

    for reader in (segments, view):
        found = list(reader.blocks("a"))
        assert [one.damaged for one in found] == [int(number == 50) for number in range(100)]
        assert payloads(reader) == [b"%d" % number for number in range(100) if number != 50]


@pytest.mark.parametrize("lost", [{0}, {1}, {49}, {50}, {98}, {99}, {30, 31, 32}, {0, 49, 50, 99}])
@pytest.mark.parametrize("is_backward", [False, True])
def test_entries_that_no_bookie_has_any_more_are_damage_of_their_records_alone(
    cluster: LedgerCluster, lost: set[int], *, is_backward: bool
) -> None:
    stored = [b"%d" % number * (1 + number % 7) for number in range(100)]
    segments, written = with_segment(cluster, *stored)
    for number in lost:
        cluster.ledgers.flip_byte(ledger_of(cluster, "a"), number)

    for owner in (segments, cluster.open()):
        for number in sorted(range(100), reverse=is_backward):
            if number in lost:
                with pytest.raises(RecordDamaged, match="a: damaged record at"):
                    read_record(owner, written.places[number])
            else:
                assert read_record(owner, written.places[number]) == stored[number]
        with pytest.raises(SegmentDamaged, match=r"a: ledger .* misses entries"):
            payloads(owner)


def test_a_shard_with_a_damaged_manifest_is_refused(cluster: LedgerCluster) -> None:
    with_segment(cluster, b"record")
    cluster.ledgers.damage(ledger_of(cluster, "manifest"), 0)

    with pytest.raises(SegmentDamaged, match=r"shard 1-0007: its manifest is damaged: entry 0"):
        cluster.open()


def test_a_flipped_bit_of_all_copies_costs_its_message_alone_and_is_said_and_everything_else_fires(
    cluster: LedgerCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with_days(cluster)
    damage_bucket(cluster, b"payload of d2-1")

    schedule = DelayStore.open(cluster.open())

    came = [f"d{day}-{number}" for day in (1, 2, 3) for number in range(3)]
    came.remove("d2-1")
    assert drain(schedule, NOW_MS + 4 * DAY_MS) == came
    for one in (schedule, DelayStore.open(cluster.open())):
        figures = one.queries.figures()
        assert (figures["quarantined_runs"], figures["quarantined_messages"], figures["scheduled"]) == (1, 1, 0)
    [told] = [one for one in caplog.records if event_name(one) == "run_quarantined"]
    assert vars(told)["messages"] == 1
