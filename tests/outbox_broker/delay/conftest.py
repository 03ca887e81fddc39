"""Schedules on the folder of a test, dropped as by a kill or closed in order, and opened again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.log.storage import Storage
from outbox_broker.schedule.delay_store import DelayOptions, DelayStore, Timed
from outbox_broker.schedule.local_segments import LocalSegmentStore

NOW_MS = 1_800_000_000_000
SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000


def timed(message_id: str, due_ms: int, *, topic: str = "t") -> Timed:
    """A message whose payload proves whose it is."""
    return Timed(due_ms, message_id, topic, f"payload of {message_id}".encode() * 3)


class Opened:
    """A schedule that can be killed and opened again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.options = DelayOptions()
        self.segments: LocalSegmentStore | None = None
        self.schedule: DelayStore | None = None

    def open(self, *, storage: Storage | None = None, **options: Any) -> DelayStore:
        """Open, or open again after a kill; options stay until others are given."""
        self.drop()
        if options:
            self.options = DelayOptions(**options)
        self.segments = LocalSegmentStore.open(self.folder, storage=storage)
        self.schedule = DelayStore.open(self.segments, options=self.options)
        return self.schedule

    def drop(self) -> None:
        """As a kill: nothing is written any more."""
        if self.segments is not None:
            self.segments.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """A schedule on a fresh folder."""
    one = Opened(tmp_path / "delay")
    yield one
    one.drop()


def put(schedule: DelayStore, now_ms: int, *messages: Timed) -> None:
    """Schedule, all of it anew."""
    assert set(schedule.schedule(messages, now_ms=now_ms)) == {"stored"}


def drain(schedule: DelayStore, now_ms: int) -> list[str]:
    """Everything due, settled; ids in the order in which they came. Checks payloads and due times."""
    ids: list[str] = []
    while (batch := schedule.due(now_ms)) is not None:
        for message in batch.messages:
            assert message.due_ms <= now_ms
            assert message == timed(message.id, message.due_ms, topic=message.topic)
        ids += [message.id for message in batch.messages]
        schedule.fired(batch.number)
    return ids


def settle(schedule: DelayStore, now_ms: int) -> None:
    """All housekeeping that is to be done now."""
    while schedule.maintain(now_ms):
        pass


def flush(schedule: DelayStore, now_ms: int) -> None:
    """What is in memory goes to buckets."""
    schedule._flush(now_ms)
