"""A segment that is written, synced or deleted by several threads at once. What is in it, other tests say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from outbox_broker.log.storage import DiskStorage
from outbox_broker.segments.local_segments import LocalSegmentStore
from outbox_core.common.errors import StorageFailed
from tests.outbox_broker.open_files import open_files

WAIT_SECONDS = 120


class Gate:
    """Where the thread that comes first is held until it is let go."""

    def __init__(self) -> None:
        self.reached = Event()
        self.go = Event()

    def hold(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self.go.wait(WAIT_SECONDS)


class GatedDisk(DiskStorage):
    """A disk on which the next write, or the next sync, can be held. Counts syncs."""

    def __init__(self) -> None:
        self.write_gate: Gate | None = None
        self.sync_gate: Gate | None = None
        self.syncs = 0

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        if self.write_gate is not None:
            self.write_gate.hold()
        super().write(descriptor, data, position=position)

    def sync(self, descriptor: int) -> None:
        if self.sync_gate is not None:
            self.sync_gate.hold()
        super().sync(descriptor)
        self.syncs += 1


@pytest.fixture
def disk() -> GatedDisk:
    return GatedDisk()


@pytest.fixture
def store(tmp_path: Path, disk: GatedDisk) -> Iterator[LocalSegmentStore]:
    """An open store."""
    opened = LocalSegmentStore.open(tmp_path, storage=disk)
    yield opened
    opened.close()


def while_held(gate: Gate, act: Callable[[], object], meanwhile: Callable[[], object]) -> list[StorageFailed]:
    """Do one thing while another is held on the disk; returns what that one raised."""
    raised: list[StorageFailed] = []

    def run() -> None:
        try:
            act()
        except StorageFailed as error:
            raised.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    assert gate.reached.wait(WAIT_SECONDS)
    meanwhile()
    gate.go.set()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    return raised


def test_what_is_written_while_another_syncs_the_segment_is_synced_by_its_own_commit(
    store: LocalSegmentStore, disk: GatedDisk
) -> None:
    *_, end = store.append("a", [b"first"], position=0)
    disk.write_gate = Gate()
    raised = while_held(
        disk.write_gate, lambda: store.append("a", [b"second"], position=end), lambda: store.sync(["a"])
    )
    before = disk.syncs

    store.sync(["a"])

    assert not raised
    assert disk.syncs == before + 1, "the sync of the other one began before the write was there"


def test_a_segment_that_is_deleted_while_it_is_synced_fails_nobody_and_leaves_no_file_open(
    store: LocalSegmentStore, disk: GatedDisk, tmp_path: Path
) -> None:
    store.append("a", [b"old"], position=0)
    *_, end = store.append("b", [b"new"], position=0)
    disk.sync_gate = Gate()

    raised = while_held(disk.sync_gate, lambda: store.sync(["a"]), lambda: store.delete(["a"]))

    assert not raised
    assert store.list() == ["b"]
    store.append("b", [b"more"], position=end)
    store.sync(["b"])
    assert not [one for one in open_files(tmp_path) if one.name.startswith("a.delay")]


def test_a_store_that_is_closed_under_a_write_never_has_it_written_to_a_file_of_another_store(
    store: LocalSegmentStore, disk: GatedDisk, tmp_path: Path
) -> None:
    *_, end = store.append("a", [b"first"], position=0)
    disk.write_gate = Gate()
    others: list[LocalSegmentStore] = []
    closing = Thread(target=store.close, daemon=True)

    def close_and_open_another() -> None:
        closing.start()
        while is_open(store):
            pass
        others.append(LocalSegmentStore.open(tmp_path / "other"))  # descriptors that were let go are taken again
        others[0].append("b", [b"of another store"], position=0)

    raised = while_held(disk.write_gate, lambda: store.append("a", [b"second"], position=end), close_and_open_another)
    closing.join(WAIT_SECONDS)
    others[0].close()

    assert not closing.is_alive()
    assert not raised
    reopened = LocalSegmentStore.open(tmp_path)
    assert [record.payload for record in reopened.scan("a")] == [b"first", b"second"]
    reopened.close()
    again = LocalSegmentStore.open(tmp_path / "other")
    assert [record.payload for record in again.scan("b")] == [b"of another store"]
    again.close()


def is_open(store: LocalSegmentStore) -> bool:
    try:
        store.sync(())
    except StorageFailed:
        return False
    return True
