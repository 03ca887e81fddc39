"""A power cut that keeps some pages that were never synced, and loses others, costs nothing that was answered."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from outbox_broker.common.engine_options import Durability, EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import Message, Record
from tests.outbox_broker.powered_storage import PoweredStorage, start_anew

TOPIC, GROUP = "orders", "billing"
START_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
PAGE_BYTES = 4096
CUTS = 25
OPTIONS = EngineOptions(reserve_bytes=4096)


class PagedStorage(PoweredStorage):
    """Writes its pages back one by one, in any order; syncs wait from hold() until release()."""

    def __init__(self) -> None:
        super().__init__()
        self._free = threading.Event()
        self._free.set()
        self._written = threading.Condition()
        self._writes = 0

    def hold(self) -> None:
        self._free.clear()
        self._writes = 0

    def release(self) -> None:
        self._free.set()

    def wait_for_writes(self, count: int) -> None:
        with self._written:
            assert self._written.wait_for(lambda: self._writes >= count, timeout=120)

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        super().write(descriptor, data, position=position)
        with self._written:
            self._writes += 1
            self._written.notify_all()

    def sync(self, descriptor: int) -> None:
        assert self._free.wait(timeout=120)
        super().sync(descriptor)

    def copy_after_lost_pages(self, folder: Path, to: Path, *, random: Random) -> None:
        """The folder after a power cut: of the pages with bytes that were never synced, only some were written."""
        with self._lock:
            shutil.copytree(folder, to)
            for path in folder.rglob("*"):
                unsynced_bytes = self._unsynced(path)
                if unsynced_bytes:
                    _lose_pages(to / path.relative_to(folder), unsynced_bytes, random)
            start_anew(to)


def _lose_pages(path: Path, unsynced_bytes: int, random: Random) -> None:
    data = bytearray(path.read_bytes())
    begin = len(data) - unsynced_bytes
    while begin < len(data):
        end = min(len(data), (begin // PAGE_BYTES + 1) * PAGE_BYTES)
        if random.random() < 0.5:
            data[begin:end] = bytes(end - begin)
        begin = end
    path.write_bytes(data)


def message(message_id: str, *, deliver_at_ms: int | None = None) -> Message:
    return Message(id=message_id, topic=TOPIC, body=message_id.encode() * 800, deliver_at_ms=deliver_at_ms)


def drained(engine: Engine) -> list[str]:
    ids: list[str] = []
    while deliveries := engine.puller.pull(TOPIC, GROUP, max_messages=100):
        assert all(one.body == message(one.id).body for one in deliveries)
        engine.settler.ack([one.receipt for one in deliveries])
        ids += [one.id for one in deliveries]
    return ids


def publish_unsynced(
    engine: Engine, storage: PagedStorage, pool: ThreadPoolExecutor, *, receipt: str
) -> list[Future[object]]:  # fmt: skip
    """Ask for much that nobody is answered for yet, and return once all of it is written."""
    storage.hold()
    asked: list[Future[object]] = [pool.submit(engine.settler.ack, [receipt])]
    for number in range(4):
        asked.append(pool.submit(engine.publisher.publish, [message(f"unsynced{number}")]))
        later = [message(f"unsynced-later{number}", deliver_at_ms=START_MS + HOUR_MS)]
        asked.append(pool.submit(engine.publisher.publish, later))
    storage.wait_for_writes(1 + 4 + 4)
    return asked


@pytest.fixture
def cut(tmp_path: Path, random_seed: int) -> list[Path]:
    """Folders as many power cuts left them, in the middle of the same work."""
    random = Random(random_seed)
    storage, folder = PagedStorage(), tmp_path / "data"
    engine = Engine.open(folder, clock=ManualClock(START_MS), options=OPTIONS, storage=storage)
    engine.publisher.publish([message(f"answered{number}") for number in range(5)])
    engine.publisher.publish(
        [message(f"answered-later{number}", deliver_at_ms=START_MS + HOUR_MS) for number in range(3)]
    )
    acked, held = engine.puller.pull(TOPIC, GROUP, max_messages=2, invisible_ms=HOUR_MS // 2)
    engine.settler.ack([acked.receipt])
    copies = [tmp_path / f"cut{number}" for number in range(CUTS)]
    with ThreadPoolExecutor(9) as pool:
        asked = publish_unsynced(engine, storage, pool, receipt=held.receipt)
        for one in copies:
            storage.copy_after_lost_pages(folder, one, random=random)
        storage.release()
        for future in asked:
            future.result(timeout=120)
    engine.close()
    return copies


def test_whatever_pages_a_power_cut_loses_what_was_answered_comes_once_and_nothing_is_invented(
    cut: list[Path],
) -> None:
    unanswered = {f"unsynced{number}" for number in range(4)} | {f"unsynced-later{number}" for number in range(4)}
    for folder in cut:
        clock = ManualClock(START_MS)
        engine = Engine.open(folder, clock=clock, options=OPTIONS)
        try:
            came = drained(engine)
            clock.advance(HOUR_MS)
            came += drained(engine)
        finally:
            engine.close()

        assert len(came) == len(set(came))
        answered = {f"answered{number}" for number in range(1, 5)} | {f"answered-later{number}" for number in range(3)}
        assert answered - {"answered1"} <= set(came) <= answered | unanswered


@pytest.mark.parametrize("durability", list(Durability))
def test_a_power_cut_over_rolls_of_the_logs_leaves_a_folder_that_opens_with_all_that_was_synced(
    tmp_path: Path, random_seed: int, durability: Durability
) -> None:
    random = Random(random_seed)
    storage, folder = PagedStorage(), tmp_path / "data"
    options = replace(OPTIONS, durability=durability, segment_bytes=4096, checkpoint_bytes=4096)
    engine = Engine.open(folder, clock=ManualClock(START_MS), options=options, storage=storage)
    published: list[str] = []
    for number in range(60):
        engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=f"m{number}".encode() * 100)])
        published.append(f"m{number}")
        [one] = engine.puller.pull(TOPIC, GROUP, max_messages=1)
        engine.settler.ack([one.receipt])
        if number % 2:
            storage.copy_after_lost_pages(folder, tmp_path / f"cut{number}", random=random)
    engine.close()

    for number in range(1, 60, 2):
        reopened = Engine.open(tmp_path / f"cut{number}", clock=ManualClock(START_MS), options=options)
        readable = [one.id for one in read_from_the_start(reopened)]
        if durability is Durability.FSYNC:
            assert readable == published[: number + 1], number
            assert reopened.puller.pull(TOPIC, GROUP, max_messages=100) == []
        else:
            assert set(readable) <= set(published), number
            assert readable == sorted(readable, key=published.index), number
        reopened.publisher.publish([message("after")])
        assert read_from_the_start(reopened)[-1].id == "after", number
        reopened.close()


def read_from_the_start(engine: Engine) -> list[Record]:
    """All of the topic that can be read."""
    offset, found = 0, list[Record]()
    while True:
        read = engine.reader.read_on(TOPIC, offset, max_messages=1_000) if TOPIC in engine.admin.topics() else None
        if read is None or read.next_offset == offset:
            return found
        found, offset = [*found, *read.messages], read.next_offset
