"""Segments and checkpoints of the action log: full disks, failing calls, retention, kills."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.journal.block import FrameKind
from outbox_core.messages.message import GroupConfig, Message
from tests.outbox_broker.action_log import action_segments, blocks_in, checkpoints, damage_checkpoints, whole_checkpoint
from tests.outbox_broker.failing_storage import FailingStorage

TOPIC = "orders"
HOUR_MS = 3_600_000
CHECKPOINT_BYTES = 4096
SMALL = {
    "segment_bytes": 4096, "checkpoint_bytes": CHECKPOINT_BYTES, "retention_ms": HOUR_MS, "retention_check_ms": 10**15,
}  # fmt: skip
"""The keeper looks at retention never: the tests do."""
type_of_open = Callable[..., Engine]


class FullDisk(FailingStorage):
    """A disk without room for checkpoints, and with room for all other actions, while it `is_full`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False
        self.refused = 0

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        if self.is_full and b"OMQB" + bytes([FrameKind.CHECKPOINT]) in data:
            self.refused += 1
            super().write(descriptor, data[: len(data) // 2], position=position)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(descriptor, data, position=position)


def declare(engine: Engine, *, groups: int) -> None:
    for number in range(groups):
        engine.admin.declare_group(TOPIC, f"group-{number}", GroupConfig(max_attempts=2))


def act(engine: Engine, *, times: int) -> None:
    """Append to the action log, and change nothing in the end; do what the keeper does meanwhile."""
    for number in range(times):
        engine.admin.pause(TOPIC, "group-0", paused=number % 2 == 0)
        engine.writer.write_checkpoint_if_due()


def act_until_segments(engine: Engine, folder: Path, count: int) -> None:
    for _ in range(10_000):
        if len(action_segments(folder)) >= count:
            return
        act(engine, times=2)
    raise AssertionError(f"there are no {count} segments")


def seen(engine: Engine) -> object:
    return {
        name: (engine.admin.group_config(TOPIC, name), engine.admin.group_figures(TOPIC, name))
        for name in engine.admin.groups(TOPIC)
    }


def test_a_full_disk_as_a_checkpoint_is_due_stops_no_action_and_one_is_written_once_there_is_room(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    disk = FullDisk()
    engine = open_engine(storage=disk, **SMALL)
    declare(engine, groups=3)
    disk.is_full = True

    act(engine, times=400)

    assert disk.refused, "none was due"
    assert whole_checkpoint(folder) is None
    assert action_segments(folder)[0].name.endswith("-000000000001.segment"), "nothing may be dropped"
    disk.is_full = False
    act_until_segments(engine, folder, len(action_segments(folder)) + 4)
    assert whole_checkpoint(folder)
    before = seen(engine)
    files = len(action_segments(folder))
    clock.advance(2 * HOUR_MS)
    engine.retention.drop_outdated()
    assert len(action_segments(folder)) < files
    engine = open_engine(**SMALL)
    assert seen(engine) == before


def test_while_the_disk_is_full_a_checkpoint_is_tried_no_more_often_than_one_would_be_due(
    open_engine: type_of_open,
) -> None:
    disk = FullDisk()
    engine = open_engine(storage=disk, **SMALL)
    declare(engine, groups=3)
    disk.is_full = True
    begin = engine.context.actions.end

    act(engine, times=2_000)

    assert 3 <= disk.refused <= (engine.context.actions.end - begin) // CHECKPOINT_BYTES + 1


@pytest.mark.parametrize("call", ["create", "write", "sync_folder actions"])
def test_a_roll_that_fails_at_any_call_is_done_later_and_nothing_of_it_is_found_on_opening(
    open_engine: type_of_open, folder: Path, call: str
) -> None:
    disk = FailingStorage()
    engine = open_engine(storage=disk, **SMALL)
    declare(engine, groups=3)
    files = len(action_segments(folder))
    calls = iter(range(1))
    made = disk.calls.count("create")

    def before(one: str) -> None:
        is_rolling = disk.calls.count("create") > made - (call == "create")
        if one == call and is_rolling and next(calls, None) is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.before = before

    if call == "sync_folder actions":  # final: what the folder has is not known any more
        with pytest.raises(Exception, match="No space left"):
            act_until_segments(engine, folder, files + 2)
        before_restart = seen(open_engine(**SMALL))
        assert seen(open_engine(**SMALL)) == before_restart
        return
    act_until_segments(engine, folder, files + 2)

    assert next(calls, None) is None, "nothing failed"
    before_restart = seen(engine)
    assert seen(open_engine(**SMALL)) == before_restart


def test_checkpoints_take_no_more_than_what_stands_between_them(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine(**SMALL)
    declare(engine, groups=60)

    act_until_segments(engine, folder, 12)
    open_engine(**SMALL)

    assert sum(block.end - block.position for block in checkpoints(folder)) > 2 * CHECKPOINT_BYTES
    grown_bytes = checkpoint_bytes = 0
    for path in action_segments(folder):
        for block in blocks_in(path):
            if block.kind == FrameKind.CHECKPOINT:
                checkpoint_bytes += block.end - block.position
            else:
                grown_bytes += block.end - block.position
            assert checkpoint_bytes <= grown_bytes


def test_retention_keeps_what_the_second_newest_checkpoint_needs(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**SMALL)
    declare(engine, groups=3)
    act_until_segments(engine, folder, 8)
    engine.writer.write_checkpoint()
    before = seen(engine)
    files = len(action_segments(folder))
    clock.advance(2 * HOUR_MS)

    engine.retention.drop_outdated()

    assert len(action_segments(folder)) < files
    engine.close()
    captured = whole_checkpoint(folder)
    damage_checkpoints(folder, captured=captured)
    assert whole_checkpoint(folder) != captured
    engine = open_engine(**SMALL)
    assert seen(engine) == before


def test_a_kill_while_a_checkpoint_is_written_costs_nothing_however_often_it_happens(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**SMALL)
    declare(engine, groups=3)
    for number in range(4):
        act_until_segments(engine, folder, 3)
        engine.writer.write_checkpoint()
        before = seen(engine)
        engine.close()
        newest = action_segments(folder)[-1]
        newest.write_bytes(newest.read_bytes()[:-20])
        newest.with_suffix(".proven").unlink()

        engine = open_engine(**SMALL)

        assert seen(engine) == before
        clock.advance(2 * HOUR_MS)
        engine.retention.drop_outdated()
        engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=b"x")])
