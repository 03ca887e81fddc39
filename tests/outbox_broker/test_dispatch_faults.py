"""Each call to the disk while messages fall due, as the last of its process or as one that fails: all come, once."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import StorageFailed
from outbox_core.messages.message import GroupConfig, Message
from tests.outbox_broker.failing_storage import FailingStorage
from tests.outbox_broker.powered_storage import PoweredStorage

TOPICS, GROUP = ("orders", "bills"), "readers"
BATCH = 3
SECONDS_MAX = 300
IDS = [f"m{number:02}" for number in range(4 * BATCH)]
EXPECTED = {topic: IDS[number :: len(TOPICS)] for number, topic in enumerate(TOPICS)}
START_MS = 1_800_000_000_000
DUE_MS = START_MS + 3_600_000
OPTIONS = EngineOptions(
    fire_batch_max=BATCH, reserve_bytes=0, dedup_messages_max=1, segment_bytes=4096, checkpoint_bytes=1
)
"""Ids are forgotten at once, so that nothing but the logs knows what came already; segments and checkpoints begin amid
a dispatch."""


class KilledAtCalls(PoweredStorage):
    """Copies, while it is armed, the folder before this share of all writes and syncs, as a kill and as a power cut
    leave it.
    """

    def __init__(self, folder: Path, to: Path, random: Random, *, share: float = 1) -> None:
        super().__init__()
        self.share = share
        self.folder = folder
        self.to = to
        self.random = random
        self.is_armed = False
        self.copies: list[Path] = []

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        with self._lock:
            self._copy()
            super().write(descriptor, data, position=position)

    def sync(self, descriptor: int) -> None:
        with self._lock:
            self._copy()
            super().sync(descriptor)

    def _copy(self) -> None:
        if self.is_armed and self.random.random() < self.share:
            killed, cut = (self.to / f"{self.folder.name}-{len(self.copies)}{kind}" for kind in ("killed", "cut"))
            self.copy_after_kill(self.folder, killed)
            self.copy_after_power_cut(self.folder, cut, random=self.random, whole_in="actions")
            self.copies += [killed, cut]


@contextmanager
def opened(
    folder: Path, *, storage: FailingStorage | PoweredStorage | None = None
) -> Iterator[tuple[Engine, ManualClock]]:
    """An engine on this folder when its messages are due; on a new one, an hour before that."""
    clock = ManualClock(DUE_MS if folder.exists() else START_MS)
    engine = Engine.open(folder, clock=clock, options=OPTIONS, storage=storage)
    try:
        yield engine, clock
    finally:
        with suppress(StorageFailed):  # of a sync that failed before
            engine.close()


def schedule(engine: Engine) -> None:
    """Messages that are due at one time, in turn on each topic."""
    for topic in TOPICS:
        engine.admin.declare_group(topic, GROUP, GroupConfig())
    for number, message_id in enumerate(IDS):
        body, topic = message_id.encode() * 200, TOPICS[number % len(TOPICS)]
        engine.publisher.publish([Message(id=message_id, topic=topic, body=body, deliver_at_ms=DUE_MS)])


def dispatch(engine: Engine) -> None:
    """Have all that is due moved into its topic, and settled."""
    for _ in IDS:
        engine.publisher.cancel([])


def dispatch_to_the_end(engine: Engine) -> None:
    """The same, and what the timer has taken before, too."""
    dispatch(engine)
    deadline = time.monotonic() + SECONDS_MAX
    while engine.operations.is_dispatching():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def drained(engine: Engine) -> dict[str, list[str]]:
    """All that comes on each topic, acknowledged."""
    came: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for topic in TOPICS:
        while deliveries := engine.puller.pull(topic, GROUP, max_messages=100):
            assert all(delivery.body == delivery.id.encode() * 200 for delivery in deliveries)
            engine.settler.ack([delivery.receipt for delivery in deliveries])
            came[topic] += [delivery.id for delivery in deliveries]
    return came


def counted(engine: Engine) -> list[int]:
    """How much of each topic is scheduled, or waits for its group."""
    figures = [engine.admin.group_figures(topic, GROUP) for topic in TOPICS]
    return [of_group["scheduled"] + of_group["backlog"] for of_group in figures]


def check(folder: Path) -> None:
    """Of the messages in this folder, each is counted once, comes once and in order, also over another restart."""
    with opened(folder) as (engine, _):
        assert counted(engine) == [len(ids) for ids in EXPECTED.values()]
        assert drained(engine) == EXPECTED
        assert counted(engine) == [0, 0]
    with opened(folder) as (engine, _):
        assert drained(engine) == {topic: [] for topic in TOPICS}
        assert [engine.admin.topic_figures(topic)["stored"] for topic in TOPICS] == [
            len(ids) for ids in EXPECTED.values()
        ]


@pytest.mark.slow
def test_whatever_call_of_a_dispatch_is_the_last_and_then_of_the_next_each_message_comes_once_and_in_order(
    folder: Path, tmp_path: Path, random_seed: int
) -> None:
    random = Random(random_seed)
    storage = KilledAtCalls(folder, tmp_path, random)
    with opened(folder, storage=storage) as (engine, clock):
        schedule(engine)
        storage.is_armed = True
        clock.advance(DUE_MS - START_MS)
        dispatch_to_the_end(engine)
        storage.is_armed = False
    assert len(storage.copies) > 2 * len(IDS), "a dispatch has more calls than this"

    for copy in random.sample(storage.copies, 16):
        again = KilledAtCalls(copy, tmp_path, random, share=0.1)
        again.is_armed = True
        with opened(copy, storage=again) as (engine, _):
            dispatch_to_the_end(engine)
            again.is_armed = False
        print(copy.name)
        check(copy)
        for second in again.copies[:4]:
            print(second.name)
            check(second)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "code"), [("write", errno.ENOSPC), ("write", errno.EIO), ("sync", errno.EIO)])
def test_whatever_call_of_a_dispatch_fails_each_message_comes_once_and_in_order(
    tmp_path: Path, call: str, code: int
) -> None:
    for number in range(1, 100):
        folder, storage = tmp_path / f"data{number}", FailingStorage()
        left = number

        def before(one: str) -> None:
            nonlocal left
            left -= one == call
            if one == call and left == 0:
                raise OSError(code, os.strerror(code))

        with opened(folder, storage=storage) as (engine, clock):
            schedule(engine)
            storage.before = before
            clock.advance(DUE_MS - START_MS)
            with suppress(StorageFailed):
                dispatch(engine)
            storage.mend()
            if call == "write":
                dispatch(engine)
                assert counted(engine) == [len(ids) for ids in EXPECTED.values()], number
        print(number)
        check(folder)
        if left > 0:
            assert number > len(IDS) // BATCH, "a dispatch has more calls than this"
            return
    pytest.fail("a dispatch did not end")
