"""What a log does on every medium; what it refuses."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from outbox_broker.journal.journal import frames
from outbox_broker.log.storage import DiskStorage, UnsyncedStorage
from outbox_broker.segments.local import LocalSegments
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import FRAMES_MAX, FrameKind
from outbox_core.journal.journal import SegmentDamaged
from tests.outbox_broker.failing_storage import FailingStorage
from tests.outbox_broker.journal.written_journal import AT_MS, WANTED, WrittenJournal, opened, recovered
from tests.outbox_broker.segments.conftest import LocalMedium
from tests.outbox_broker.segments.gates import Gate, while_held
from tests.outbox_broker.segments.memory_segments import MemoryMedium
from tests.outbox_broker.segments.written_log import Medium


def grown(medium: Medium, *, checkpoints: int = 0, records: int = 12) -> WrittenJournal:
    """A log of several segments, committed record by record, with checkpoints at its end."""
    written = WrittenJournal()
    written.open(medium.open())
    for number in range(records):
        written.append(FrameKind.CHANGE if number % 2 else FrameKind.SCHEDULED, size_bytes=40)
        written.commit()
    for _ in range(checkpoints):
        written.write_checkpoint(parts=2, between=1)
        written.commit()
    return written


def test_a_log_comes_back_over_rolls_checkpoints_and_owners(medium: Medium) -> None:
    written = grown(medium)
    assert len(written.names()) > 2
    written.check_reads()

    for parts in (1, 3, 7):
        written.open(medium.open())
        written.append(FrameKind.SCHEDULED)
        written.write_checkpoint(parts=parts, between=1)
        written.append()
        written.commit()
        written.check_reads()
    written.journal.seal()

    assert recovered(opened(medium.open())) == written.records


def test_what_others_append_between_the_parts_of_a_checkpoint_is_replayed(medium: Medium) -> None:
    written = grown(medium)
    captured = written.journal.end
    written.write_checkpoint(parts=3, between=2)
    written.commit()

    journal = opened(medium.open())
    assert journal.recovered.checkpoint is not None
    assert journal.recovered.checkpoint.captured == captured
    assert len([block for block in journal.recovered.blocks(WANTED) if block.position >= captured]) == 8
    assert recovered(journal) == written.records


def test_only_blocks_of_wanted_kinds_are_replayed_and_a_change_comes_once(medium: Medium) -> None:
    written = grown(medium)
    journal = opened(medium.open())

    found = [frame.payload for block in journal.recovered.blocks({FrameKind.CHANGE}) for frame in block.frames]

    assert found == written.records[1::2]


def test_segments_are_dropped_only_before_the_older_of_the_two_newest_checkpoints(medium: Medium) -> None:
    written = grown(medium)
    count = len(written.names())
    written.write_checkpoint(parts=2)
    assert not written.journal.drop_before(written.journal.end)
    captured = written.journal.end
    for _ in range(6):
        written.append(size_bytes=100)
        written.commit()
    written.write_checkpoint(parts=2)

    assert not written.journal.drop_before(0)
    dropped = written.journal.drop_before(written.journal.end)

    assert 0 < len(dropped) <= count
    assert written.journal.segments[0].first <= captured
    with pytest.raises(StorageFailed, match="dropped"):
        written.journal.read(0, 10)
    written.open(medium.open())
    assert written.names()[0] != dropped[0].name


def test_without_syncs_nothing_is_dropped_for_checkpoints_that_only_the_newest_segment_has(tmp_path: Path) -> None:
    segments = LocalSegments.open(tmp_path, storage=UnsyncedStorage(DiskStorage()))
    written = WrittenJournal()
    written.open(segments)
    for _ in range(12):
        written.append(size_bytes=100)
        written.commit()
    written.write_checkpoint(parts=1)
    written.write_checkpoint(parts=1)
    assert len(written.names()) > 1

    assert not written.journal.drop_before(written.journal.end)

    for _ in range(8):
        written.append(size_bytes=100)
        written.commit()
    assert written.journal.drop_before(written.journal.end)
    segments.close()


class FailsBehindWrites(FailingStorage):
    """While it `is_failing`, a write is there, and is told to have failed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_failing = False

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        super().write(descriptor, data, position=position)
        if self.is_failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_what_is_left_of_a_roll_that_failed_is_replaced_before_anything_else_is_appended(tmp_path: Path) -> None:
    disk = FailsBehindWrites()
    segments = LocalSegments.open(tmp_path, storage=disk)
    written = WrittenJournal()
    written.open(segments, segment_bytes=1 << 20)
    written.append()
    written.commit()
    written.journal.roll()
    disk.is_failing = True
    disk.fail("remove")
    with pytest.raises(StorageFailed):
        written.append(size_bytes=50)
    disk.mend()
    disk.is_failing = False

    for _ in range(3):
        written.append()
        written.commit()

    segments.close()
    again = LocalSegments.open(tmp_path)
    written.open(again, segment_bytes=1 << 20)
    again.close()


def test_an_owner_drops_nothing_before_it_has_written_a_checkpoint_of_its_own(medium: Medium) -> None:
    written = grown(medium, checkpoints=2)
    written.open(medium.open())
    names = written.names()

    assert not written.journal.drop_before(written.journal.end)
    assert written.names() == names


def test_a_damaged_checkpoint_leaves_the_one_before_it_to_count(memory: MemoryMedium) -> None:
    written = grown(memory, checkpoints=3)
    written.journal.drop_before(written.journal.end)
    written.journal.seal()

    for is_last in (False, True):
        newest = opened(memory.open()).recovered.checkpoint
        assert newest is not None
        damage(memory, newest.parts[0])
        if not is_last:
            assert recovered(opened(memory.open())) == written.records

    with pytest.raises(SegmentDamaged, match="no checkpoint is whole"):
        opened(memory.open())


def damage(memory: MemoryMedium, found: bytes) -> None:
    """Flip a bit in the last place where these bytes are."""
    for name in sorted(memory.segments, reverse=True):
        position = memory.segments[name].data.rfind(found)
        if position >= 0:
            memory.flip(name, position)
            return
    pytest.fail("the bytes are nowhere")


def test_the_first_checkpoint_may_be_lost_as_the_log_begins_with_its_beginning(memory: MemoryMedium) -> None:
    written = grown(memory, checkpoints=1)
    found = opened(memory.open()).recovered.checkpoint
    assert found is not None
    damage(memory, found.parts[-1])

    journal = opened(memory.open())
    assert journal.recovered.checkpoint is None
    assert recovered(journal) == written.records


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_segment_that_is_missing_is_refused_by_name(memory: MemoryMedium, number: int) -> None:
    written = grown(memory, records=24)
    name = written.names()[number]
    del memory.segments[name]

    with pytest.raises(SegmentDamaged, match=name if number else "no checkpoint is whole"):
        opened(memory.open())


def test_a_segment_that_ends_before_the_next_one_begins_is_refused(memory: MemoryMedium) -> None:
    written = grown(memory)
    first, second, *_ = written.names()
    for name, size_bytes in ((second, 1), (second, 44 + 16 + 40), (first, 1)):
        kept = bytes(memory.segments[name].data)
        del memory.segments[name].data[-size_bytes:]
        with pytest.raises(SegmentDamaged, match=f"{name}: "):
            recovered(opened(memory.open()))
        memory.segments[name].data[:] = kept


def test_a_segment_begun_behind_one_whose_end_was_lost_is_removed_as_nothing_in_it_was_acknowledged(
    memory: MemoryMedium, caplog: pytest.LogCaptureFixture
) -> None:
    written = WrittenJournal()
    written.open(memory.open(), segment_bytes=100)
    written.append()
    written.commit()
    written.append()
    written.append()
    assert len(written.names()) == 2
    del memory.segments[written.names()[0]].data[-1:]

    with caplog.at_level(logging.WARNING):
        written.open(memory.open(), segment_bytes=100)

    assert written.records == [b"0-xxxxxxxx"]
    assert "unacknowledged_segment_removed" in caplog.text
    written.append()
    written.append()
    written.commit()
    written.open(memory.open())
    assert len(written.records) == 3


@pytest.mark.parametrize("seed", range(10))
def test_what_a_killed_owner_left_to_the_page_cache_is_made_durable_before_what_follows_it(seed: int) -> None:
    memory, written = MemoryMedium(seed), WrittenJournal()
    written.open(memory.open(), segment_bytes=100)
    written.append()
    written.commit()
    written.append()
    written.append()
    assert len(written.names()) == 2

    written.open(memory.open(), segment_bytes=1000)
    assert len(written.records) == 3
    written.append()
    written.commit()
    memory.kill()

    written.open(memory.open())
    assert len(written.records) == 4


def test_an_append_never_waits_for_a_sync_and_what_a_roll_began_is_not_acknowledged_before_the_rest(
    local: LocalMedium,
) -> None:
    written, gate = WrittenJournal(), Gate()
    written.open(local.open(), segment_bytes=150)
    written.append()
    written.commit()
    written.append(size_bytes=60)
    durable: list[int] = []
    ends: list[int] = []
    local.storage.before = lambda call: gate.hold() if call == "sync" else None

    def meanwhile() -> None:
        ends.append(written.journal.end)
        written.append()
        durable.append(written.journal.durable)
        assert len(written.names()) == 2

    assert while_held(gate, written.journal.commit, meanwhile) == []

    assert durable[0] < ends[0] <= written.journal.durable < written.journal.end
    local.storage.calls.clear()
    written.commit()
    assert local.storage.calls.count("sync") == 1, "the first one is durable"
    written.open(local.open())
    assert len(written.records) == 3


def test_a_log_does_not_roll_while_the_roll_before_is_not_durable(medium: Medium) -> None:
    written = WrittenJournal()
    written.open(medium.open(), segment_bytes=100)
    written.append()
    written.commit()
    for _ in range(20):
        written.append()
    assert len(written.names()) == 2

    written.commit()
    written.append()
    assert len(written.names()) == 3
    written.commit()
    written.open(medium.open())
    assert len(written.records) == 22


def test_a_roll_that_is_asked_for_comes_with_the_next_block(medium: Medium) -> None:
    written = WrittenJournal()
    written.open(medium.open(), segment_bytes=10_000)
    written.journal.roll()
    for _ in range(3):
        written.append()
        written.commit()
    assert len(written.names()) == 1 + ("log-000000000002" in written.names())

    written.journal.roll()
    written.append()
    written.append()
    written.commit()
    count = len(written.names())
    written.append()
    assert len(written.names()) == count
    written.commit()
    written.open(medium.open())
    assert len(written.records) == 6


def test_a_segment_begins_with_the_block_that_it_is_to_begin_with(medium: Medium) -> None:
    written = WrittenJournal()
    written.open(medium.open(), segment_bytes=10_000)
    journal = written.journal
    footer = frames(FrameKind.FOOTER, [b"footer"], first_number=7)
    first = journal.append(frames(FrameKind.SCHEDULED, [b"one"]), at_ms=AT_MS)
    journal.commit()
    behind = journal.append(frames(FrameKind.SCHEDULED, [b"two"]), at_ms=AT_MS, begin_with=footer)
    journal.commit()
    assert [segment.first for segment in journal.segments] == [0], "no roll is due"

    end = journal.append(frames(FrameKind.SCHEDULED, [b"three"]), at_ms=AT_MS, roll=True, begin_with=footer)
    journal.commit()

    assert 0 < first < behind < end
    assert [segment.first for segment in journal.segments] == [0, behind]
    newest = journal.segments[-1]
    found = list(journal.blocks_of(newest, {FrameKind.FOOTER, FrameKind.SCHEDULED}))
    assert [(block.kind, block.frames[0].payload) for block in found] == [
        (FrameKind.FOOTER, b"footer"), (FrameKind.SCHEDULED, b"three"),
    ]  # fmt: skip
    assert (found[0].position, found[-1].end) == (behind, end)


def test_a_full_disk_at_an_opening_keeps_nothing_from_being_read_and_the_log_goes_on_with_room(
    local: LocalMedium, memory: MemoryMedium
) -> None:
    for medium in (local, memory):
        written = grown(medium)
        local.storage.room_bytes = memory.faults.room_bytes = 10
        written.open(medium.open())
        for _ in range(3):
            with pytest.raises(StorageFailed, match="No space left on device"):
                written.append()
            with pytest.raises(StorageFailed, match="No space left on device"):
                written.write_checkpoint(parts=2)
        local.storage.room_bytes = memory.faults.room_bytes = None

        written.append()
        written.write_checkpoint(parts=2)
        written.commit()
        written.open(medium.open())
        assert len(written.records) == 13


def test_a_roll_without_room_leaves_the_log_as_it_was(local: LocalMedium, memory: MemoryMedium) -> None:
    for medium in (local, memory):
        written = grown(medium)
        written.journal.roll()
        local.storage.room_bytes = memory.faults.room_bytes = 50
        with pytest.raises(StorageFailed, match="No space left on device"):
            written.append()
        names = written.names()
        local.storage.room_bytes = memory.faults.room_bytes = None

        written.append()
        written.commit()
        assert written.names()[: len(names)] == names
        written.open(medium.open())
        assert len(written.records) == 13


def test_a_checkpoint_without_room_counts_for_nothing_and_is_no_reason_for_another(memory: MemoryMedium) -> None:
    written = grown(memory, checkpoints=1)
    before = opened_checkpoint(memory)
    written.open(memory.open())
    assert written.journal.grown_bytes > 0
    memory.faults.room_bytes = 450

    with pytest.raises(StorageFailed, match="No space left on device"):
        written.write_checkpoint(parts=3)

    memory.faults.room_bytes = None
    assert written.journal.grown_bytes == 0
    written.append()
    written.commit()
    assert opened_checkpoint(memory) == before
    written.open(memory.open())
    assert not written.journal.drop_before(written.journal.end)


def test_what_a_log_has_grown_by_is_the_blocks_since_the_newest_checkpoint_but_its_parts(medium: Medium) -> None:
    written = grown(medium, checkpoints=1)
    assert 0 < written.journal.grown_bytes < 400, "two records came between the parts, and the beginning of a segment"
    before, captured = written.journal.grown_bytes, written.journal.end

    written.append(size_bytes=100)
    written.commit()

    grown_bytes = before + written.journal.end - captured
    assert written.journal.grown_bytes == grown_bytes
    written.open(medium.open())
    assert written.journal.grown_bytes == grown_bytes, "also after an opening"
    written.write_checkpoint(parts=3)
    assert written.journal.grown_bytes == 0


def opened_checkpoint(memory: MemoryMedium) -> object:
    return opened(memory.open()).recovered.checkpoint


def test_without_syncs_nothing_is_known_to_be_durable_over_rolls_and_openings(tmp_path: Path) -> None:
    written = WrittenJournal()
    for _ in range(3):
        segments = LocalSegments.open(tmp_path, storage=UnsyncedStorage(DiskStorage()))
        written.open(segments, segment_bytes=100)
        for _ in range(4):
            written.append()
            written.commit()
        assert written.journal.durable == 0
        assert len(written.names()) > 1
        segments.close()


def test_a_sealed_log_takes_no_more_and_all_of_it_is_durable(medium: Medium) -> None:
    written = grown(medium)
    written.append()
    written.journal.seal()
    written.acknowledged = len(written.records)
    written.journal.seal()
    written.journal.commit()

    with pytest.raises(StorageFailed, match="sealed"):
        written.append()
    written.open(medium.open())


def test_an_empty_log_can_be_sealed_committed_read_and_dropped(medium: Medium) -> None:
    journal = opened(medium.open())
    assert (journal.recovered.checkpoint, list(journal.recovered.blocks(WANTED)), journal.end) == (None, [], 0)
    journal.resume()
    journal.commit()
    assert not journal.drop_before(10)
    with pytest.raises(StorageFailed):
        journal.read(0, 1)
    journal.seal()
    with pytest.raises(StorageFailed, match="sealed"):
        journal.append(frames(FrameKind.CHANGE, [b"x"]), at_ms=AT_MS)


def test_what_no_block_can_hold_is_refused_before_anything_is_written(memory: MemoryMedium) -> None:
    journal = opened(memory.open())
    journal.resume()

    for kind, count in (
        (FrameKind.MESSAGE, FRAMES_MAX + 1),
        (FrameKind.CHANGE, FRAMES_MAX // 2 + 1),
        (FrameKind.MESSAGE, 0),
    ):
        with pytest.raises(ValueError, match="a block has"):
            journal.append(frames(kind, [b"x"] * count), at_ms=AT_MS)
    with pytest.raises(ValueError, match="a payload has"):
        frames(FrameKind.MESSAGE, [b"x", b""])
    with pytest.raises(ValueError, match="a checkpoint has"):
        journal.write_checkpoint([], captured=0, at_ms=AT_MS, lock=nullcontext())
    assert memory.segments == {}


def test_a_later_owner_fences_an_earlier_one(medium: Medium) -> None:
    first = grown(medium)
    second = WrittenJournal()
    second.records = list(first.records)
    second.open(medium.open())

    def append_late() -> None:
        first.append()
        first.commit()

    with pytest.raises(StorageFailed):
        append_late()

    second.append()
    second.commit()
    second.open(medium.open())
    assert len(second.records) == 13
