"""A segment that is gone is told before anything is written, wherever it was: the newest one and the only one too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.messages.message import Message
from tests.outbox_broker.action_log import action_segments
from tests.outbox_broker.message_log import message_segments
from tests.outbox_broker.message_log import segments_of as log_segments

TOPIC, GROUP = "orders", "billing"
HOUR_MS = 3_600_000
SMALL = {"segment_bytes": 4096, "checkpoint_bytes": 4096, "retention_ms": HOUR_MS, "retention_check_ms": 10**15}
type_of_open = Callable[..., Engine]


def work(engine: Engine, name: str = "m", *, count: int = 60) -> list[str]:
    ids = [f"{name}{number}" for number in range(count)]
    for one in ids:
        engine.publisher.publish([Message(id=one, topic=TOPIC, body=one.encode() * 50)])
        engine.settler.ack([delivery.receipt for delivery in engine.puller.pull(TOPIC, GROUP)])
    return ids


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in [*folder.rglob("*.log"), *folder.rglob("*.segment")]}


def segments_of(folder: Path, log: str) -> list[Path]:
    return log_segments(folder, log)


def kill(engine: Engine) -> None:
    """Let the folder be as a kill leaves it: its notes are those of the last roll, not of an end in order."""
    folder = engine.context.folder
    notes = {path: path.read_bytes() for path in [*folder.glob("*/proven"), *folder.glob("*/*.proven")]}
    engine.close()
    for path, data in notes.items():
        path.write_bytes(data)


@pytest.mark.parametrize("log", ["messages", "actions"])
@pytest.mark.parametrize("end", [Engine.close, kill])
def test_the_newest_segment_is_missed_however_the_broker_ended(
    open_engine: type_of_open, folder: Path, log: str, end: Callable[[Engine], None]
) -> None:
    engine = open_engine(**SMALL)
    work(engine)
    end(engine)
    newest = segments_of(folder, log)[-1]
    data = newest.read_bytes()
    newest.unlink()
    before = files(folder)

    for _ in range(2):
        with pytest.raises(
            SegmentDamaged, match=rf"{newest.stem}(\.log)? is missing in .*{log}.*restore it from a copy"
        ):
            open_engine(**SMALL)

    assert files(folder) == before
    newest.write_bytes(data)
    assert open_engine(**SMALL).admin.topic_figures(TOPIC)["stored"] == 60


def test_the_only_action_segment_is_missed(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine()
    work(engine, count=3)
    engine.close()
    [only] = action_segments(folder)
    only.unlink()

    with pytest.raises(SegmentDamaged, match=f"{only.stem} is missing"):
        open_engine()


@pytest.mark.parametrize(("log", "other"), [("messages", "actions"), ("actions", "messages")])
def test_a_log_that_is_gone_with_its_folder_is_missed(
    open_engine: type_of_open, folder: Path, log: str, other: str
) -> None:
    engine = open_engine()
    work(engine, count=3)
    engine.close()
    away = (folder / log).rename(folder.parent / "away")

    with pytest.raises(SegmentDamaged, match=rf"all segments in .*{log} are missing.*{other}"):
        open_engine()

    shutil.rmtree(folder / log)
    away.rename(folder / log)
    assert open_engine().admin.topic_figures(TOPIC)["stored"] == 3


def test_who_has_no_copy_goes_on_without_what_was_in_the_segment(open_engine: type_of_open, folder: Path) -> None:
    engine = open_engine(**SMALL)
    work(engine)
    engine.close()
    newest = message_segments(folder)[-1]
    newest.unlink()
    with pytest.raises(SegmentDamaged) as refused:
        open_engine(**SMALL)
    note = newest.with_suffix(".proven")
    assert str(note) in str(refused.value)
    note.unlink()

    engine = open_engine(**SMALL)

    assert engine.admin.topic_figures(TOPIC)["stored"] == 60, "no sequence is given twice"
    assert work(engine, "after", count=1) == ["after0"]


def test_who_has_no_copy_goes_on_without_what_was_in_the_segment_of_actions(
    open_engine: type_of_open, folder: Path
) -> None:
    engine = open_engine(**SMALL)
    work(engine)
    engine.close()
    newest = action_segments(folder)[-1]
    newest.unlink()
    with pytest.raises(SegmentDamaged) as refused:
        open_engine(**SMALL)
    assert str(newest.with_suffix(".proven")) in str(refused.value)
    newest.with_suffix(".proven").unlink()

    engine = open_engine(**SMALL)

    assert engine.admin.topic_figures(TOPIC)["stored"] == 60
    work(engine, "after", count=1)
    assert engine.admin.group_figures(TOPIC, GROUP)["backlog"] == 0


def test_what_retention_dropped_is_not_missed(open_engine: type_of_open, folder: Path, clock: ManualClock) -> None:
    engine = open_engine(**SMALL)
    work(engine)
    clock.advance(2 * HOUR_MS)
    work(engine, "more")
    engine.retention.drop_outdated()
    assert len(message_segments(folder)) < 20
    kill(engine)

    assert open_engine(**SMALL).admin.topic_figures(TOPIC)["stored"] == 120
