"""Segments of the action log: each begins with a whole checkpoint, or the broker does not depend on it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from outbox_broker.engine.engine import Engine
from outbox_broker.state import checkpoint
from outbox_core.common.clock import ManualClock
from outbox_core.journal import journal
from outbox_core.journal.journal import (
    Checkpoint,
    SegmentDamaged,
    SegmentHeader,
    SegmentKind,
    read_segment,
    segment_paths,
)
from outbox_core.messages.message import GroupConfig, Message
from tests.outbox_broker.failing_storage import FailingStorage

TOPIC = "orders"
HOUR_MS = 3_600_000
SMALL = {
    "segment_bytes": 4096, "checkpoint_bytes": 4096, "retention_ms": HOUR_MS, "retention_check_ms": 10**15,
}  # fmt: skip
"""The timer looks at retention never: the tests do."""
type_of_open = Callable[..., Engine]


class FullDisk(FailingStorage):
    """A disk without room for checkpoints, and with room for all other actions, while it `is_full`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False
        self.refused = 0

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        if self.is_full and b"checkpoint" in data:
            self.refused += 1
            super().write(descriptor, data[: len(data) // 2], position=position)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(descriptor, data, position=position)


def declare(engine: Engine, *, groups: int) -> None:
    for number in range(groups):
        engine.admin.declare_group(TOPIC, f"group-{number}", GroupConfig(max_attempts=2))


def act(engine: Engine, *, times: int) -> None:
    """Append to the action log, and change nothing in the end."""
    for number in range(times):
        engine.admin.pause(TOPIC, "group-0", paused=number % 2 == 0)


def act_until_segments(engine: Engine, folder: Path, count: int) -> None:
    for _ in range(10_000):
        if len(segment_paths(folder / "actions")) >= count:
            return
        act(engine, times=2)
    raise AssertionError(f"there are no {count} segments")


def begins_whole(path: Path) -> bool:
    """Whether a segment is the first of all, or begins with a whole checkpoint."""
    if int(path.stem) == 0:
        return True
    try:
        records = (journal.decode_action(one.payload) for one in read_segment(path)[1])
        return checkpoint.read(records) is not None
    except SegmentDamaged:
        return False


def damage_checkpoint(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"checkpoint") + 30] ^= 1
    path.write_bytes(data)


def without_checkpoint(folder: Path) -> list[str]:
    return [path.name for path in segment_paths(folder / "actions") if not begins_whole(path)]


def seen(engine: Engine) -> object:
    return {
        name: (engine.admin.group_config(TOPIC, name), engine.admin.group_figures(TOPIC, name))
        for name in engine.admin.groups(TOPIC)
    }


def test_a_full_disk_at_the_moment_of_a_roll_leaves_no_segment_without_its_checkpoint(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    disk = FullDisk()
    engine = open_engine(storage=disk, **SMALL)
    declare(engine, groups=3)
    disk.is_full = True

    act(engine, times=400)

    assert disk.refused, "no segment was full"
    assert len(segment_paths(folder / "actions")) == 1, "actions go on in the segment that there is"
    disk.is_full = False
    act_until_segments(engine, folder, 4)
    assert without_checkpoint(folder) == []
    before = seen(engine)
    clock.advance(2 * HOUR_MS)
    engine.retention.drop_outdated()
    assert len(segment_paths(folder / "actions")) == 2
    engine = open_engine(**SMALL)
    assert seen(engine) == before


def test_while_the_disk_is_full_a_checkpoint_is_tried_ever_more_seldom(open_engine: type_of_open) -> None:
    disk = FullDisk()
    engine = open_engine(storage=disk, **SMALL)
    declare(engine, groups=3)
    disk.is_full = True

    act(engine, times=2_000)

    assert 3 <= disk.refused <= 8


@pytest.mark.parametrize("call", ["create", "write", "sync_folder actions"])
def test_a_roll_that_fails_at_any_call_is_done_later_and_nothing_of_it_is_found_on_opening(
    open_engine: type_of_open, folder: Path, call: str
) -> None:
    disk = FailingStorage()
    engine = open_engine(storage=disk, **SMALL)
    declare(engine, groups=3)
    files = len(segment_paths(folder / "actions"))
    calls = iter(range(1))

    def before(one: str) -> None:
        creates = len([name for name in disk.calls if name == "create"])
        if one == call and creates > made and next(calls, None) is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made = len([name for name in disk.calls if name == "create"]) - (1 if call == "create" else 0)
    disk.before = before

    act_until_segments(engine, folder, files + 2)

    assert next(calls, None) is None, "nothing failed"
    assert without_checkpoint(folder) == []
    before_restart = seen(engine)
    assert seen(open_engine(**SMALL)) == before_restart


def test_a_checkpoint_as_large_as_its_segment_is_followed_by_one_that_has_a_checkpoint_too(
    open_engine: type_of_open, folder: Path
) -> None:
    engine = open_engine(**SMALL)
    declare(engine, groups=60)

    act_until_segments(engine, folder, 8)

    assert all(path.stat().st_size > 2 * 4096 for path in segment_paths(folder / "actions")[-3:-1])
    assert without_checkpoint(folder) == []


def test_checkpoints_take_no_more_than_what_stands_between_them(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine(**SMALL)
    declare(engine, groups=60)

    act_until_segments(engine, folder, 8)
    open_engine(**SMALL)

    for path in segment_paths(folder / "actions")[1:-1]:
        header, frames = read_segment(path)
        behind_checkpoint = next(
            one.offset for one in frames if not isinstance(journal.decode_action(one.payload), Checkpoint)
        )
        end = header.first_offset + path.stat().st_size - journal.HEADER_BYTES
        assert behind_checkpoint - header.first_offset <= end - behind_checkpoint


@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_retention_keeps_the_segments_from_the_second_newest_whole_checkpoint_on(
    open_engine: type_of_open, folder: Path, clock: ManualClock, damaged: int
) -> None:
    engine = open_engine(**SMALL)
    declare(engine, groups=3)
    act_until_segments(engine, folder, 8)
    before = seen(engine)
    paths = segment_paths(folder / "actions")
    for path in paths[-damaged:]:
        damage_checkpoint(path)
    clock.advance(2 * HOUR_MS)

    engine.retention.drop_outdated()

    assert segment_paths(folder / "actions") == paths[-damaged - 2 :]
    engine.close()
    damage_checkpoint(paths[-damaged - 1])
    engine = open_engine(**SMALL)
    assert seen(engine) == before


def add_empty_segment(folder: Path) -> Path:
    """What a kill between the beginning of a segment and its checkpoint leaves behind."""
    newest = segment_paths(folder / "actions")[-1]
    end = int(newest.stem) + newest.stat().st_size - journal.HEADER_BYTES
    path = journal.segment_path(folder / "actions", end)
    path.write_bytes(SegmentHeader(kind=SegmentKind.ACTIONS, first_offset=end, created_at_ms=0).encode())
    return path


def cut_short(folder: Path) -> Path:
    path = segment_paths(folder / "actions")[-1]
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"checkpoint") + 200])
    return path


@pytest.mark.parametrize("left_behind", [add_empty_segment, cut_short])
def test_a_kill_while_a_segment_is_begun_costs_no_checkpoint_however_often_it_happens(
    open_engine: type_of_open, folder: Path, clock: ManualClock, left_behind: Callable[[Path], Path]
) -> None:
    engine = open_engine(**SMALL)
    declare(engine, groups=3)
    act_until_segments(engine, folder, 3)
    for number in range(4):
        before = seen(engine)
        engine.close()
        left_behind(folder)

        engine = open_engine(**SMALL)

        assert seen(engine) == before
        assert begins_whole(segment_paths(folder / "actions")[-1])
        clock.advance(2 * HOUR_MS)
        engine.retention.drop_outdated()
        engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=b"x")])
        act_until_segments(engine, folder, 3)
