"""A log that is killed at any call, cut at any byte, and damaged at any bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from outbox_broker.journal.journal import frames
from outbox_broker.log.storage import UnsyncedStorage
from outbox_broker.segments.local import LocalSegments
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import FrameKind
from outbox_core.journal.journal import SegmentDamaged
from tests.outbox_broker.delay.failing_disk import Killed
from tests.outbox_broker.journal.written_journal import WANTED, WrittenJournal, opened, recovered
from tests.outbox_broker.powered_storage import PoweredStorage
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster
from tests.outbox_broker.segments.memory_segments import MemoryMedium
from tests.outbox_broker.segments.test_faults import Deaths, LedgerDeaths, LocalDeaths, MemoryDeaths
from tests.outbox_broker.segments.written_log import Medium

CALLS_MAX = 500
MEDIA: dict[str, Callable[[int], Medium]] = {"memory": MemoryMedium, "ledgers": LedgerCluster}


@pytest.fixture(params=["ledgers", "memory", "before", "half", "power"])
def deaths(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Deaths]:
    """Makes a medium anew, by a number."""

    def made(number: int) -> Deaths:
        if request.param == "ledgers":
            return LedgerDeaths(number)
        if request.param == "memory":
            return MemoryDeaths(number)
        return LocalDeaths(tmp_path / str(number), request.param)

    return made


def write(written: WrittenJournal) -> None:
    """Append, commit late, roll, write checkpoints, drop."""
    for number in range(6):
        written.append(FrameKind.CHANGE if number % 2 else FrameKind.SCHEDULED, size_bytes=50)
        if number % 3 == 2:
            written.commit()
    for _ in range(2):
        written.write_checkpoint(parts=3, between=1)
        written.append()
        written.journal.drop_before(written.journal.end)
    written.journal.seal()
    written.acknowledged = len(written.records)


def test_a_kill_at_any_call_loses_nothing_that_was_acknowledged_and_the_log_goes_on(
    deaths: Callable[[int], Deaths],
) -> None:
    for at in range(CALLS_MAX):
        medium, written = deaths(at), WrittenJournal()
        written.open(medium.open(), segment_bytes=200)
        write(written)
        medium.die()
        try:
            written.open(medium.open(at=at), segment_bytes=200)
            write(written)
        except Killed:
            medium.die()
        else:
            assert at > 20, "a history has more calls than this"
            return
        written.open(medium.open(), segment_bytes=200)
        write(written)
        medium.die()
        written.open(medium.open())
        medium.die()
    pytest.fail(f"a history did not end within {CALLS_MAX} calls")


@pytest.mark.parametrize("seed", range(20))
def test_without_syncs_a_power_failure_leaves_a_log_that_opens_with_a_prefix(tmp_path: Path, seed: int) -> None:
    folder, random, disk, written = tmp_path / "log", Random(seed), PoweredStorage(), WrittenJournal()
    segments = LocalSegments.open(folder, storage=UnsyncedStorage(disk))
    written.open(segments, segment_bytes=200)
    for number in range(60):
        written.append(size_bytes=50)
        if random.random() < 0.5:
            written.commit()
        if number % 20 == 19:
            written.write_checkpoint(parts=3, between=1)
            written.journal.drop_before(written.journal.end)
        if number % 6:
            continue

        disk.copy_after_power_cut(folder, tmp_path / str(number), random=random, whole_in=folder.name)
        found = LocalSegments.open(tmp_path / str(number))
        left = WrittenJournal()
        left.records = list(written.records)  # of which nothing was promised but their order
        left.open(found, segment_bytes=200)
        write(left)
        found.close()
    segments.close()


def test_a_tail_that_is_cut_anywhere_leaves_exactly_the_whole_blocks() -> None:
    memory, written = MemoryMedium(), WrittenJournal()
    written.open(memory.open(), segment_bytes=10_000)
    ends = [0]
    for number in range(5):
        written.append(FrameKind.CHANGE if number % 2 else FrameKind.SCHEDULED)
        ends.append(written.journal.end)
    [name] = memory.segments
    whole = bytes(memory.segments[name].data)

    for size in range(1, len(whole)):
        memory.segments[name].data[:] = whole[:size]
        journal = opened(memory.open())
        count = sum(end <= size for end in ends) - 1
        assert recovered(journal) == written.records[:count]
        assert journal.end == ends[count]


def test_a_flipped_bit_costs_no_change_and_no_checkpoint_and_of_the_rest_one_record_that_is_told() -> None:
    memory, written = MemoryMedium(), WrittenJournal()
    written.open(memory.open(), segment_bytes=400)
    write(written)
    assert len(memory.segments) > 1

    for name, stored in memory.segments.items():
        for position in range(len(stored.data)):
            memory.flip(name, position)
            journal = opened(memory.open())
            found = recovered(journal)
            memory.flip(name, position)
            lost = [record for record in written.records if record not in found]
            assert found == [record for record in written.records if record in found]
            assert len(lost) <= 1
            assert not lost or [block.damaged for block in journal.recovered.blocks(WANTED) if block.damaged != 0]


def test_both_copies_of_a_change_lost_are_refused_by_name_and_place(memory: MemoryMedium) -> None:
    written = WrittenJournal()
    written.open(memory.open())
    for _ in range(3):
        written.append()
        written.commit()
    [name] = memory.segments
    data = memory.segments[name].data
    position = data.find(written.records[1])
    memory.flip(name, position)
    assert recovered(opened(memory.open())) == written.records
    memory.flip(name, data.find(written.records[1]))

    with pytest.raises(SegmentDamaged, match=f"{name}: a change of state at \\d+ is lost"):
        recovered(opened(memory.open()))


class JournalHistory(RuleBasedStateMachine):
    """Any history of owners, kills, full disks and calls, on a medium that a seed decides on."""

    kinds = st.sampled_from([FrameKind.CHANGE, FrameKind.SCHEDULED])

    @initialize(medium=st.sampled_from(sorted(MEDIA)), seed=st.integers(0, 1000), segment_bytes=st.integers(60, 900))
    def begin(self, medium: str, seed: int, segment_bytes: int) -> None:
        self.medium = MEDIA[medium](seed)
        self.segment_bytes = segment_bytes
        self.written = WrittenJournal()
        self.open()

    @rule()
    def open(self) -> None:
        """The machine runs on: only the process was killed."""
        self.written.open(self.medium.open(), segment_bytes=self.segment_bytes)

    @rule()
    def power_failure(self) -> None:
        if isinstance(self.medium, MemoryMedium):
            self.medium.kill()
        self.open()

    @rule(kind=kinds, size_bytes=st.integers(10, 300))
    def append(self, kind: FrameKind, size_bytes: int) -> None:
        self.written.append(kind, size_bytes=size_bytes)

    @rule()
    def commit(self) -> None:
        self.written.commit()

    @rule()
    def roll(self) -> None:
        self.written.journal.roll()

    @rule(parts=st.integers(1, 4), between=st.integers(0, 2))
    def checkpoint(self, parts: int, between: int) -> None:
        self.written.write_checkpoint(parts=parts, between=between)

    @rule(part=st.floats(0, 1))
    def drop(self, part: float) -> None:
        self.written.journal.drop_before(int(part * self.written.journal.end))

    @rule()
    def seal(self) -> None:
        self.written.journal.seal()
        self.written.acknowledged = len(self.written.records)
        self.open()

    @rule(room_bytes=st.integers(0, 900), parts=st.integers(1, 3))
    def full_disk(self, room_bytes: int, parts: int) -> None:
        if not isinstance(self.medium, MemoryMedium):
            return
        self.medium.faults.room_bytes = room_bytes
        try:
            self.written.append(size_bytes=100)
            self.written.commit()
            self.written.write_checkpoint(parts=parts, between=1)
        except StorageFailed:
            pass
        finally:
            self.medium.faults.room_bytes = None

    @rule(calls=st.integers(0, 12), parts=st.integers(1, 3))
    def killed_soon(self, calls: int, parts: int) -> None:
        if not isinstance(self.medium, MemoryMedium):
            return
        self.medium.faults.calls_left = calls
        try:
            self.written.append()
            self.written.commit()
            self.written.append(size_bytes=200)
            self.written.write_checkpoint(parts=parts, between=1)
            self.written.journal.drop_before(self.written.journal.end)
            self.written.open(self.medium.open(), segment_bytes=self.segment_bytes)
        except Killed:
            pass
        self.medium.faults.calls_left = None
        self.power_failure()

    @invariant()
    def everything_is_read_where_it_was_put(self) -> None:
        if hasattr(self, "written"):
            self.written.check_reads()


TestJournalHistory = JournalHistory.TestCase
TestJournalHistory.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("cut_bytes", [1, 3, 40])
def test_what_comes_behind_a_durable_block_whose_end_is_gone_is_read_by_the_next_owner(
    tmp_path: Path, cut_bytes: int
) -> None:
    with closing(LocalSegments.open(tmp_path)) as segments:
        journal = opened(segments)
        journal.resume()
        for number, record in enumerate((b"first", b"second-" * 20)):
            journal.append(frames(FrameKind.SCHEDULED, [record], first_number=number), at_ms=1)
        journal.seal()
    [path] = tmp_path.glob("*.segment")
    path.write_bytes(path.read_bytes()[:-cut_bytes])

    for record in (b"third", b"fourth"):
        with closing(LocalSegments.open(tmp_path)) as segments:
            journal = opened(segments)
            journal.resume()
            journal.append(frames(FrameKind.SCHEDULED, [record]), at_ms=1)
            journal.commit()

    with closing(LocalSegments.open(tmp_path)) as segments:
        journal = opened(segments)
        assert recovered(journal) == [b"first", b"third", b"fourth"]
        assert journal.recovered.damaged_bytes > 0
