"""What segments do when their medium fails, is full, or the process dies at any call: on every medium with faults."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from outbox_broker.segments.local import LocalSegments
from outbox_broker.segments.port import Segments, WriterFenced
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import SegmentKind
from tests.outbox_broker.delay.failing_disk import Killed, KillingDisk
from tests.outbox_broker.segments.conftest import LocalMedium
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster
from tests.outbox_broker.segments.memory_segments import MemoryMedium
from tests.outbox_broker.segments.written_log import Medium, WrittenSegment, end_of, names, payloads

CALLS_MAX = 300
ROOM_BYTES_MAX = 900


class History:
    """A log and two other segments as an owner writes them: rolled, cut, sealed, deleted. Notes what was acknowledged,
    before the next call.
    """

    def __init__(self) -> None:
        self.log: list[bytes] = []
        self.acknowledged = 0
        self.other: list[bytes] = []
        self.other_acknowledged = 0
        self.is_deleted = False

    def write(self, segments: Segments) -> None:
        newest = max((name for name in names(segments) if name.startswith("log-")), default="log-0")
        self._append(self._gone_on(segments, newest), number=0)
        rolled = WrittenSegment.create(segments, f"log-{int(newest[4:]) + 2}", first=self._first(segments))
        self._append(rolled, number=1)
        bucket = WrittenSegment.create(segments, "bucket")
        self.other, self.other_acknowledged = [], 0
        for number in range(3):
            kept = bucket.append(b"bucket %d" % number)
            bucket.append(b"cut")
            bucket.writer.cut(kept)
            self.other.append(b"bucket %d" % number)
            bucket.commit()
            self.other_acknowledged = number + 1
        self.is_deleted = False
        index = WrittenSegment.create(segments, "index")
        index.append(b"index")
        index.writer.seal()
        segments.delete(["index"])
        self.is_deleted = True

    def _first(self, segments: Segments) -> int:
        return max((info.first + end_of(segments, info.name) for info in self._segments(segments)), default=0)

    def _segments(self, segments: Segments) -> list[object]:
        return [info for info in segments.list() if info.name.startswith("log-")]

    def _gone_on(self, segments: Segments, newest: str) -> WrittenSegment:
        first = self._first(segments)
        if newest in names(segments):
            writer = segments.reopen(newest, end=end_of(segments, newest))
            if writer is not None:
                return WrittenSegment(writer, first=first - writer.end)
        return WrittenSegment.create(segments, f"log-{int(newest[4:]) + 1}", first=first)

    def _append(self, log: WrittenSegment, *, number: int) -> None:
        for part in range(3):
            self.log.append(b"%d-%d of %d" % (number, part, len(self.log)))
            log.append(self.log[-1])
            if part:
                log.commit()
                self.acknowledged = len(self.log)

    def check(self, segments: Segments) -> None:
        """What was acknowledged is there, in order; of the rest a prefix. Continues with what was found."""
        found = [payload for info in self._segments(segments) for payload in payloads(segments, info.name)]
        assert found == self.log[: len(found)]
        assert len(found) >= self.acknowledged
        self.log, self.acknowledged = found, len(found)
        if "bucket" in names(segments):
            bucket = [payload for payload in payloads(segments, "bucket") if payload != b"cut"]
            assert bucket[: self.other_acknowledged] == self.other[: self.other_acknowledged]
        assert not (self.is_deleted and "index" in names(segments))


class Deaths(Protocol):
    """How processes die on a medium."""

    def open(self, *, at: int | None = None) -> Segments:
        """Become the owner; the process is killed instead of its `at`-th call to the medium."""

    def die(self) -> None:
        """The process is gone, and what it left on its way may arrive or not."""


class MemoryDeaths:
    def __init__(self, seed: int) -> None:
        self.medium = MemoryMedium(seed)

    def open(self, *, at: int | None = None) -> Segments:
        self.medium.faults.calls_left = at
        return self.medium.open()

    def die(self) -> None:
        self.medium.faults.calls_left = None
        self.medium.kill()


class LedgerDeaths:
    def __init__(self, seed: int) -> None:
        self.cluster = LedgerCluster(seed)

    def open(self, *, at: int | None = None) -> Segments:
        self.cluster.ledgers.calls.left = at
        return self.cluster.open(manifest_changes_max=5)

    def die(self) -> None:
        self.cluster.ledgers.calls.left = None


class LocalDeaths:
    """By a way of KillingDisk."""

    def __init__(self, folder: Path, way: str) -> None:
        self._folder = folder
        self._way = way
        self._segments: LocalSegments | None = None

    def open(self, *, at: int | None = None) -> Segments:
        self.die()
        storage = None if at is None else KillingDisk(at=at + 1, way=self._way)
        boot = "another" if self._way == "power" else "the same"
        self._segments = LocalSegments.open(self._folder, storage=storage, boot=boot)
        return self._segments

    def die(self) -> None:
        if self._segments is not None:
            self._segments.close()


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


def test_a_kill_at_any_call_loses_nothing_that_was_acknowledged_and_leaves_no_hole(
    deaths: Callable[[int], Deaths],
) -> None:
    for at in range(CALLS_MAX):
        medium, history = deaths(at), History()
        segments = medium.open()
        history.write(segments)
        medium.die()
        try:
            segments = medium.open(at=at)
            history.check(segments)
            history.write(segments)
        except Killed:
            medium.die()
        else:
            assert at > 20, "a history has more calls than this"
            return
        for _ in range(2):
            segments = medium.open()
            history.check(segments)
            history.write(segments)
            medium.die()
        history.check(medium.open())
        medium.die()
    pytest.fail(f"a history did not end within {CALLS_MAX} calls")


def full_media(tmp_path: Path) -> Iterator[tuple[Medium, Callable[[int | None], None]]]:
    """Yields media, and what says how much room there is on each."""
    memory = MemoryMedium()

    def leave_in_memory(room_bytes: int | None) -> None:
        memory.faults.room_bytes = room_bytes

    yield memory, leave_in_memory
    local = LocalMedium(tmp_path / "full")

    def leave_on_disk(room_bytes: int | None) -> None:
        local.storage.room_bytes = room_bytes

    yield local, leave_on_disk
    local.end()


def append_ever_more(written: WrittenSegment) -> None:
    for part in range(100):
        written.append(b"x" * (1 + 20 * part))


def test_a_full_disk_refuses_an_append_and_the_next_one_goes_where_it_would_have_gone(tmp_path: Path) -> None:
    for medium, leave in full_media(tmp_path):
        segments = medium.open()
        for number, room_bytes in enumerate(range(0, ROOM_BYTES_MAX, 7)):
            written = WrittenSegment.create(segments, f"s-{number}")
            leave(room_bytes)
            with pytest.raises(StorageFailed, match="No space left on device"):
                append_ever_more(written)
            count = len(written.places)
            leave(None)
            written = WrittenSegment(written.writer, number=count) if count else written
            written.append_committed(b"there is room")

            assert payloads(segments, f"s-{number}")[count:] == [b"there is room"]
            assert len(payloads(medium.open(), f"s-{number}")) == count + 1
            segments = medium.open()


def test_a_create_that_failed_leaves_no_segment_or_an_empty_one_and_can_be_repeated(
    tmp_path: Path, ledgers: LedgerCluster
) -> None:
    for medium, leave in full_media(tmp_path):
        segments = medium.open()
        leave(10)
        with pytest.raises(StorageFailed):
            WrittenSegment.create(segments).append(b"x" * 100)
        leave(None)
        assert [payloads(segments, name) for name in names(segments)] in ([], [[]])
        WrittenSegment.create(segments).append_committed(b"again")
        assert payloads(medium.open()) == [b"again"]

    segments = ledgers.open()
    ledgers.ledgers.faults.create_fails = 1.0
    written = WrittenSegment.create(segments)
    for _ in range(2):
        with pytest.raises(StorageFailed, match="no ledger can be created"):
            written.append_committed(b"queued")
    assert names(segments) == []
    ledgers.ledgers.faults.create_fails = 0.0
    written.commit()
    assert payloads(ledgers.open()) == [b"queued", b"queued"]


def test_a_commit_that_fails_is_final_until_another_owner_opens(local: LocalMedium, memory: MemoryMedium) -> None:
    for medium in (local, memory):
        segments = medium.open()
        written = WrittenSegment.create(segments)
        written.append_committed(b"acknowledged")
        written.append(b"in doubt")
        local.storage.fail("sync", errno.EIO)
        memory.faults.commits_fail = True
        with pytest.raises(StorageFailed, match="did not confirm"):
            written.commit()
        local.storage.mend()
        memory.faults.commits_fail = False

        with pytest.raises(StorageFailed):
            written.append(b"more")
        with pytest.raises(StorageFailed):
            segments.create("b", kind=SegmentKind.BUCKET)
        for refused in (written.commit, segments.check):
            with pytest.raises(StorageFailed):
                refused()
        assert payloads(medium.open())[0] == b"acknowledged"


def test_an_owner_that_was_paused_learns_of_its_successor_though_the_fence_is_disguised(
    ledgers: LedgerCluster,
) -> None:
    paused = ledgers.open()
    written = WrittenSegment.create(paused)
    written.append_committed(b"1")
    ledgers.open()
    ledgers.ledgers.faults.disguised_fence = 1.0

    with pytest.raises(WriterFenced):
        written.append_committed(b"late")


def test_a_flipped_bit_costs_its_frame_alone_and_is_told(
    local: LocalMedium, memory: MemoryMedium, ledgers: LedgerCluster
) -> None:
    def flip_on_disk(position: int) -> None:
        data = bytearray(local.path().read_bytes())
        data[40 + position] ^= 1
        local.path().write_bytes(data)

    def flip_on_bookies(position: int) -> None:
        [ledger] = [
            ledger for ledger, one in ledgers.ledgers.ledgers.items() if one.metadata["outbox-segment"] == b"a"
        ]  # fmt: skip
        ledgers.ledgers.damage(ledger, 0, at=1 + position)

    def flip_in_memory(position: int) -> None:
        memory.flip("a", position)

    media: tuple[tuple[Medium, Callable[[int], None]], ...] = (
        (local, flip_on_disk), (memory, flip_in_memory), (ledgers, flip_on_bookies)
    )  # fmt: skip
    for medium, flip in media:
        segments = medium.open()
        written = WrittenSegment.create(segments)
        written.append(b"one", b"two", b"three")
        written.append(b"four")
        written.commit()
        written.writer.seal()
        segments.close()
        flip(written.places[1].position + 17)

        segments = medium.open()
        [first, second] = segments.blocks("a", proven=written.writer.end)
        assert [frame.payload for frame in first.frames] == [b"one", b"three"]
        assert (first.damaged, second.damaged) == (1, 0)
        assert [frame.payload for frame in second.frames] == [b"four"]
        segments.close()


def test_no_room_for_a_copy_does_not_keep_a_log_from_going_on(local: LocalMedium) -> None:
    segments = local.open()
    written = WrittenSegment.create(segments)
    end = written.append_committed(b"1")
    segments.close()
    os.truncate(local.path(), 40 + end)
    local.storage.room_bytes = 20

    segments = local.open()
    writer = segments.reopen("a", end=end)
    assert writer is not None
    local.storage.room_bytes = None
    WrittenSegment(writer, number=1).append_committed(b"2")

    assert payloads(local.open()) == [b"1", b"2"]
