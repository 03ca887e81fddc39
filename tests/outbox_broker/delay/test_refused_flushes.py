"""A flush that finds no room leaves nothing behind, and keeps nothing from being deleted or delivered meanwhile."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from outbox_broker.log.storage import DiskStorage
from outbox_broker.schedule.delay_store import DelayStore
from outbox_core.common.errors import StorageFailed
from tests.outbox_broker.delay.conftest import DAY_MS, HOUR_MS, MINUTE_MS, NOW_MS, Opened, drain, put, settle, timed


class NoRoomFor(DiskStorage):
    """Takes half of each write to files of this prefix, while there is one."""

    def __init__(self) -> None:
        self.prefix: str | None = None
        self.refused = 0

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if self.prefix is not None and name.startswith(self.prefix):
            self.refused += 1
            super().write(descriptor, data[: len(data) // 2], position=position)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(descriptor, data, position=position)


def segments(opened: Opened) -> list[str]:
    return sorted(path.name for path in opened.folder.glob("*.segment"))


def fill(schedule: DelayStore, name: str, due_ms: int) -> list[str]:
    ids = [f"{name}{number}" for number in range(10)]
    put(schedule, NOW_MS, *(timed(one, due_ms) for one in ids))
    return ids


@pytest.mark.parametrize("prefix", ["ids-", "l1", "l0"])
def test_a_flush_that_is_refused_again_and_again_leaves_no_segment_behind(opened: Opened, prefix: str) -> None:
    disk = NoRoomFor()
    schedule = opened.open(storage=disk, memory_messages_max=10)
    stored = fill(schedule, "first", NOW_MS + 3 * DAY_MS)
    settle(schedule, NOW_MS)
    disk.prefix = prefix
    stored += fill(schedule, "second", NOW_MS + (HOUR_MS if prefix == "l0" else 30 * DAY_MS))
    before = segments(opened)

    for _ in range(5):
        with pytest.raises(StorageFailed, match="No space left"):
            schedule.housekeeping.step(NOW_MS)

    assert disk.refused >= 5
    assert segments(opened) == before
    disk.prefix = None
    settle(schedule, NOW_MS)
    schedule = opened.open()
    assert sorted(drain(schedule, NOW_MS + 60 * DAY_MS)) == sorted(stored)


def test_a_refused_flush_keeps_no_finished_bucket_on_the_disk(opened: Opened) -> None:
    disk = NoRoomFor()
    schedule = opened.open(storage=disk, memory_messages_max=10)
    due = fill(schedule, "due", NOW_MS + MINUTE_MS)
    settle(schedule, NOW_MS)
    [bucket] = [name for name in segments(opened) if name.startswith("l0")]
    fill(schedule, "waits", NOW_MS + 30 * DAY_MS)
    disk.prefix = "ids-"
    assert drain(schedule, NOW_MS + 2 * MINUTE_MS) == due

    with pytest.raises(StorageFailed, match="No space left"):
        schedule.housekeeping.step(NOW_MS + 2 * MINUTE_MS)

    assert bucket not in segments(opened)
